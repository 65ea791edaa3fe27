//! A hostile guest, whatever it writes and rings, with any scheduler below it, beside another guest.

use crate::events::{Event, Settings};
use crate::rest;
use crate::vm::Vm;
use arbitrary::{Arbitrary, Unstructured};
use pvlock_host::Statistics;

/// Two VMs: each sees exactly what it would see without the other, and whatever its guest does, what `vm.rs` checks holds.
pub fn engine(data: &[u8]) {
    statistics(data);
}

/// The same; returns what the engines have counted.
pub fn statistics(data: &[u8]) -> Statistics {
    let mut data = Unstructured::new(data);
    let Ok(vms) = <[Settings; 2]>::arbitrary(&mut data) else { return Statistics::default() };
    // What happens, and to which VM.
    let events: Vec<(bool, Event)> = rest(data);
    let alone = [false, true].map(|which| {
        let mut vm = Vm::new(&vms[usize::from(which)]);
        events.iter().filter(|event| event.0 == which).for_each(|(_, event)| vm.step(event));
        vm.finish()
    });
    let mut together = vms.each_ref().map(Vm::new);
    for (which, event) in &events {
        together[usize::from(*which)].step(event);
    }
    assert!(together.map(Vm::finish) == alone, "a VM sees what its neighbour does");
    alone.into_iter().fold(Statistics::default(), |sum, outcome| sum + outcome.statistics)
}
