//! Faults that models switch on in this crate. Outside models there are none.

pvlock_protocol::mutations! {
    /// Transitions of a vCPU's word are Relaxed.
    VcpuWordRelaxed,
    /// Transitions of a vCPU's word are a load and a store.
    VcpuWordByStore,
    /// A halt looks whether anyone may park before its own park is visible, not afterwards.
    StoppedCheckedFirst,
    /// A sleeper does not look for a circle after it was put on a queue.
    CircleNotChecked,
    /// No fence stands between a new edge and the look for a circle.
    CircleNotFenced,
    /// A hand-over leaves a sleeper without an owner between two queues.
    HandOverViaNone,
    /// Sleepers are put on the queue of a vCPU that is offline.
    OfflineNotChecked,
    /// Whoever writes to a record looks whether there is a region before it takes the lock, not under it.
    RegionSeenUnlocked,
    /// A poller that goes to sleep does not fence before its last look.
    PollerNotFenced,
    /// A poller goes to sleep without a last look.
    NoLastLook,
    /// Spinners are parked without asking, under the queue's lock, whether the one they wait for is off-CPU.
    StrandNotChecked,
    /// A vCPU that runs again wakes who sleeps on it before it is marked as running.
    DrainedFirst,
    /// A vCPU that runs again leaves the spinners on its queue asleep.
    NotDrained,
    /// A sleeper that wakes stays on the queue that it is on.
    NotDequeued,
    /// A reset vCPU leaves asleep who sleeps on it.
    ResetLeavesSleepers,
    /// A vCPU that is reset, or comes online or goes offline, is not woken.
    ReleasedAsleep,
    /// Pause and other changes of mode wake nobody.
    ModeWakesNobody,
    /// A hand-over does not look for a circle.
    HandOverCircle,
    /// A hand-over that takes the new holder off a queue, as it sleeps again, leaves it asleep.
    OffQueueAsleep,
    /// A vCPU that is reset, or comes online or goes offline, is woken first and taken off its queue then.
    WokenOnQueue,
    /// Somebody who spun is parked on one whose ticket is not known to be the one before.
    StaleHintTrusted,
    /// Somebody who spun is parked behind a sleeper though it was interrupted in its wait.
    HandlerParked,
    /// A wake is not posted if the vCPU is not parked yet, whatever it is.
    KickNotLatched,
    /// A driver's thread notes that it sleeps with a load and a store.
    AsleepByStore,
    /// A driver leaves a token with a load and a store.
    TokenByStore,
    /// A driver leaves a token Relaxed.
    TokenLeftRelaxed,
    /// A driver's thread takes its token Relaxed.
    TokenTakenRelaxed,
}
