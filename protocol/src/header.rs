//! The header: who speaks what, and the host's settings for the whole VM.

use crate::const_unless_loom;
use crate::offset::header;
use crate::sync::AtomicU64;
use crate::{ABI_VERSION, CACHE_LINE, MAGIC, MAX_VCPUS, RECORD_STRIDE};

/// One cache line at the start of the region. The guest writes the first four words before it registers and leaves them
/// alone until it has unregistered; the host writes the rest.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Header {
    /// Guest: [`MAGIC`](crate::MAGIC).
    pub magic: AtomicU64,
    /// Guest: ABI version in bits 0–31, number of vCPUs (records) in bits 32–63.
    pub version: AtomicU64,
    /// Guest: bytes from one record to the next in bits 0–31; bits 32–63 reserved, zero.
    pub stride: AtomicU64,
    /// Guest: the [`Features`] it speaks.
    pub features: AtomicU64,
    /// Host: the [`Features`] it accepts, valid after a successful registration.
    pub accepted: AtomicU64,
    /// Host: [`HostFlags`]; may change at any time.
    pub flags: AtomicU64,
    /// Host: default spin budget of a waiter in ticks before it halts; 0 leaves it to the guest.
    pub spin_budget: AtomicU64,
    /// Host: frequency of the guest's tick counter in Hz; 0 if the host does not know it.
    pub tick_hz: AtomicU64,
}

macro_rules! bits {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $flag:ident = $bit:expr;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u64);

        impl $name {
            $($(#[$doc])* pub const $flag: Self = Self(1 << $bit);)*

            /// The word, unknown bits included.
            #[inline]
            pub const fn from_bits(bits: u64) -> Self {
                Self(bits)
            }

            /// The word as it stands in the region.
            #[inline]
            pub const fn bits(self) -> u64 {
                self.0
            }

            /// Whether every bit of `other` is set.
            #[inline]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Bits set in both.
            #[inline]
            pub const fn intersection(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }

            /// Bits set here and not there.
            #[inline]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// Bits set in either.
            #[inline]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }
    };
}

bits! {
    /// What a side can do. A guest states its own, the host answers with what it accepts of them.
    Features {
        /// Waiters halt through the HALT doorbell and are woken by KICK.
        HALT = 0;
        /// The guest reports long spins through the PAUSE_LOOP doorbell.
        PAUSE_LOOP = 1;
        /// The guest counts kicks in [`Record::kick_word`](crate::Record::kick_word) and skips the doorbell while the host
        /// says that a poller is awake.
        KICK_WORD = 2;
    }
}

bits! {
    /// The host's settings for the VM, in [`Header::flags`].
    HostFlags {
        /// Never halt: the locks spin as if there were no host.
        OFF = 0;
        /// Every vCPU has a CPU of its own: halting cannot pay.
        DEDICATED = 1;
        /// A poller looks at the kick words: see [`RegionRef::announce_kick`](crate::RegionRef::announce_kick).
        POLLER = 2;
    }
}

impl Header {
    const_unless_loom! {
        /// A header as a guest writes it before it registers, for `vcpus` records.
        ///
        /// # Panics
        ///
        /// If `vcpus` is 0 or above [`MAX_VCPUS`].
        pub const fn new(vcpus: usize, features: Features) -> Self {
            assert!(vcpus > 0 && vcpus <= MAX_VCPUS, "a region holds 1 to MAX_VCPUS vCPUs");
            Self {
                magic: AtomicU64::new(MAGIC),
                version: AtomicU64::new(ABI_VERSION as u64 | (vcpus as u64) << 32),
                stride: AtomicU64::new(RECORD_STRIDE as u64),
                features: AtomicU64::new(features.bits()),
                accepted: AtomicU64::new(0),
                flags: AtomicU64::new(0),
                spin_budget: AtomicU64::new(0),
                tick_hz: AtomicU64::new(0),
            }
        }
    }
}

/// What a host needs to know of a region before it touches a record, read and checked once at registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of vCPU records, 1 to [`MAX_VCPUS`].
    pub vcpus: usize,
    /// Bytes from one record to the next: a multiple of [`PREFETCH_PAIR`](crate::PREFETCH_PAIR), at least
    /// [`RECORD_STRIDE`], at most [`Geometry::MAX_STRIDE`].
    pub stride: usize,
    /// What the guest speaks.
    pub features: Features,
}

/// Why a header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// The first word is not [`MAGIC`]: the address is wrong, or the page was not initialised.
    Magic,
    /// The guest speaks another ABI version.
    Version,
    /// No vCPUs, or more than [`MAX_VCPUS`].
    Vcpus,
    /// The stride is too small, too large, not aligned, or reserved bits beside it are set.
    Stride,
}

impl Geometry {
    /// Largest stride a host accepts; a page per vCPU is more than any version will need.
    pub const MAX_STRIDE: usize = 4096;

    /// Reads each of the guest's header words once through `load` (which takes a byte offset) and checks them.
    pub fn read(mut load: impl FnMut(usize) -> u64) -> Result<Self, HeaderError> {
        if load(header::MAGIC) != MAGIC {
            return Err(HeaderError::Magic);
        }
        let version = load(header::VERSION);
        if version as u32 != ABI_VERSION {
            return Err(HeaderError::Version);
        }
        let vcpus = (version >> 32) as usize;
        if vcpus == 0 || vcpus > MAX_VCPUS {
            return Err(HeaderError::Vcpus);
        }
        let stride = load(header::STRIDE);
        if stride < RECORD_STRIDE as u64 || stride > Self::MAX_STRIDE as u64 || !stride.is_multiple_of(crate::PREFETCH_PAIR as u64)
        {
            return Err(HeaderError::Stride);
        }
        Ok(Self { vcpus, stride: stride as usize, features: Features::from_bits(load(header::FEATURES)) })
    }

    /// Bytes of the region that this geometry describes.
    pub const fn size(&self) -> usize {
        crate::region_size(self.vcpus, self.stride)
    }
}

const _: () = assert!(Geometry::MAX_STRIDE.is_multiple_of(CACHE_LINE));

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(header: &Header) -> [u64; 8] {
        use crate::sync::Ordering::Relaxed;
        [
            &header.magic,
            &header.version,
            &header.stride,
            &header.features,
            &header.accepted,
            &header.flags,
            &header.spin_budget,
            &header.tick_hz,
        ]
        .map(|word| word.load(Relaxed))
    }

    #[test]
    fn row_17_a_header_has_no_padding() {
        assert_no_padding!(Header::new(1, Features::HALT) => Header, Header {
            magic, version, stride, features, accepted, flags, spin_budget, tick_hz,
        });
    }

    #[test]
    fn a_new_header_reads_back_as_its_geometry() {
        let words = words(&Header::new(7, Features::HALT));
        let geometry = Geometry::read(|offset| words[offset / 8]).unwrap();
        assert_eq!(geometry, Geometry { vcpus: 7, stride: RECORD_STRIDE, features: Features::HALT });
        assert_eq!(geometry.size(), 8 * RECORD_STRIDE);
    }

    #[test]
    fn each_wrong_word_has_its_own_error() {
        let good = words(&Header::new(7, Features::HALT));
        let with = |offset: usize, value: u64| {
            let mut words = good;
            words[offset / 8] = value;
            Geometry::read(move |offset| words[offset / 8])
        };
        assert_eq!(with(header::MAGIC, 0), Err(HeaderError::Magic));
        assert_eq!(with(header::VERSION, 2 | 7 << 32), Err(HeaderError::Version));
        assert_eq!(with(header::VERSION, 1), Err(HeaderError::Vcpus));
        assert_eq!(with(header::VERSION, 1 | (MAX_VCPUS as u64 + 1) << 32), Err(HeaderError::Vcpus));
        for stride in [0, 255, 192, 257, 1 << 32 | 256, 8192] {
            assert_eq!(with(header::STRIDE, stride), Err(HeaderError::Stride), "{stride}");
        }
        assert_eq!(with(header::FEATURES, u64::MAX).unwrap().features.bits(), u64::MAX, "unknown bits survive");
    }

    proptest! {
        #[test]
        fn any_header_is_read_once_per_word_and_never_yields_an_unusable_geometry(words: [u64; 4]) {
            let mut reads = [0; 8];
            let result = Geometry::read(|offset| { reads[offset / 8] += 1; words[offset / 8] });
            prop_assert!(reads.iter().all(|&n| n <= 1));
            if let Ok(g) = result {
                prop_assert!((1..=MAX_VCPUS).contains(&g.vcpus));
                prop_assert!((RECORD_STRIDE..=Geometry::MAX_STRIDE).contains(&g.stride));
            }
        }
    }
}
