//! Any lock, and what it protects.

use loom::cell::UnsafeCell;
use pvlock_guest::RawLock;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::rc::Rc;

/// Room for a lock.
#[repr(align(64))]
struct Place(#[allow(dead_code, reason = "only its size counts")] MaybeUninit<[u64; 8]>);

thread_local! {
    static PLACES: [std::cell::UnsafeCell<Place>; 2] =
        const { [const { std::cell::UnsafeCell::new(Place(MaybeUninit::uninit())) }; 2] };
}

/// A lock of this execution, at an address that is the same in every execution of a model: see `machine`.
fn in_place<L: 'static>(place: usize, new: L) -> &'static L {
    const { assert!(size_of::<L>() <= size_of::<Place>() && align_of::<L>() <= align_of::<Place>()) };
    let lock: *mut L = PLACES.with(|places| places[place].get().cast());
    // SAFETY: the place is large enough and lives as long as this OS thread, on which all threads of its models run; the
    // locks of earlier executions, which nobody uses any more, need no drop.
    unsafe {
        lock.write(new);
        &*lock
    }
}

/// A lock and what it protects. There are two per execution of a model at most.
#[derive(Debug)]
pub struct Work<L: 'static> {
    lock: &'static L,
    /// Loom notices accesses that are not ordered.
    data: UnsafeCell<u32>,
    visits: Cell<u32>,
}

impl<L> Work<L> {
    /// Work under `lock`, which is free.
    pub fn new(lock: L) -> Self {
        Self { lock: in_place(0, lock), data: UnsafeCell::new(0), visits: Cell::new(0) }
    }

    /// The second work of this execution, under `lock`, which is free.
    pub fn beside(lock: L) -> Self {
        Self { lock: in_place(1, lock), data: UnsafeCell::new(0), visits: Cell::new(0) }
    }

    /// The lock.
    pub fn lock(&self) -> &'static L {
        self.lock
    }

    /// The critical section; the caller owns the lock.
    pub fn inside(&self) {
        // SAFETY: loom panics if another thread is inside, or has been without happening before.
        self.data.with_mut(|data| unsafe { *data += 1 });
        self.visits.set(self.visits.get() + 1);
    }

    /// How often somebody has been inside.
    pub fn visits(&self) -> u32 {
        self.visits.get()
    }
}

impl<L: RawLock> Work<L> {
    /// Free work that several vCPUs share.
    pub fn shared(lock: L) -> Rc<Self> {
        Rc::new(Self::new(lock))
    }

    /// Takes the lock and works; the result is for [`Work::end`].
    pub fn begin(&self) -> L::Token {
        let token = self.lock.lock();
        self.inside();
        token
    }

    /// Releases the lock.
    pub fn end(&self, token: L::Token) {
        // SAFETY: `begin` has taken the lock with this token.
        unsafe { self.lock.unlock(token) };
    }

    /// Takes the lock, works, releases it.
    pub fn once(&self) {
        self.end(self.begin());
    }
}
