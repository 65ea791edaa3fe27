//! What things cost: `params.toml`, in which each number has its source.

use crate::sched::Times;
use serde::Deserialize;

/// The documented set, which all tables use.
pub const DEFAULT: &str = include_str!("../params.toml");

macro_rules! sections {
    ($($(#[$doc:meta])* $section:ident { $($(#[$field_doc:meta])* $field:ident,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $section {
                $($(#[$field_doc])* pub $field: u64,)*
            }

            impl $section {
                /// The first number that is zero.
                fn zero(&self) -> Option<&'static str> {
                    [$((stringify!($field), self.$field),)*].into_iter().find(|&(_, value)| value == 0).map(|(name, _)| name)
                }
            }
        )*
    };
}

sections! {
    /// Costs in the guest, in ns.
    Guest {
        /// A PAUSE, in cycles.
        pause_cycles,
        /// A lock operation on a line in the own cache.
        atomic,
        /// A line from another core.
        transfer,
        /// Each further waiter that fetches the same line.
        refetch,
        /// Handling a TLB flush.
        flush,
    }
    /// Costs of leaving the guest, in ns.
    Exits {
        /// Out and back.
        exit,
        /// The pause-loop handler.
        pause_loop,
        /// A candidate of a directed yield that is tried in vain.
        candidate,
        /// More for each other vCPU of the VM that is in the handler.
        contended,
        /// A decision of pvlock's engine from hints.
        decide,
        /// Waking a task, for who wakes it.
        wake_cost,
        /// Until the woken task's CPU acts on it.
        wake_latency,
        /// A context switch.
        switch,
        /// Sending an interrupt.
        ipi_send,
        /// Receiving one.
        ipi_receive,
    }
    /// The hardware's pause-loop detection.
    PauseLoop {
        /// PAUSEs that are further apart are not one loop, in cycles.
        gap_cycles,
        /// A loop of this length exits, in cycles.
        window_cycles,
    }
    /// The scheduler, in ns.
    Scheduler {
        /// Before scaling by the number of CPUs.
        latency_base,
        /// Before scaling.
        min_granularity_base,
        /// Before scaling.
        wakeup_granularity_base,
        /// Between two ticks.
        tick,
        /// What ran so recently is not pulled away.
        migration_cost,
        /// Between two balancings of a busy CPU.
        balance_busy,
        /// Between two balancings of an idle CPU.
        balance_idle,
        /// How long a gang runs.
        gang_slice,
    }
}

/// All parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Cycles per microsecond.
    pub mhz: u64,
    /// In the guest.
    pub guest: Guest,
    /// Between guest and host.
    pub exits: Exits,
    /// The hardware's pause-loop detection.
    pub pause_loop: PauseLoop,
    /// The scheduler.
    pub scheduler: Scheduler,
}

/// What is wrong with a set of parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParamsError {
    /// Not readable, or with a key that does not exist.
    #[error("the parameters cannot be read: {0}")]
    Read(String),
    /// A cost of nothing would let the simulation stand still.
    #[error("the parameter {0} is 0: every cost and time must be above 0")]
    Zero(String),
    /// Not `key=value`.
    #[error("{0}: a parameter is set by section.name=number, such as exits.exit=1500")]
    Set(String),
}

impl Params {
    /// Reads a whole set.
    ///
    /// # Errors
    ///
    /// Unknown or missing keys, and zeros.
    pub fn parse(text: &str) -> Result<Self, ParamsError> {
        Self::checked(toml::from_str(text).map_err(|error| ParamsError::Read(error.message().to_owned()))?)
    }

    /// The documented set with some values set, each as `section.name=number`.
    ///
    /// # Errors
    ///
    /// As [`Params::parse`].
    pub fn with(text: &str, settings: &[String]) -> Result<Self, ParamsError> {
        let mut table: toml::Table = toml::from_str(text).map_err(|error| ParamsError::Read(error.message().to_owned()))?;
        for setting in settings {
            let wrong = || ParamsError::Set(setting.clone());
            let (key, value) = setting.split_once('=').ok_or_else(wrong)?;
            let value = toml::Value::Integer(value.trim().replace('_', "").parse().map_err(|_| wrong())?);
            let (section, name) = match key.trim().split_once('.') {
                Some((section, name)) => (table.get_mut(section).and_then(toml::Value::as_table_mut).ok_or_else(wrong)?, name),
                None => (&mut table, key.trim()),
            };
            section.insert(name.to_owned(), value);
        }
        Self::checked(table.try_into().map_err(|error: toml::de::Error| ParamsError::Read(error.message().to_owned()))?)
    }

    fn checked(self) -> Result<Self, ParamsError> {
        let Self { mhz, guest, exits, pause_loop, scheduler } = &self;
        let sections = [
            ("guest.", guest.zero()),
            ("exits.", exits.zero()),
            ("pause_loop.", pause_loop.zero()),
            ("scheduler.", scheduler.zero()),
            ("", (*mhz == 0).then_some("mhz")),
        ];
        match sections.into_iter().find_map(|(section, zero)| Some(format!("{section}{}", zero?))) {
            Some(zero) => Err(ParamsError::Zero(zero)),
            None => Ok(self),
        }
    }

    /// Cycles in so many ns; at least 1, as everything takes time.
    pub fn cycles(&self, ns: u64) -> u64 {
        (ns * self.mhz / 1000).max(1)
    }

    /// ns in so many cycles.
    pub fn ns(&self, cycles: u64) -> u64 {
        (u128::from(cycles) * 1000 / u128::from(self.mhz)) as u64
    }

    /// The scheduler's times in cycles, on a host with so many CPUs.
    pub fn times(&self, cpus: usize) -> Times {
        let factor = 1 + u64::from(cpus.clamp(1, 8).ilog2());
        let Scheduler { latency_base, min_granularity_base, wakeup_granularity_base, .. } = self.scheduler;
        let Scheduler { tick, migration_cost, balance_busy, balance_idle, .. } = self.scheduler;
        Times {
            latency: self.cycles(latency_base * factor),
            min_granularity: self.cycles(min_granularity_base * factor),
            wakeup_granularity: self.cycles(wakeup_granularity_base * factor),
            tick: self.cycles(tick),
            migration_cost: self.cycles(migration_cost),
            balance_busy: self.cycles(balance_busy),
            balance_idle: self.cycles(balance_idle),
        }
    }
}

impl Default for Params {
    fn default() -> Self {
        match Self::parse(DEFAULT) {
            Ok(params) => params,
            Err(error) => unreachable!("params.toml is tested: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_set_is_sound() {
        let params = Params::default();
        assert_eq!(params.cycles(1000), params.mhz);
        assert_eq!(params.ns(params.mhz * 7), 7000);
    }

    #[test]
    fn bad_parameters_are_refused_with_their_names() {
        let with = |setting: &str| Params::with(DEFAULT, &[setting.to_owned()]).unwrap_err().to_string();
        assert!(with("exits.exit=0").contains("exits.exit is 0"));
        assert!(with("exits.exti=1").contains("exti"));
        assert!(with("exit.exit=1").contains("section.name=number"));
        assert!(with("exits.exit").contains("section.name=number"));
        assert!(with("exits.exit=many").contains("section.name=number"));
        assert!(with("mhz=0").contains("mhz is 0"));
        assert!(Params::parse("mhz = 1").unwrap_err().to_string().contains("missing"));
        assert_eq!(Params::with(DEFAULT, &["exits.exit=1_500".to_owned()]).unwrap().exits.exit, 1500);
    }
}
