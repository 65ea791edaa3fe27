//! One VM as its guest sees it: the shared region, the guest's own bookkeeping, registration and mode.
//!
//! # Why nobody halts right after registration
//!
//! In native mode a release is a plain store, which would erase the note that the next waiter has halted. So the mode
//! changes in two steps, and a vCPU counts as done only when it calls [`GuestRef::online`], outside any lock operation:
//!
//! ```text
//! Native ----- register ----> Paravirtual ---- every vCPU that ran before ----> Halting
//! store                       read-modify-write     has called online()          + waiters halt
//! ```
//!
//! A vCPU that held a lock or was inside a native release when the mode changed has finished by the time it comes online;
//! only then may anyone write what that store could erase. vCPUs started after `register` see `Paravirtual` from their
//! first instruction, because who started them saw it.

use crate::sync::{AtomicU32, Ordering, array, const_unless_loom};
use crate::waiters::Bucket;
use crossbeam_utils::CachePadded;
use pvlock_hypercalls::{Doorbell, Ring, Status};
use pvlock_protocol::{Features, HostFlags, Region, RegionRef, VcpuId};

/// Spin budget in ticks where the host gives none: about 10 µs on a 3 GHz counter, a few times what a halt and a kick cost
/// on hardware KVM (1–2 µs an exit), so that spinning never costs much more than halting would have.
pub const DEFAULT_SPIN_BUDGET: u64 = 1 << 15;

/// What the locks of this VM do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Mode {
    /// No host, or one that says every vCPU has a CPU of its own: plain ticket locks.
    Native = 0,
    /// Releases look for halted waiters; nobody halts yet.
    Paravirtual = 1,
    /// Waiters halt after their spin budget.
    Halting = 2,
}

/// Guest-private state of a vCPU. Only that vCPU writes `depth`; loads and stores suffice because interrupts nest.
#[derive(Debug)]
pub(crate) struct PerVcpu {
    /// Wait slots in use, the number of nested waits.
    pub(crate) depth: AtomicU32,
    /// 1 from `register` until the vCPU has called `online`, if it ran before.
    behind: AtomicU32,
}

/// State shared by all vCPUs and written rarely.
#[derive(Debug)]
pub(crate) struct Shared {
    mode: AtomicU32,
    /// vCPUs that ran at `register` and have not called `online` since.
    behind: AtomicU32,
}

/// The state of a VM with up to `N` vCPUs: put one in a `static`.
#[derive(Debug)]
pub struct Guest<const N: usize> {
    region: Region<N>,
    vcpus: [CachePadded<PerVcpu>; N],
    waiters: [Bucket; N],
    shared: CachePadded<Shared>,
}

impl<const N: usize> Guest<N> {
    const_unless_loom! {
        /// A guest that has not registered: its locks spin.
        #[allow(clippy::new_without_default, reason = "a guest is a static")]
        pub const fn new() -> Self {
            Self {
                region: Region::new(Features::HALT),
                vcpus: array!(CachePadded::new(PerVcpu { depth: AtomicU32::new(0), behind: AtomicU32::new(0) })),
                waiters: array!(Bucket::new()),
                shared: CachePadded::new(Shared { mode: AtomicU32::new(Mode::Native as u32), behind: AtomicU32::new(0) }),
            }
        }
    }

    /// The guest without its size in the type, as [`Platform::guest`](crate::Platform::guest) returns it.
    #[inline]
    pub const fn as_ref(&self) -> GuestRef<'_> {
        GuestRef { region: self.region.as_ref(), vcpus: &self.vcpus, waiters: &self.waiters, shared: &self.shared }
    }
}

/// A [`Guest`] whose number of vCPUs is not in the type.
#[derive(Clone, Copy, Debug)]
pub struct GuestRef<'a> {
    pub(crate) region: RegionRef<'a>,
    pub(crate) vcpus: &'a [CachePadded<PerVcpu>],
    pub(crate) waiters: &'a [Bucket],
    shared: &'a CachePadded<Shared>,
}

impl<'a> GuestRef<'a> {
    /// The region to register: its address is [`RegionRef::header`]'s.
    pub const fn region(&self) -> RegionRef<'a> {
        self.region
    }

    /// What the locks do at present.
    #[inline]
    pub fn mode(&self) -> Mode {
        // Acquire: pairs with the Release in `caught_up`: who sees `Halting` sees every native release.
        match self.shared.mode.load(Ordering::Acquire) {
            0 => Mode::Native,
            1 => Mode::Paravirtual,
            _ => Mode::Halting,
        }
    }

    /// Whether the locks are plain ticket locks at present: the one branch on the fast path.
    #[inline]
    pub(crate) fn is_native(&self) -> bool {
        // Relaxed: see the module's documentation for why a stale answer is harmless.
        self.shared.mode.load(Ordering::Relaxed) == Mode::Native as u32
    }

    /// Registers the region, whose page frame number is `pfn`, with the host behind `ring`, and switches the locks over.
    ///
    /// `running` lists the vCPUs that may be using locks by now; each of them has to call [`GuestRef::online`] afterwards,
    /// while it holds no lock and waits for none, before anyone halts. At boot, before other vCPUs are started, that is the
    /// calling one.
    ///
    /// If the host says that every vCPU has a CPU of its own, the locks stay native.
    ///
    /// # Errors
    ///
    /// The host's answer; [`Status::OutOfRange`] if `pfn` is no page frame number.
    pub fn register(&self, ring: &impl Ring, pfn: u64, running: impl IntoIterator<Item = VcpuId>) -> Result<Features, Status> {
        let (high, low) = Doorbell::register(pfn).ok_or(Status::OutOfRange)?;
        if let Some(high) = high {
            ring.ring(high.encode());
        }
        match ring.call(low) {
            Status::Ok => {}
            error => return Err(error),
        }
        let header = self.region.header;
        let accepted = Features::from_bits(header.accepted.load(Ordering::Relaxed));
        let dedicated = HostFlags::from_bits(header.flags.load(Ordering::Relaxed)).contains(HostFlags::DEDICATED);
        if accepted.contains(Features::HALT) && !dedicated {
            // Before anyone is counted: who comes online from here on has seen that the mode is no longer native.
            self.shared.mode.store(Mode::Paravirtual as u32, Ordering::Relaxed);
            let counted = running.into_iter().filter_map(|vcpu| self.vcpus.get(vcpu.index()));
            let newly = counted.filter(|vcpu| vcpu.behind.swap(1, Ordering::AcqRel) == 0).count() as u32;
            // Release, like the swap: pairs with the AcqRel of who catches up.
            self.shared.behind.fetch_add(newly, Ordering::Release);
            self.caught_up(0);
        }
        Ok(accepted)
    }

    /// The calling vCPU `vcpu` takes part from now on. Call it on every vCPU while it holds no lock and waits for none: at
    /// bring-up, and after a `register` that listed it as running has returned.
    ///
    /// # Errors
    ///
    /// The host's answer. The locks work all the same, they only spin longer.
    pub fn online(&self, ring: &impl Ring, vcpu: VcpuId) -> Result<(), Status> {
        let (Some(record), Some(private)) = (self.region.record(vcpu), self.vcpus.get(vcpu.index())) else {
            return Err(Status::NoSuchVcpu);
        };
        record.online.store(1, Ordering::Relaxed);
        let answer = ring.call(Doorbell::Online(vcpu));
        // AcqRel: pairs with `register`: this vCPU's locks are paravirtual from here on.
        let behind = private.behind.swap(0, Ordering::AcqRel);
        self.caught_up(behind);
        if answer == Status::Ok { Ok(()) } else { Err(answer) }
    }

    /// `vcpu` no longer takes part: it holds no lock and waits for none. Called by itself or by who unplugged it.
    ///
    /// # Errors
    ///
    /// The host's answer.
    pub fn offline(&self, ring: &impl Ring, vcpu: VcpuId) -> Result<(), Status> {
        let record = self.region.record(vcpu).ok_or(Status::NoSuchVcpu)?;
        record.online.store(0, Ordering::Relaxed);
        match ring.call(Doorbell::Offline(vcpu)) {
            Status::Ok => Ok(()),
            error => Err(error),
        }
    }

    /// The region is going to be reused (kexec, shutdown): nobody halts from now on, and the host wakes who has. Releases
    /// stay read-modify-writes, which cost little and are always right.
    ///
    /// # Errors
    ///
    /// The host's answer.
    pub fn unregister(&self, ring: &impl Ring) -> Result<(), Status> {
        if self.mode() == Mode::Halting {
            self.shared.mode.store(Mode::Paravirtual as u32, Ordering::Relaxed);
        }
        match ring.call(Doorbell::Unregister) {
            Status::Ok => Ok(()),
            error => Err(error),
        }
    }

    /// Takes `vcpus` (0 or 1) off the count of those that may still be in a native release; the last allows halting.
    fn caught_up(&self, vcpus: u32) {
        // AcqRel: the native releases of the vCPUs before happen before whatever follows `Halting`.
        // Wrapping: a vCPU may come online between being marked and being counted.
        let behind = self.shared.behind.fetch_sub(vcpus, Ordering::AcqRel).wrapping_sub(vcpus);
        if behind == 0 {
            // A failure means that the mode is Native (not registered) or Halting already.
            let _ = self.shared.mode.compare_exchange(
                Mode::Paravirtual as u32,
                Mode::Halting as u32,
                // Release: pairs with the Acquire load in `mode`.
                Ordering::Release,
                Ordering::Relaxed,
            );
        }
    }

    /// Whether a waiter may halt now: everybody has caught up and the host does not forbid it.
    pub(crate) fn may_halt(&self) -> bool {
        let flags = HostFlags::from_bits(self.region.header.flags.load(Ordering::Relaxed));
        let forbidden = flags.contains(HostFlags::OFF) || flags.contains(HostFlags::DEDICATED);
        !forbidden && self.mode() == Mode::Halting
    }

    /// The spin budget of a vCPU in ticks: the host's for this vCPU, else its default, else ours.
    pub(crate) fn spin_budget(&self, vcpu: VcpuId) -> u64 {
        let own = self.region.record(vcpu).map_or(0, |record| record.spin_budget.load(Ordering::Relaxed));
        let budgets = [own, self.region.header.spin_budget.load(Ordering::Relaxed), DEFAULT_SPIN_BUDGET];
        // The last is not 0.
        budgets.into_iter().find(|&budget| budget != 0).unwrap_or(DEFAULT_SPIN_BUDGET)
    }
}
