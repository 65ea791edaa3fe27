//! One owner at a time, in the order of the tickets, who sees what the owners before did.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_loom_tests::{Config, Machine, Model, SlotLatches, Start, Wait, WorkOn};

    /// Each vCPU takes the lock `times`.
    fn contend<const N: usize>(start: Start, times: u32) {
        // Spinning: nobody goes on before something has changed.
        let looks = if start == Start::Native { 0 } else { 2 };
        let wait = if N == 2 { Wait::Poll } else { Wait::Sleep };
        let machine = Machine::new::<N>(Config { start, looks, halt: wait, spin: wait, ..Config::default() });
        let work = WorkOn::<SlotLatches>::new();
        let others: Vec<_> = (1..N)
            .map(|vcpu| {
                let work = work.clone();
                machine.spawn(vcpu, move || (0..times).for_each(|_| work.once()))
            })
            .collect();
        (0..times).for_each(|_| work.once());
        others.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        work.finish(N as u32 * times);
    }

    const NATIVE_2: Model = Model::exhaustive("exclusion: native, 2 vCPUs, twice each");
    const NATIVE_3: Model = Model::bounded("exclusion: native, 3 vCPUs", 3);
    const HALTING_2: Model = Model::exhaustive("exclusion: halting, 2 vCPUs");

    #[test]
    fn native_2() {
        NATIVE_2.holds(|| contend::<2>(Start::Native, 2));
    }

    #[test]
    fn native_3() {
        NATIVE_3.holds(|| contend::<3>(Start::Native, 1));
    }

    #[test]
    fn halting_2() {
        HALTING_2.holds(|| contend::<2>(Start::Halting, 1));
    }
}
