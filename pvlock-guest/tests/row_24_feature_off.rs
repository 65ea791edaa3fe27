//! Row 24: the wrong vendor's hypercall was patched into the text. (The instruction is chosen once, as a value: see
//! `pvlock-hypercalls`.) Here: a host that switches the feature off, or does not answer at all, gets locks that work.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, VCPUS, Vm, cpu, for_both_locks, id, run_as, unlock};
use pvlock_guest::Mode;
use pvlock_guest::hypercalls::{Direct, Status};
use pvlock_guest::protocol::Features;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

for_both_locks! {
    row_24_the_locks_work_with_the_feature_switched_off
}

/// All vCPUs share a lock; nobody may ring a doorbell.
fn contend<L: Lock>(vm: &'static Vm) {
    let lock = &L::INIT;
    let counter = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for vcpu in 0..VCPUS {
            let counter = &counter;
            scope.spawn(move || {
                run_as(vm, Some(vcpu));
                for _ in 0..500 {
                    let token = lock.lock();
                    counter.store(counter.load(Relaxed) + 1, Relaxed);
                    unlock(lock, token);
                }
                cpu(|cpu| assert_eq!((cpu.halts.get(), cpu.kicks.get()), (0, 0), "nobody listens"));
            });
        }
    });
    assert_eq!(counter.into_inner(), 500 * VCPUS as u64);
}

fn row_24_the_locks_work_with_the_feature_switched_off<L: Lock>() {
    // Refused, not even known, and accepted without what the locks need.
    for (status, accepts) in
        [(Status::BadVersion, 0), (Status::Unknown, 0), (Status::Ok, 0), (Status::Ok, Features::KICK_WORD.bits())]
    {
        let vm = Vm::new();
        let guest = vm.guest.as_ref();
        guest.region().header.accepted.store(accepts, Relaxed);
        let host = Direct(|_| status.encode());
        let registered = guest.register(&host, 1, (0..VCPUS).map(id));
        assert_eq!(registered.is_ok(), status == Status::Ok);
        (0..VCPUS).for_each(|vcpu| _ = guest.online(&host, id(vcpu)));
        assert_eq!(guest.mode(), Mode::Native, "{status:?}");
        contend::<L>(vm);
    }
}
