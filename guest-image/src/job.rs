//! What the guest is to do and what came of it: one structure that VMM and guest share. All zeros is a valid job.
//!
//! Everything is atomic, because both sides look at it while the other runs; what the VMM reads of it is checked like
//! anything a guest writes.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// Most vCPUs a job can have.
pub const MAX_VCPUS: usize = 64;
/// Most locks a job can use.
pub const MAX_LOCKS: usize = 64;
/// Sub-buckets per power of two of the wait histogram: a resolution of about 6 %.
const SUB_BUCKETS: usize = 16;
/// Buckets of the wait histogram.
pub const WAIT_BUCKETS: usize = (64 - 3) * SUB_BUCKETS;

/// The workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Workload {
    /// All vCPUs take one lock and advance the counter that it protects.
    Counter = 0,
    /// All vCPUs take one lock; only the one whose turn it is may advance the counter.
    PingPong = 1,
    /// Each acquisition is of another of many locks.
    ManyLocks = 2,
    /// Each acquisition is of two locks, one inside the other.
    Nested = 3,
    /// Every other acquisition tries first, and waits only if that failed.
    TryMix = 4,
    /// vCPU 0 takes the lock and keeps it, for tests of the watchdog.
    Stuck = 5,
    /// vCPU 0 panics.
    Panic = 6,
    /// Nobody does anything but spin: the neighbour that hostile ones are measured against.
    Spin = 7,
    /// vCPU 0 writes rubbish all over the shared region while the others use it.
    Scribble = 8,
    /// Each kind of doorbell in its turn, with arguments of every kind, as fast as it goes.
    DoorbellStorm = 9,
    /// Everybody kicks everybody all the time.
    KickAll = 10,
    /// Everybody registers, unregisters and comes online anew, at the right page and at wrong ones.
    RegisterTwice = 11,
    /// Everybody says that it waits for somebody who waits for it, halts, and reports its spinning.
    LieCycles = 12,
    /// Everybody halts, and nobody kicks.
    HaltForever = 13,
}

impl Workload {
    /// All workloads with their names.
    pub const ALL: [(&'static str, Self); 14] = [
        ("counter", Self::Counter),
        ("ping-pong", Self::PingPong),
        ("many-locks", Self::ManyLocks),
        ("nested", Self::Nested),
        ("try-mix", Self::TryMix),
        ("stuck", Self::Stuck),
        ("panic", Self::Panic),
        ("spin", Self::Spin),
        ("scribble", Self::Scribble),
        ("doorbell-storm", Self::DoorbellStorm),
        ("kick-all", Self::KickAll),
        ("register-twice", Self::RegisterTwice),
        ("lie-cycles", Self::LieCycles),
        ("halt-forever", Self::HaltForever),
    ];

    /// Those that break the rules. A vCPU of theirs notices the end of the job all the same, if the host lets it run.
    pub const HOSTILE: [Self; 6] =
        [Self::Scribble, Self::DoorbellStorm, Self::KickAll, Self::RegisterTwice, Self::LieCycles, Self::HaltForever];

    /// Whether all vCPUs take one and the same lock, or none.
    pub const fn has_one_lock(self) -> bool {
        !matches!(self, Self::ManyLocks | Self::Nested | Self::TryMix)
    }

    /// The workload with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().map(|(_, workload)| workload).find(|workload| *workload as u32 == number)
    }
}

/// How waiters halt and are kicked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum HaltBy {
    /// By pvlock's doorbells: a pvlock host puts them to sleep.
    #[default]
    Doorbell = 0,
    /// By stock KVM's PV_UNHALT, `hlt` and `KVM_HC_KICK_CPU`: there is no pvlock host.
    PvUnhalt = 1,
}

impl HaltBy {
    /// Both with their names.
    pub const ALL: [(&'static str, Self); 2] = [("doorbell", Self::Doorbell), ("pv-unhalt", Self::PvUnhalt)];
}

/// Values of [`Job::phase`], in their order.
pub mod phase {
    /// Wait until all are ready.
    pub const READY: u32 = 0;
    /// Work, but do not measure: at first some vCPUs run and others have never been scheduled, which flatters every lock.
    pub const WARM_UP: u32 = 1;
    /// Work and measure.
    pub const MEASURE: u32 = 2;
    /// Come to an end.
    pub const STOP: u32 = 3;
}

/// One acquisition as the order log keeps it. The position in the log is the order of the critical sections: the lock
/// itself protects the log.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LogEntry {
    /// Ticket, or [`LogEntry::BYPASS`].
    pub ticket: AtomicU64,
    /// vCPU.
    pub vcpu: AtomicU64,
    /// Ticks just before the ticket was drawn.
    pub before_draw: AtomicU64,
    /// Ticks just after the ticket was drawn.
    pub after_draw: AtomicU64,
    /// Ticks when the lock was acquired.
    pub acquired: AtomicU64,
    /// Ticks when the section was over, just before the release.
    pub left: AtomicU64,
}

impl LogEntry {
    /// "Ticket" of an acquisition that had none.
    pub const BYPASS: u64 = u64::MAX;
}

/// What a lock protects. The owner updates it with plain loads and stores: two owners at once would lose an update.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Protected {
    /// Advanced once in each critical section.
    pub counter: AtomicU64,
    /// Entries written to this lock's log.
    pub logged: AtomicU64,
}

impl Protected {
    /// Adds one, not atomically, in the course of `section`: who is inside at the same time loses one of the two updates.
    /// Returns the value before.
    #[inline]
    pub fn advance_around(cell: &AtomicU64, section: impl FnOnce()) -> u64 {
        let value = cell.load(Ordering::Relaxed);
        section();
        cell.store(value.wrapping_add(1), Ordering::Relaxed);
        value
    }

    /// Adds one, not atomically.
    #[inline]
    pub fn advance(cell: &AtomicU64) -> u64 {
        Self::advance_by(cell, 1)
    }

    /// Adds to a cell, not atomically. Wraps.
    #[inline]
    pub fn advance_by(cell: &AtomicU64, amount: u64) -> u64 {
        let value = cell.load(Ordering::Relaxed);
        cell.store(value.wrapping_add(amount), Ordering::Relaxed);
        value
    }
}

/// What one vCPU did. Only it writes here.
#[derive(Debug)]
#[repr(C)]
pub struct Done {
    /// Critical sections.
    pub sections: AtomicU64,
    /// Acquisitions: as many as critical sections, except where two locks are taken for one.
    pub acquisitions: AtomicU64,
    /// Acquisitions while measuring.
    pub measured: AtomicU64,
    /// Failed attempts without waiting.
    pub failed_tries: AtomicU64,
    /// Turns taken in ping-pong.
    pub turns: AtomicU64,
    /// Longest wait while measuring, in ticks.
    pub longest_wait: AtomicU64,
    /// PAUSEs in the waits that ended while measuring.
    pub pauses: AtomicU64,
    /// Halts, where no pvlock host counts them.
    pub halts: AtomicU64,
    /// Kicks of others, where no pvlock host counts them.
    pub kicks: AtomicU64,
    /// Waits while measuring by length, see [`wait_bucket`].
    pub waits: [AtomicU64; WAIT_BUCKETS],
}

/// The job.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Job {
    /// [`Workload`].
    pub workload: AtomicU32,
    /// [`LockKind`](crate::LockKind).
    pub lock: AtomicU32,
    /// vCPUs that take part.
    pub vcpus: AtomicU32,
    /// Locks in use, 1 to [`MAX_LOCKS`].
    pub locks: AtomicU32,
    /// Iterations of work inside the lock.
    pub inside: AtomicU64,
    /// Iterations of work outside.
    pub outside: AtomicU64,
    /// Critical sections of each vCPU, 0: until [`phase::STOP`].
    pub limit: AtomicU64,
    /// Log entries for each lock, 0: no log.
    pub log_capacity: AtomicU64,
    /// Address of the logs, one lock's after the other's.
    pub log_address: AtomicU64,
    /// Ticks that a waiter spins before it reports it to the host, again and again; 0: never.
    pub pause_window: AtomicU64,
    /// Spin budget in ticks where no pvlock host gives one; 0: the guest's own.
    pub spin_budget: AtomicU64,
    /// [`HaltBy`].
    pub halt: AtomicU32,
    /// Doorbell port of the host; 0: there is no host, or CPUID names another kind of doorbell.
    pub port: AtomicU32,
    /// Set by the guest when vCPU 0 has tried to register: 1 + the status.
    pub registered: AtomicU32,
    /// vCPUs that are ready to start.
    pub ready: AtomicU32,
    /// Set by the VMM: see [`phase`].
    pub phase: AtomicU32,
    /// vCPUs that have ended.
    pub ended: AtomicU32,
    /// Critical sections of a vCPU from one end of its life to the next, see [`life`](crate::life); 0: it lives on.
    pub churn: AtomicU32,
    /// Times that the guest has registered anew. Whoever sees it move has to come online.
    pub registrations: AtomicU32,
    /// What the locks protect.
    pub protected: [CachePadded<Protected>; MAX_LOCKS],
    /// What each vCPU did.
    pub done: [CachePadded<Done>; MAX_VCPUS],
}

/// The bucket of a wait: exact below 16 ticks, then 16 buckets for each power of two.
pub fn wait_bucket(ticks: u64) -> usize {
    let Some(exponent) = ticks.checked_ilog2().filter(|&exponent| exponent >= 4) else { return ticks as usize };
    let sub = (ticks >> (exponent - 4)) as usize - SUB_BUCKETS;
    (exponent as usize - 3) * SUB_BUCKETS + sub
}

/// The smallest wait that falls into a bucket, in ticks.
pub fn wait_of_bucket(bucket: usize) -> u64 {
    match (bucket / SUB_BUCKETS).checked_sub(1) {
        None => bucket as u64,
        Some(exponent) => ((SUB_BUCKETS + bucket % SUB_BUCKETS) as u64) << exponent,
    }
}

const _: () = {
    assert!(size_of::<LogEntry>() == 48);
    assert!(core::mem::offset_of!(Job, protected) == 128);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_wait_in_order() {
        let mut last = 0;
        for exponent in 0..64 {
            for ticks in [(1u64 << exponent) - 1, 1 << exponent, (1 << exponent) + 1, (1u64 << exponent) / 3 * 5] {
                let bucket = wait_bucket(ticks);
                assert!(bucket < WAIT_BUCKETS);
                assert!(wait_of_bucket(bucket) <= ticks, "{ticks}");
                assert!(bucket + 1 == WAIT_BUCKETS || wait_of_bucket(bucket + 1) > ticks, "{ticks}");
            }
            let bucket = wait_bucket(1 << exponent);
            assert!(bucket > last || exponent == 0);
            last = bucket;
        }
        assert_eq!(wait_bucket(u64::MAX), WAIT_BUCKETS - 1);
    }
}
