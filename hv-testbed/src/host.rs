//! The engine's view of this hypervisor: how it wakes vCPUs and what it may know of the scheduler.

use crate::apic;
use crate::run::Run;
use crate::trace::Mark;
use crate::vm::Vm;
use pvlock_host::protocol::VcpuId;
use pvlock_host::{Placement, Scheduler, Waker, Yields};
use pvlock_hv_testbed::scheduler::Place;

/// One VM on this hypervisor.
pub(crate) struct Host<'a> {
    pub(crate) run: &'a Run,
    pub(crate) vm: &'a Vm,
}

impl Host<'_> {
    /// The vCPU's number among those of all VMs.
    fn number(&self, vcpu: VcpuId) -> usize {
        self.vm.first + vcpu.index()
    }

    /// Whether this vCPU, which exists, is on a CPU.
    pub(crate) fn is_running(&self, vcpu: VcpuId) -> bool {
        matches!(self.run.scheduler.lock().place(self.number(vcpu)), Place::Running(_))
    }
}

impl Waker for Host<'_> {
    fn wake(&self, vcpu: VcpuId) {
        self.vm.order.lock().wakes(vcpu.index());
        self.run.trace.mark(Mark::Kick, self.vm.id, vcpu.index());
        let idle = self.run.scheduler.lock().wake(self.number(vcpu));
        if let Some(cpu) = idle {
            apic::wake(cpu);
        }
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

impl Scheduler for Host<'_> {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        match self.run.scheduler.lock().place(self.number(vcpu)) {
            Place::Running(_) => Placement::Running,
            Place::Queued(_) => Placement::Preempted,
            Place::Asleep(_) | Place::Ended => Placement::Sleeping,
        }
    }

    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        Some(self.run.scheduler.lock().backlog(self.number(vcpu)))
    }

    fn yields(&self) -> Yields {
        Yields::Directed
    }
}
