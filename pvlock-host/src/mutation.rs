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
}
