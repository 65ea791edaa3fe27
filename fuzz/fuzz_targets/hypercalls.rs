//! See `pvlock_fuzz::hypercalls`.
#![cfg_attr(fuzzing, no_main)]

pvlock_fuzz::program!(pvlock_fuzz::hypercalls);
