//! See `pvlock_fuzz::engine`.
#![cfg_attr(fuzzing, no_main)]

pvlock_fuzz::program!(pvlock_fuzz::engine);
