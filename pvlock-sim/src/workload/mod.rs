//! What guests do.

mod rounds;
mod vcpu;

pub use rounds::{Guests, Rounds};
pub(crate) use rounds::{Handler, interrupt};
pub(crate) use vcpu::Vcpu;

use rand_distr::{Distribution, Exp1};

/// What the vCPUs of a VM do.
#[derive(Clone, Debug, PartialEq)]
pub enum Workload {
    /// Takes one of so many locks, again and again: the microbenchmark of `pvlock run`. A piece of work is a section.
    Micro {
        /// Locks, taken at random.
        locks: usize,
        /// Time in the section, in ns.
        inside_ns: u64,
        /// Time between sections: exponentially distributed about this mean, in ns.
        outside_ns: u64,
    },
    /// Computes. A piece of work is a millisecond.
    Busy,
    /// Does everything that can be done with locks, for a number of rounds, or everything that a guest must not do.
    Rounds(Rounds),
}

impl Workload {
    /// How many locks a VM with so many vCPUs has.
    pub(crate) fn locks(&self, _vcpus: usize) -> usize {
        match self {
            Self::Micro { locks, .. } => *locks,
            Self::Busy => 0,
            Self::Rounds(rounds) => rounds.locks(),
        }
    }

    /// Whether the guest does not keep to the protocol.
    pub(crate) fn is_hostile(&self) -> bool {
        matches!(self, Self::Rounds(Rounds { guests: Guests::Hostile, .. }))
    }

    /// The code of one vCPU.
    pub(crate) fn run(&self, mut vcpu: Vcpu) {
        match *self {
            Self::Micro { inside_ns, outside_ns, .. } => loop {
                vcpu.compute_about(outside_ns);
                let lock = vcpu.any_lock();
                vcpu.section(lock, inside_ns);
                vcpu.worked();
            },
            Self::Busy => loop {
                vcpu.compute(1_000_000);
                vcpu.worked();
            },
            Self::Rounds(rounds) => rounds.run(vcpu),
        }
    }
}

/// A sample of an exponential distribution with this mean.
pub(crate) fn exponential(mean: u64, random: &mut rand_pcg::Pcg64Mcg) -> u64 {
    let sample: f64 = Exp1.sample(random);
    (sample * mean as f64) as u64
}
