//! The region: a header and the records behind it.

use crate::mutation::{Mutation, active};
use crate::offset::header;
use crate::sync::{AtomicU64, Ordering, fence};
use crate::{Features, Header, HostFlags, RECORD_STRIDE, Record, VcpuId};
use crate::{array, const_unless_loom};

/// Bytes in a page; a region starts on one, because its address is registered as a page frame number.
pub const PAGE_SIZE: usize = 4096;

/// Byte offset of a vCPU's record: the header takes the place of "record −1".
pub const fn record_offset(vcpu: VcpuId, stride: usize) -> usize {
    (vcpu.index() + 1) * stride
}

/// Bytes of a region with `vcpus` records.
pub const fn region_size(vcpus: usize, stride: usize) -> usize {
    (vcpus + 1) * stride
}

/// A region for `N` vCPUs, to be placed in a `static` or on pages of the guest's own.
///
/// The tail of the last page, if the records do not fill it, is not part of the ABI.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Region<const N: usize> {
    pub(crate) header: Header,
    reserved: [u64; (RECORD_STRIDE - crate::CACHE_LINE) / 8],
    pub(crate) records: [Record; N],
}

impl<const N: usize> Region<N> {
    const_unless_loom! {
        /// A region as a guest writes it before it registers.
        ///
        /// # Panics
        ///
        /// If `N` is 0 or above [`MAX_VCPUS`](crate::MAX_VCPUS); at compile time for a `static`.
        pub const fn new(features: Features) -> Self {
            Self {
                header: Header::new(N, features),
                reserved: [0; (RECORD_STRIDE - crate::CACHE_LINE) / 8],
                records: array!(Record::new()),
            }
        }
    }

    /// The region without its size in the type.
    pub const fn as_ref(&self) -> RegionRef<'_> {
        RegionRef { header: &self.header, records: &self.records }
    }
}

/// A region as the guest sees it.
#[derive(Clone, Copy, Debug)]
pub struct RegionRef<'a> {
    /// The header.
    pub header: &'a Header,
    /// One record per vCPU.
    pub records: &'a [Record],
}

impl<'a> RegionRef<'a> {
    /// The record of a vCPU, if the region has one.
    #[inline]
    pub fn record(&self, vcpu: VcpuId) -> Option<&'a Record> {
        self.records.get(vcpu.index())
    }

    /// Guest: counts a kick of `vcpu` in its record if the host says that a poller looks there. Returns whether the KICK
    /// doorbell must be rung.
    ///
    /// The poller may go to sleep meanwhile: it clears [`HostFlags::POLLER`], and looks once more. So the flag is read again
    /// after the kick was counted; either that sees the flag cleared, or the last look sees the kick.
    #[inline]
    pub fn announce_kick(&self, vcpu: VcpuId) -> bool {
        let polls = || HostFlags::from_bits(self.header.flags.load(Ordering::Relaxed)).contains(HostFlags::POLLER);
        let Some(record) = self.record(vcpu).filter(|_| polls()) else { return true };
        // Release: pairs with the host's Acquire load; what the kick is about is visible to the vCPU that it wakes.
        record.kick_word.fetch_add(1, Ordering::Release);
        // SeqCst: pairs with the poller's, between clearing the flag and its last look.
        if !active(Mutation::KickNotFenced) {
            fence(Ordering::SeqCst);
        }
        !polls()
    }

    /// The word at a byte offset in the region; `None` for reserved words and beyond. This is how a host in the same
    /// process (threads as vCPUs, a model, a simulator) reaches the region without any mapping.
    pub fn word(&self, offset: usize) -> Option<&'a AtomicU64> {
        match (offset / RECORD_STRIDE).checked_sub(1) {
            Some(index) => self.records.get(index)?.word(offset % RECORD_STRIDE),
            None => Some(match offset {
                header::MAGIC => &self.header.magic,
                header::VERSION => &self.header.version,
                header::STRIDE => &self.header.stride,
                header::FEATURES => &self.header.features,
                header::ACCEPTED => &self.header.accepted,
                header::FLAGS => &self.header.flags,
                header::SPIN_BUDGET => &self.header.spin_budget,
                header::TICK_HZ => &self.header.tick_hz,
                _ => return None,
            }),
        }
    }
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use crate::Geometry;
    use crate::offset::record;
    use crate::sync::Ordering::Relaxed;

    /// A region that ends where a page does. The tail of others is no part of the ABI.
    #[test]
    fn row_17_a_region_has_no_padding() {
        assert_no_padding!(Region::new(Features::HALT) => Region<15>, Region { header, reserved, records });
    }

    #[test]
    fn a_region_reads_back_through_byte_offsets() {
        static REGION: Region<3> = Region::new(Features::HALT);
        let region = REGION.as_ref();
        let geometry = Geometry::read(|offset| region.word(offset).unwrap().load(Relaxed)).unwrap();
        assert_eq!(geometry.vcpus, 3);
        for vcpu in 0..3 {
            let id = VcpuId::new(vcpu).unwrap();
            let word = region.word(record_offset(id, geometry.stride) + record::RUN_STATE).unwrap();
            assert!(core::ptr::eq(word, &region.record(id).unwrap().run_state));
        }
        assert!(region.word(geometry.size()).is_none());
        assert!(region.word(64).is_none());
        assert!(region.word(4).is_none());
    }
}
