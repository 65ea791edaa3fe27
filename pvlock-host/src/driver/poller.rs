//! The poller's thread: looks for kicks that the guest only counts, while that is worth a CPU. `Poller` is the rule.
//!
//! ```text
//! blocked --- a KICK doorbell ---> watching --- many in a period ---> awake: HostFlags::POLLER is set, it polls
//!    ^                              |    ^                              |
//!    +----- none in a period -------+    +-- few in some periods, or ---+
//!                                            its CPU is wanted
//! ```
//!
//! Only `awake` uses a CPU. Whether the poller runs matters to how fast kicks are, never to whether they arrive.

use super::{Inner, Machine};
use crate::driver::parker::Parker;
use crate::{GuestMemory, Poller, Polling};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it is decided whether the poller is worth it. `Poller`'s defaults count kicks in 1 ms.
const PERIOD: Duration = Duration::from_millis(1);
/// Longest sleep of a blocked poller; only a bound, as it is woken.
const FOREVER: Duration = Duration::from_secs(3600);
/// PAUSEs between two looks: a look costs a load for each vCPU, and a hyperthread next door wants to run too.
const PAUSES: u32 = 16;

/// What the vCPUs' threads tell the poller.
pub(super) struct Bell {
    parker: Parker,
    /// KICK doorbells since the poller last asked.
    kicks: AtomicU32,
    blocked: AtomicBool,
    stop: AtomicBool,
}

impl Bell {
    pub(super) fn new() -> Self {
        Self { parker: Parker::new(), kicks: AtomicU32::new(0), blocked: AtomicBool::new(false), stop: AtomicBool::new(false) }
    }

    /// A KICK doorbell was rung.
    pub(super) fn kick(&self) {
        // SeqCst: pairs with `block`: either that sees the kick, or this sees `blocked`.
        self.kicks.fetch_add(1, Ordering::SeqCst);
        if self.blocked.load(Ordering::SeqCst) && self.blocked.swap(false, Ordering::SeqCst) {
            self.parker.unpark();
        }
    }

    /// Sleeps until a KICK doorbell is rung or the thread is to stop.
    fn block(&self) {
        self.blocked.store(true, Ordering::SeqCst);
        if self.kicks.load(Ordering::SeqCst) == 0 {
            self.parker.park(Instant::now() + FOREVER);
        }
        self.blocked.store(false, Ordering::SeqCst);
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.parker.unpark();
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Starts the thread; `Bell::stop` ends it, at once, and then the guest rings again.
pub(super) fn start<M: GuestMemory + 'static>(inner: &Arc<Inner<M>>, settings: Poller) -> std::io::Result<JoinHandle<()>> {
    inner.bell.stop.store(false, Ordering::Relaxed);
    let inner = Arc::clone(inner);
    let run = move || Loop { inner: &inner, bell: &inner.bell, settings, cpus: cpus() }.run();
    std::thread::Builder::new().name("pvlock-poller".into()).spawn(run)
}

/// CPUs that this process may use.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

struct Loop<'a, M> {
    inner: &'a Inner<M>,
    bell: &'a Bell,
    settings: Poller,
    cpus: usize,
}

impl<M: GuestMemory> Loop<'_, M> {
    fn run(&self) {
        let mut now = Polling::default();
        let mut kicks = 0;
        let mut denial = Denial::default();
        while !self.bell.is_stopped() {
            if !now.awake && kicks == 0 {
                self.bell.block();
            }
            let (seen, got_cpu) = if now.awake { self.poll() } else { self.watch() };
            kicks = self.bell.kicks.swap(0, Ordering::Relaxed).saturating_add(seen);
            let spare = self.settings.own_cpu || denial.allows(now.awake, if now.awake { got_cpu } else { self.has_spare_cpu() });
            now = self.change(now, self.settings.next(now, kicks, Some(spare)));
        }
        self.change(now, Polling::default());
    }

    /// Tells the guest what the poller is from now on.
    fn change(&self, now: Polling, next: Polling) -> Polling {
        let engine = &self.inner.engine;
        match (now.awake, next.awake) {
            // Also if it was awake: the guest may have registered anew.
            (_, true) if engine.poller_wakes() => next,
            (true, _) => {
                engine.poller_sleeps(&Machine(self.inner));
                Polling::default()
            }
            (false, _) => Polling::default(),
        }
    }

    /// Waits for a period.
    fn watch(&self) -> (u32, bool) {
        let end = Instant::now() + PERIOD;
        while Instant::now() < end && !self.bell.is_stopped() {
            self.bell.parker.park(end);
        }
        (0, false)
    }

    /// Polls for a period; how many kicks that found, and whether nobody else wanted the CPU.
    fn poll(&self) -> (u32, bool) {
        let (start, cpu) = (Instant::now(), cpu_time());
        let mut kicks = 0u32;
        loop {
            kicks = kicks.saturating_add(self.inner.engine.poll(&Machine(self.inner)) as u32);
            let time = start.elapsed();
            if time >= PERIOD || self.bell.is_stopped() {
                // An eighth is for interrupts, and wake-ups that took the kernel a while.
                return (kicks, cpu_time().saturating_sub(cpu) >= time - time / 8);
            }
            (0..PAUSES).for_each(|_| core::hint::spin_loop());
        }
    }

    /// Whether this VM leaves a CPU idle, as far as is known here: a vCPU that sleeps elsewhere counts as running.
    fn has_spare_cpu(&self) -> bool {
        let engine = &self.inner.engine;
        engine.vcpus().count() - engine.dump(0).count() < self.cpus
    }
}

/// Keeps a poller from coming back at once where others wanted its CPU: each time that happens it stays away for twice as
/// long, and each period that it polls undisturbed counts against that.
#[derive(Default)]
struct Denial {
    /// Periods that it stayed away the last time.
    length: u32,
    /// Periods to go.
    left: u32,
}

impl Denial {
    /// About a second: what trying costs then is lost among 1000 periods.
    const LONGEST: u32 = 1024;

    /// Whether there is a spare CPU for it after this period. `spare`: whether it looks like that.
    fn allows(&mut self, awake: bool, spare: bool) -> bool {
        match (awake, spare) {
            (true, true) => self.length = self.length.saturating_sub(1),
            (true, false) => {
                self.length = (2 * self.length).clamp(1, Self::LONGEST);
                self.left = self.length;
            }
            (false, _) if self.left > 0 => {
                self.left -= 1;
                return false;
            }
            (false, _) => {}
        }
        spare
    }
}

/// CPU time of the calling thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poller_whose_cpu_is_wanted_stays_away_for_longer_each_time() {
        let mut denial = Denial::default();
        let mut away = |undisturbed: u32| {
            (0..undisturbed).for_each(|_| assert!(denial.allows(true, true)));
            assert!(!denial.allows(true, false));
            (0..).take_while(|_| !denial.allows(false, true)).count() as u32
        };
        assert_eq!([0; 4].map(&mut away), [1, 2, 4, 8]);
        assert_eq!(away(3), 10, "8 - 3, twice");
        assert_eq!(away(100), 1);
        assert_eq!([0; 12].map(&mut away)[9..], [1024; 3]);
        assert!(!Denial::default().allows(false, false));
    }
}
