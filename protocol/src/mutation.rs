//! Faults that can be switched on in models, to show that the models would notice them. Outside models they do not exist:
//! `active` is a constant `false`.
//!
//! `cargo xtask mutate` runs models with the environment variable `PVLOCK_MUTATION=NAME`; which model has to fail for which
//! fault stands in `loom-tests/mutations.md`. Names are unique among the crates.

/// Defines `Mutation`, the named faults of a crate, and `active` and `weakened`, which its code asks at each of them. In a
/// model (`--cfg pvlock_loom`) there is `Mutation::with` as well, which runs a closure with the fault switched on in this thread.
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

        /// The ordering `sound`, or `weak` if the model wants this fault.
        #[allow(dead_code, reason = "not every crate has such a fault")]
        #[cfg_attr(not(pvlock_loom), inline(always))]
        pub(crate) fn weakened(
            mutation: Mutation,
            sound: core::sync::atomic::Ordering,
            weak: core::sync::atomic::Ordering,
        ) -> core::sync::atomic::Ordering {
            if active(mutation) { weak } else { sound }
        }

        #[cfg(pvlock_loom)]
        std::thread_local! {
            static ACTIVE: core::cell::Cell<u64> = core::cell::Cell::new(Mutation::from_environment());
        }

        #[cfg(pvlock_loom)]
        impl Mutation {
            /// The one that `PVLOCK_MUTATION` names, if it is one of this crate's.
            fn from_environment() -> u64 {
                let wanted = std::env::var("PVLOCK_MUTATION").unwrap_or_default();
                let all = [$((stringify!($name), Self::$name),)*];
                all.into_iter().find(|(name, _)| *name == wanted).map_or(0, |(_, mutation)| mutation.bit())
            }

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
    /// A reader loads the id of a wait slot Relaxed.
    SlotIdReadRelaxed,
    /// A reader loads the word of a wait slot Relaxed.
    SlotWordReadRelaxed,
    /// A guest that counts a kick does not fence before it looks whether the poller is still awake.
    KickNotFenced,
}
