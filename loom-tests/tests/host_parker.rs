//! How the drivers' threads sleep, alone.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use loom::cell::UnsafeCell;
    use pvlock_host::Unpark;
    use pvlock_host::driver::Parker;
    use pvlock_loom_tests::{FOREVER, Model};
    use std::rc::Rc;
    use std::time::Instant;

    /// One thread does something and wakes another, which then sees it, whether it slept or found the token.
    fn wake() {
        let shared = Rc::new((Parker::new(), UnsafeCell::new(0)));
        let waker = pvlock_loom_tests::spawn({
            let shared = shared.clone();
            move || {
                // SAFETY: loom panics if another thread looks before this happened.
                shared.1.with_mut(|data| unsafe { *data = 1 });
                shared.0.unpark();
            }
        });
        assert_eq!(shared.0.park(Instant::now() + FOREVER), Unpark::Woken);
        // SAFETY: as above.
        assert_eq!(shared.1.with(|data| unsafe { *data }), 1);
        waker.join().unwrap();
        // The token is used up.
        assert_eq!(shared.0.park(Instant::now()), Unpark::Deadline);
    }

    const WAKE: Model = Model::exhaustive("a driver's thread is woken");

    #[test]
    fn a_wake_is_not_lost_and_shows_what_was_done_before() {
        WAKE.holds(wake);
    }
}
