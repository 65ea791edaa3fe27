//! vCPUs that are threads of this process and run guest code themselves: no virtual machine at all.

use super::{Driver, Outcome};
use crate::{Config, EngineError, Nested};
use pvlock_hypercalls::{Access, Direct, Ring};
use pvlock_protocol::{RegionRef, VcpuId};

/// A "VM" of threads.
pub type Threads = Driver<Nested>;

/// A driver for a guest whose region is `region`, in this process; its page frame number is 0.
///
/// # Errors
///
/// See [`Engine::new`](crate::Engine::new).
pub fn threads(config: Config, region: RegionRef<'static>, vcpus: usize) -> Result<Threads, EngineError> {
    Driver::new(config, vcpus, Nested(region))
}

impl Threads {
    /// The doorbell of `vcpu`, to be rung by its own thread. Signals during a sleep end it spuriously.
    pub fn doorbell(&self, vcpu: VcpuId) -> impl Ring + '_ {
        Direct(move |access: Access| {
            let mut answer = 0;
            let (Outcome::Resume | Outcome::Signal) = self.access(vcpu, access, |word| answer = word);
            answer
        })
    }
}
