//! What hypervisor is there, and what does it offer?
//!
//! | leaf | eax | ebx | ecx | edx |
//! |---|---|---|---|---|
//! | base | last leaf (base + 2) | `pvlo` | `ckpv` | `lock` |
//! | base + 1 | ABI version | features 0–31 | features 32–63 | 0 |
//! | base + 2 | transport: 1 PIO, 2 MMIO, 3 MSR, 4 vmcall | place 0–31 | place 32–63 | 0 |
//!
//! `base` is the first of 0x4000_0000, 0x4000_0100, … 0x4000_ff00 that carries the signature, so that pvlock's leaves can
//! stand behind those of KVM, Hyper-V or Xen.

use crate::{Mmio, Msr, Pio, Transport};
use pvlock_protocol::{ABI_VERSION, Features};

/// The signature in ebx, ecx, edx of the base leaf.
pub const SIGNATURE: [u8; 12] = *b"pvlockpvlock";

const KVM_SIGNATURE: [u8; 12] = *b"KVMKVMKVM\0\0\0";
/// Bit 7 of eax in KVM's base + 1 (`KVM_FEATURE_PV_UNHALT` in KVM's public ABI).
const KVM_FEATURE_PV_UNHALT: u32 = 1 << 7;
const FIRST_BASE: u32 = 0x4000_0000;
const LAST_BASE: u32 = 0x4000_ff00;
/// CPUID.1:ECX bit 31 is reserved for hypervisors to say that one is present.
const HYPERVISOR_PRESENT: u32 = 1 << 31;

/// One CPUID leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// Register eax.
    pub eax: u32,
    /// Register ebx.
    pub ebx: u32,
    /// Register ecx.
    pub ecx: u32,
    /// Register edx.
    pub edx: u32,
}

impl Registers {
    fn signature(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip([self.ebx, self.ecx, self.edx]) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The CPUID instruction, as a trait so that tests can fake a hypervisor.
pub trait Cpuid {
    /// Executes CPUID with `leaf` in eax and 0 in ecx.
    fn leaf(&self, leaf: u32) -> Registers;
}

impl<F: Fn(u32) -> Registers> Cpuid for F {
    fn leaf(&self, leaf: u32) -> Registers {
        self(leaf)
    }
}

/// The CPU's own instruction.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, Default)]
pub struct NativeCpuid;

#[cfg(target_arch = "x86_64")]
impl Cpuid for NativeCpuid {
    fn leaf(&self, leaf: u32) -> Registers {
        let x86::cpuid::CpuIdResult { eax, ebx, ecx, edx } = x86::cpuid::native_cpuid::cpuid_count(leaf, 0);
        Registers { eax, ebx, ecx, edx }
    }
}

/// The hypercall instruction of this CPU's vendor.
#[cfg(target_arch = "x86_64")]
pub fn native_instruction(cpuid: &impl Cpuid) -> crate::Instruction {
    // CPUID leaf 0 spells the vendor in ebx, edx, ecx.
    let Registers { ebx, ecx, edx, .. } = cpuid.leaf(0);
    let vendor = Registers { eax: 0, ebx, ecx: edx, edx: ecx }.signature();
    match &vendor {
        b"AuthenticAMD" | b"HygonGenuine" => crate::Instruction::Vmmcall,
        _ => crate::Instruction::Vmcall,
    }
}

/// What a pvlock host offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What the host can do; registration says what it accepts of the guest's.
    pub features: Features,
    /// How to ring it.
    pub transport: Transport,
}

/// What is underneath.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// No hypervisor, or one that can neither halt nor kick for us: the locks spin.
    None,
    /// Stock KVM without a pvlock host, which offers `hlt` + `KVM_HC_KICK_CPU`.
    PvUnhalt,
    /// A pvlock host.
    Pvlock(Offer),
}

/// Looks for a host, once, at start-up.
pub fn discover(cpuid: &impl Cpuid) -> Host {
    if cpuid.leaf(1).ecx & HYPERVISOR_PRESENT == 0 {
        return Host::None;
    }
    let mut found = Host::None;
    for base in (FIRST_BASE..=LAST_BASE).step_by(0x100) {
        let first = cpuid.leaf(base);
        match first.signature() {
            SIGNATURE if first.eax >= base + 2 => {
                if let Some(offer) = Offer::read(cpuid.leaf(base + 1), cpuid.leaf(base + 2)) {
                    return Host::Pvlock(offer);
                }
            }
            // Old KVMs say 0 for "last leaf" and mean base + 1.
            KVM_SIGNATURE if cpuid.leaf(base + 1).eax & KVM_FEATURE_PV_UNHALT != 0 => found = Host::PvUnhalt,
            _ => {}
        }
    }
    found
}

impl Offer {
    /// Host: the three leaves from `base` on that announce this offer, each with its number.
    pub fn leaves(&self, base: u32) -> [(u32, Registers); 3] {
        let word = |chunk: usize| u32::from_le_bytes(core::array::from_fn(|byte| SIGNATURE[4 * chunk + byte]));
        let features = self.features.bits();
        let (kind, place) = match self.transport {
            Transport::Pio(Pio { port }) => (1, u64::from(port)),
            Transport::Mmio(Mmio { address }) => (2, address),
            Transport::Msr(Msr { index }) => (3, u64::from(index)),
            Transport::Vmcall => (4, 0),
        };
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let (features_low, features_high) = halves(features);
        let (place_low, place_high) = halves(place);
        [
            (base, Registers { eax: base + 2, ebx: word(0), ecx: word(1), edx: word(2) }),
            (base + 1, Registers { eax: ABI_VERSION, ebx: features_low, ecx: features_high, edx: 0 }),
            (base + 2, Registers { eax: kind, ebx: place_low, ecx: place_high, edx: 0 }),
        ]
    }

    /// Guest: the offer in leaves base + 1 and base + 2; `None` if it is of another ABI version or names a transport that
    /// this version does not know.
    fn read(abi: Registers, doorbell: Registers) -> Option<Self> {
        if abi.eax != ABI_VERSION {
            return None;
        }
        let place = u64::from(doorbell.ebx) | u64::from(doorbell.ecx) << 32;
        let transport = match doorbell.eax {
            1 => Transport::Pio(Pio { port: place.try_into().ok()? }),
            2 => Transport::Mmio(Mmio { address: place }),
            3 => Transport::Msr(Msr { index: place.try_into().ok()? }),
            4 => Transport::Vmcall,
            _ => return None,
        };
        Some(Self { features: Features::from_bits(u64::from(abi.ebx) | u64::from(abi.ecx) << 32), transport })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Instruction;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// A CPU with these leaves; others read as zero.
    fn cpu(leaves: Vec<(u32, Registers)>) -> impl Cpuid {
        let present = (1, Registers { ecx: HYPERVISOR_PRESENT, ..Registers::default() });
        move |leaf| leaves.iter().chain([&present]).find(|(n, _)| *n == leaf).map(|(_, r)| *r).unwrap_or_default()
    }

    fn vendor(base: u32, name: &[u8; 12], features: u32) -> Vec<(u32, Registers)> {
        let word = |chunk: usize| u32::from_le_bytes(name[4 * chunk..][..4].try_into().unwrap());
        [
            (base, Registers { eax: base + 1, ebx: word(0), ecx: word(1), edx: word(2) }),
            (base + 1, Registers { eax: features, ..Registers::default() }),
        ]
        .into()
    }

    fn offers() -> impl Strategy<Value = Offer> {
        let transport = prop_oneof![
            any::<u16>().prop_map(|port| Transport::Pio(Pio { port })),
            any::<u64>().prop_map(|address| Transport::Mmio(Mmio { address })),
            any::<u32>().prop_map(|index| Transport::Msr(Msr { index })),
            Just(Transport::Vmcall),
        ];
        (any::<u64>(), transport).prop_map(|(bits, transport)| Offer { features: Features::from_bits(bits), transport })
    }

    proptest! {
        #[test]
        fn an_offer_is_found_wherever_it_stands_and_whoever_stands_before_it(offer in offers(), place in 0u32..0x100, other in 0usize..3) {
            let names = [b"KVMKVMKVM\0\0\0", b"Microsoft Hv", b"XenVMMXenVMM"];
            let mut leaves = if place > 0 { vendor(FIRST_BASE, names[other], u32::MAX) } else { Vec::new() };
            leaves.extend(offer.leaves(FIRST_BASE + 0x100 * place));
            prop_assert_eq!(discover(&cpu(leaves)), Host::Pvlock(offer));
        }

        #[test]
        fn any_leaves_are_survived(registers: [u32; 4], leaves: [u32; 4]) {
            discover(&|leaf: u32| Registers { eax: registers[leaf as usize % 4], ebx: leaves[0], ecx: leaves[1] | HYPERVISOR_PRESENT, edx: leaves[2] });
        }
    }

    #[test]
    fn others_are_told_apart() {
        assert_eq!(discover(&|_: u32| Registers::default()), Host::None, "bare metal");
        assert_eq!(discover(&cpu(Vec::new())), Host::None, "no known hypervisor");
        assert_eq!(discover(&cpu(vendor(FIRST_BASE, b"Microsoft Hv", u32::MAX))), Host::None);
        assert_eq!(discover(&cpu(vendor(FIRST_BASE, b"XenVMMXenVMM", u32::MAX))), Host::None);
        assert_eq!(discover(&cpu(vendor(FIRST_BASE, &KVM_SIGNATURE, 0))), Host::None, "PV_UNHALT switched off");
        assert_eq!(discover(&cpu(vendor(FIRST_BASE, &KVM_SIGNATURE, 1 << 7))), Host::PvUnhalt);
        let both = [vendor(FIRST_BASE, b"Microsoft Hv", 0), vendor(FIRST_BASE + 0x100, &KVM_SIGNATURE, 1 << 7)].concat();
        assert_eq!(discover(&cpu(both)), Host::PvUnhalt);
    }

    #[test]
    fn an_offer_of_another_version_or_transport_is_not_ours() {
        let offer = Offer { features: Features::HALT, transport: Transport::Vmcall };
        for (leaf, eax) in [(1, 2), (2, 9), (0, FIRST_BASE)] {
            let mut leaves = offer.leaves(FIRST_BASE);
            leaves[leaf].1.eax = eax;
            assert_eq!(discover(&cpu(leaves.into())), Host::None, "leaf {leaf}");
        }
    }

    /// Row 24: chosen at start-up by vendor, as a value; nothing is patched. And with PV_UNHALT switched off by the host there
    /// is nothing to execute it for.
    #[test]
    fn row_24_the_instruction_is_the_vendors_and_the_feature_may_be_off() {
        let cpu = |name: &[u8; 12]| {
            let word = |chunk: usize| u32::from_le_bytes(name[4 * chunk..][..4].try_into().unwrap());
            let registers = Registers { eax: 0, ebx: word(0), ecx: word(2), edx: word(1) };
            native_instruction(&move |_: u32| registers)
        };
        assert_eq!(cpu(b"GenuineIntel"), Instruction::Vmcall);
        assert_eq!(cpu(b"AuthenticAMD"), Instruction::Vmmcall);
        assert_eq!(cpu(b"HygonGenuine"), Instruction::Vmmcall);
        // Others are compatible with Intel, where they virtualise at all.
        assert_eq!(cpu(b"CentaurHauls"), Instruction::Vmcall);
        assert_eq!(cpu(b"  Shanghai  "), Instruction::Vmcall);
        for others in [0, !(1 << 7)] {
            assert_eq!(discover(&super::tests::cpu(vendor(FIRST_BASE, &KVM_SIGNATURE, others))), Host::None);
        }
    }

    /// Row 29: a query costs an exit, so everything is asked once, at start-up, each leaf once.
    #[test]
    fn row_29_discovery_asks_for_each_leaf_once() {
        use std::cell::RefCell;
        use std::collections::BTreeMap;
        let offer = Offer { features: Features::HALT, transport: Transport::Vmcall };
        let worlds = [
            Vec::new(),
            vendor(FIRST_BASE, &KVM_SIGNATURE, u32::MAX),
            offer.leaves(FIRST_BASE).into(),
            [vendor(FIRST_BASE, &KVM_SIGNATURE, u32::MAX), offer.leaves(LAST_BASE).into()].concat(),
        ];
        for leaves in worlds {
            let asked = RefCell::new(BTreeMap::<u32, u32>::new());
            let cpu = cpu(leaves);
            let counting = |leaf: u32| {
                *asked.borrow_mut().entry(leaf).or_default() += 1;
                cpu.leaf(leaf)
            };
            discover(&counting);
            native_instruction(&counting);
            assert!(asked.borrow().values().all(|&times| times == 1), "{asked:?}");
        }
    }
}
