//! Interrupts between vCPUs of a VM: they reach guest code only while it runs.

use super::{Activity, Asleep, Event, Machine};
use crate::sched::TaskId;
use pvlock_host::Unpark;
use pvlock_host::protocol::VcpuId;
use std::sync::atomic::Ordering;

impl Machine {
    /// `task` has an interrupt sent to a vCPU of its VM.
    pub(super) fn send(&mut self, task: TaskId, target: VcpuId, acknowledge: Option<TaskId>) {
        let Some(vm) = self.vcpus[task].vm else { return };
        let target = self.task_of(vm, target);
        self.at(self.now + self.costs.wake_latency / 2, Event::Interrupt { task: target, acknowledge });
    }

    /// `task` has all others of its VM flush, and each acknowledge it.
    pub(super) fn flush(&mut self, task: TaskId) {
        let Some(vm) = self.vcpus[task].vm else { return };
        for vcpu in 0..self.vcpus_of(vm) {
            let target = self.first_of(vm) + vcpu;
            if target != task {
                self.at(self.now + self.costs.wake_latency / 2, Event::Interrupt { task: target, acknowledge: Some(task) });
            }
        }
        self.enter_guest(task);
    }

    /// An interrupt arrives.
    pub(super) fn interrupt(&mut self, task: TaskId, acknowledge: Option<TaskId>) {
        let on_cpu = self.sched.current(self.sched.cpu_of(task)) == Some(task);
        if let (Some(sender), true, false) = (acknowledge, self.clairvoyant, on_cpu) {
            // Who is not on a CPU has nothing to flush; a bound knows that.
            self.acknowledge(sender);
            return;
        }
        if acknowledge.is_none() {
            self.vcpus[task].events += 1;
        }
        self.vcpus[task].interrupts.push(acknowledge);
        match self.vcpus[task].asleep {
            Some(Asleep::Idle) => {
                let (sleep, waker) = (self.vcpus[task].sleep, self.sched.cpu_of(task));
                self.awake(task, sleep, Unpark::Woken, waker);
            }
            Some(Asleep::Parked) => self.interrupt_parked(task),
            Some(Asleep::Stolen | Asleep::Oracle) => {}
            None => {
                if on_cpu && !matches!(self.vcpus[task].activity, Activity::Host { .. }) {
                    self.book(task, self.now);
                    self.deliver(task);
                    self.proceed(task);
                }
            }
        }
    }

    /// Takes the interrupts that wait for `task`, which is on a CPU and about to be in the guest.
    pub(super) fn deliver(&mut self, task: TaskId) {
        if self.vcpus[task].interrupts.is_empty() {
            return;
        }
        let interrupts = std::mem::take(&mut self.vcpus[task].interrupts);
        // One exit for all that came meanwhile.
        self.vcpus[task].overhead += self.costs.ipi_receive;
        self.vcpus[task].counts.interrupts += 1;
        for sender in interrupts.into_iter().flatten() {
            self.vcpus[task].overhead += self.costs.flush;
            self.acknowledge(sender);
        }
    }

    fn acknowledge(&mut self, sender: TaskId) {
        let Some(vm) = self.vcpus[sender].vm else { return };
        let id = self.vcpus[sender].id;
        let (word, line) = self.acknowledgements(vm, id);
        word.fetch_sub(1, Ordering::Relaxed);
        self.notify(line);
    }
}
