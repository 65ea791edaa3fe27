//! lib
#![no_std]
