//! Guest RAM that the guest changes while the host looks, and that the host may touch only where the guest has registered.

use pvlock_host::GuestMemory;
use pvlock_host::protocol::PAGE_SIZE;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

/// Guest-physical address of the first byte.
pub(crate) const START: u64 = 16 * PAGE_SIZE as u64;
const WORDS: usize = 4 * PAGE_SIZE / 8;

/// The RAM of one guest.
#[derive(Clone)]
pub(crate) struct Ram(Arc<Inner>);

struct Inner {
    words: Vec<AtomicU64>,
    watch: Mutex<Watch>,
}

#[derive(Default)]
struct Watch {
    /// What the host may touch.
    resident: Range<u64>,
    /// Whether the host may ask for more.
    registering: bool,
    accesses: usize,
    race: Option<Race>,
}

/// A write of the guest's during the next event of the host's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Race {
    /// After this many of the host's loads.
    pub(crate) after: u8,
    pub(crate) at: u16,
    pub(crate) word: u64,
}

impl Ram {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Inner { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), watch: Mutex::default() }))
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.0.watch.lock().expect("a target ends with its first panic")
    }

    /// The guest writes a word, anywhere.
    pub(crate) fn write(&self, at: usize, word: u64) {
        self.0.words[at % WORDS].store(word, Relaxed);
    }

    pub(crate) fn words(&self) -> Vec<u64> {
        self.0.words.iter().map(|word| word.load(Relaxed)).collect()
    }

    pub(crate) fn race(&self, race: Race) {
        self.watch().race = Some(race);
    }

    /// An event begins, of which the host may learn of a new region only if it is a REGISTER.
    pub(crate) fn begin(&self, registering: bool) {
        let mut watch = self.watch();
        watch.registering = registering;
        watch.accesses = 0;
    }

    /// How often it has touched RAM, when it is over.
    pub(crate) fn accesses(&self) -> usize {
        let mut watch = self.watch();
        watch.race = None;
        watch.accesses
    }

    /// Nothing is registered: the host may touch nothing.
    pub(crate) fn forget_region(&self) {
        self.watch().resident = 0..0;
    }

    fn access(&self, address: u64, load: bool) -> &AtomicU64 {
        let mut watch = self.watch();
        let Range { start, end } = watch.resident;
        assert!(address >= start && address + 8 <= end, "{address:#x} is not in the registered region, {start:#x}..{end:#x}");
        assert!(address.is_multiple_of(8), "{address:#x} is not aligned");
        watch.accesses += 1;
        if load && let Some(race) = &mut watch.race {
            match race.after.checked_sub(1) {
                Some(after) => race.after = after,
                None => {
                    self.write(race.at.into(), race.word);
                    watch.race = None;
                }
            }
        }
        &self.0.words[((address - START) / 8) as usize]
    }
}

impl GuestMemory for Ram {
    fn contains(&self, address: u64, length: u64) -> bool {
        let mut watch = self.watch();
        // To look for a page may fault, and sleep: nothing for an exit.
        assert!(watch.registering, "only REGISTER may ask what RAM there is");
        let end = START + WORDS as u64 * 8;
        let contains = address >= START && address.checked_add(length).is_some_and(|last| last <= end);
        if contains {
            watch.resident = address..address + length;
        }
        contains
    }

    fn load(&self, address: u64) -> u64 {
        self.access(address, true).load(Relaxed)
    }

    fn store(&self, address: u64, value: u64) {
        self.access(address, false).store(value, Relaxed);
    }
}
