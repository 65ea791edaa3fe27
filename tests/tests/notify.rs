//! The ways a kick reaches the host, on real vCPUs: nothing lost, nobody overtaken, nobody forgotten.

use pvlock::backend::{Backend, Spec};
use pvlock::measure::Measured;
use pvlock::vm::ExitKind;
use pvlock_guest_image::LockKind;
use pvlock_host::driver::threads::threads;
use pvlock_host::hypercalls::{DEFAULT_PORT, Doorbell, Pio, Transport};
use pvlock_host::protocol::{Features, Region, VcpuId};
use pvlock_host::{Config, Policy, Poller, Queue};
use pvlock_tests::{backends, kvm, run, scaled, spec};

const VCPUS: u32 = 6;

/// A run in which everybody halts: sections that outlast the spin, and more of them than fit a time slice.
fn halting(backend: Backend, host: Config, ioeventfd: bool) -> Measured {
    let (limit, inside) = (scaled(1000), 50_000);
    let spec = spec(LockKind::Ticket, VCPUS as usize);
    let log = u64::from(VCPUS) * limit;
    let measured = run(backend, &Spec { host: Config { spin_budget: 1, ..host }, limit, inside, log, ioeventfd, ..spec });
    let context = format!("{backend:?} {host:?}: {measured:?}");
    assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{context}");
    assert_eq!((measured.host.forced, measured.host.refused), (0, 0), "{context}");
    assert!(measured.host.kicked > 0, "with a budget of one tick waiters halt: {context}");
    measured
}

fn host() -> Config {
    spec(LockKind::Ticket, 1).host
}

#[test]
fn with_a_poller_that_stays_awake_kicks_need_no_doorbell() {
    for backend in backends() {
        for queue in [Queue::Previous, Queue::Holder] {
            let poller = Poller { enter: 1, patience: u32::MAX, keep: 0, own_cpu: true };
            let policy = Policy { poller: Some(poller), ..Policy::default() };
            let host = halting(backend, Config { policy, queue, ..host() }, false).host;
            // If each kick that the poller finds had been rung as well, there would be no fewer doorbells.
            assert!(host.polled > host.kicks_sent, "{backend:?} {queue:?}: {host:?}");
        }
    }
}

#[test]
fn a_poller_that_comes_and_goes_loses_no_kick() {
    let restless = Poller { enter: 1, patience: 1, keep: u32::MAX, own_cpu: true };
    for backend in backends() {
        for poller in [restless, Poller::default()] {
            let policy = Policy { poller: Some(poller), ..Policy::default() };
            halting(backend, Config { policy, ..host() }, false);
        }
    }
}

#[test]
fn without_a_poller_every_kick_is_a_doorbell() {
    for backend in backends() {
        let host = halting(backend, host(), false).host;
        assert_eq!((host.polled, host.kicks), (0, host.kicks_sent), "{backend:?}");
    }
}

#[test]
fn kicks_through_eventfds_make_no_exits() {
    let Some(backend) = kvm() else { return };
    for queue in [Queue::Previous, Queue::Holder] {
        let measured = halting(backend, Config { queue, ..host() }, true);
        let host = measured.host;
        let context = format!("{queue:?}: {host:?}");
        // REGISTER, the ONLINEs, each halt, each vCPU's end; no kick.
        let vcpus = u64::from(VCPUS);
        assert_eq!(measured.exits.unwrap().get(ExitKind::IoOut), 1 + vcpus + host.halts + vcpus, "{context}");
        assert_eq!(host.kicks_sent, 0, "{context}");
        assert!(host.kicks >= host.kicked, "{context}");
    }
}

/// KVM would signal them for ever, and nobody would look.
#[test]
fn eventfds_that_cannot_all_be_had_leave_none_behind() {
    use kvm_ioctls::IoEventAddress::Pio as At;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
    let Some(_) = kvm() else { return };
    let vm = pvlock::vm::open().unwrap().create_vm().unwrap();
    let region: &Region<3> = Box::leak(Box::new(Region::new(Features::HALT)));
    let driver = threads(Config::default(), region.as_ref(), 3).unwrap();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let word = |vcpu| -> u32 { Doorbell::Kick(VcpuId::new(vcpu).unwrap()).encode() };
    let (transport, address) = (Transport::Pio(Pio { port: DEFAULT_PORT }), At(DEFAULT_PORT.into()));
    // Somebody else has one of the words.
    vm.register_ioevent(&event, &address, word(2)).unwrap();
    assert!(driver.kick_by_eventfd(transport, &vm).is_err());
    vm.unregister_ioevent(&event, &address, word(2)).unwrap();
    driver.kick_by_eventfd(transport, &vm).unwrap();
}
