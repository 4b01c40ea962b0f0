//! Proves that the device build links for each library and that every matrix instruction in it is a
//! known word in an allowed packet. Skipped with a printed reason without the pinned nightly.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod common;

use common::matrix::{FORMS, check_packets};
use common::{LIBRARIES, guest};

/// The words of each executable segment of a 32-bit little-endian ELF file.
fn code_words(elf: &[u8]) -> Vec<Vec<u32>> {
    let half = |at: usize| usize::from(u16::from_le_bytes([elf[at], elf[at + 1]]));
    let word = |at: usize| u32::from_le_bytes(elf[at..at + 4].try_into().unwrap());
    let size = |at: usize| usize::try_from(word(at)).unwrap();
    assert_eq!(
        &elf[..6],
        b"\x7fELF\x01\x01",
        "not a 32-bit little-endian ELF file"
    );
    let (table, entry_bytes, count) = (size(28), half(42), half(44));
    let headers = (0..count).map(|i| table + i * entry_bytes);
    let executable = headers.filter(|at| word(*at) == 1 && word(at + 24) & 1 == 1);
    executable
        .map(|at| {
            elf[size(at + 4)..][..size(at + 16)]
                .as_chunks::<4>()
                .0
                .iter()
                .map(|w| u32::from_le_bytes(*w))
                .collect()
        })
        .collect()
}

#[test]
#[ignore = "builds for the DSP with the pinned nightly: make dsp"]
fn device_builds_hold_only_known_matrix_packets() {
    for library in LIBRARIES {
        let path = match guest(library) {
            Ok(path) => path,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        let segments = code_words(&std::fs::read(path).unwrap());
        let bytes: usize = segments.iter().map(|words| 4 * words.len()).sum();
        let mut counts = [0; FORMS.len()];
        for words in segments {
            for (sum, count) in counts.iter_mut().zip(check_packets(&words)) {
                *sum += count;
            }
        }
        println!("{library}: {bytes} bytes of code, matrix words {counts:?}");
        assert!(
            counts.iter().all(|count| *count > 0),
            "{library}: forms missing in {counts:?}"
        );
        assert_eq!(
            counts[0], counts[1],
            "activations and weights come in pairs"
        );
    }
}

#[test]
fn packet_rules_are_enforced() {
    let end = 3 << 14;
    let goes_on = 1 << 14;
    let nop = 0x7f00_0000;
    let words = |words: &[u32]| {
        std::panic::catch_unwind({
            let words = words.to_vec();
            move || check_packets(&words)
        })
    };
    let (activation, weight, clear) = (0x9200_02e2, 0x9201_23ef, 0xa6e0_0013);
    assert_eq!(
        words(&[nop | goes_on, activation | goes_on, weight | end]).unwrap(),
        [1, 1, 0, 0, 0]
    );
    assert_eq!(words(&[clear | end]).unwrap(), [0, 0, 0, 1, 0]);
    assert!(words(&[activation | end]).is_err());
    assert!(words(&[activation | goes_on, nop | goes_on, weight | end]).is_err());
    assert!(words(&[clear | goes_on, nop | end]).is_err());
    assert!(words(&[0xa6e0_001f | end]).is_err());
}
