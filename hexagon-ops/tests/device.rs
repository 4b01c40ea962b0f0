//! Proves that the device build links for each architecture and that every matrix instruction in it is a known word in
//! an allowed packet. Skipped with a printed reason without the pinned nightly.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod common;

use common::guest;

/// What may stand where: the base word, without operands and parse bits, and the bits that are fixed.
struct Form {
    name: &'static str,
    base: u32,
    fixed: u32,
}

/// Bits of the two operand registers.
const OPERANDS: u32 = 31 << 16 | 31 << 8;
/// Parse bits: 01 the packet goes on, 11 it ends here.
const PARSE: u32 = 3 << 14;

/// The forms this crate uses.
///
/// SOURCE: encodings as decoded from every matrix word of Qualcomm's own V68, V73 and V81 libraries.
const FORMS: [Form; 5] = [
    Form {
        name: "activation.hf:deep",
        base: 0x9200_00e2,
        fixed: !(OPERANDS | PARSE),
    },
    Form {
        name: "weight.hf",
        base: 0x9200_20ef,
        fixed: !(OPERANDS | PARSE),
    },
    Form {
        name: "bias=mxmem2",
        base: 0x9200_03fe,
        fixed: !(31 << 16 | PARSE),
    },
    Form {
        name: "mxclracc.hf",
        base: 0xa6e0_0013,
        fixed: !PARSE,
    },
    Form {
        name: "mxmem:after.hf=acc",
        base: 0xa6e0_2004,
        fixed: !(OPERANDS | PARSE),
    },
];

/// The name of a matrix instruction, `None` for other words.
///
/// # Panics
/// If the word has the matrix unit's opcode but no known form.
fn matrix_form(word: u32) -> Option<&'static str> {
    let form = FORMS.iter().find(|form| word & form.fixed == form.base);
    let stores = word >> 21 == 0x537;
    assert!(
        form.is_some() || !stores,
        "unknown matrix word {word:#010x}"
    );
    form.map(|form| form.name)
}

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

/// Checks all packets and returns how often each form occurs.
fn check_packets(words: &[u32]) -> [usize; FORMS.len()] {
    let mut counts = [0; FORMS.len()];
    let mut packet: Vec<Option<&str>> = Vec::new();
    for word in words {
        packet.push(matrix_form(*word));
        // 11 ends a packet, 00 is a pair of short instructions that ends one too.
        let parse = (word & PARSE) >> 14;
        if parse == 1 || parse == 2 {
            continue;
        }
        let matrix: Vec<&str> = packet.iter().copied().flatten().collect();
        match matrix[..] {
            [] => {}
            [one] => assert!(
                packet.last() == Some(&Some(one)) && !one.ends_with(":deep") && one != "weight.hf",
                "{packet:?}"
            ),
            ["activation.hf:deep", "weight.hf"] => {
                assert!(
                    packet.ends_with(&[Some("activation.hf:deep"), Some("weight.hf")]),
                    "{packet:?}"
                );
            }
            _ => panic!("matrix instructions share a packet: {packet:?}"),
        }
        for (count, form) in counts.iter_mut().zip(&FORMS) {
            *count += matrix.iter().filter(|name| **name == form.name).count();
        }
        packet.clear();
    }
    counts
}

#[test]
#[ignore = "builds for the DSP with the pinned nightly: make dsp"]
fn device_builds_hold_only_known_matrix_packets() {
    for (arch, arithmetic) in [
        ("v73", "ieee"),
        ("v73", "qfloat"),
        ("v75", "ieee"),
        ("v79", "qfloat"),
        ("v81", "qfloat"),
    ] {
        let path = match guest(arch, arithmetic) {
            Ok(path) => path,
            Err(reason) => return println!("SKIPPED {arch} {arithmetic}: {reason}"),
        };
        let segments = code_words(&std::fs::read(path).unwrap());
        let bytes: usize = segments.iter().map(|words| 4 * words.len()).sum();
        let mut counts = [0; FORMS.len()];
        for words in segments {
            for (sum, count) in counts.iter_mut().zip(check_packets(&words)) {
                *sum += count;
            }
        }
        println!("{arch} {arithmetic}: {bytes} bytes of code, matrix words {counts:?}");
        assert!(
            counts.iter().all(|count| *count > 0),
            "{arch} {arithmetic}: forms missing in {counts:?}"
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
