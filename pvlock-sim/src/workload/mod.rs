//! What guests do: scripts of lock and think times. Think times are exponentially distributed, sections have fixed lengths.
//!
//! The benchmarks are not the programs of these names but what their discussions say of their locks. How often which lock is
//! taken and for how long is not published; the numbers here are assumed. They were chosen once, with all of T1 to T4 in view,
//! within what such programs can do, and are the same for every row of every table.

mod rounds;
mod vcpu;

pub use rounds::{Guests, Rounds};
pub(crate) use rounds::{Handler, interrupt};
pub(crate) use vcpu::Vcpu;

use pvlock_host::protocol::VcpuId;
use rand::RngExt;
use rand_distr::{Distribution, Exp1};
use std::sync::atomic::Ordering;

/// What the vCPUs of a VM do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Workload {
    /// Takes one of so many locks, again and again: the microbenchmark of `pvlock run`. A piece of work is a section.
    Micro {
        /// Locks, taken at random.
        locks: usize,
        /// Time in the section, in ns.
        inside_ns: u64,
        /// Mean time between sections, in ns.
        outside_ns: u64,
    },
    /// Computes. A piece of work is a millisecond.
    Busy,
    /// Many short sections of a file system: each operation takes one of 64 locks, and one in eight the hot one (the directory
    /// cache's).
    Dbench,
    /// One hot address space: maps, touches, unmaps. Each record takes the hot lock twice, and one in two has all other vCPUs
    /// flush their TLBs and waits for them.
    Ebizzy,
    /// Messages between tasks: each takes a socket's lock, then the receiver's run queue's, and wakes its vCPU if that idles.
    /// Forty messages per vCPU are under way.
    Hackbench,
    /// Compilers: almost only computing, page allocation now and then (one hot lock).
    Kernbench,
    /// A database whose waits are sleeps: locks are many, and short.
    Sysbench,
    /// Does everything that can be done with locks, for a number of rounds, or everything that a guest must not do.
    Rounds(Rounds),
}

/// One section.
const SHORT_NS: u64 = 300;

impl Workload {
    /// All benchmarks with their names.
    pub const NAMED: [(&'static str, Self); 6] = [
        ("busy", Self::Busy),
        ("dbench", Self::Dbench),
        ("ebizzy", Self::Ebizzy),
        ("hackbench", Self::Hackbench),
        ("kernbench", Self::Kernbench),
        ("sysbench", Self::Sysbench),
    ];

    /// How many locks a VM with so many vCPUs has.
    pub(crate) fn locks(&self, vcpus: usize) -> usize {
        match self {
            Self::Micro { locks, .. } => *locks,
            Self::Busy => 0,
            Self::Dbench => 1 + 64,
            Self::Ebizzy => 1,
            Self::Hackbench => SOCKETS + vcpus,
            Self::Kernbench => 1 + 16,
            Self::Sysbench => 128,
            Self::Rounds(rounds) => rounds.locks(),
        }
    }

    /// Whether the guest does not keep to the protocol.
    pub(crate) fn is_hostile(&self) -> bool {
        matches!(self, Self::Rounds(Rounds { guests: Guests::Hostile, .. }))
    }

    /// The code of one vCPU.
    pub(crate) fn run(&self, mut vcpu: Vcpu) {
        let operation: fn(&mut Vcpu) = match *self {
            Self::Micro { inside_ns, outside_ns, .. } => loop {
                vcpu.compute_about(outside_ns);
                let lock = vcpu.any_lock();
                vcpu.section(lock, inside_ns);
                vcpu.worked();
            },
            Self::Hackbench => return hackbench(vcpu),
            Self::Busy => |vcpu| vcpu.compute(1_000_000),
            Self::Dbench => dbench,
            Self::Ebizzy => ebizzy,
            Self::Kernbench => kernbench,
            Self::Sysbench => sysbench,
            Self::Rounds(rounds) => return rounds.run(vcpu),
        };
        loop {
            operation(&mut vcpu);
            vcpu.worked();
        }
    }
}

fn dbench(vcpu: &mut Vcpu) {
    vcpu.compute_about(5_000);
    let lock = vcpu.random.random_range(1..vcpu.locks.len());
    vcpu.section(lock, SHORT_NS);
    if vcpu.random.random_range(0..8) == 0 {
        vcpu.section(0, SHORT_NS);
    }
}

/// Updating the list of mappings.
const MAP_NS: u64 = 4_000;

fn ebizzy(vcpu: &mut Vcpu) {
    // A chunk of 256 KiB is copied and searched.
    vcpu.compute_about(200_000);
    vcpu.section(0, MAP_NS);
    vcpu.compute_about(50_000);
    if vcpu.random.random_range(0..2) == 0 {
        vcpu.flush();
    }
    vcpu.section(0, MAP_NS);
}

/// Sockets that are in use.
const SOCKETS: usize = 4;
/// Messages under way per vCPU.
const MESSAGES: u64 = 40;

fn hackbench(mut vcpu: Vcpu) {
    let own = vcpu.id.index();
    let mail = vcpu.mail;
    mail[own].fetch_add(MESSAGES, Ordering::Relaxed);
    loop {
        while mail[own].load(Ordering::Relaxed) == 0 {
            vcpu.idle();
        }
        vcpu.section(SOCKETS + own, SHORT_NS);
        mail[own].fetch_sub(1, Ordering::Relaxed);
        for _ in 0..3 {
            vcpu.compute_about(1_000);
            let socket = vcpu.random.random_range(0..SOCKETS);
            vcpu.section(socket, SHORT_NS);
        }
        let receiver = vcpu.random.random_range(0..vcpu.vcpus);
        let queue = vcpu.lock(SOCKETS + receiver);
        vcpu.compute(SHORT_NS);
        let idle = mail[receiver].fetch_add(1, Ordering::Relaxed) == 0;
        vcpu.unlock(queue);
        if let Some(receiver) = VcpuId::new(receiver)
            && idle
            && receiver != vcpu.id
        {
            vcpu.notify(receiver);
        }
        vcpu.worked();
    }
}

fn kernbench(vcpu: &mut Vcpu) {
    for _ in 0..4 {
        vcpu.compute_about(10_000);
        let lock = vcpu.random.random_range(1..vcpu.locks.len());
        vcpu.section(lock, SHORT_NS);
    }
    vcpu.section(0, SHORT_NS);
}

fn sysbench(vcpu: &mut Vcpu) {
    vcpu.compute_about(100_000);
    let lock = vcpu.any_lock();
    vcpu.section(lock, SHORT_NS);
}

/// A sample of an exponential distribution with this mean.
pub(crate) fn exponential(mean: u64, random: &mut rand_pcg::Pcg64Mcg) -> u64 {
    let sample: f64 = Exp1.sample(random);
    (sample * mean as f64) as u64
}
