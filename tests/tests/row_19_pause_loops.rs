//! Row 19: a guest could not boot where two hypervisors adapted its pause-loop exits. Whatever a guest's pause-loop exits do
//! (there are none, none ever comes, every PAUSE is one) and whatever the host answers, the locks go on.

use pvlock_guest::{Guest, GuestRef, Platform, PreemptableTicketLock, RawLock, TicketLock, Word};
use pvlock_guest_image::pause_loop;
use pvlock_host::driver::threads::{Threads, threads};
use pvlock_host::hypercalls::{Doorbell, Ring};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use pvlock_host::{Actuator, Config, Policy, Queue, Window};
use pvlock_tests::DEADLINE_NS;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const VCPUS: usize = 4;
/// Critical sections of each vCPU.
const SECTIONS: u64 = 150;

/// Ticks of spinning after which a guest exits: never, later than any wait, at each PAUSE.
const WINDOWS: [u64; 3] = [0, u64::MAX, 1];

struct Vm {
    guest: GuestRef<'static>,
    host: Threads,
    window: u64,
}

std::thread_local! {
    static CURRENT: Cell<Option<(&'static Vm, VcpuId)>> = const { Cell::new(None) };
}

fn current() -> (&'static Vm, VcpuId) {
    CURRENT.get().expect("the thread is a vCPU")
}

fn ring(doorbell: Doorbell) {
    let (vm, vcpu) = current();
    vm.host.doorbell(vcpu).ring(doorbell.encode());
}

enum Thread {}

impl Platform for Thread {
    fn guest() -> GuestRef<'static> {
        current().0.guest
    }

    fn current() -> Option<VcpuId> {
        Some(current().1)
    }

    fn ticks() -> u64 {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        pause_loop::wait_while::<Self>(word, value, deadline, current().0.window, || ring(Doorbell::PauseLoop))
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        ring(Doorbell::Halt { slot, interrupts });
    }

    fn kick(vcpu: VcpuId) {
        let (vm, own) = current();
        vm.guest.kick(&vm.host.doorbell(own), vcpu);
    }
}

/// All vCPUs share a lock whose sections outlast a time slice's end now and then; says how many exits that made.
fn progress<L: RawLock + Sync + 'static>(config: Config, window: u64) -> u64 {
    let guest = Box::leak(Box::new(Guest::<VCPUS>::new())).as_ref();
    let host = threads(config, guest.region(), VCPUS).unwrap();
    let vm: &'static Vm = Box::leak(Box::new(Vm { guest, host, window }));
    let boot = VcpuId::new(0).unwrap();
    guest.register(&vm.host.doorbell(boot), 0, [boot]).unwrap();
    let lock: &'static L = Box::leak(Box::new(L::INIT));
    let counter: &'static AtomicU64 = Box::leak(Box::default());
    let vcpus: Vec<_> = (0..VCPUS)
        .filter_map(VcpuId::new)
        .map(|vcpu| {
            std::thread::spawn(move || {
                CURRENT.set(Some((vm, vcpu)));
                guest.online(&vm.host.doorbell(vcpu), vcpu).unwrap();
                for n in 0..SECTIONS {
                    let token = lock.lock();
                    let count = counter.load(Ordering::Relaxed);
                    if n % 16 == 0 {
                        std::thread::yield_now();
                    }
                    counter.store(count + 1, Ordering::Relaxed);
                    // SAFETY: locked above, with this token.
                    unsafe { lock.unlock(token) };
                }
            })
        })
        .collect();
    vcpus.into_iter().for_each(|vcpu| vcpu.join().unwrap());
    assert_eq!(counter.load(Ordering::Relaxed), SECTIONS * VCPUS as u64, "an update was lost");
    let counts = vm.host.statistics();
    assert_eq!((counts.forced, counts.refused), (0, 0), "a wake was lost");
    counts.pause_loops
}

fn whatever_the_exits_do<L: RawLock + Sync + 'static>() {
    // Two levels that adapt, as in the row: the host's window and the guest's own budget.
    let window = Some(Window { floor: 1, ceiling: 1 << 16, start: 4096, grow: 2, shrink: 2, actuator: Actuator::Ticks });
    for (name, ..) in Policy::NAMED {
        for adapts in [None, window] {
            let policy = Policy { window: adapts, ..Policy::named(name).unwrap() };
            let queue = if name == "park-on-holder" { Queue::Holder } else { Queue::Previous };
            let config = Config { queue, policy, deadline_ns: DEADLINE_NS, ..Config::default() };
            let exits = WINDOWS.map(|window| progress::<L>(config, window));
            assert_eq!(exits[..2], [0, 0], "{name}: exits that the guest does not make");
            assert!(exits[2] > 0, "{name}: every PAUSE is an exit");
        }
    }
}

#[test]
fn row_19_ticket_lock_goes_on_without_exits_and_with_nothing_but_exits() {
    whatever_the_exits_do::<TicketLock<Thread>>();
}

#[test]
fn row_19_preemptable_lock_goes_on_without_exits_and_with_nothing_but_exits() {
    whatever_the_exits_do::<PreemptableTicketLock<Thread>>();
}
