//! Any header at any page of any RAM: what is answered is true, and the host writes what is its own, where it was told to.

use crate::counted::Counted;
use crate::rest;
use arbitrary::{Arbitrary, Unstructured};
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::{header, record};
use pvlock_host::protocol::{
    ABI_VERSION, Features, Geometry, MAGIC, MAX_VCPUS, PAGE_SIZE, RECORD_STRIDE, RunState, VcpuId, record_offset, region_size,
};
use pvlock_host::{Config, Engine, Mapped, RunStates, Verdict};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const MOST_VCPUS: usize = 12;
const MOST_WORDS: usize = 4 * PAGE_SIZE / 8;
/// RAM that starts no later ends before the address space does.
const LAST_START: u64 = (1 << 52) - 5;

#[derive(Arbitrary, Debug)]
struct Settings {
    vcpus: u8,
    words: u16,
    /// The page frame on which RAM starts.
    start: Start,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Start {
    Zero,
    Low(u8),
    Any(u64),
    /// So many pages below the last there can be.
    High(u8),
}

#[derive(Arbitrary, Debug)]
enum Event {
    /// A page of RAM, or near it.
    Register(u8, u8),
    RegisterAt(u8, u64),
    High(u8, u32),
    Unregister(u8),
    Online(u8, u16),
    Offline(u8, u16),
    Reset(u8),
    ResetVm,
    ScheduledIn(u8),
    Header {
        page: u8,
        wrong: Option<(u8, u64)>,
        vcpus: u8,
        strides: u8,
        features: u64,
    },
    Write(u16, u64),
}

/// A VM whose guest registers and unregisters.
struct Vm<'a> {
    words: &'a [AtomicU64],
    /// The page frame on which RAM starts.
    start: u64,
    engine: Engine<Mapped, Counted>,
    vcpus: usize,
    /// As the guest knows it from the answers it got.
    registered: Option<(u64, Geometry)>,
    high: Vec<u32>,
}

/// Any header in any RAM.
pub fn registration(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let Ok(settings) = Settings::arbitrary(&mut data) else { return };
    // Exactly as long as it is said to be, for a sanitizer to see.
    let words: Box<[AtomicU64]> = (0..usize::from(settings.words) % MOST_WORDS).map(|_| AtomicU64::new(0)).collect();
    let start = match settings.start {
        Start::Zero => 0,
        Start::Low(page) => page.into(),
        Start::Any(page) => (page >> 12).min(LAST_START),
        Start::High(pages) => LAST_START - u64::from(pages),
    };
    let memory = NonNull::from(&*words).cast();
    // SAFETY: `words` is aligned, outlives the engine, and consists of atomics.
    let memory = unsafe { Mapped::new(start * PAGE_SIZE as u64, memory, size_of_val(&*words)) };
    let vcpus = usize::from(settings.vcpus) % MOST_VCPUS + 1;
    let config = Config { run_states: RunStates::Exact, spin_budget: 7, tick_hz: 11, ..Config::default() };
    let engine = Engine::new(config, vcpus, memory).expect("the configuration is sound");
    let mut vm = Vm { words: &words, start, engine, vcpus, registered: None, high: vec![0; vcpus] };
    rest(data).iter().for_each(|event| vm.step(event));
}

impl Vm<'_> {
    fn own(&self, id: u8) -> VcpuId {
        VcpuId::new(usize::from(id) % self.vcpus).expect("a vCPU of this VM")
    }

    fn step(&mut self, event: &Event) {
        let before = self.snapshot();
        match *event {
            Event::Register(id, page) => self.register(self.own(id), self.start.wrapping_add(page.into()).wrapping_sub(2), &before),
            Event::RegisterAt(id, pfn) => self.register(self.own(id), pfn, &before),
            Event::High(id, high) => {
                let vcpu = self.own(id);
                self.high[vcpu.index()] = high & 0xff_ffff;
                let _: Verdict = self.ring(vcpu, Doorbell::RegisterHigh { high: high & 0xff_ffff });
                self.host_wrote(&before);
            }
            Event::Unregister(id) => {
                let expected = if self.registered.is_some() { Status::Ok } else { Status::NotRegistered };
                assert_eq!(self.call(self.own(id), Doorbell::Unregister), expected);
                self.registered = None;
                self.host_wrote(&before);
            }
            Event::Online(id, target) => {
                let Some(target) = VcpuId::new(target.into()) else { return };
                let expected = match (target.index() < self.vcpus, self.registered) {
                    (false, _) => Status::NoSuchVcpu,
                    (true, None) => Status::NotRegistered,
                    (true, Some(_)) => Status::Ok,
                };
                assert_eq!(self.call(self.own(id), Doorbell::Online(target)), expected);
                self.host_wrote(&before);
            }
            Event::Offline(id, target) => {
                let Some(target) = VcpuId::new(target.into()) else { return };
                let expected = if target.index() < self.vcpus { Status::Ok } else { Status::NoSuchVcpu };
                assert_eq!(self.call(self.own(id), Doorbell::Offline(target)), expected);
                self.host_wrote(&before);
            }
            Event::Reset(id) => {
                let vcpu = self.own(id);
                self.engine.reset(vcpu, &nobody);
                self.high[vcpu.index()] = 0;
                assert_eq!(self.engine.answer(vcpu), Status::Ok.encode());
                self.host_wrote(&before);
            }
            Event::ResetVm => {
                self.engine.reset_vm(&nobody);
                (self.registered, self.high) = (None, vec![0; self.vcpus]);
                self.host_wrote(&before);
            }
            Event::ScheduledIn(id) => {
                let vcpu = self.own(id);
                self.engine.scheduled_in(vcpu, &nobody);
                self.host_wrote(&before);
                if let Some((base, geometry)) = self.registered {
                    let word = self.load(base + (record_offset(vcpu, geometry.stride) + record::RUN_STATE) as u64);
                    assert_eq!(RunState::from_word(word), RunState::Running);
                }
            }
            Event::Header { page, wrong, vcpus, strides, features } => {
                let stride = RECORD_STRIDE + usize::from(strides % 32) * 128;
                let mut words = [MAGIC, u64::from(ABI_VERSION) | u64::from(vcpus) << 32, stride as u64, features];
                if let Some((at, word)) = wrong {
                    words[usize::from(at) % 4] = word;
                }
                let first = usize::from(page % 4) * PAGE_SIZE / 8;
                self.words.iter().skip(first).zip(words).for_each(|(place, word)| place.store(word, Relaxed));
            }
            Event::Write(at, word) => {
                if let Some(place) = self.words.get(usize::from(at)) {
                    place.store(word, Relaxed);
                }
            }
        }
    }

    fn snapshot(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Relaxed)).collect()
    }

    fn ring(&self, vcpu: VcpuId, doorbell: Doorbell) -> Verdict {
        self.engine.doorbell(vcpu, doorbell.encode(), 0, &nobody)
    }

    fn call(&self, vcpu: VcpuId, doorbell: Doorbell) -> Status {
        let _: Verdict = self.ring(vcpu, doorbell);
        Status::decode(self.engine.answer(vcpu))
    }

    fn address(&self) -> u64 {
        self.start * PAGE_SIZE as u64
    }

    /// Whether these bytes are RAM.
    fn holds(&self, address: u64, length: usize) -> bool {
        let offset = address.checked_sub(self.address());
        offset.is_some_and(|offset| offset + length as u64 <= size_of_val(self.words) as u64)
    }

    fn load(&self, address: u64) -> u64 {
        self.words[((address - self.address()) / 8) as usize].load(Relaxed)
    }

    /// Registers, after whatever upper bits this vCPU has rung before.
    fn register(&mut self, vcpu: VcpuId, pfn: u64, before: &[u64]) {
        let high = &mut self.high[vcpu.index()];
        if let Some((Some(Doorbell::RegisterHigh { high: upper }), _)) = Doorbell::register(pfn) {
            *high = upper;
            let _: Verdict = self.engine.doorbell(vcpu, Doorbell::RegisterHigh { high: upper }.encode(), 0, &nobody);
        }
        let low = pfn as u32 & 0xfff_ffff;
        let pfn = Doorbell::pfn(std::mem::take(high), low);
        let wrong = self.wrong(pfn);
        let status = self.call(vcpu, Doorbell::Register { low });
        match wrong {
            Ok(geometry) => {
                assert_eq!(status, Status::Ok, "{geometry:?} at page {pfn:#x}");
                self.registered = Some((pfn * PAGE_SIZE as u64, geometry));
            }
            // Which of several faults is named is the host's choice.
            Err(faults) => assert!(faults.contains(&status), "{status:?} of {faults:?}"),
        }
        self.host_wrote(before);
        if let (Status::Ok, Some((base, geometry))) = (status, self.registered) {
            let word = |offset: usize| self.load(base + offset as u64);
            let accepted = geometry.features.intersection(Features::HALT.union(Features::PAUSE_LOOP));
            let expected = [accepted.bits(), 0, 7, 11];
            assert_eq!([header::ACCEPTED, header::FLAGS, header::SPIN_BUDGET, header::TICK_HZ].map(word), expected);
        }
    }

    /// The region at this page, or everything that is wrong with it.
    fn wrong(&self, pfn: u64) -> Result<Geometry, Vec<Status>> {
        let mut faults = Vec::new();
        if self.registered.is_some() {
            faults.push(Status::AlreadyRegistered);
        }
        let base = pfn * PAGE_SIZE as u64;
        if !self.holds(base, size_of::<[u64; 8]>()) {
            faults.push(Status::OutOfRange);
            return Err(faults);
        }
        let [magic, version, stride, features] =
            [header::MAGIC, header::VERSION, header::STRIDE, header::FEATURES].map(|offset| self.load(base + offset as u64));
        let vcpus = (version >> 32) as usize;
        if magic != MAGIC {
            faults.push(Status::BadMagic);
        }
        if version as u32 != ABI_VERSION {
            faults.push(Status::BadVersion);
        }
        if vcpus < self.vcpus || vcpus > MAX_VCPUS {
            faults.push(Status::BadVcpus);
        }
        if !(256..=4096).contains(&stride) || stride % 128 != 0 {
            faults.push(Status::BadStride);
        } else if !self.holds(base, region_size(vcpus, stride as usize)) {
            faults.push(Status::OutOfRange);
        }
        let geometry = Geometry { vcpus, stride: stride as usize, features: Features::from_bits(features) };
        if faults.is_empty() { Ok(geometry) } else { Err(faults) }
    }

    /// Nothing has changed since `before` but the host's words of the region that is registered.
    fn host_wrote(&self, before: &[u64]) {
        for (n, (&before, now)) in before.iter().zip(self.words).enumerate() {
            let now = now.load(Relaxed);
            if now != before {
                let address = self.address() + n as u64 * 8;
                assert!(self.is_hosts(address), "the host wrote {now:#x} over {before:#x} at {address:#x}");
            }
        }
    }

    fn is_hosts(&self, address: u64) -> bool {
        let Some((base, geometry)) = self.registered else { return false };
        let Some(offset) = address.checked_sub(base).map(|offset| offset as usize) else { return false };
        match (offset / geometry.stride).checked_sub(1) {
            None => (header::ACCEPTED..=header::TICK_HZ).contains(&offset),
            Some(vcpu) => vcpu < self.vcpus && (record::GUEST_END..record::HOST_END).contains(&(offset % geometry.stride)),
        }
    }
}

fn nobody(vcpu: VcpuId) {
    panic!("{vcpu:?} is woken and does not sleep");
}
