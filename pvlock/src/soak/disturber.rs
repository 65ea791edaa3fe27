//! What happens to the vCPUs of a run.

use super::mix::Mix;
use crate::nap::Nap;
use crate::session::{Disturbance, Vcpus};
use pvlock_host::protocol::HostFlags;
use std::io;
use std::time::{Duration, Instant};

/// Time to disturb in, at each look of a session at its vCPUs; it waits as long until the next.
const SPELL: Duration = Duration::from_millis(20);
/// Longest time that a vCPU is kept from running, and the VM paused.
const LONGEST_NAP: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Disturbs.
pub(super) struct Disturber {
    random: fastrand::Rng,
    time: Duration,
    pace: Option<Duration>,
    vcpus: usize,
    resets: bool,
    count: u64,
    fault: Option<&'static str>,
    signal: Nap,
    longest_nap: Duration,
    flags: HostFlags,
}

impl Disturber {
    pub(super) fn new(mix: &Mix) -> io::Result<Self> {
        // A vCPU naps a quarter of its time at most: such signals are queued, and a vCPU that gets more than it can sleep through
        // does nothing else.
        let longest_nap = mix.pace.map_or(Duration::ZERO, |pace| LONGEST_NAP.min(pace.mul_f64(6.0 * mix.spec.vcpus as f64)));
        Ok(Self {
            random: fastrand::Rng::with_seed(mix.seed),
            time: mix.time,
            pace: mix.pace,
            vcpus: mix.spec.vcpus,
            resets: mix.resets(),
            count: 0,
            fault: None,
            // Installs the handler as well.
            signal: Nap::new(Duration::ZERO)?,
            longest_nap,
            flags: mix.spec.host.flags,
        })
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The first thing that a disturbance found wrong.
    pub(super) fn fault(&self) -> Option<&'static str> {
        self.fault
    }

    /// `time` into the run. Once its time is over there is peace: a signal would end the sleep of who has lost its kick.
    pub(super) fn disturb(&mut self, time: Duration, vcpus: &dyn Vcpus) {
        let Some(pace) = self.pace.filter(|_| time < self.time) else { return };
        let end = Instant::now() + SPELL;
        while Instant::now() < end {
            std::thread::sleep(pace.mul_f64(2.0 * self.random.f64()));
            let next = self.next();
            self.count += 1;
            if let Err(fault) = vcpus.disturb(next) {
                self.fault.get_or_insert(fault);
            }
        }
    }

    fn next(&mut self) -> Disturbance {
        let random = &mut self.random;
        let vcpu = random.usize(..self.vcpus);
        // Short ones more often.
        let time = |random: &mut fastrand::Rng, longest: Duration| longest.mul_f64(random.f64().powi(4));
        match random.u32(..24) {
            0..8 => Disturbance::Signal(vcpu, self.signal),
            8..16 => Disturbance::Signal(vcpu, Nap::new(time(random, self.longest_nap)).unwrap_or(self.signal)),
            16..19 => Disturbance::Interrupt(vcpu),
            19 => Disturbance::Pause(time(random, LONGEST_PAUSE)),
            20 if self.resets => Disturbance::ResetVm,
            21 if self.resets => Disturbance::Reset(vcpu),
            // Mostly on again.
            22 => Disturbance::Flags(if random.u32(..4) == 0 { HostFlags::OFF } else { self.flags }),
            _ => Disturbance::Look,
        }
    }
}
