//! `pvlock sim`: locks on a simulated host.

pub mod fuzz;

use clap::{Args, Subcommand};

/// Arguments of `pvlock sim`.
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// What to simulate.
    #[command(subcommand)]
    pub command: Command,
}

/// What to simulate.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Let things go wrong, by seed, and look whether everything holds that has to
    Fuzz(fuzz::Options),
}
