//! Faults that models switch on in this crate. Outside models they do not exist.

pvlock_protocol::mutations! {
    /// A release is a load and a Release store instead of one read-modify-write.
    ReleaseByStore,
    /// The releasing read-modify-write is Relaxed.
    ReleaseRelaxed,
    /// A release clears the note of the halted waiter afterwards, in a lock that is no longer the owner's.
    TouchAfterRelease,
    /// The first look at the word after the draw is Relaxed.
    AcquireRelaxed,
    /// The look at the word after a halt is Relaxed.
    AcquireAfterHaltRelaxed,
    /// A waiter that is not next halts after a plain load of the word.
    HaltAfterLoad,
    /// A waiter that is not next halts after a read-modify-write that publishes nothing.
    HaltAfterRelaxed,
    /// A waiter says that it halts only after it has told the releaser.
    AnnounceBeforeState,
    /// Every waiter that halts writes its vCPU into the word, next in line or not.
    EveryHalterNotes,
    /// The next waiter halts although its compare-exchange failed.
    HaltThoughNotNoted,
    /// A new owner does not look for its successor.
    NoSuccessorLookup,
    /// A release kicks nobody.
    NoKick,
    /// No waiter finds room in the table of waiters. Not a fault by itself.
    TableFull,
    /// A waiter halts although it is not in the table.
    HaltOutsideTable,
    /// A nested wait uses the slot of the wait that it interrupted.
    SlotShared,
    /// Interrupts stay enabled from the last check to the halt although the vCPU has only one latch.
    HaltUnmasked,
    /// A waiter halts with interrupts off although a kick is an interrupt.
    HaltDeaf,
    /// Halting is allowed as soon as the region is registered.
    OnlineNotRequired,
    /// A failing `try_lock` has drawn a ticket.
    TryLockDraws,
    /// The next waiter halts without noting itself, nor does the owner note it.
    NextNotNoted,
    /// The head of a queue halts although nobody owns the lock.
    HeadHaltsOnFree,
    /// The head of a queue, back from a halt, does not say that it is present.
    HeadStaysAway,
    /// A newcomer takes a free lock although the head of its queue polls.
    BypassPresent,
    /// A waiter with a ticket takes a free lock out of turn.
    QueuedBypasses,
    /// A fair release is like any other.
    FairIgnored,
    /// A native release is Relaxed.
    NativeReleaseRelaxed,
    /// The first look of a spinning waiter is Relaxed.
    FirstLookRelaxed,
    /// The look with which a spinning waiter finds itself served is Relaxed.
    ServedLookRelaxed,
    /// Changes of the preemptable lock's word acquire nothing.
    ChangeNotAcquired,
    /// Registration opens before everybody who has to come online is counted.
    OpenedEarly,
}
