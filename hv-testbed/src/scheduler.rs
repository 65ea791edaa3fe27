//! Which vCPU runs where: one fair run queue for each CPU.
//!
//! The vCPU that has had the least time runs next; who has slept gets up to a slice for it, no more. Knows nothing of engines and
//! guests, and locks nothing: whoever owns it does. vCPUs of all VMs are numbered together. Times are in ns.

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
    /// The time that it has had.
    had: u64,
    /// It was woken while it ran: its next sleep ends at once.
    token: bool,
    /// It has slept since it ran last.
    slept: Option<Ended>,
}

#[derive(Debug)]
struct Cpu {
    /// In the order of their arrival.
    queue: VecDeque<usize>,
    running: Option<usize>,
    /// The one on the queue that was given this CPU.
    favoured: Option<usize>,
}

/// What a CPU is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Run this vCPU.
    pub vcpu: usize,
    /// Which has slept since it ran last.
    pub slept: Option<Ended>,
    /// It was given this CPU, with what was left of the giver's slice.
    pub given: bool,
}

/// All CPUs and vCPUs.
#[derive(Debug)]
pub struct Scheduler {
    slice: u64,
    /// The least time that whoever ran last had had: sleepers are not left further behind than a slice.
    floor: u64,
    cpus: Vec<Cpu>,
    vcpus: Vec<Vcpu>,
}

impl Scheduler {
    /// All vCPUs ready to run, dealt out to the CPUs. Allocates once and for all.
    pub fn new(cpus: usize, vcpus: usize, slice: u64) -> Self {
        let deal = |cpu| {
            let mut queue = VecDeque::with_capacity(vcpus);
            queue.extend((cpu..vcpus).step_by(cpus));
            Cpu { queue, running: None, favoured: None }
        };
        let vcpu = |vcpu| Vcpu { place: Place::Queued(vcpu % cpus), cpu: vcpu % cpus, had: 0, token: false, slept: None };
        Self { slice, floor: 0, cpus: (0..cpus).map(deal).collect(), vcpus: (0..vcpus).map(vcpu).collect() }
    }

    /// Where a vCPU is.
    pub fn place(&self, vcpu: usize) -> Place {
        self.vcpus[vcpu].place
    }

    /// Who of a queue has had the least time, the first of several.
    fn poorest(&self, cpu: usize) -> Option<usize> {
        self.cpus[cpu].queue.iter().copied().min_by_key(|&vcpu| self.vcpus[vcpu].had)
    }

    /// The vCPU that `cpu` runs next: whom it was given to, else the poorest of its own queue, else of the longest.
    pub fn next(&mut self, cpu: usize) -> Option<Next> {
        let favoured = self.cpus[cpu].favoured.take();
        let given = favoured.is_some();
        let vcpu = favoured.or_else(|| self.poorest(cpu)).or_else(|| {
            let longest = (0..self.cpus.len()).max_by_key(|&other| self.cpus[other].queue.len())?;
            self.poorest(longest)
        })?;
        self.dequeue(vcpu);
        self.cpus[cpu].running = Some(vcpu);
        let state = &mut self.vcpus[vcpu];
        (state.place, state.cpu) = (Place::Running(cpu), cpu);
        self.floor = self.floor.max(state.had);
        Some(Next { vcpu, slept: state.slept.take(), given })
    }

    fn dequeue(&mut self, vcpu: usize) {
        if let Place::Queued(cpu) = self.vcpus[vcpu].place {
            self.cpus[cpu].queue.retain(|&queued| queued != vcpu);
            if self.cpus[cpu].favoured == Some(vcpu) {
                self.cpus[cpu].favoured = None;
            }
        }
    }

    fn enqueue(&mut self, cpu: usize, vcpu: usize) {
        self.vcpus[vcpu].place = Place::Queued(cpu);
        self.cpus[cpu].queue.push_back(vcpu);
    }

    /// Takes `vcpu` off the CPU it is on, where it was for `ran`.
    fn stop(&mut self, vcpu: usize, ran: u64) -> usize {
        let cpu = self.vcpus[vcpu].cpu;
        debug_assert_eq!(self.vcpus[vcpu].place, Place::Running(cpu));
        self.cpus[cpu].running = None;
        self.vcpus[vcpu].had += ran;
        cpu
    }

    /// `vcpu` loses its CPU, and gets one again when it is its turn.
    pub fn preempt(&mut self, vcpu: usize, ran: u64) {
        let cpu = self.stop(vcpu, ran);
        self.enqueue(cpu, vcpu);
    }

    /// `vcpu` gives up its CPU to whoever is next: it counts as having had as much as that one.
    pub fn give_up(&mut self, vcpu: usize, ran: u64) {
        let cpu = self.stop(vcpu, ran);
        if let Some(next) = self.poorest(cpu) {
            self.vcpus[vcpu].had = self.vcpus[vcpu].had.max(self.vcpus[next].had);
        }
        self.enqueue(cpu, vcpu);
    }

    /// `vcpu` gives its CPU to `target`, if that waits for one, wherever.
    pub fn give_to(&mut self, vcpu: usize, target: usize, ran: u64) {
        let cpu = self.stop(vcpu, ran);
        if let Place::Queued(_) = self.vcpus[target].place {
            self.dequeue(target);
            self.enqueue(cpu, target);
            self.cpus[cpu].favoured = Some(target);
        }
        self.enqueue(cpu, vcpu);
    }

    /// `vcpu` sleeps until it is woken or `until` has come; `false` if it was woken before: it still runs.
    #[must_use]
    pub fn sleep(&mut self, vcpu: usize, until: u64, ran: u64) -> bool {
        if core::mem::take(&mut self.vcpus[vcpu].token) {
            return false;
        }
        self.stop(vcpu, ran);
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

    /// To the CPU with the least to do, rather to that where it ran last.
    fn wakes(&mut self, vcpu: usize, how: Ended) -> usize {
        let last = self.vcpus[vcpu].cpu;
        let load = |cpu: &usize| self.cpus[*cpu].queue.len() + usize::from(self.cpus[*cpu].running.is_some());
        let cpu = core::iter::once(last).chain(0..self.cpus.len()).min_by_key(load).unwrap_or(last);
        let state = &mut self.vcpus[vcpu];
        state.slept = Some(how);
        state.had = state.had.max(self.floor.saturating_sub(self.slice));
        self.enqueue(cpu, vcpu);
        cpu
    }

    /// `vcpu`, which runs, never runs again.
    pub fn end(&mut self, vcpu: usize) {
        self.stop(vcpu, 0);
        self.vcpus[vcpu].place = Place::Ended;
    }

    /// Whether `vcpu` has had its CPU for long enough: somebody else wants it, and its slice is over or it is a slice ahead.
    pub fn has_had_enough(&self, vcpu: usize, ran: u64, slice: u64) -> bool {
        let Vcpu { cpu, had, .. } = self.vcpus[vcpu];
        self.poorest(cpu).is_some_and(|other| ran >= slice || self.vcpus[other].had + self.slice < had + ran)
    }

    /// How many others want the CPU that `vcpu` is on, or was on last.
    pub fn backlog(&self, vcpu: usize) -> u32 {
        let Vcpu { place, cpu, .. } = self.vcpus[vcpu];
        let cpu = if let Place::Queued(cpu) = place { cpu } else { cpu };
        let there = self.cpus[cpu].queue.len() + usize::from(self.cpus[cpu].running.is_some());
        let itself = matches!(place, Place::Running(_) | Place::Queued(_));
        (there - usize::from(itself)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLICE: u64 = 100;

    fn next(scheduler: &mut Scheduler, cpu: usize) -> Option<usize> {
        scheduler.next(cpu).map(|next| next.vcpu)
    }

    #[test]
    fn equals_go_round_their_cpus_queue() {
        let mut scheduler = Scheduler::new(2, 6, SLICE);
        let order: Vec<_> = (0..6)
            .map(|_| {
                let vcpu = next(&mut scheduler, 1).unwrap();
                scheduler.preempt(vcpu, SLICE);
                vcpu
            })
            .collect();
        assert_eq!(order, [1, 3, 5, 1, 3, 5]);
    }

    #[test]
    fn who_has_had_less_comes_first_and_who_yields_comes_after_the_next() {
        let mut scheduler = Scheduler::new(1, 3, SLICE);
        for (expected, ran) in [(0, 100), (1, 10), (2, 50), (1, 5)] {
            assert_eq!(next(&mut scheduler, 0), Some(expected));
            scheduler.preempt(expected, ran);
        }
        // 0 has had 100, 1 15, 2 50.
        assert_eq!(next(&mut scheduler, 0), Some(1));
        scheduler.give_up(1, 5);
        assert_eq!(next(&mut scheduler, 0), Some(2));
        scheduler.preempt(2, 1);
        assert_eq!(next(&mut scheduler, 0), Some(1), "no worse off than by the time of one");
    }

    #[test]
    fn a_cpu_without_work_takes_of_the_longest_queue() {
        let mut scheduler = Scheduler::new(2, 3, SLICE);
        assert_eq!(next(&mut scheduler, 1), Some(1));
        assert!(scheduler.sleep(1, 10, 0));
        assert_eq!((next(&mut scheduler, 1), next(&mut scheduler, 0), next(&mut scheduler, 0)), (Some(0), Some(2), None));
    }

    #[test]
    fn a_wake_before_the_sleep_is_not_lost_and_counts_once() {
        let mut scheduler = Scheduler::new(1, 1, SLICE);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        assert_eq!(scheduler.wake(0), None);
        assert!(!scheduler.sleep(0, 10, 0), "woken before");
        assert!(scheduler.sleep(0, 10, 0));
        assert_eq!(scheduler.wake(0), Some(0), "this CPU has nothing to do");
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: Some(Ended::Woken), given: false }));
        scheduler.preempt(0, 0);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: None, given: false }), "told once");
    }

    #[test]
    fn a_sleeper_is_a_slice_ahead_of_others_at_most_and_takes_the_cpu_from_who_is_richer_by_more() {
        let mut scheduler = Scheduler::new(1, 2, SLICE);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        assert!(scheduler.sleep(0, 10, 0));
        for _ in 0..10 {
            assert_eq!(next(&mut scheduler, 0), Some(1));
            scheduler.preempt(1, SLICE);
        }
        assert_eq!(next(&mut scheduler, 0), Some(1));
        assert!(!scheduler.has_had_enough(1, 5 * SLICE, SLICE), "nobody else is there");
        scheduler.expire(9);
        assert_eq!(scheduler.place(0), Place::Asleep(10));
        scheduler.expire(10);
        assert_eq!(scheduler.place(0), Place::Queued(0));
        assert!(!scheduler.has_had_enough(1, 0, SLICE), "a slice behind: not more");
        assert!(scheduler.has_had_enough(1, 1, SLICE));
        scheduler.preempt(1, 1);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 0, slept: Some(Ended::Deadline), given: false }));
        assert!(!scheduler.has_had_enough(0, SLICE - 1, SLICE));
        assert!(scheduler.has_had_enough(0, SLICE, SLICE));
    }

    #[test]
    fn a_directed_yield_fetches_its_target_from_wherever_it_waits() {
        let mut scheduler = Scheduler::new(2, 6, SLICE);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        scheduler.give_to(0, 5, 0);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 5, slept: None, given: true }));
        assert_eq!(scheduler.place(5), Place::Running(0));
        // Who runs or sleeps cannot be given anything.
        assert_eq!(next(&mut scheduler, 1), Some(1));
        scheduler.give_to(5, 1, 0);
        assert_eq!(scheduler.next(0), Some(Next { vcpu: 2, slept: None, given: false }));
    }

    #[test]
    fn a_wake_goes_where_least_is_to_do() {
        let mut scheduler = Scheduler::new(2, 4, SLICE);
        assert_eq!(next(&mut scheduler, 0), Some(0));
        assert!(scheduler.sleep(0, 10, 0));
        assert_eq!((next(&mut scheduler, 0), next(&mut scheduler, 1)), (Some(2), Some(1)));
        scheduler.wake(0);
        assert_eq!(scheduler.place(0), Place::Queued(0));
        assert!(scheduler.sleep(1, 10, 0));
        assert_eq!(next(&mut scheduler, 1), Some(3));
        scheduler.wake(1);
        assert_eq!(scheduler.place(1), Place::Queued(1));
    }

    #[test]
    fn the_backlog_counts_the_others() {
        let mut scheduler = Scheduler::new(2, 5, SLICE);
        assert_eq!((scheduler.backlog(0), scheduler.backlog(1)), (2, 1));
        assert_eq!(next(&mut scheduler, 1), Some(1));
        assert_eq!((scheduler.backlog(1), scheduler.backlog(3)), (1, 1));
        assert!(scheduler.sleep(1, 9, 0));
        assert_eq!((scheduler.backlog(1), scheduler.backlog(3)), (1, 0), "a sleeper is among the others of nobody");
    }

    proptest! {
        #[test]
        fn every_vcpu_is_in_one_place(steps in proptest::collection::vec((0u8..8, 0usize..8, 0usize..8), 0..200)) {
            let mut scheduler = Scheduler::new(3, 8, SLICE);
            for (what, a, b) in steps {
                let running = matches!(scheduler.place(a), Place::Running(_));
                match what {
                    0 | 1 if scheduler.cpus[a % 3].running.is_none() => { scheduler.next(a % 3); }
                    2 if running => scheduler.give_up(a, b as u64),
                    3 if running && a != b => scheduler.give_to(a, b, 1),
                    4 if running => { let _ = scheduler.sleep(a, b as u64, 2); }
                    5 => { scheduler.wake(a); }
                    6 => scheduler.expire(b as u64),
                    7 if running => scheduler.preempt(a, b as u64),
                    _ => {}
                }
                for vcpu in 0..8 {
                    let queued: Vec<_> = (0..3).filter(|&cpu| scheduler.cpus[cpu].queue.contains(&vcpu)).collect();
                    let running: Vec<_> = (0..3).filter(|&cpu| scheduler.cpus[cpu].running == Some(vcpu)).collect();
                    let place = scheduler.place(vcpu);
                    prop_assert_eq!(queued, if let Place::Queued(cpu) = place { [cpu].to_vec() } else { [].to_vec() });
                    prop_assert_eq!(running, if let Place::Running(cpu) = place { [cpu].to_vec() } else { [].to_vec() });
                }
                for cpu in &scheduler.cpus {
                    prop_assert!(cpu.favoured.is_none_or(|vcpu| cpu.queue.contains(&vcpu)));
                }
                let all: usize = scheduler.cpus.iter().map(|cpu| cpu.queue.len()).sum();
                prop_assert!(all <= 8, "nobody is queued twice");
            }
        }
    }
}
