//! A vCPU as its code sees it: time, locks, interrupts.

use super::exponential;
use crate::locks::{Lock, Token};
use crate::machine::{After, LineId};
use crate::params::Params;
use crate::platform::{self, Sim};
use crossbeam_utils::CachePadded;
use pvlock_guest::Platform;
use pvlock_host::protocol::VcpuId;
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use std::sync::atomic::{AtomicU64, Ordering};

/// The vCPU that the code runs on.
pub(crate) struct Vcpu {
    pub(crate) id: VcpuId,
    pub(crate) vcpus: usize,
    pub(crate) task: usize,
    pub(crate) locks: &'static [CachePadded<Lock>],
    pub(crate) lock_line: LineId,
    pub(crate) acknowledge_line: LineId,
    pub(crate) unacknowledged: &'static [AtomicU64],
    /// Messages for each vCPU.
    pub(crate) mail: &'static [AtomicU64],
    pub(crate) params: Params,
    pub(crate) random: Pcg64Mcg,
}

/// A lock that is held.
pub(crate) struct Owned {
    lock: usize,
    token: Token,
    wanted: u64,
    taken: u64,
}

/// The running code takes a lock.
pub(super) fn take(locks: &[CachePadded<Lock>], first_line: LineId, lock: usize) -> Owned {
    match take_with(locks, first_line, lock, |lock, line| Some(lock.lock(line))) {
        Some(owned) => owned,
        None => unreachable!("to wait for a lock does not fail"),
    }
}

fn take_with(
    locks: &[CachePadded<Lock>],
    first_line: LineId,
    lock: usize,
    how: impl FnOnce(&Lock, LineId) -> Option<Token>,
) -> Option<Owned> {
    let line = first_line + lock;
    let wanted = platform::with(|machine| {
        machine.wants(line);
        machine.now
    });
    platform::compute(platform::with(|machine| machine.touch(line)));
    let token = how(&locks[lock], line);
    platform::with(|machine| {
        let Some(token) = token else {
            machine.gives_up();
            return None;
        };
        machine.acquired(wanted);
        machine.took(line, token.ticket());
        Some(Owned { lock, token, wanted, taken: machine.now })
    })
}

/// The running code gives it back.
pub(super) fn give_back(locks: &[CachePadded<Lock>], first_line: LineId, owned: Owned, fair: bool) {
    let Owned { lock, token, wanted, taken } = owned;
    let line = first_line + lock;
    platform::compute(platform::with(|machine| machine.touch(line)));
    platform::with(|machine| {
        machine.released(lock, wanted, taken);
        machine.releases(line, fair);
    });
    if fair {
        locks[lock].unlock_fair(token, line);
    } else {
        locks[lock].unlock(token, line);
    }
    platform::with(crate::machine::Machine::has_released);
}

impl Vcpu {
    /// Computes for so many ns.
    pub(crate) fn compute(&mut self, ns: u64) {
        platform::compute(self.params.cycles(ns));
    }

    /// Computes for about so many ns, exponentially distributed.
    pub(crate) fn compute_about(&mut self, mean_ns: u64) {
        let ns = exponential(mean_ns, &mut self.random);
        self.compute(ns);
    }

    /// One of the VM's locks.
    pub(crate) fn any_lock(&mut self) -> usize {
        if self.locks.len() == 1 { 0 } else { self.random.random_range(0..self.locks.len()) }
    }

    /// Takes a lock.
    pub(crate) fn lock(&mut self, lock: usize) -> Owned {
        take(self.locks, self.lock_line, lock)
    }

    /// Takes a lock if that needs no waiting.
    pub(crate) fn try_lock(&mut self, lock: usize) -> Option<Owned> {
        take_with(self.locks, self.lock_line, lock, |lock, _| lock.try_lock())
    }

    /// Gives it back.
    pub(crate) fn unlock(&mut self, owned: Owned) {
        give_back(self.locks, self.lock_line, owned, false);
    }

    /// Gives it back so that nobody overtakes those who wait.
    pub(crate) fn unlock_fair(&mut self, owned: Owned) {
        give_back(self.locks, self.lock_line, owned, true);
    }

    /// Computes for so many ns with a lock held.
    pub(crate) fn section(&mut self, lock: usize, ns: u64) {
        let owned = self.lock(lock);
        self.compute(ns);
        self.unlock(owned);
    }

    /// A piece of work is done.
    pub(crate) fn worked(&mut self) {
        let task = self.task;
        platform::with(|machine| machine.vcpus[task].counts.work += 1);
    }

    /// Has all other vCPUs of the VM flush, and spins until they have.
    pub(crate) fn flush(&mut self) {
        let word = &self.unacknowledged[self.id.index()];
        let line = self.acknowledge_line + self.id.index();
        platform::with(|machine| machine.touch(line));
        word.store(self.vcpus as u64 - 1, Ordering::Relaxed);
        let cost = platform::with(|machine| machine.costs.ipi_send);
        platform::exit(cost, After::Flush);
        loop {
            match word.load(Ordering::Relaxed) {
                0 => break,
                some => drop(Sim::wait_while(word, some, u64::MAX / 2)),
            }
        }
    }

    /// Wakes another vCPU of the VM from [`Vcpu::idle`], or keeps it from going there.
    pub(crate) fn notify(&mut self, vcpu: VcpuId) {
        let cost = platform::with(|machine| machine.costs.ipi_send);
        platform::exit(cost, After::Interrupt(vcpu));
    }

    /// Sleeps until somebody has notified this vCPU since it last did so.
    pub(crate) fn idle(&mut self) {
        let task = self.task;
        while platform::with(|machine| std::mem::take(&mut machine.vcpus[task].events)) == 0 {
            platform::exit(0, After::Idle);
        }
    }
}
