//! The doorbell word and its answer.

use pvlock_protocol::{HeaderError, SlotIndex, VcpuId, WAIT_SLOTS};
use static_assertions::const_assert;

/// Bits of a doorbell's argument; the opcode stands above them.
const ARGUMENT_BITS: u32 = 28;
const ARGUMENT_MASK: u32 = (1 << ARGUMENT_BITS) - 1;
/// Page frame numbers have 52 bits at most (64-bit addresses, 4 KiB pages).
const PFN_BITS: u32 = 52;
const SLOT_BITS: u32 = 2;

const_assert!(VcpuId::BITS <= ARGUMENT_BITS);
const_assert!(WAIT_SLOTS <= 1 << SLOT_BITS);
const_assert!(PFN_BITS <= 2 * ARGUMENT_BITS);

/// The I/O port that pvlock's own VMM decodes. Any free port will do, discovery names it; this one is used by no device of
/// QEMU's, Firecracker's or crosvm's x86 machines.
pub const DEFAULT_PORT: u16 = 0x0d1c;

/// What a guest tells its host, as one 32-bit word: opcode in bits 28–31, argument in bits 0–27.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// 1: bits 28 and up of the page frame number that this vCPU's next `Register` completes. Not needed when they are 0.
    /// No answer.
    RegisterHigh {
        /// Bits 28–51 of the page frame number.
        high: u32,
    },
    /// 2: the region begins at this guest-physical page. Answered by a [`Status`].
    Register {
        /// Bits 0–27 of the page frame number.
        low: u32,
    },
    /// 3: the region is about to be reused; the host forgets it before it answers, and every vCPU is offline until it says
    /// `Online` again. Answered by a [`Status`].
    Unregister,
    /// 4: this vCPU takes part from now on, as one that was just reset: kicks and interrupts from before are forgotten, and whoever
    /// sleeps on it is woken. Answered by a [`Status`].
    Online(VcpuId),
    /// 5: this vCPU has left, with the same consequences; that needs no region. Answered by a [`Status`].
    Offline(VcpuId),
    /// 6: the calling vCPU has nothing to do until the latch of `slot` is set; consumes the latch. May return spuriously.
    /// No answer.
    Halt {
        /// The wait slot whose latch ends the halt.
        slot: SlotIndex,
        /// Whether the guest takes interrupts: then an interrupt ends the halt as well.
        interrupts: bool,
    },
    /// 7: set all latches of this vCPU and wake it if it is halted. No answer.
    Kick(VcpuId),
    /// 8: the calling vCPU has spun for long (where hardware does not report it). No answer.
    PauseLoop,
}

impl Doorbell {
    /// The doorbells that register the region at page frame number `pfn`: one if it fits a word, else two.
    /// `None` if `pfn` has more than 52 bits.
    pub const fn register(pfn: u64) -> Option<(Option<Self>, Self)> {
        if pfn >> PFN_BITS != 0 {
            return None;
        }
        let high = (pfn >> ARGUMENT_BITS) as u32;
        let high = if high == 0 { None } else { Some(Self::RegisterHigh { high }) };
        Some((high, Self::Register { low: pfn as u32 & ARGUMENT_MASK }))
    }

    /// The page frame number of a `Register` whose `RegisterHigh` said `high` (0 if there was none).
    pub const fn pfn(high: u32, low: u32) -> u64 {
        (high as u64) << ARGUMENT_BITS | low as u64
    }

    /// Guest: the word to send.
    #[inline]
    pub const fn encode(self) -> u32 {
        let (opcode, argument) = match self {
            Self::RegisterHigh { high } => (1, high),
            Self::Register { low } => (2, low),
            Self::Unregister => (3, 0),
            Self::Online(vcpu) => (4, vcpu.index() as u32),
            Self::Offline(vcpu) => (5, vcpu.index() as u32),
            Self::Halt { slot, interrupts } => (6, slot.index() as u32 | (interrupts as u32) << SLOT_BITS),
            Self::Kick(vcpu) => (7, vcpu.index() as u32),
            Self::PauseLoop => (8, 0),
        };
        opcode << ARGUMENT_BITS | argument & ARGUMENT_MASK
    }

    /// Host: the doorbell that a word means; `None` for words of no known opcode or with an argument out of range.
    #[inline]
    pub const fn decode(word: u32) -> Option<Self> {
        let argument = word & ARGUMENT_MASK;
        let vcpu = VcpuId::new(argument as usize);
        Some(match (word >> ARGUMENT_BITS, vcpu) {
            (1, _) if argument >> (PFN_BITS - ARGUMENT_BITS) == 0 => Self::RegisterHigh { high: argument },
            (2, _) => Self::Register { low: argument },
            (3, _) if argument == 0 => Self::Unregister,
            (4, Some(vcpu)) => Self::Online(vcpu),
            (5, Some(vcpu)) => Self::Offline(vcpu),
            (6, _) if argument >> (SLOT_BITS + 1) == 0 => {
                let Some(slot) = SlotIndex::new((argument & ((1 << SLOT_BITS) - 1)) as usize) else { return None };
                Self::Halt { slot, interrupts: argument >> SLOT_BITS == 1 }
            }
            (7, Some(vcpu)) => Self::Kick(vcpu),
            (8, _) if argument == 0 => Self::PauseLoop,
            _ => return None,
        })
    }
}

/// The answer to a doorbell, read back from where the doorbell was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The word is no doorbell, or its argument is out of range.
    Unknown = 1,
    /// There is no magic number at this page: register the page on which the region starts, after initialising it.
    BadMagic = 2,
    /// The host speaks another ABI version.
    BadVersion = 3,
    /// The number of records is 0, or below the number of vCPUs of this VM.
    BadVcpus = 4,
    /// The record stride is not one this version allows.
    BadStride = 5,
    /// The region does not lie in guest RAM as a whole.
    OutOfRange = 6,
    /// A region is registered already: unregister it first.
    AlreadyRegistered = 7,
    /// No region is registered.
    NotRegistered = 8,
    /// The VM has no such vCPU.
    NoSuchVcpu = 9,
}

impl Status {
    /// Guest: the status that a word means; words that a newer host might send read as [`Status::Unknown`].
    pub const fn decode(word: u32) -> Self {
        match word {
            0 => Self::Ok,
            2 => Self::BadMagic,
            3 => Self::BadVersion,
            4 => Self::BadVcpus,
            5 => Self::BadStride,
            6 => Self::OutOfRange,
            7 => Self::AlreadyRegistered,
            8 => Self::NotRegistered,
            9 => Self::NoSuchVcpu,
            _ => Self::Unknown,
        }
    }

    /// Host: the word to answer with.
    pub const fn encode(self) -> u32 {
        self as u32
    }
}

impl From<HeaderError> for Status {
    fn from(error: HeaderError) -> Self {
        match error {
            HeaderError::Magic => Self::BadMagic,
            HeaderError::Version => Self::BadVersion,
            HeaderError::Vcpus => Self::BadVcpus,
            HeaderError::Stride => Self::BadStride,
        }
    }
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Unknown => "the host does not know this doorbell",
            Self::BadMagic => "no magic number at this page: initialise the region before registering it",
            Self::BadVersion => "the host speaks another ABI version",
            Self::BadVcpus => "the region must hold a record for every vCPU of the VM",
            Self::BadStride => "the record stride is not allowed by this ABI version",
            Self::OutOfRange => "the region must lie in guest RAM as a whole",
            Self::AlreadyRegistered => "a region is registered already: unregister it first",
            Self::NotRegistered => "no region is registered: register one first",
            Self::NoSuchVcpu => "the VM has no such vCPU",
        })
    }
}

impl core::error::Error for Status {}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use pvlock_protocol::MAX_VCPUS;

    pub(crate) fn doorbells() -> impl Strategy<Value = Doorbell> {
        let vcpu = || (0..MAX_VCPUS).prop_map(|id| VcpuId::new(id).unwrap());
        prop_oneof![
            (0u32..1 << 24).prop_map(|high| Doorbell::RegisterHigh { high }),
            (0u32..1 << 28).prop_map(|low| Doorbell::Register { low }),
            Just(Doorbell::Unregister),
            vcpu().prop_map(Doorbell::Online),
            vcpu().prop_map(Doorbell::Offline),
            (0..WAIT_SLOTS, any::<bool>())
                .prop_map(|(slot, interrupts)| Doorbell::Halt { slot: SlotIndex::new(slot).unwrap(), interrupts }),
            vcpu().prop_map(Doorbell::Kick),
            Just(Doorbell::PauseLoop),
        ]
    }

    proptest! {
        #[test]
        fn what_the_guest_encodes_the_host_decodes(doorbell in doorbells()) {
            prop_assert_eq!(Doorbell::decode(doorbell.encode()), Some(doorbell));
        }

        #[test]
        fn every_word_is_one_doorbell_or_none(word: u32) {
            if let Some(doorbell) = Doorbell::decode(word) {
                prop_assert_eq!(doorbell.encode(), word);
            }
        }

        #[test]
        fn a_page_frame_number_arrives_whole(pfn in 0u64..1 << 52) {
            let (high, low) = Doorbell::register(pfn).unwrap();
            let high = match high { Some(Doorbell::RegisterHigh { high }) => high, None => 0, other => panic!("{other:?}") };
            let Doorbell::Register { low } = low else { panic!("{low:?}") };
            prop_assert_eq!(Doorbell::pfn(high, low), pfn);
            prop_assert_eq!(high != 0, pfn >> 28 != 0);
        }
    }

    #[test]
    fn a_page_frame_number_too_long_is_refused() {
        assert_eq!(Doorbell::register(1 << 52), None);
    }

    #[test]
    fn every_status_reads_back() {
        for word in 0..10 {
            assert_eq!(Status::decode(word).encode(), word);
        }
        assert_eq!(Status::decode(77), Status::Unknown);
    }
}
