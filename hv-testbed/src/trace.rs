//! Who was on which CPU when, for a schedule map: kept in memory while it happens, printed afterwards.

use crate::irq_lock::IrqLock;
use crate::serial::line;
use crate::{apic, cpu};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use lock_api::Mutex;

/// What can happen at one moment.
#[derive(Clone, Copy)]
pub(crate) enum Mark {
    /// A vCPU goes to sleep in the engine.
    Park,
    /// It is woken.
    Kick,
    /// It loses its CPU while others say that it holds a lock.
    Hold,
}

#[derive(Clone, Copy)]
enum Entry {
    Span { cpu: usize, start: u64, end: u64, vm: usize, vcpu: usize },
    Mark { cpu: usize, at: u64, kind: Mark, vm: usize, vcpu: usize },
}

/// A trace; of no capacity if nobody wants one.
pub(crate) struct Trace {
    entries: Mutex<IrqLock, Vec<Entry>>,
    /// When it began, in ns; it has not if this is the end of time.
    from: AtomicU64,
}

impl Trace {
    /// Room for so many entries; what comes later is lost.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { entries: Mutex::new(Vec::with_capacity(capacity)), from: AtomicU64::new(u64::MAX) }
    }

    /// From now on.
    pub(crate) fn begin(&self) {
        self.from.store(apic::now(), Ordering::Relaxed);
    }

    /// Whether it has begun, and somebody wants it.
    pub(crate) fn is_on(&self) -> bool {
        self.from.load(Ordering::Relaxed) != u64::MAX && self.entries.lock().capacity() > 0
    }

    fn push(&self, entry: Entry) {
        let mut entries = self.entries.lock();
        if self.from.load(Ordering::Relaxed) != u64::MAX && entries.len() < entries.capacity() {
            entries.push(entry);
        }
    }

    pub(crate) fn mark(&self, kind: Mark, vm: usize, vcpu: usize) {
        self.push(Entry::Mark { cpu: cpu::index(), at: apic::now(), kind, vm, vcpu });
    }

    pub(crate) fn span(&self, start: u64, vm: usize, vcpu: usize) {
        self.push(Entry::Span { cpu: cpu::index(), start, end: apic::now(), vm, vcpu });
    }

    /// Prints all of it under the name of a run, with times since it began.
    pub(crate) fn print(&self, name: &str) {
        let from = self.from.load(Ordering::Relaxed);
        for entry in self.entries.lock().iter() {
            match *entry {
                Entry::Span { cpu, start, end, vm, vcpu } => line!(
                    r#"{{"of":"{name}","span":{{"cpu":{cpu},"start":{},"end":{},"vm":{vm},"vcpu":{vcpu}}}}}"#,
                    start.saturating_sub(from),
                    end.saturating_sub(from)
                ),
                Entry::Mark { cpu, at, kind, vm, vcpu } => {
                    let kind = match kind {
                        Mark::Park => "park",
                        Mark::Kick => "kick",
                        Mark::Hold => "hold",
                    };
                    let at = at.saturating_sub(from);
                    line!(r#"{{"of":"{name}","mark":{{"cpu":{cpu},"at":{at},"kind":"{kind}","vm":{vm},"vcpu":{vcpu}}}}}"#);
                }
            }
        }
    }
}
