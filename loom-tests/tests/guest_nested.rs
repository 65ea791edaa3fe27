//! A waiter is interrupted at any step, and the interrupt waits for a lock of its own.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_guest::PreemptableTicketLock;
    use pvlock_loom_tests::{
        Config, InterruptAt, InterruptKick, Kick, Machine, Model, OnMachine, SlotLatches, VcpuLatch, Wait, Work, WorkOn,
    };
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    /// vCPU 0 owns two locks. vCPU 1 waits for one of them, and its interrupt for the other. With three vCPUs, vCPU 2 waits
    /// for the first one too, so that vCPU 1 can be next in line or not.
    fn interrupted<K: Kick, const N: usize>(config: Config, at: InterruptAt, inner_first: bool) {
        let machine = Machine::new::<N>(config);
        let outer = WorkOn::<K>::new();
        let inner = WorkOn::<K>::new();
        outer.begin();
        inner.begin();
        machine.interrupt(at, {
            let inner = inner.clone();
            move || inner.once()
        });
        let waiter = {
            let outer = outer.clone();
            machine.spawn(1, move || outer.once())
        };
        let third = (N == 3).then(|| {
            let outer = outer.clone();
            machine.spawn(2, move || outer.once())
        });
        if inner_first {
            inner.end();
            outer.end();
        } else {
            outer.end();
            inner.end();
        }
        waiter.join().unwrap();
        third.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        outer.finish(N as u32);
        inner.finish(if machine.interrupted() { 2 } else { 1 });
    }

    /// The same with two preemptable locks and two vCPUs.
    fn interrupted_preemptable<K: Kick>(config: Config, at: InterruptAt, inner_first: bool) {
        let machine = Machine::new::<2>(config);
        let outer = Work::shared(PreemptableTicketLock::<OnMachine<K>>::new());
        let inner = Rc::new(Work::beside(PreemptableTicketLock::<OnMachine<K>>::new()));
        let (outer_held, inner_held) = (outer.begin(), inner.begin());
        machine.interrupt(at, {
            let inner = inner.clone();
            move || inner.once()
        });
        let waiter = {
            let outer = outer.clone();
            machine.spawn(1, move || outer.once())
        };
        if inner_first {
            inner.end(inner_held);
            outer.end(outer_held);
        } else {
            outer.end(outer_held);
            inner.end(inner_held);
        }
        waiter.join().unwrap();
        assert_eq!((outer.visits(), inner.visits()), (2, if machine.interrupted() { 2 } else { 1 }));
    }

    /// Explores `check` for each step until none is left; how many there were.
    fn at_every_step(first: usize, mut check: impl FnMut(InterruptAt)) -> usize {
        for step in first..100 {
            let came = Arc::new(AtomicBool::new(false));
            check(InterruptAt { vcpu: 1, step, came: came.clone() });
            if !came.load(Ordering::Relaxed) {
                return step;
            }
        }
        panic!("the steps do not end")
    }

    const NESTED_2: Model = Model::exhaustive("interrupted waiter, 2 vCPUs");
    // More preemptions take minutes, for every step is a model of its own.
    const NESTED_3: Model = Model::bounded("interrupted waiter, 3 vCPUs", 1);

    fn model<const N: usize>() -> Model {
        if N == 2 { NESTED_2 } else { NESTED_3 }
    }

    fn config<const N: usize>(interrupt_ends_halt: bool) -> Config {
        // Two vCPUs that poll can do so in turns for ever.
        let spin = if N == 2 { Wait::Poll } else { Wait::Sleep };
        Config { interrupt_ends_halt, spin, blind: N == 3, ..Config::default() }
    }

    /// The outer waiter wakes whenever the interrupt comes.
    fn holds<K: Kick, const N: usize>(interrupt_ends_halt: bool) {
        // With three vCPUs not the steps before the waiter has claimed its slot, each of which takes seconds, and
        // only the order in which the outer lock's kick comes during the inner wait: the other one takes
        // another half minute.
        let first = if N == 2 { 0 } else { 5 };
        for &inner_first in if N == 2 { &[false, true][..] } else { &[false] } {
            let start = Instant::now();
            let mut executions = 0;
            let steps = at_every_step(first, |at| {
                let model_of_step = move || interrupted::<K, N>(config::<N>(interrupt_ends_halt), at.clone(), inner_first);
                executions += model::<N>().executions(model_of_step);
            });
            println!(
                "interrupted waiter, {N} vCPUs, {:?}: holds at {steps} steps, {executions} executions, {:.2?}",
                K::KIND,
                start.elapsed()
            );
            assert!(steps > 10, "an interrupt came at each step of a wait");
        }
    }

    #[test]
    fn row_04_latch_for_each_slot() {
        holds::<SlotLatches, 2>(false);
    }

    #[test]
    fn row_04_latch_for_each_slot_and_three_vcpus() {
        holds::<SlotLatches, 3>(false);
    }

    const PREEMPTABLE: Model = Model::bounded("interrupted waiter of a preemptable lock", 3);

    fn preemptable_holds<K: Kick>(interrupt_ends_halt: bool) {
        for inner_first in [false, true] {
            let start = Instant::now();
            let mut executions = 0;
            let steps = at_every_step(0, |at| {
                let model = move || interrupted_preemptable::<K>(config::<2>(interrupt_ends_halt), at.clone(), inner_first);
                executions += PREEMPTABLE.executions(model);
            });
            println!(
                "interrupted waiter of a preemptable lock, {:?}: holds at {steps} steps, {executions} executions, {:.2?}",
                K::KIND,
                start.elapsed()
            );
            assert!(steps > 10, "an interrupt came at each step of a wait");
        }
    }

    #[test]
    fn row_04_preemptable() {
        preemptable_holds::<SlotLatches>(false);
    }

    #[test]
    fn row_08_preemptable_latch_for_each_slot_and_an_interrupt_ends_a_halt() {
        preemptable_holds::<SlotLatches>(true);
    }

    #[test]
    fn row_08_preemptable_latch_for_the_vcpu() {
        preemptable_holds::<VcpuLatch>(true);
    }

    #[test]
    fn row_28_preemptable_kick_is_an_interrupt() {
        preemptable_holds::<InterruptKick>(true);
    }

    #[test]
    fn row_08_latch_for_each_slot_and_an_interrupt_ends_a_halt() {
        holds::<SlotLatches, 2>(true);
    }

    #[test]
    fn row_08_latch_for_the_vcpu() {
        holds::<VcpuLatch, 2>(true);
    }

    #[test]
    fn row_28_kick_is_an_interrupt() {
        holds::<InterruptKick, 2>(true);
    }
}
