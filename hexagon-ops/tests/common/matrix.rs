//! The matrix instructions that code for the DSP may have: their words, and the packets that they
//! may be in.

/// One allowed form of an instruction: the base word, without operands and parse bits, and the bits
/// that are fixed.
pub struct Form {
    pub name: &'static str,
    base: u32,
    fixed: u32,
}

/// Bits of the two operand registers.
const OPERANDS: u32 = 31 << 16 | 31 << 8;
/// Parse bits: 01 continues the packet, 11 ends it.
const PARSE: u32 = 3 << 14;

/// The forms this crate uses.
///
/// SOURCE: encodings as decoded from every matrix word of Qualcomm's own V68, V73 and V81
/// libraries.
pub const FORMS: [Form; 5] = [
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

/// Checks all packets and returns how often each form occurs.
pub fn check_packets(words: &[u32]) -> [usize; FORMS.len()] {
    let mut counts = [0; FORMS.len()];
    let mut packet: Vec<Option<&str>> = Vec::new();
    for word in words {
        packet.push(matrix_form(*word));
        // Parse bits 11 end a packet; 00 marks a pair of short instructions, which also ends one.
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
