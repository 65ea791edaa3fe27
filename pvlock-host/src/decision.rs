//! Every decision of the engine has a name and is counted.

use crate::event::{Boost, Resume, Sleep, Verdict, Yield};

/// An enumeration whose values can be listed and named.
macro_rules! reasons {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $value:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$doc])* $value,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($value)),*].len()] = [$(Self::$value),*];

            /// Its name, as in the code.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => concat!(stringify!($name), "::", stringify!($value)),)*
                }
            }
        }
    };
}
pub(crate) use reasons;

/// What was done with a vCPU after an event, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// It went back to the guest.
    Resume(Resume),
    /// It gave up its CPU to whoever the scheduler picks.
    Yield(Yield),
    /// It gave up its CPU to another vCPU.
    Boost(Boost),
    /// It was put to sleep.
    Park(Sleep),
}

const YIELDS: usize = Resume::ALL.len();
const BOOSTS: usize = YIELDS + Yield::ALL.len();
const PARKS: usize = BOOSTS + Boost::ALL.len();

impl Decision {
    /// How many there are.
    pub const COUNT: usize = PARKS + Sleep::ALL.len();

    /// All of them, in the order of their [`Decision::index`].
    pub fn all() -> impl Iterator<Item = Self> {
        let resumes = Resume::ALL.into_iter().map(Self::Resume);
        let yields = Yield::ALL.into_iter().map(Self::Yield);
        let boosts = Boost::ALL.into_iter().map(Self::Boost);
        resumes.chain(yields).chain(boosts).chain(Sleep::ALL.into_iter().map(Self::Park))
    }

    /// Its place in a table of [`Decision::COUNT`] entries.
    pub const fn index(self) -> usize {
        match self {
            Self::Resume(why) => why as usize,
            Self::Yield(why) => YIELDS + why as usize,
            Self::Boost(why) => BOOSTS + why as usize,
            Self::Park(why) => PARKS + why as usize,
        }
    }

    /// Its name, as in the code: `Resume::HolderRunning`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resume(why) => why.name(),
            Self::Yield(why) => why.name(),
            Self::Boost(why) => why.name(),
            Self::Park(why) => why.name(),
        }
    }

    /// The decision behind the verdict on a doorbell that is no pause loop.
    pub(crate) fn of(verdict: &Verdict) -> Self {
        match *verdict {
            Verdict::Resume(why) => Self::Resume(why),
            Verdict::Yield(why) => Self::Yield(why),
            Verdict::YieldTo(_, why) => Self::Boost(why),
            Verdict::Park(_) => Self::Park(Sleep::Halted),
        }
    }
}

impl core::fmt::Display for Decision {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_decision_has_its_own_place_and_name() {
        let mut names = std::collections::BTreeSet::new();
        for (index, decision) in Decision::all().enumerate() {
            assert_eq!(decision.index(), index, "{decision}");
            assert!(names.insert(decision.name()), "{decision} twice");
        }
        assert_eq!(names.len(), Decision::COUNT);
    }
}
