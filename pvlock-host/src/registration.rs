//! Where the region is, if the guest has registered one.

use crate::GuestMemory;
use crate::statistics::Counters;
use crate::sync::{AtomicU64, Ordering};
use pvlock_protocol::offset::{header, record};
use pvlock_protocol::{Features, Geometry, LockId, PAGE_SIZE, RunState, SlotIndex, VcpuId, WAIT_SLOTS, Wait, record_offset};

/// What this version of the host can do with a guest.
const SUPPORTED: Features = Features::HALT.union(Features::PAUSE_LOOP);

/// The registered region.
pub(crate) struct Registration {
    /// Its address and stride, published in one word. Bits 12 and up: address. Bits 1–6: stride in units of 128 bytes. Bit 0:
    /// registered.
    word: AtomicU64,
    /// How many there were before.
    ended: AtomicU64,
}

/// A region that is, or was a moment ago, registered.
#[derive(Clone, Copy)]
pub(crate) struct Registered<'a, M> {
    memory: &'a M,
    base: u64,
    stride: usize,
}

const STRIDE_UNIT: usize = pvlock_protocol::PREFETCH_PAIR;
const _: () = assert!(Geometry::MAX_STRIDE / STRIDE_UNIT < 1 << 6);

impl Registration {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU64::new(0), ended: AtomicU64::new(0) }
    }

    pub(crate) fn get<'a, M: GuestMemory>(&self, memory: &'a M) -> Option<Registered<'a, M>> {
        // Acquire: pairs with `set`.
        let word = self.word.load(Ordering::Acquire);
        let stride = (word >> 1 & 0x3f) as usize * STRIDE_UNIT;
        (word & 1 == 1).then_some(Registered { memory, base: word & !(PAGE_SIZE as u64 - 1), stride })
    }

    pub(crate) fn set(&self, base: u64, geometry: &Geometry) {
        // Release: pairs with `get`.
        let word = base | ((geometry.stride / STRIDE_UNIT) as u64) << 1 | 1;
        self.word.store(word, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.word.store(0, Ordering::Release);
        // Release: pairs with `ended`.
        self.ended.fetch_add(1, Ordering::Release);
    }

    /// How many regions were registered and are no more. Who gets a region afterwards gets none of these.
    pub(crate) fn ended(&self) -> u64 {
        // Acquire: pairs with `clear`.
        self.ended.load(Ordering::Acquire)
    }
}

impl<M: GuestMemory> Registered<'_, M> {
    /// Answers the guest's header.
    pub(crate) fn answer(memory: &M, base: u64, geometry: &Geometry, config: &crate::Config, flags: u64) -> Features {
        let supported = if config.policy.poller.is_some() { SUPPORTED.union(Features::KICK_WORD) } else { SUPPORTED };
        let accepted = geometry.features.intersection(supported);
        memory.store(base + header::FLAGS as u64, flags);
        memory.store(base + header::SPIN_BUDGET as u64, config.spin_budget);
        memory.store(base + header::TICK_HZ as u64, config.tick_hz);
        memory.store(base + header::ACCEPTED as u64, accepted.bits());
        accepted
    }

    fn address(&self, vcpu: VcpuId, offset: usize) -> u64 {
        self.base + (record_offset(vcpu, self.stride) + offset) as u64
    }

    /// What this vCPU publishes in a slot. Hints: nothing in it is checked but its range.
    pub(crate) fn wait(&self, vcpu: VcpuId, slot: SlotIndex) -> Option<Wait> {
        let load = |offset| self.memory.load(self.address(vcpu, offset));
        Wait::snapshot(|| load(record::slot_id(slot)), || load(record::slot_word(slot)))
    }

    /// What a vCPU publishes at its innermost nesting level, and which that is. Each word is read once (the id once more to
    /// be compared): six loads at most.
    pub(crate) fn innermost(&self, vcpu: VcpuId) -> Option<(SlotIndex, Wait)> {
        (0..WAIT_SLOTS).rev().filter_map(SlotIndex::new).find_map(|slot| Some((slot, self.wait(vcpu, slot)?)))
    }

    /// What a vCPU publishes at its outermost level that waits. Six loads at most, but for slots that are being written.
    pub(crate) fn outermost(&self, vcpu: VcpuId) -> Option<Wait> {
        SlotIndex::all().find_map(|slot| self.wait(vcpu, slot))
    }

    /// What a vCPU publishes of this lock. Twelve loads at most.
    pub(crate) fn wait_for(&self, vcpu: VcpuId, lock: LockId) -> Option<Wait> {
        SlotIndex::all().filter_map(|slot| self.wait(vcpu, slot)).find(|wait| wait.lock == lock)
    }

    /// How many kicks of a vCPU the guest has counted, if it tells the truth.
    pub(crate) fn kick_word(&self, vcpu: VcpuId) -> u64 {
        self.memory.load(self.address(vcpu, record::KICK_WORD))
    }

    /// Publishes the host's settings for the VM. The caller keeps others from registering meanwhile.
    pub(crate) fn set_flags(&self, flags: u64) {
        self.memory.store(self.base + header::FLAGS as u64, flags);
    }

    /// Publishes a vCPU's spin budget in ticks. The caller holds the vCPU's queue lock.
    pub(crate) fn set_spin_budget(&self, vcpu: VcpuId, ticks: u64) {
        self.memory.store(self.address(vcpu, record::SPIN_BUDGET), ticks);
    }

    /// Publishes a vCPU's run state. The caller holds the vCPU's queue lock.
    pub(crate) fn set_run_state(&self, vcpu: VcpuId, state: RunState) {
        let address = self.address(vcpu, record::RUN_STATE);
        self.memory.store(address, state.next_word(self.memory.load(address)));
    }

    /// Publishes a vCPU's counters. The caller holds the vCPU's queue lock.
    pub(crate) fn set_counters(&self, vcpu: VcpuId, counters: &Counters) {
        let Counters { kicks, parks, parked_ns, .. } = counters;
        for (offset, counter) in [(record::KICKS, kicks), (record::PARKS, parks), (record::PARKED_NS, parked_ns)] {
            self.memory.store(self.address(vcpu, offset), counter.load(Ordering::Relaxed));
        }
    }
}
