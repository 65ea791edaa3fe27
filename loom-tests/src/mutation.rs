//! Faults of the machine that the models run on.

pvlock_protocol::mutations! {
    /// The machine announces a latch for each wait slot and has one for the vCPU.
    LatchesShared,
}
