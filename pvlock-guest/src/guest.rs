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
//!
//! Mode and count are one word, of which `Halting` is one value: no vCPU that comes online can mistake a registration that
//! is still counting, or one that has ended, for one that everybody has caught up with.
//!
//! | bits | field | |
//! |---|---|---|
//! | 0 | `HOST` | there is, or was, somebody who halts and kicks: releases are read-modify-writes |
//! | 1 | `OPEN` | they have been switched over, and everybody who has to come online is counted |
//! | 2–31 | behind | vCPUs that have to come online before anyone halts |

use crate::mutation::{Mutation, active};
use crate::sync::{AtomicU32, Ordering, array, const_unless_loom};
use crate::waiters::Bucket;
use crossbeam_utils::CachePadded;
use pvlock_hypercalls::{Doorbell, Ring, Status};
use pvlock_protocol::{Features, HostFlags, Region, RegionRef, VcpuId};

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
    /// Its own spin budget in ticks, see [`crate::budget`]; 0 until it is first adapted.
    pub(crate) budget: AtomicU32,
    /// 1 from `register` until the vCPU has called `online`, if it ran before.
    behind: AtomicU32,
}

/// Bits of the state that all vCPUs share, see the module's documentation.
const HOST: u32 = 1;
const OPEN: u32 = 1 << 1;
const BEHIND: u32 = 1 << 2;
/// Everybody has caught up.
const HALTING: u32 = HOST | OPEN;

/// The state of a VM with up to `N` vCPUs: put one in a `static`.
#[derive(Debug)]
pub struct Guest<const N: usize> {
    region: Region<N>,
    vcpus: [CachePadded<PerVcpu>; N],
    waiters: [Bucket; N],
    /// Written rarely.
    state: CachePadded<AtomicU32>,
}

impl<const N: usize> Guest<N> {
    const_unless_loom! {
        /// A guest that has not registered: its locks spin.
        #[allow(clippy::new_without_default, reason = "a guest is a static")]
        pub const fn new() -> Self {
            Self {
                region: Region::new(Features::HALT.union(Features::KICK_WORD)),
                vcpus: array!(CachePadded::new(PerVcpu { depth: AtomicU32::new(0), budget: AtomicU32::new(0), behind: AtomicU32::new(0) })),
                waiters: array!(Bucket::new()),
                state: CachePadded::new(AtomicU32::new(0)),
            }
        }
    }

    /// The guest without its size in the type, as [`Platform::guest`](crate::Platform::guest) returns it.
    #[inline]
    pub const fn as_ref(&self) -> GuestRef<'_> {
        GuestRef { region: self.region.as_ref(), vcpus: &self.vcpus, waiters: &self.waiters, state: &self.state }
    }
}

/// A [`Guest`] whose number of vCPUs is not in the type.
#[derive(Clone, Copy, Debug)]
pub struct GuestRef<'a> {
    pub(crate) region: RegionRef<'a>,
    pub(crate) vcpus: &'a [CachePadded<PerVcpu>],
    pub(crate) waiters: &'a [Bucket],
    state: &'a CachePadded<AtomicU32>,
}

impl<'a> GuestRef<'a> {
    /// The region to register: its address is [`RegionRef::header`]'s.
    pub const fn region(&self) -> RegionRef<'a> {
        self.region
    }

    /// What the locks do at present.
    #[inline]
    pub fn mode(&self) -> Mode {
        // Acquire: pairs with the read-modify-writes in `online`: who sees `Halting` sees every native release.
        match self.state.load(Ordering::Acquire) {
            HALTING => Mode::Halting,
            state if state & HOST == 0 => Mode::Native,
            _ if active(Mutation::OnlineNotRequired) => Mode::Halting,
            _ => Mode::Paravirtual,
        }
    }

    /// Whether the locks are plain ticket locks at present: the one branch on the fast path.
    #[inline]
    pub(crate) fn is_native(&self) -> bool {
        // Relaxed: see the module's documentation for why a stale answer is harmless.
        self.state.load(Ordering::Relaxed) & HOST == 0
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
            self.switch_over(running);
        }
        Ok(accepted)
    }

    /// Switches the locks over, as [`GuestRef::register`] does once its host agrees.
    ///
    /// For a machine that halts and kicks without a pvlock host, as stock KVM does with PV_UNHALT: call it instead of
    /// `register`, and give [`NoHost`](pvlock_hypercalls::NoHost) to [`GuestRef::online`], [`GuestRef::offline`] and
    /// [`GuestRef::unregister`]. [`Platform::halt`](crate::Platform::halt) and [`Platform::kick`](crate::Platform::kick) are
    /// then the machine's own, and who has halted when `unregister` is called is kicked as ever. `running` is what it is for
    /// `register`.
    pub fn switch_over(&self, running: impl IntoIterator<Item = VcpuId>) {
        // Before anyone is marked: who comes online and finds the mark has seen that the mode is no longer native.
        self.state.fetch_or(HOST, Ordering::Relaxed);
        if active(Mutation::OpenedEarly) {
            self.state.fetch_or(OPEN, Ordering::AcqRel);
        }
        for vcpu in running.into_iter().filter_map(|vcpu| self.vcpus.get(vcpu.index())) {
            // Counted first: the vCPU may come online as soon as it is marked.
            self.state.fetch_add(BEHIND, Ordering::Relaxed);
            // Release: pairs with `online`.
            if vcpu.behind.swap(1, Ordering::AcqRel) == 1 {
                self.state.fetch_sub(BEHIND, Ordering::Relaxed);
            }
        }
        // Everybody is counted. Release: as in `online`.
        self.state.fetch_or(OPEN, Ordering::AcqRel);
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
        // Acquire: pairs with `register`: this vCPU's locks are paravirtual from here on.
        if private.behind.swap(0, Ordering::AcqRel) == 1 {
            // Release: pairs with `mode`: this vCPU's native releases happen before what follows `Halting`.
            self.state.fetch_sub(BEHIND, Ordering::AcqRel);
        }
        if answer == Status::Ok { Ok(()) } else { Err(answer) }
    }

    /// `vcpu` no longer takes part: it holds no lock and waits for none. Called by itself or by who unplugged it.
    ///
    /// # Errors
    ///
    /// The host's answer.
    pub fn offline(&self, ring: &impl Ring, vcpu: VcpuId) -> Result<(), Status> {
        let (Some(record), Some(private)) = (self.region.record(vcpu), self.vcpus.get(vcpu.index())) else {
            return Err(Status::NoSuchVcpu);
        };
        record.online.store(0, Ordering::Relaxed);
        // Nobody has to wait for its native releases any more. As in `online`.
        if private.behind.swap(0, Ordering::AcqRel) == 1 {
            self.state.fetch_sub(BEHIND, Ordering::AcqRel);
        }
        match ring.call(Doorbell::Offline(vcpu)) {
            Status::Ok => Ok(()),
            error => Err(error),
        }
    }

    /// What [`Platform::kick`](crate::Platform::kick) does where kicks are doorbells: rings the host, or only counts the kick in
    /// memory while the host says that somebody looks there.
    #[inline]
    pub fn kick(&self, ring: &impl Ring, vcpu: VcpuId) {
        if self.region.announce_kick(vcpu) {
            ring.ring(Doorbell::Kick(vcpu).encode());
        }
    }

    /// The region is going to be reused (kexec, shutdown): nobody halts from now on, and the host wakes who has and touches
    /// the region no more. Waiters go on publishing in it, so its memory may be reused only when no vCPU uses a lock any more.
    /// Releases stay read-modify-writes, which cost little and are always right.
    ///
    /// # Errors
    ///
    /// The host's answer.
    pub fn unregister(&self, ring: &impl Ring) -> Result<(), Status> {
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        match ring.call(Doorbell::Unregister) {
            Status::Ok => Ok(()),
            error => Err(error),
        }
    }

    /// Whether a waiter may halt now: everybody has caught up and the host does not forbid it.
    pub(crate) fn may_halt(&self) -> bool {
        let flags = HostFlags::from_bits(self.region.header.flags.load(Ordering::Relaxed));
        let forbidden = flags.contains(HostFlags::OFF) || flags.contains(HostFlags::DEDICATED);
        !forbidden && self.mode() == Mode::Halting
    }
}
