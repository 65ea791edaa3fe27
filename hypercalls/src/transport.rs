//! The ways a doorbell word travels.
//!
//! | transport | ring | answer | who |
//! |---|---|---|---|
//! | [`Pio`] | `out dx, eax` | `in eax, dx` | user-space VMMs |
//! | [`Mmio`] | 32-bit store | 32-bit load of the same address | user-space VMMs, other architectures |
//! | [`Msr`] | `wrmsr` | `rdmsr` | hypervisors that trap MSRs (a guest in CPL 0) |
//! | [`Vmcall`] | `vmcall` / `vmmcall`: rax [`Vmcall::NUMBER`], rbx word | rax | type-1 hypervisors |
//! | [`Direct`] | a function call | its value | threads, simulator |

use crate::Doorbell;
#[cfg(target_arch = "x86_64")]
use core::arch::asm;

/// Where the host wants its doorbells, as discovery says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Port I/O.
    Pio(Pio),
    /// Memory-mapped I/O.
    Mmio(Mmio),
    /// A model-specific register.
    Msr(Msr),
    /// The hypercall instruction.
    Vmcall,
}

/// Guest: a way to ring the host.
pub trait Ring {
    /// Sends one doorbell word; for the doorbells that have one, returns once the host has acted on it.
    fn ring(&self, word: u32);

    /// Reads the answer to this vCPU's last doorbell.
    fn answer(&self) -> u32;

    /// Sends a doorbell that has an answer.
    fn call(&self, doorbell: Doorbell) -> crate::Status {
        self.ring(doorbell.encode());
        crate::Status::decode(self.answer())
    }
}

/// Host: a decoded access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The guest rang this word.
    Ring(u32),
    /// The guest wants the answer to its last doorbell.
    Answer,
    /// The guest used our place with another width: no doorbell, but nobody else's either.
    Malformed,
}

/// The operands of the guest's instruction: what the encoder hands to the CPU and the exit hands to the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operands<P> {
    /// Port, address or register number.
    pub place: P,
    /// The word written.
    pub word: u32,
}

fn access_written(data: &[u8]) -> Access {
    match data.try_into() {
        Ok(bytes) => Access::Ring(u32::from_le_bytes(bytes)),
        Err(_) => Access::Malformed,
    }
}

fn access_read(data: &[u8]) -> Access {
    if data.len() == 4 { Access::Answer } else { Access::Malformed }
}

/// Port I/O with 32-bit accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pio {
    /// The port.
    pub port: u16,
}

impl Pio {
    /// Guest: operands of the `out`.
    #[inline]
    pub const fn encode(self, word: u32) -> Operands<u16> {
        Operands { place: self.port, word }
    }

    /// Host: decodes an `out` exit; `None` if the port is not ours.
    pub fn decode_out(self, port: u16, data: &[u8]) -> Option<Access> {
        (port == self.port).then(|| access_written(data))
    }

    /// Host: decodes an `in` exit; `None` if the port is not ours.
    pub fn decode_in(self, port: u16, data: &[u8]) -> Option<Access> {
        (port == self.port).then(|| access_read(data))
    }
}

#[cfg(target_arch = "x86_64")]
impl Pio {
    /// Guest: the doorbell at this port.
    ///
    /// # Safety
    ///
    /// A pvlock host decodes this port (discovery said so), and the guest is allowed to use it.
    pub const unsafe fn doorbell(self) -> impl Ring + Copy {
        PioDoorbell(self)
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct PioDoorbell(Pio);

#[cfg(target_arch = "x86_64")]
impl Ring for PioDoorbell {
    #[inline]
    fn ring(&self, word: u32) {
        let Operands { place, word } = self.0.encode(word);
        // SAFETY: `Pio::doorbell`'s contract: this port is the host's doorbell; writing it changes no memory of ours.
        unsafe { x86::io::outl(place, word) }
    }

    #[inline]
    fn answer(&self) -> u32 {
        // SAFETY: as above; reading the doorbell port has no effect.
        unsafe { x86::io::inl(self.0.port) }
    }
}

/// Memory-mapped I/O with 32-bit accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mmio {
    /// Guest-physical address on the host's side; the guest maps it and uses the virtual address for [`Mmio::mapped`].
    pub address: u64,
}

impl Mmio {
    /// Guest: operands of the store.
    #[inline]
    pub const fn encode(self, word: u32) -> Operands<u64> {
        Operands { place: self.address, word }
    }

    /// Host: decodes a write exit; `None` if the address is not ours.
    pub fn decode_write(self, address: u64, data: &[u8]) -> Option<Access> {
        (address == self.address).then(|| access_written(data))
    }

    /// Host: decodes a read exit; `None` if the address is not ours.
    pub fn decode_read(self, address: u64, data: &[u8]) -> Option<Access> {
        (address == self.address).then(|| access_read(data))
    }

    /// Guest: the doorbell mapped at `virtual_address`.
    ///
    /// # Safety
    ///
    /// A 4-byte aligned, uncached mapping of the host's doorbell address stands at `virtual_address` for as long as the
    /// result is used.
    pub const unsafe fn mapped(virtual_address: usize) -> impl Ring + Copy {
        MappedMmio { virtual_address }
    }
}

#[derive(Clone, Copy)]
struct MappedMmio {
    virtual_address: usize,
}

impl Ring for MappedMmio {
    fn ring(&self, word: u32) {
        let Operands { place, word } = Mmio { address: self.virtual_address as u64 }.encode(word);
        // SAFETY: `Mmio::mapped`'s contract: the doorbell is mapped here.
        unsafe { core::ptr::with_exposed_provenance_mut::<u32>(place as usize).write_volatile(word) }
    }

    fn answer(&self) -> u32 {
        // SAFETY: as above.
        unsafe { core::ptr::with_exposed_provenance::<u32>(self.virtual_address).read_volatile() }
    }
}

/// A model-specific register. `wrmsr` carries 64 bits: the upper half is zero, anything else is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msr {
    /// The register's number.
    pub index: u32,
}

impl Msr {
    /// Guest: operands of the `wrmsr`.
    #[inline]
    pub const fn encode(self, word: u32) -> Operands<u32> {
        Operands { place: self.index, word }
    }

    /// Host: decodes a write exit; `None` if the register is not ours.
    pub fn decode_write(self, index: u32, data: u64) -> Option<Access> {
        (index == self.index).then(|| u32::try_from(data).map_or(Access::Malformed, Access::Ring))
    }

    /// Host: decodes a read exit; `None` if the register is not ours.
    pub fn decode_read(self, index: u32) -> Option<Access> {
        (index == self.index).then_some(Access::Answer)
    }
}

#[cfg(target_arch = "x86_64")]
impl Msr {
    /// Guest: the doorbell in this register.
    ///
    /// # Safety
    ///
    /// A pvlock host decodes this register (discovery said so), and the guest runs in CPL 0.
    pub const unsafe fn doorbell(self) -> impl Ring + Copy {
        MsrDoorbell(self)
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct MsrDoorbell(Msr);

#[cfg(target_arch = "x86_64")]
impl Ring for MsrDoorbell {
    #[inline]
    fn ring(&self, word: u32) {
        let Operands { place, word } = self.0.encode(word);
        // SAFETY: `Msr::doorbell`'s contract: this register is the host's doorbell, not one of the CPU's.
        unsafe { x86::msr::wrmsr(place, u64::from(word)) }
    }

    #[inline]
    fn answer(&self) -> u32 {
        // SAFETY: as above.
        unsafe { x86::msr::rdmsr(self.0.index) as u32 }
    }
}

/// Which instruction leaves the guest: the other vendor's raises #UD or must be patched by the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// Intel: `vmcall`.
    Vmcall,
    /// AMD, Hygon: `vmmcall`.
    Vmmcall,
}

/// The hypercall instruction, for type-1 hypervisors. On stock KVM unknown numbers never reach user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vmcall {
    /// The vendor's instruction; see `native_instruction`.
    pub instruction: Instruction,
}

impl Vmcall {
    /// Hypercall number: `pvlk` in ASCII, far from the numbers of KVM, Xen and Hyper-V.
    pub const NUMBER: u64 = 0x7076_6c6b;
    /// The "word" that asks for the answer to the last doorbell: opcode 0, which is no doorbell.
    const ANSWER: u32 = 0;

    /// Guest: operands of a ring, in rax and rbx.
    #[inline]
    pub const fn encode(self, word: u32) -> Operands<u64> {
        Operands { place: Self::NUMBER, word }
    }

    /// Host: decodes a hypercall exit from rax and rbx; `None` if the number is not ours.
    pub fn decode(rax: u64, rbx: u64) -> Option<Access> {
        (rax == Self::NUMBER).then(|| match u32::try_from(rbx) {
            Ok(Self::ANSWER) => Access::Answer,
            Ok(word) => Access::Ring(word),
            Err(_) => Access::Malformed,
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Vmcall {
    /// Guest: the doorbell behind this instruction.
    ///
    /// # Safety
    ///
    /// A pvlock host takes this hypercall (discovery said so), and `instruction` is this CPU's vendor's.
    pub const unsafe fn doorbell(self) -> impl Ring + Copy {
        VmcallDoorbell(self)
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct VmcallDoorbell(Vmcall);

#[cfg(target_arch = "x86_64")]
impl VmcallDoorbell {
    #[inline]
    fn hypercall(self, word: u32) -> u32 {
        let Operands { place, word } = self.0.encode(word);
        // SAFETY: `Vmcall::doorbell`'s contract.
        unsafe { hypercall(self.0.instruction, place, u64::from(word), 0) as u32 }
    }
}

#[cfg(target_arch = "x86_64")]
impl Ring for VmcallDoorbell {
    #[inline]
    fn ring(&self, word: u32) {
        self.hypercall(word);
    }

    #[inline]
    fn answer(&self) -> u32 {
        self.hypercall(Vmcall::ANSWER)
    }
}

/// Executes the hypercall instruction with `number` in rax and arguments in rbx and rcx, and returns rax.
///
/// # Safety
///
/// A hypervisor that knows `number` must be there, and the instruction must be its vendor's.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn hypercall(instruction: Instruction, number: u64, rbx: u64, rcx: u64) -> u64 {
    let result;
    // LLVM keeps rbx for itself: it is exchanged around the instruction.
    match instruction {
        // SAFETY: the caller's contract; the hypervisor changes no register but rax.
        Instruction::Vmcall => unsafe {
            asm!("xchg rbx, {rbx}", "vmcall", "xchg rbx, {rbx}", rbx = inout(reg) rbx => _, inout("rax") number => result, in("rcx") rcx)
        },
        // SAFETY: as above.
        Instruction::Vmmcall => unsafe {
            asm!("xchg rbx, {rbx}", "vmmcall", "xchg rbx, {rbx}", rbx = inout(reg) rbx => _, inout("rax") number => result, in("rcx") rcx)
        },
    }
    result
}

/// Guest on stock KVM: wakes the vCPU with this APIC id from `hlt` (`KVM_HC_KICK_CPU`, number 5 in KVM's public ABI).
///
/// # Safety
///
/// [`discover`](crate::discover) must have found [`Host::PvUnhalt`](crate::Host::PvUnhalt), and the caller run in CPL 0.
#[cfg(target_arch = "x86_64")]
#[inline]
pub unsafe fn kick_cpu(instruction: Instruction, apic_id: u32) {
    const KVM_HC_KICK_CPU: u64 = 5;
    // SAFETY: the caller's contract.
    unsafe { hypercall(instruction, KVM_HC_KICK_CPU, 0, u64::from(apic_id)) };
}

/// Nobody: what is rung goes nowhere, and the answer is always yes. For a guest on a machine that halts and kicks by itself, as
/// stock KVM does with PV_UNHALT: it has the same things to say when a vCPU comes and goes, and no pvlock host to say them to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoHost;

impl Ring for NoHost {
    #[inline]
    fn ring(&self, _: u32) {}

    #[inline]
    fn answer(&self) -> u32 {
        crate::Status::Ok.encode()
    }
}

/// A host in the same process: the doorbell is a function call that returns the answer.
#[derive(Clone, Copy, Debug)]
pub struct Direct<F>(pub F);

impl<F: Fn(Access) -> u32> Ring for Direct<F> {
    #[inline]
    fn ring(&self, word: u32) {
        (self.0)(Access::Ring(word));
    }

    #[inline]
    fn answer(&self) -> u32 {
        (self.0)(Access::Answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::tests::doorbells;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pio_round_trip(doorbell in doorbells(), port: u16, other: u16) {
            let out = Pio { port }.encode(doorbell.encode());
            let decoded = Pio { port }.decode_out(out.place, &out.word.to_le_bytes());
            prop_assert_eq!(decoded, Some(Access::Ring(doorbell.encode())));
            prop_assert_eq!(Pio { port }.decode_in(port, &[0; 4]), Some(Access::Answer));
            prop_assert_eq!(Pio { port }.decode_out(other, &[0; 4]).is_some(), other == port);
        }

        #[test]
        fn mmio_round_trip(doorbell in doorbells(), address: u64) {
            let store = Mmio { address }.encode(doorbell.encode());
            let decoded = Mmio { address }.decode_write(store.place, &store.word.to_le_bytes());
            prop_assert_eq!(decoded, Some(Access::Ring(doorbell.encode())));
            prop_assert_eq!(Mmio { address }.decode_read(address, &[0; 4]), Some(Access::Answer));
            prop_assert_eq!(Mmio { address }.decode_write(!address, &[0; 4]), None);
        }

        #[test]
        fn msr_round_trip(doorbell in doorbells(), index: u32, high in 1u64..1 << 32) {
            let write = Msr { index }.encode(doorbell.encode());
            let decoded = Msr { index }.decode_write(write.place, u64::from(write.word));
            prop_assert_eq!(decoded, Some(Access::Ring(doorbell.encode())));
            prop_assert_eq!(Msr { index }.decode_write(index, high << 32), Some(Access::Malformed));
            prop_assert_eq!(Msr { index }.decode_read(index), Some(Access::Answer));
            prop_assert_eq!(Msr { index }.decode_read(!index), None);
        }

        #[test]
        fn vmcall_round_trip(doorbell in doorbells(), other: u64) {
            let call = Vmcall { instruction: Instruction::Vmcall }.encode(doorbell.encode());
            prop_assert_eq!(Vmcall::decode(call.place, u64::from(call.word)), Some(Access::Ring(doorbell.encode())));
            prop_assert_eq!(Vmcall::decode(other, 0).is_some(), other == Vmcall::NUMBER);
            prop_assert_eq!(Vmcall::decode(Vmcall::NUMBER, 0), Some(Access::Answer));
            prop_assert_eq!(Vmcall::decode(Vmcall::NUMBER, 1 << 32), Some(Access::Malformed));
        }

        #[test]
        fn direct_round_trip(doorbell in doorbells()) {
            let rung = std::cell::Cell::new(None);
            let direct = Direct(|access| {
                if let Access::Ring(word) = access { rung.set(Doorbell::decode(word)); }
                crate::Status::OutOfRange.encode()
            });
            prop_assert_eq!(direct.call(doorbell), crate::Status::OutOfRange);
            prop_assert_eq!(rung.get(), Some(doorbell));
        }

        #[test]
        fn another_width_is_malformed(data in proptest::collection::vec(any::<u8>(), 0..9)) {
            let expected = if data.len() == 4 { None } else { Some(Access::Malformed) };
            if expected.is_some() {
                prop_assert_eq!(Pio { port: 1 }.decode_out(1, &data), expected);
                prop_assert_eq!(Pio { port: 1 }.decode_in(1, &data), expected);
                prop_assert_eq!(Mmio { address: 1 }.decode_write(1, &data), expected);
                prop_assert_eq!(Mmio { address: 1 }.decode_read(1, &data), expected);
            }
        }
    }

    #[test]
    fn nobody_agrees_to_everything() {
        assert_eq!(NoHost.call(Doorbell::Unregister), crate::Status::Ok);
    }

    #[test]
    fn mapped_mmio_stores_and_loads_the_word() {
        let mut page = 0u32;
        // SAFETY: the "doorbell" is a live, aligned local that nothing else touches meanwhile.
        let doorbell = unsafe { Mmio::mapped((&raw mut page).expose_provenance()) };
        doorbell.ring(0x1234);
        assert_eq!(doorbell.answer(), 0x1234);
        assert_eq!(page, 0x1234);
    }
}
