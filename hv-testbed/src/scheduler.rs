//! Which vCPU runs where: one round-robin run queue for each CPU.
//!
//! Knows nothing of engines and guests, and locks nothing: whoever owns it does. vCPUs of all VMs are numbered together.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Where a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On a CPU.
    Running(usize),
    /// On a CPU's run queue.
    Queued(usize),
    /// Until it is woken, or this time has come.
    Asleep(u64),
    /// Gone for good.
    Ended,
}

/// How a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Somebody woke it.
    Woken,
    /// Its time had come.
    Deadline,
}

#[derive(Debug)]
struct Vcpu {
    place: Place,
    /// The CPU that it was on last.
    cpu: usize,
    /// It was woken while it ran: its next sleep ends at once.
    token: bool,
    /// It has slept since it ran last.
    slept: Option<Ended>,
}

#[derive(Debug)]
struct Cpu {
    queue: VecDeque<usize>,
    running: Option<usize>,
}

/// What a CPU is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Run this vCPU.
    pub vcpu: usize,
    /// Which has slept since it ran last.
    pub slept: Option<Ended>,
}

/// All CPUs and vCPUs.
#[derive(Debug)]
pub struct Scheduler {
    cpus: Vec<Cpu>,
    vcpus: Vec<Vcpu>,
}

impl Scheduler {
    /// All vCPUs ready to run, dealt out to the CPUs. Allocates once and for all.
    pub fn new(cpus: usize, vcpus: usize) -> Self {
        let deal = |cpu| {
            let mut queue = VecDeque::with_capacity(vcpus);
            queue.extend((cpu..vcpus).step_by(cpus));
            Cpu { queue, running: None }
        };
        let vcpu = |vcpu| Vcpu { place: Place::Queued(vcpu % cpus), cpu: vcpu % cpus, token: false, slept: None };
        Self { cpus: (0..cpus).map(deal).collect(), vcpus: (0..vcpus).map(vcpu).collect() }
    }

    /// Where a vCPU is.
    pub fn place(&self, vcpu: usize) -> Place {
        self.vcpus[vcpu].place
    }

    /// The vCPU that `cpu` runs next: the first of its own queue, else the last of the longest.
    pub fn next(&mut self, cpu: usize) -> Option<Next> {
        let vcpu = self.cpus[cpu].queue.pop_front().or_else(|| {
            let longest = (0..self.cpus.len()).max_by_key(|&other| self.cpus[other].queue.len())?;
            self.cpus[longest].queue.pop_back()
        })?;
        Some(self.run(cpu, vcpu))
    }

    fn run(&mut self, cpu: usize, vcpu: usize) -> Next {
        self.cpus[cpu].running = Some(vcpu);
        let state = &mut self.vcpus[vcpu];
        (state.place, state.cpu) = (Place::Running(cpu), cpu);
        Next { vcpu, slept: state.slept.take() }
    }

    fn enqueue(&mut self, cpu: usize, vcpu: usize) {
        self.vcpus[vcpu].place = Place::Queued(cpu);
        self.cpus[cpu].queue.push_back(vcpu);
    }

    /// Takes `vcpu` off the CPU it is on.
    fn stop(&mut self, vcpu: usize) -> usize {
        let cpu = self.vcpus[vcpu].cpu;
        debug_assert_eq!(self.vcpus[vcpu].place, Place::Running(cpu));
        self.cpus[cpu].running = None;
        cpu
    }

    /// `vcpu` gives up its CPU, and gets one again when it is its turn.
    pub fn give_up(&mut self, vcpu: usize) {
        let cpu = self.stop(vcpu);
        self.enqueue(cpu, vcpu);
    }

    /// `vcpu` gives its CPU to `target`, if that waits for one, wherever. Then it is `target`'s turn on that CPU.
    pub fn give_to(&mut self, vcpu: usize, target: usize) {
        let cpu = self.stop(vcpu);
        if let Place::Queued(other) = self.vcpus[target].place {
            self.cpus[other].queue.retain(|&queued| queued != target);
            self.vcpus[target].place = Place::Queued(cpu);
            self.cpus[cpu].queue.push_front(target);
        }
        self.enqueue(cpu, vcpu);
    }

    /// `vcpu` sleeps until it is woken or `until` has come; `false` if it was woken before: it still runs.
    #[must_use]
    pub fn sleep(&mut self, vcpu: usize, until: u64) -> bool {
        if core::mem::take(&mut self.vcpus[vcpu].token) {
            return false;
        }
        self.stop(vcpu);
        self.vcpus[vcpu].place = Place::Asleep(until);
        true
    }

    /// Wakes `vcpu`, if it sleeps or is about to. Returns a CPU that has nothing to do and should look at its queue.
    pub fn wake(&mut self, vcpu: usize) -> Option<usize> {
        match self.vcpus[vcpu].place {
            Place::Asleep(_) => Some(self.wakes(vcpu, Ended::Woken)),
            Place::Running(_) => {
                self.vcpus[vcpu].token = true;
                None
            }
            Place::Queued(_) | Place::Ended => None,
        }
        .filter(|&cpu| self.cpus[cpu].running.is_none())
    }

    /// Wakes all whose time has come.
    pub fn expire(&mut self, now: u64) {
        for vcpu in 0..self.vcpus.len() {
            if matches!(self.vcpus[vcpu].place, Place::Asleep(until) if until <= now) {
                self.wakes(vcpu, Ended::Deadline);
            }
        }
    }

    /// Where it ran last, but rather where nothing else does.
    fn wakes(&mut self, vcpu: usize, how: Ended) -> usize {
        let is_free = |cpu: &usize| self.cpus[*cpu].running.is_none() && self.cpus[*cpu].queue.is_empty();
        let last = self.vcpus[vcpu].cpu;
        let cpu = core::iter::once(last).chain(0..self.cpus.len()).find(is_free).unwrap_or(last);
        self.vcpus[vcpu].slept = Some(how);
        self.enqueue(cpu, vcpu);
        cpu
    }

    /// `vcpu`, which runs, never runs again.
    pub fn end(&mut self, vcpu: usize) {
        self.stop(vcpu);
        self.vcpus[vcpu].place = Place::Ended;
    }

    /// How many others want the CPU that `vcpu` is on, or was on last.
    pub fn backlog(&self, vcpu: usize) -> u32 {
        let Vcpu { place, cpu, .. } = self.vcpus[vcpu];
        let there = self.cpus[cpu].queue.len() + usize::from(self.cpus[cpu].running.is_some());
        let itself = matches!(place, Place::Running(_) | Place::Queued(_));
        (there - usize::from(itself)) as u32
    }

    /// Whether another vCPU waits for this CPU.
    pub fn has_others(&self, cpu: usize) -> bool {
        !self.cpus[cpu].queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn next(scheduler: &mut Scheduler, cpu: usize) -> Option<usize> {
        scheduler.next(cpu).map(|next| next.vcpu)
    }

    #[test]
    fn each_cpu_goes_round_its_own_queue() {
        let mut scheduler = Scheduler::new(2, 6);
        let order: Vec<_> = (0..6)
            .map(|_| {
                let vcpu = next(&mut scheduler, 1).unwrap();
                scheduler.give_up(vcpu);
                vcpu
            })
            .collect();
        assert_eq!(order, [1, 3, 5, 1, 3, 5]);
    }

    #[test]
    fn a_cpu_without_work_takes_the_last_of_the_longest_queue() {
        let mut scheduler = Scheduler::new(2, 3);
        assert_eq!(next(&mut scheduler, 1), Some(1));
        assert!(scheduler.sleep(1, 10));
        assert_eq!((next(&mut scheduler, 1), next(&mut scheduler, 0), next(&mut scheduler, 0)), (Some(2), Some(0), None));
    }

    #[test]
    fn a_wake_before_the_sleep_is_not_lost_and_counts_once() {
        let mut scheduler = Scheduler::new(1, 1);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        assert_eq!(scheduler.wake(0), None);
        assert!(!scheduler.sleep(0, 10), "woken before");
        assert!(scheduler.sleep(0, 10));
        assert_eq!(scheduler.wake(0), Some(0), "this CPU has nothing to do");
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: Some(Ended::Woken) }));
        scheduler.give_up(0);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: None }), "told once");
    }

    #[test]
    fn a_deadline_wakes_at_its_time_and_a_busy_cpu_is_not_disturbed() {
        let mut scheduler = Scheduler::new(1, 2);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        assert!(scheduler.sleep(0, 10));
        assert_eq!(next(&mut scheduler, 0), Some(1));
        scheduler.expire(9);
        assert_eq!(scheduler.place(0), Place::Asleep(10));
        scheduler.expire(10);
        assert_eq!(scheduler.place(0), Place::Queued(0));
        assert_eq!(scheduler.wake(0), None);
        scheduler.give_up(1);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: Some(Ended::Deadline) }));
    }

    #[test]
    fn a_directed_yield_fetches_its_target_from_wherever_it_waits() {
        let mut scheduler = Scheduler::new(2, 6);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        scheduler.give_to(0, 5);
        assert_eq!((next(&mut scheduler, 0), scheduler.place(5)), (Some(5), Place::Running(0)));
        // Who runs or sleeps cannot be given anything.
        assert_eq!(next(&mut scheduler, 1), Some(1));
        scheduler.give_to(5, 1);
        assert_eq!(next(&mut scheduler, 0), Some(2));
    }

    #[test]
    fn the_backlog_counts_the_others() {
        let mut scheduler = Scheduler::new(2, 5);
        assert_eq!((scheduler.backlog(0), scheduler.backlog(1)), (2, 1));
        assert_eq!(next(&mut scheduler, 1), Some(1));
        assert_eq!((scheduler.backlog(1), scheduler.backlog(3)), (1, 1));
        assert!(scheduler.sleep(1, 9));
        assert_eq!((scheduler.backlog(1), scheduler.backlog(3)), (1, 0), "a sleeper is among the others of nobody");
    }

    proptest! {
        #[test]
        fn every_vcpu_is_in_one_place(steps in proptest::collection::vec((0u8..7, 0usize..8, 0usize..8), 0..200)) {
            let mut scheduler = Scheduler::new(3, 8);
            for (what, a, b) in steps {
                let running = matches!(scheduler.place(a), Place::Running(_));
                match what {
                    0 | 1 if scheduler.cpus[a % 3].running.is_none() => { scheduler.next(a % 3); }
                    2 if running => scheduler.give_up(a),
                    3 if running && a != b => scheduler.give_to(a, b),
                    4 if running => { let _ = scheduler.sleep(a, b as u64); }
                    5 => { scheduler.wake(a); }
                    6 => scheduler.expire(b as u64),
                    _ => {}
                }
                for vcpu in 0..8 {
                    let queued: Vec<_> = (0..3).filter(|&cpu| scheduler.cpus[cpu].queue.contains(&vcpu)).collect();
                    let running: Vec<_> = (0..3).filter(|&cpu| scheduler.cpus[cpu].running == Some(vcpu)).collect();
                    let place = scheduler.place(vcpu);
                    prop_assert_eq!(queued, if let Place::Queued(cpu) = place { [cpu].to_vec() } else { [].to_vec() });
                    prop_assert_eq!(running, if let Place::Running(cpu) = place { [cpu].to_vec() } else { [].to_vec() });
                }
                let all: usize = scheduler.cpus.iter().map(|cpu| cpu.queue.len()).sum();
                prop_assert!(all <= 8, "nobody is queued twice");
            }
        }
    }
}
