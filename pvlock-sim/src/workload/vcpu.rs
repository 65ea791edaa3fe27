//! A vCPU as its code sees it: time, locks, interrupts.

use super::exponential;
use crate::locks::{Lock, Token};
use crate::machine::{After, LineId};
use crate::outcome::Hold;
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
        let line = self.lock_line + lock;
        let wanted = Sim::ticks();
        platform::compute(platform::with(|machine| machine.touch(line)));
        let token = self.locks[lock].lock(line);
        let taken = platform::with(|machine| {
            machine.acquired(wanted);
            machine.now
        });
        Owned { lock, token, wanted, taken }
    }

    /// Gives it back.
    pub(crate) fn unlock(&mut self, owned: Owned) {
        let Owned { lock, token, wanted, taken } = owned;
        let line = self.lock_line + lock;
        platform::compute(platform::with(|machine| machine.touch(line)));
        let hold = Hold { task: self.task, lock, wanted, taken, released: 0 };
        platform::with(|machine| machine.released(hold));
        self.locks[lock].unlock(token, line);
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
