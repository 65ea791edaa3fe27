//! Words, accesses and CPUID leaves as they arrive: everything is something or nothing, and says the same both ways.

use crate::rest;
use arbitrary::{Arbitrary, Unstructured};
use pvlock_host::hypercalls::{
    Access, Direct, Doorbell, Host, Instruction, Mmio, Msr, Offer, Pio, Registers, Ring, SIGNATURE, Status, Transport, Vmcall,
    discover, native_instruction,
};
use pvlock_host::protocol::{Features, VcpuId, WAIT_SLOTS};
use std::cell::Cell;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    word: u32,
    status: u32,
    pfn: u64,
    /// Where the host has its doorbells, and where the guest touches.
    port: [u16; 2],
    address: [u64; 2],
    index: [u32; 2],
    data: &'a [u8],
    msr: u64,
    registers: [u64; 2],
    hypervisor: bool,
}

/// A CPUID leaf of a hypervisor's.
#[derive(Arbitrary, Debug)]
struct Leaf {
    /// Which of the places at which one looks.
    place: u8,
    number: u8,
    signed: bool,
    registers: [u32; 4],
}

/// Doorbells and their answers, the five transports, discovery.
pub fn hypercalls(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let Ok(input) = Input::arbitrary(&mut data) else { return };
    // Small arguments are hit more rarely than they matter.
    for word in [input.word, input.word & 0xf000_003f] {
        words(word, &input);
    }
    accesses(&input);
    discovery(&input, &rest::<Leaf>(data));
}

fn words(word: u32, input: &Input) {
    let doorbell = Doorbell::decode(word);
    if let Some(doorbell) = doorbell {
        assert_eq!(doorbell.encode(), word, "{doorbell:?} is written differently");
        match doorbell {
            Doorbell::Online(vcpu) | Doorbell::Offline(vcpu) | Doorbell::Kick(vcpu) => {
                assert_eq!(VcpuId::new(vcpu.index()), Some(vcpu));
            }
            Doorbell::Halt { slot, .. } => assert!(slot.index() < WAIT_SLOTS),
            Doorbell::RegisterHigh { high } => assert_eq!(high >> 24, 0, "no page has such a number"),
            Doorbell::Register { .. } | Doorbell::Unregister | Doorbell::PauseLoop => {}
        }
    }
    let status = Status::decode(input.status);
    assert!(status == Status::Unknown || status.encode() == input.status);
    assert!(!status.to_string().is_empty());

    match Doorbell::register(input.pfn) {
        None => assert_ne!(input.pfn >> 52, 0),
        Some((high, Doorbell::Register { low })) => {
            let high = high.map_or(0, |high| match Doorbell::decode(high.encode()) {
                Some(Doorbell::RegisterHigh { high }) => high,
                other => panic!("{other:?} for the upper bits of {:#x}", input.pfn),
            });
            assert_eq!(Doorbell::pfn(high, low), input.pfn);
        }
        Some(other) => panic!("{other:?} for {:#x}", input.pfn),
    }

    // A guest in the same process gets the word through, and the answer back.
    let rung = Cell::new(None);
    let direct = Direct(|access| match access {
        Access::Ring(word) => {
            rung.set(Some(word));
            0
        }
        _ => input.status,
    });
    if let Some(doorbell) = doorbell {
        assert_eq!(direct.call(doorbell), status);
        assert_eq!(rung.get(), Some(word));
    }
}

fn accesses(input: &Input) {
    let word = <[u8; 4]>::try_from(input.data).map(u32::from_le_bytes);
    let written = |ours: bool| ours.then_some(word.map_or(Access::Malformed, Access::Ring));
    let read = |ours: bool| ours.then_some(word.map_or(Access::Malformed, |_| Access::Answer));

    let [port, at] = input.port;
    let pio = Pio { port };
    assert_eq!(pio.decode_out(at, input.data), written(at == port));
    assert_eq!(pio.decode_in(at, input.data), read(at == port));
    let operands = pio.encode(input.word);
    assert_eq!(pio.decode_out(operands.place, &operands.word.to_le_bytes()), Some(Access::Ring(input.word)));

    let [address, at] = input.address;
    let mmio = Mmio { address };
    assert_eq!(mmio.decode_write(at, input.data), written(at == address));
    assert_eq!(mmio.decode_read(at, input.data), read(at == address));
    let operands = mmio.encode(input.word);
    assert_eq!(mmio.decode_write(operands.place, &operands.word.to_le_bytes()), Some(Access::Ring(input.word)));

    let [index, at] = input.index;
    let msr = Msr { index };
    let expected = u32::try_from(input.msr).map_or(Access::Malformed, Access::Ring);
    assert_eq!(msr.decode_write(at, input.msr), (at == index).then_some(expected));
    assert_eq!(msr.decode_read(at), (at == index).then_some(Access::Answer));
    let operands = msr.encode(input.word);
    assert_eq!(msr.decode_write(operands.place, operands.word.into()), Some(Access::Ring(input.word)));

    let [number, argument] = input.registers;
    let call = |argument: u64| match argument {
        0 => Access::Answer,
        word => u32::try_from(word).map_or(Access::Malformed, Access::Ring),
    };
    assert_eq!(Vmcall::decode(number, argument), (number == Vmcall::NUMBER).then(|| call(argument)));
    for instruction in [Instruction::Vmcall, Instruction::Vmmcall] {
        let operands = Vmcall { instruction }.encode(input.word);
        assert_eq!(Vmcall::decode(operands.place, operands.word.into()), Some(call(input.word.into())));
    }
}

impl Leaf {
    fn base(&self) -> u32 {
        0x4000_0000 + u32::from(self.place) * 0x100
    }

    fn registers(&self) -> Registers {
        let [eax, ebx, ecx, edx] = self.registers;
        if !self.signed {
            return Registers { eax, ebx, ecx, edx };
        }
        let word = |n: usize| u32::from_le_bytes(std::array::from_fn(|byte| SIGNATURE[4 * n + byte]));
        Registers { eax: self.base() + eax % 4, ebx: word(0), ecx: word(1), edx: word(2) }
    }
}

fn discovery(input: &Input, leaves: &[Leaf]) {
    let asked = Cell::new(0);
    let cpuid = |leaf: u32| {
        asked.set(asked.get() + 1);
        let present = u32::from(input.hypervisor) << 31;
        match leaves.iter().find(|known| known.base() + u32::from(known.number % 4) == leaf) {
            Some(known) => known.registers(),
            None if leaf == 1 => Registers { ecx: present, ..Registers::default() },
            None => Registers::default(),
        }
    };
    let host = discover(&cpuid);
    assert!(asked.get() <= 1 + 256 * 3, "CPUID was executed {} times", asked.get());
    assert!(input.hypervisor || host == Host::None, "{host:?} on bare metal");
    if let Host::Pvlock(offer) = host {
        assert!(leaves.iter().any(|leaf| leaf.signed || leaf.registers().ebx == u32::from_le_bytes(*b"pvlo")));
        found_again(offer);
    }
    native_instruction(&cpuid);

    let transport = match input.word % 4 {
        0 => Transport::Pio(Pio { port: input.port[0] }),
        1 => Transport::Mmio(Mmio { address: input.address[0] }),
        2 => Transport::Msr(Msr { index: input.index[0] }),
        _ => Transport::Vmcall,
    };
    found_again(Offer { features: Features::from_bits(input.pfn), transport });
}

/// What a host offers, its guest finds.
fn found_again(offer: Offer) {
    let leaves = offer.leaves(0x4000_0300);
    let cpuid = |leaf: u32| match leaves.iter().find(|(number, _)| *number == leaf) {
        Some((_, registers)) => *registers,
        None => Registers { ecx: u32::from(leaf == 1) << 31, ..Registers::default() },
    };
    assert_eq!(discover(&cpuid), Host::Pvlock(offer));
}
