//! Guests without the units that no available emulator has.

use std::path::{Path, PathBuf};

/// The DMA engine of a guest without one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// Every copy is done at once, and copies nothing.
    Free,
    /// Every copy fails, so that the DSP's code copies by loads and stores.
    Refused,
}

/// Makes a copy of the guest in which the matrix unit's instructions do nothing, and the DMA engine
/// does as `copies` says: no available emulator has these units. Each packet counts as one.
pub fn without_units(guest: &Path, copies: Copies) -> PathBuf {
    // SOURCE: `nop`, at the end of a packet and before it; the words of src/hmx/hexagon.rs.
    const NOP: u32 = 0x7f00_c000;
    const NOP_AND: u32 = 0x7f00_4000;
    // Instruction words, the bits of a register's number in them, and the words that replace them.
    // SOURCE of the last five: `dmstart`, `dmlink`, `dmwait`, `dmpoll` and `dmpause`, `memw(Rs+#4)
    // = #-1`, which sets the descriptor's bit for a copy that is done, and `Rd = #0`, as LLVM
    // assembles them.
    let start = match copies {
        Copies::Free => 0x3c40_e0ff,
        Copies::Refused => NOP,
    };
    // `dmlink(Rs,Rt)` has the register of the descriptor at another place.
    const LINK: u32 = 0xa600_c040;
    const LINKED: u32 = 31 << 8;
    let words = [
        (0xa6e0_c013, 0, NOP),
        (0x9200_c3fe, 0, NOP),
        (0x9200_42e2, 0, NOP_AND),
        (0x9201_e3ef, 0, NOP),
        (0xa6e0_e104, 0, NOP),
        (0xa600_c020, 31 << 16, start),
        (0xa800_c020, 31, 0x7800_c000),
        (0xa800_c040, 31, 0x7800_c000),
        (0xa800_c060, 31, 0x7800_c000),
    ];
    let mut program = std::fs::read(guest).unwrap();
    let mut found = [0; 10];
    for word in program.as_chunks_mut::<4>().0 {
        let have = u32::from_le_bytes(*word);
        if have & !(31 << 16 | LINKED) == LINK {
            let linked = match copies {
                Copies::Free => start | (have & LINKED) << 8,
                Copies::Refused => NOP,
            };
            *word = linked.to_le_bytes();
            found[9] += 1;
            continue;
        }
        for ((from, register, to), found) in words.iter().zip(&mut found) {
            if have & !register == *from {
                let register = if *to == NOP { 0 } else { *register };
                *word = (to | have & register).to_le_bytes();
                *found += 1;
                break;
            }
        }
    }
    // `dmwait` is not used: it would wait forever for an engine that hangs.
    found[6] = 1;
    assert!(found.iter().all(|n| *n > 0), "another encoding: {found:?}");
    let copy = guest.with_file_name(match copies {
        Copies::Free => "hexagon-guest-without-units",
        Copies::Refused => "hexagon-guest-without-copies",
    });
    std::fs::write(&copy, program).unwrap();
    let mode = std::fs::metadata(guest).unwrap().permissions();
    std::fs::set_permissions(&copy, mode).unwrap();
    copy
}
