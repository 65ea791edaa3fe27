//! Who was on which CPU when, for a schedule map: kept in memory while it happens, printed afterwards.

use crate::irq_lock::IrqLock;
use crate::serial::line;
use crate::{apic, cpu};
use alloc::vec::Vec;
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
pub(crate) struct Trace(Mutex<IrqLock, Vec<Entry>>);

impl Trace {
    /// Room for so many entries; what comes later is lost.
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Mutex::new(Vec::with_capacity(capacity)))
    }

    /// Whether somebody does.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.lock().capacity() > 0
    }

    fn push(&self, entry: Entry) {
        let mut entries = self.0.lock();
        if entries.len() < entries.capacity() {
            entries.push(entry);
        }
    }

    pub(crate) fn mark(&self, kind: Mark, vm: usize, vcpu: usize) {
        self.push(Entry::Mark { cpu: cpu::index(), at: apic::now(), kind, vm, vcpu });
    }

    pub(crate) fn span(&self, start: u64, vm: usize, vcpu: usize) {
        self.push(Entry::Span { cpu: cpu::index(), start, end: apic::now(), vm, vcpu });
    }

    /// Prints what ended after `from`, with times since then, under the name of a run.
    pub(crate) fn print(&self, name: &str, from: u64) {
        for entry in self.0.lock().iter() {
            match *entry {
                Entry::Span { cpu, start, end, vm, vcpu } if end > from => line!(
                    r#"{{"of":"{name}","span":{{"cpu":{cpu},"start":{},"end":{},"vm":{vm},"vcpu":{vcpu}}}}}"#,
                    start.saturating_sub(from),
                    end - from
                ),
                Entry::Mark { cpu, at, kind, vm, vcpu } if at > from => {
                    let kind = match kind {
                        Mark::Park => "park",
                        Mark::Kick => "kick",
                        Mark::Hold => "hold",
                    };
                    line!(
                        r#"{{"of":"{name}","mark":{{"cpu":{cpu},"at":{},"kind":"{kind}","vm":{vm},"vcpu":{vcpu}}}}}"#,
                        at - from
                    );
                }
                Entry::Span { .. } | Entry::Mark { .. } => {}
            }
        }
    }
}
