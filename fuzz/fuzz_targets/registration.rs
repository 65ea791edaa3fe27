//! See `pvlock_fuzz::registration`.
#![cfg_attr(fuzzing, no_main)]

pvlock_fuzz::program!(pvlock_fuzz::registration);
