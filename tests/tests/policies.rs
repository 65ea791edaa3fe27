//! What the host does with vCPUs that report their spinning, on real vCPUs: nothing lost, nobody overtaken, nobody forgotten.

use pvlock_guest_image::LockKind;
use pvlock_host::{Config, Decision, Policy, Queue, Resume, Sleep};
use pvlock_tests::{backends, run, scaled, spec};

#[test]
fn every_policy_is_exact_and_strictly_ordered_and_forgets_no_sleeper() {
    for backend in backends() {
        for (name, ..) in Policy::NAMED {
            let policy = Policy::named(name).unwrap();
            let queue = if name == "park-on-holder" { Queue::Holder } else { Queue::Previous };
            let host = Config { policy, queue, ..spec(LockKind::Ticket, 1).host };
            // Sections that outlast the window after which a guest reports its spinning, and more of them than fit a time slice.
            let (limit, inside) = (scaled(1000), 50_000);
            let spec = pvlock::backend::Spec { host, limit, inside, log: 6 * limit, ..spec(LockKind::Ticket, 6) };
            let measured = run(backend, &spec);
            let context = format!("{backend:?} {name}: {measured:?}");
            assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{context}");
            assert_eq!((measured.host.forced, measured.host.refused), (0, 0), "{context}");
            let reports = measured.host.pause_loops;
            assert_eq!(reports > 0, name != "ignore", "who asked for reports gets some, who did not gets none: {context}");
            let decided = |decision| measured.host.decided(decision);
            // Nothing here says when a running vCPU is preempted: nobody may be parked on one, and no policy may claim to know.
            assert_eq!(decided(Decision::Resume(Resume::HolderRunning)), 0, "{context}");
            let parks = decided(Decision::Park(Sleep::OnHolder)) + decided(Decision::Park(Sleep::OnPrevious));
            assert!(parks == 0 || name.starts_with("park"), "{context}");
        }
    }
}
