//! A vCPU below its locks.

use crate::pauses::CountPauses;
use pvlock_guest::hypercalls::Ring;

/// What a guest can do to its host, and to itself, besides taking locks.
pub trait Bare: CountPauses {
    /// The doorbell of the vCPU that runs; none without a host.
    fn doorbell() -> Option<impl Ring>;

    /// The page frame number of the region.
    fn pfn() -> u64;

    /// Resets the vCPU that runs: it holds no lock and waits for none. In a VM it does not come back, but starts again at the
    /// entry point.
    fn reset();
}
