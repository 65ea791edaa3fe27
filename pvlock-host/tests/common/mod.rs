//! Guest RAM that checks the engine, and an engine whose wakes are recorded.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod machine;

use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::record;
use pvlock_host::protocol::{Features, Header, LockId, PAGE_SIZE, RECORD_STRIDE, SlotIndex, VcpuId, Wait, WaitState, region_size};
use pvlock_host::{Config, Engine, GuestMemory, Park, Resume, Unpark, Verdict};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Guest-physical address of the first byte of RAM, and of the region unless a test says otherwise.
pub(crate) const RAM: u64 = 16 * PAGE_SIZE as u64;

/// No test waits longer: far beyond what any of them needs, below what anybody would wait for.
const HANG: Duration = Duration::from_secs(10);

/// Runs `test`, and ends the process if it hangs: its threads cannot be ended.
pub(crate) fn within_hang_timeout(name: &'static str, test: impl FnOnce()) {
    let (done, wait) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if wait.recv_timeout(HANG) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name} hangs");
            std::process::abort();
        }
    });
    test();
    drop(done);
    watchdog.join().unwrap();
}

pub(crate) fn vcpu(id: usize) -> VcpuId {
    VcpuId::new(id).unwrap()
}

pub(crate) fn slot(index: usize) -> SlotIndex {
    SlotIndex::new(index).unwrap()
}

#[derive(Default)]
struct Watch {
    /// The range that the engine was last told is RAM: the only one it may touch.
    allowed: (u64, u64),
    loads: BTreeMap<u64, u32>,
    stores: Vec<(u64, u64)>,
}

/// Guest RAM from [`RAM`] on. Panics on any access that the engine has no right to.
pub(crate) struct Ram {
    words: Vec<AtomicU64>,
    watch: Mutex<Watch>,
}

impl Ram {
    /// RAM that begins with the region of a guest with this many vCPUs.
    pub(crate) fn new(vcpus: usize) -> Self {
        let length = region_size(vcpus, RECORD_STRIDE).next_multiple_of(PAGE_SIZE);
        let ram = Self { words: (0..length / 8).map(|_| AtomicU64::new(0)).collect(), watch: Mutex::default() };
        let header = Header::new(vcpus, Features::HALT);
        for (n, word) in [&header.magic, &header.version, &header.stride, &header.features].into_iter().enumerate() {
            ram.words[n].store(word.load(SeqCst), SeqCst);
        }
        ram
    }

    /// The word at a byte offset from [`RAM`], as the guest sees it.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words[offset / 8]
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    pub(crate) fn forget_accesses(&self) {
        let mut watch = self.watch.lock().unwrap();
        watch.loads.clear();
        watch.stores.clear();
    }

    /// How often each offset was loaded since `forget_accesses`.
    pub(crate) fn loads(&self) -> BTreeMap<usize, u32> {
        self.watch.lock().unwrap().loads.iter().map(|(&address, &n)| ((address - RAM) as usize, n)).collect()
    }

    pub(crate) fn stores(&self) -> usize {
        self.watch.lock().unwrap().stores.len()
    }

    fn access(&self, watch: &Watch, address: u64) -> &AtomicU64 {
        let (start, end) = watch.allowed;
        assert!(address >= start && address + 8 <= end, "{address:#x} is outside of {start:#x}..{end:#x}");
        assert_eq!(address % 8, 0, "{address:#x} is not aligned");
        &self.words[((address - RAM) / 8) as usize]
    }
}

/// What the engine has of it.
pub(crate) struct Memory(pub(crate) Arc<Ram>);

impl GuestMemory for Memory {
    fn contains(&self, address: u64, length: u64) -> bool {
        let end = RAM + self.0.words.len() as u64 * 8;
        let contains = address >= RAM && address.checked_add(length).is_some_and(|last| last <= end);
        if contains {
            self.0.watch.lock().unwrap().allowed = (address, address + length);
        }
        contains
    }

    fn load(&self, address: u64) -> u64 {
        let mut watch = self.0.watch.lock().unwrap();
        *watch.loads.entry(address).or_default() += 1;
        self.0.access(&watch, address).load(SeqCst)
    }

    fn store(&self, address: u64, value: u64) {
        let mut watch = self.0.watch.lock().unwrap();
        watch.stores.push((address, value));
        self.0.access(&watch, address).store(value, SeqCst);
    }
}

/// An engine on its RAM, driven by one thread.
pub(crate) struct Rig {
    pub(crate) engine: Engine<Memory, parking_lot::RawMutex>,
    pub(crate) ram: Arc<Ram>,
    woken: Mutex<Vec<usize>>,
    pub(crate) now: AtomicU64,
}

impl Rig {
    /// Nothing registered yet.
    pub(crate) fn bare(config: Config, vcpus: usize) -> Self {
        let ram = Arc::new(Ram::new(vcpus));
        let engine = Engine::new(config, vcpus, Memory(Arc::clone(&ram))).unwrap();
        Self { engine, ram, woken: Mutex::default(), now: AtomicU64::new(0) }
    }

    /// Registered, and all vCPUs online.
    pub(crate) fn new(config: Config, vcpus: usize) -> Self {
        let rig = Self::bare(config, vcpus);
        assert_eq!(rig.register(), Status::Ok);
        for id in 0..vcpus {
            assert_eq!(rig.call(0, Doorbell::Online(vcpu(id))), Status::Ok);
        }
        assert_eq!(rig.woken(), []);
        rig
    }

    pub(crate) fn register(&self) -> Status {
        self.call(0, Doorbell::Register { low: (RAM / PAGE_SIZE as u64) as u32 })
    }

    pub(crate) fn waker(&self) -> impl Fn(VcpuId) + '_ {
        // Entering the engine from here would hang if it held a lock.
        |vcpu| {
            self.engine.check_queues().unwrap();
            self.woken.lock().unwrap().push(vcpu.index());
        }
    }

    pub(crate) fn ring(&self, id: usize, word: u32) -> Verdict {
        self.engine.doorbell(vcpu(id), word, self.now.load(SeqCst), &self.waker())
    }

    /// Rings a doorbell that has an answer.
    pub(crate) fn call(&self, id: usize, doorbell: Doorbell) -> Status {
        let verdict = self.ring(id, doorbell.encode());
        let status = Status::decode(self.engine.answer(vcpu(id)));
        let expected = if status == Status::Ok { Resume::Done } else { Resume::Refused };
        assert_eq!(verdict, Verdict::Resume(expected));
        status
    }

    pub(crate) fn publish(&self, id: usize, level: usize, wait: Option<Wait>) {
        let record = (id + 1) * RECORD_STRIDE;
        self.ram.word(record + record::slot_id(slot(level))).store(wait.map_or(0, |wait| wait.lock.get()), SeqCst);
        self.ram.word(record + record::slot_word(slot(level))).store(wait.map_or(0, |wait| wait.word()), SeqCst);
    }

    pub(crate) fn halt(&self, id: usize, level: usize, interrupts: bool) -> Verdict {
        self.ring(id, Doorbell::Halt { slot: slot(level), interrupts }.encode())
    }

    /// Publishes in slot 0 and halts there; the vCPU must park, and on this queue.
    pub(crate) fn sleep(&self, id: usize, wait: Wait, on: Option<usize>) {
        self.publish(id, 0, Some(wait));
        let until = self.now.load(SeqCst) + self.engine.config().deadline_ns;
        assert_eq!(self.halt(id, 0, false), Verdict::Park(Park { until, on: on.map(vcpu) }), "vCPU {id}");
    }

    pub(crate) fn kick(&self, from: usize, to: usize) {
        assert_eq!(self.ring(from, Doorbell::Kick(vcpu(to)).encode()), Verdict::Resume(Resume::Done));
    }

    pub(crate) fn unparked(&self, id: usize, how: Unpark) {
        self.engine.unparked(vcpu(id), how, self.now.load(SeqCst), &self.waker());
    }

    /// Who was woken since the last call, in order.
    pub(crate) fn woken(&self) -> Vec<usize> {
        std::mem::take(&mut *self.woken.lock().unwrap())
    }

    /// Everybody's queue.
    pub(crate) fn queues(&self) -> Vec<Vec<usize>> {
        let queues = self.engine.check_queues().unwrap();
        queues.into_iter().map(|queue| queue.into_iter().map(VcpuId::index).collect()).collect()
    }

    pub(crate) fn run_state(&self, id: usize) -> u64 {
        self.ram.word((id + 1) * RECORD_STRIDE + record::RUN_STATE).load(SeqCst)
    }
}

pub(crate) fn waits(lock: u64, ticket: u32) -> Wait {
    Wait { lock: LockId::new(lock).unwrap(), ticket, state: WaitState::Halting, predecessor: None, holder: None }
}

pub(crate) fn behind(lock: u64, ticket: u32, predecessor: usize) -> Wait {
    Wait { predecessor: Some(vcpu(predecessor)), ..waits(lock, ticket) }
}

pub(crate) fn held_by(lock: u64, ticket: u32, holder: usize) -> Wait {
    Wait { holder: Some(vcpu(holder)), ..waits(lock, ticket) }
}
