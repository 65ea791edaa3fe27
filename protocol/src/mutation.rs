//! Faults that a model can switch on, to show that it would notice them. Outside models they do not exist: `active` is a
//! constant `false`.

/// Defines `Mutation`, the named faults of a crate, and `active`, which its code asks at each of them. In a model
/// (`--cfg pvlock_loom`) there is `Mutation::with` as well, which runs a closure with the fault switched on in this thread.
///
/// The switch belongs to the thread, because a test harness runs models side by side. Loom runs all threads of one model on
/// the thread that called it.
#[doc(hidden)]
#[macro_export]
macro_rules! mutations {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Faults that this crate can be given in a model.
        #[allow(unreachable_pub, clippy::enum_variant_names, reason = "public in models")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutation {
            $($(#[$doc])* $name,)*
        }

        /// Whether the model wants this fault.
        #[cfg(not(pvlock_loom))]
        #[inline(always)]
        pub(crate) const fn active(_: Mutation) -> bool {
            false
        }

        /// Whether the model wants this fault.
        #[cfg(pvlock_loom)]
        pub(crate) fn active(mutation: Mutation) -> bool {
            ACTIVE.get() & mutation.bit() != 0
        }

        #[cfg(pvlock_loom)]
        std::thread_local! {
            static ACTIVE: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
        }

        #[cfg(pvlock_loom)]
        impl Mutation {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Runs `model` with this fault in the crate's code, besides those that are switched on already.
            pub fn with<R>(self, model: impl FnOnce() -> R) -> R {
                struct Restore(u64);
                impl Drop for Restore {
                    fn drop(&mut self) {
                        ACTIVE.set(self.0);
                    }
                }
                let _restore = Restore(ACTIVE.get());
                ACTIVE.set(ACTIVE.get() | self.bit());
                model()
            }

            const fn bit(self) -> u64 {
                1 << self as u32
            }
        }
    };
}

mutations! {
    /// The second word of a wait slot is stored Relaxed.
    SlotWordRelaxed,
    /// Publishing does not empty the slot first.
    SlotNotEmptiedFirst,
    /// The id of a wait slot is stored Relaxed.
    SlotIdRelaxed,
}
