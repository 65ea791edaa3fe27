//! A wait slot under a concurrent reader.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use loom::thread;
    use pvlock_loom_tests::Model;
    use pvlock_protocol::{LockId, VcpuId, Wait, WaitSlot, WaitState};
    use std::rc::Rc;

    const READER: Model = Model::exhaustive("slot: reader against two publications");

    fn wait(lock: u64, ticket: u32) -> Wait {
        Wait {
            lock: LockId::new(lock).expect("not 0"),
            ticket,
            state: WaitState::Spinning,
            predecessor: VcpuId::new(0),
            holder: None,
        }
    }

    /// One wait follows another in the same slot: a reader sees either of them or none, never a mixture.
    fn reader_against_two_publications() {
        let (first, second) = (wait(8, 1), wait(16, 2));
        let slot = Rc::new(WaitSlot::new());
        let writer = {
            let slot = slot.clone();
            thread::spawn(move || {
                slot.publish(&first);
                slot.update(&Wait { state: WaitState::Halting, ..first });
                slot.publish(&second);
            })
        };
        if let Some(seen) = slot.read() {
            let state = seen.state;
            let expected = if seen.lock == first.lock { first } else { second };
            assert_eq!(Wait { state, ..expected }, seen, "a mixture of two publications");
        }
        writer.join().unwrap();
        assert_eq!(slot.read(), Some(second));
    }

    #[test]
    fn row_12_a_reader_never_sees_a_mixture() {
        READER.holds(reader_against_two_publications);
    }
}
