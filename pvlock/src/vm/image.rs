//! Loads the guest program, a static ELF file, into guest memory.

use elf::ElfBytes;
use elf::abi::{EM_X86_64, ET_EXEC, PT_LOAD};
use elf::endian::LittleEndian;
use elf::file::Class;

use super::layout;
use super::memory::GuestMemory;

/// What is wrong with a guest image. The image is built together with this program, so
/// each of these means a broken build: `cargo clean -p pvlock` and build again.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Not an ELF file, or cut short.
    #[error("the guest image is no ELF file that can be read ({0}): rebuild it (cargo clean -p pvlock)")]
    Malformed(elf::ParseError),
    /// ELF, but for another machine or not a static executable.
    #[error("the guest image is not a static x86-64 executable: rebuild it (cargo clean -p pvlock)")]
    WrongKind,
    /// Nothing to load.
    #[error("the guest image has nothing to load: rebuild it (cargo clean -p pvlock)")]
    Empty,
    /// A segment does not fit in the room reserved for the image.
    #[error(
        "the guest image wants {address:#x}+{len:#x}, outside of its room {start:#x}..{end:#x}: check the linker script",
        start = layout::IMAGE.start, end = layout::IMAGE.end
    )]
    OutOfPlace {
        /// Where the segment wants to be.
        address: u64,
        /// Its size in memory, in bytes.
        len: u64,
    },
    /// The entry point is not in a loaded segment.
    #[error("the guest image starts at {0:#x}, where it has no code: check the linker script")]
    Entry(u64),
}

/// Copies the image into fresh (zeroed) memory and returns its entry point.
///
/// # Errors
/// Any [`ImageError`]; memory may then be partly written.
pub(super) fn load(memory: &GuestMemory, image: &[u8]) -> Result<u64, ImageError> {
    let file = ElfBytes::<LittleEndian>::minimal_parse(image).map_err(ImageError::Malformed)?;
    let header = file.ehdr;
    if header.class != Class::ELF64 || header.e_machine != EM_X86_64 || header.e_type != ET_EXEC {
        return Err(ImageError::WrongKind);
    }
    let segments = file.segments().ok_or(ImageError::Empty)?;
    let (mut loaded, mut entry_found) = (false, false);
    for segment in segments.iter().filter(|s| s.p_type == PT_LOAD && s.p_memsz > 0) {
        let (address, len) = (segment.p_paddr, segment.p_memsz);
        let out_of_place = ImageError::OutOfPlace { address, len };
        let Some(end) = address.checked_add(len) else {
            return Err(out_of_place);
        };
        if address < layout::IMAGE.start || end > layout::IMAGE.end || segment.p_filesz > len {
            return Err(out_of_place);
        }
        let data = file.segment_data(&segment).map_err(ImageError::Malformed)?;
        // The rest of the segment (.bss) is zero already.
        memory.write(address, data).map_err(|_| out_of_place)?;
        loaded = true;
        entry_found |= (address..end).contains(&header.e_entry);
    }
    match (loaded, entry_found) {
        (false, _) => Err(ImageError::Empty),
        (true, false) => Err(ImageError::Entry(header.e_entry)),
        (true, true) => Ok(header.e_entry),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::new(layout::MIN_RAM).expect("16 MiB")
    }

    #[test]
    fn our_image_loads_and_starts_at_its_place() {
        let entry = load(&memory(), crate::GUEST_IMAGE).expect("the image that was just built");
        assert!(layout::IMAGE.contains(&entry));
    }

    #[test]
    fn broken_images_give_errors() {
        let memory = memory();
        assert!(matches!(load(&memory, b""), Err(ImageError::Malformed(_))));
        assert!(matches!(load(&memory, b"not an ELF file at all"), Err(ImageError::Malformed(_))));
        // Every truncation and every damaged byte of the headers: an error or a load, never a panic.
        for len in 0..256 {
            assert!(load(&memory, &crate::GUEST_IMAGE[..len]).is_err());
        }
        for at in 0..64 + 3 * 56 {
            for value in [0, 0x7f, 0xff] {
                let mut image = crate::GUEST_IMAGE.to_vec();
                image[at] = value;
                let _ = load(&memory, &image);
            }
        }
    }

    #[test]
    fn an_image_outside_its_room_is_refused() {
        let mut image = crate::GUEST_IMAGE.to_vec();
        // p_paddr of the first program header.
        image[64 + 24..64 + 32].copy_from_slice(&0x1000_u64.to_le_bytes());
        assert!(matches!(load(&memory(), &image), Err(ImageError::OutOfPlace { address: 0x1000, .. })));
    }

    #[test]
    fn an_image_for_another_machine_is_refused() {
        let mut image = crate::GUEST_IMAGE.to_vec();
        image[18..20].copy_from_slice(&183_u16.to_le_bytes()); // EM_AARCH64
        assert!(matches!(load(&memory(), &image), Err(ImageError::WrongKind)));
    }
}
