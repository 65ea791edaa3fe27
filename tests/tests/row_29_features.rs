//! Row 29: a feature was queried in the slow path, at the price of an exit each time. CPUID always exits; the guest image's code is
//! decoded to see who executes it.

#![cfg(target_arch = "x86_64")]

use elf::ElfBytes;
use elf::abi::STT_FUNC;
use elf::endian::AnyEndian;
use iced_x86::{Decoder, DecoderOptions, Mnemonic};

/// The functions of the guest image and whether each executes CPUID.
fn functions() -> Vec<(String, bool)> {
    let image = ElfBytes::<AnyEndian>::minimal_parse(pvlock::GUEST_IMAGE).expect("the image is an ELF file");
    let (symbols, names) = image.symbol_table().expect("readable").expect("the image has symbols");
    let segments = image.segments().expect("the image has segments");
    let bytes = |address: u64, size: u64| {
        let segment = segments.iter().find(|segment| (segment.p_vaddr..segment.p_vaddr + segment.p_filesz).contains(&address))?;
        let start = usize::try_from(address - segment.p_vaddr + segment.p_offset).ok()?;
        pvlock::GUEST_IMAGE.get(start..start + usize::try_from(size).ok()?)
    };
    let functions = symbols.iter().filter(|symbol| symbol.st_symtype() == STT_FUNC && symbol.st_size > 0);
    let functions = functions.filter_map(|symbol| {
        let code = bytes(symbol.st_value, symbol.st_size)?;
        let mut decoder = Decoder::with_ip(64, code, symbol.st_value, DecoderOptions::NONE);
        let queries = decoder.iter().any(|instruction| instruction.mnemonic() == Mnemonic::Cpuid);
        Some((names.get(symbol.st_name as usize).expect("a name").to_owned(), queries))
    });
    functions.collect()
}

#[test]
fn row_29_only_start_up_executes_cpuid() {
    let functions = functions();
    let (querying, others): (Vec<_>, Vec<_>) = functions.into_iter().partition(|(_, queries)| *queries);
    // The slow paths of both locks are functions of their own.
    for slow_path in ["TicketLock", "PreemptableTicketLock", "Waiter"] {
        assert!(others.iter().any(|(name, _)| name.contains(slow_path)), "{slow_path} is not in the image by this name");
    }
    let start_up = |name: &str| ["discover", "native_cpuid", "register", "start"].iter().any(|part| name.contains(part));
    assert!(!querying.is_empty(), "start-up asks");
    assert!(querying.iter().all(|(name, _)| start_up(name)), "{querying:?}");
}
