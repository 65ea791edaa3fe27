//! Invariants, for tests and for models from outside this crate.

use crate::{Engine, GuestMemory};
use alloc::vec::Vec;
use pvlock_protocol::VcpuId;

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// Every vCPU's queue, first to last, at one moment.
    ///
    /// # Errors
    ///
    /// What is wrong with the queues: a vCPU on two of them, lists and links that differ.
    #[doc(hidden)]
    pub fn check_queues(&self) -> Result<Vec<Vec<VcpuId>>, &'static str> {
        let queues = self.queues();
        // All of them, in the order of their vCPUs: nothing moves meanwhile.
        let lists: Vec<_> = queues.0.iter().map(|vcpu| vcpu.queue.lock()).collect();
        lists.iter().zip(0..).map(|(list, owner)| queues.inspect(list, owner)).collect()
    }
}
