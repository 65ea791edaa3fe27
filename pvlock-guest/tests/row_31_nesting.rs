//! Row 31: more nesting levels than record slots.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, id, run_as, unlock};
use pvlock_guest::protocol::{LockId, WAIT_SLOTS, WaitState};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

for_both_locks! {
    row_31_six_levels_deep_the_waits_without_a_slot_spin_and_the_others_are_intact
}

const LEVELS: usize = 6;

struct World<L: Lock> {
    vm: &'static Vm,
    locks: [L; LEVELS],
    /// Somebody else's ownership.
    owners: RefCell<[Option<L::Token>; LEVELS]>,
    reached: RefCell<Vec<usize>>,
    halted_in: RefCell<Vec<usize>>,
}

/// The slots of vCPU 1 that are in use hold the waits of the levels below `level`, unchanged.
fn check<L: Lock>(world: &World<L>, level: usize) {
    let record = world.vm.guest.as_ref().region().record(id(1)).unwrap();
    for (index, slot) in record.slots.iter().enumerate() {
        let wait = slot.read();
        if index < level.min(WAIT_SLOTS) {
            let wait = wait.expect("published");
            assert_eq!(wait.lock, LockId::of(&world.locks[index]), "level {index}");
            assert_eq!(wait.ticket, L::FIRST_WAITER, "level {index}");
            assert_eq!(wait.state, WaitState::Halting, "level {index}");
        } else {
            assert_eq!(wait, None, "level {index}");
        }
    }
}

/// Waits at `level`; while it waits, an interrupt waits at the next one; then the lock's owner releases it.
fn wait<L: Lock>(world: &Rc<World<L>>, level: usize) {
    if level == LEVELS {
        check(world, LEVELS);
        return;
    }
    let done = Rc::new(Cell::new(false));
    let interrupt = {
        let (world, done) = (world.clone(), done.clone());
        move || {
            if !done.replace(true) {
                wait(&world, level + 1);
                check(&world, level + 1);
                world.reached.borrow_mut().push(level);
                let owner = world.owners.borrow_mut()[level].take().expect("owned");
                unlock(&world.locks[level], owner);
            }
        }
    };
    if level < WAIT_SLOTS {
        let world = world.clone();
        cpu(|cpu| {
            cpu.on_relax.replace(None);
            cpu.on_halt.replace(Some(Box::new(move |slot, _| {
                world.halted_in.borrow_mut().push(slot.index());
                interrupt();
            })))
        });
    } else {
        // No slot is left: after several budgets it still spins.
        let mut spins = 0;
        cpu(|cpu| {
            cpu.on_halt.replace(Some(Box::new(move |_, _| panic!("level {level} has no slot to halt in"))));
            cpu.on_relax.replace(Some(Box::new(move || {
                spins += 1;
                if spins == 200 {
                    interrupt();
                }
            })))
        });
    }
    unlock(&world.locks[level], world.locks[level].lock());
    assert!(!world.locks[level].is_locked());
}

fn row_31_six_levels_deep_the_waits_without_a_slot_spin_and_the_others_are_intact<L: Lock>() {
    let vm = Vm::halting(2);
    run_as(vm, Some(0));
    let locks = [const { L::INIT }; LEVELS];
    let owners = RefCell::new(locks.each_ref().map(|lock| Some(lock.lock())));
    let world = Rc::new(World { vm, locks, owners, reached: RefCell::default(), halted_in: RefCell::default() });
    run_as(vm, Some(1));
    wait(&world, 0);
    assert_eq!(*world.reached.borrow(), [5, 4, 3, 2, 1, 0]);
    assert_eq!(*world.halted_in.borrow(), [0, 1, 2, 3]);
    check(&world, 0);
    // The slots are free again: the next wait is in the first one.
    let lock = Rc::new(L::INIT);
    let mut owner = Some(lock.lock());
    cpu(|cpu| {
        let mut spins = 0;
        cpu.on_relax.replace(Some(Box::new(move || {
            spins += 1;
            assert!(spins < 1000, "this wait has a slot to halt in");
        })));
        let lock = lock.clone();
        cpu.on_halt.replace(Some(Box::new(move |slot, _| {
            assert_eq!(slot.index(), 0);
            unlock(&*lock, owner.take().expect("halts once"));
        })))
    });
    unlock(&*lock, lock.lock());
    check(&world, 0);
}
