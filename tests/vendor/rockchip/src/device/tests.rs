//! Streams that are assembled here from the words that Mesa's rkt_regcmd.c writes for a convolution
//! with a 1 × 1 kernel.

use std::cell::RefCell;

use half::f16;

use super::{Computes, Error, Memory, Program};

mod streams;

/// Runs any product that registers can specify.
fn run(memory: &impl Memory, program: Program) -> Result<Option<Program>, Error> {
    super::run(memory, program, Computes::All)
}

/// Memory from address 0 on.
struct Flat(RefCell<Vec<u8>>);

impl Memory for Flat {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let memory = self.0.borrow();
        let start = usize::try_from(address).unwrap();
        let source = memory.get(start..start + bytes.len());
        bytes.copy_from_slice(source.ok_or(Error::Address {
            address,
            bytes: bytes.len(),
        })?);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut memory = self.0.borrow_mut();
        let start = usize::try_from(address).unwrap();
        let place = memory.get_mut(start..start + bytes.len());
        place
            .ok_or(Error::Address {
                address,
                bytes: bytes.len(),
            })?
            .copy_from_slice(bytes);
        Ok(())
    }
}

/// Addresses of the operands.
const STREAM: u32 = 0;
const FEATURES: u32 = 0x1_0000;
const WEIGHTS: u32 = 0x2_0000;
const RESULTS: u32 = 0x3_0000;
const END: usize = 0x4_0000;

/// A product whose positions are `width` × `height`.
#[derive(Clone, Copy)]
struct Case {
    half: bool,
    width: u32,
    height: u32,
    k: u32,
    n: u32,
}

impl Case {
    fn group(self) -> u32 {
        if self.half { 16 } else { 32 }
    }

    /// Returns the registers that rkt_regcmd.c sets, in its order, with packed surfaces as in
    /// rkt_task.c.
    fn registers(self) -> Vec<(u16, u16, u32)> {
        let Self {
            half,
            width,
            height,
            k,
            n,
        } = self;
        let (bytes, code, out) = if half { (2, 2, 5) } else { (1, 0, 4) };
        let positions = width * height;
        let surfaces = self.group() / 4;
        let size_e = surfaces - 1;
        let (cna, core, dpu) = (0x201, 0x801, 0x1001);
        vec![
            (cna, 0x1040, 11 << 4 | 1),
            (cna, 0x1104, 0),
            (cna, 0x1100, 0),
            (cna, 0x100c, code << 7 | code << 4),
            (dpu, 0x4004, 0xe),
            (cna, 0x1010, 51 << 4),
            (cna, 0x1014, 1 << 3 | 1),
            (cna, 0x1020, width << 16 | height),
            (cna, 0x1024, (k - 1) << 16 | k),
            (cna, 0x1028, width),
            (cna, 0x102c, positions),
            (cna, 0x1030, k * bytes * n),
            (cna, 0x1034, k * bytes),
            (cna, 0x1038, 1 << 24 | 1 << 16 | n),
            (cna, 0x1044, 1),
            (cna, 0x104c, 0xb),
            (cna, 0x1060, 0),
            (cna, 0x1064, 0),
            (cna, 0x1068, 0),
            (cna, 0x1070, FEATURES),
            (cna, 0x1074, 0),
            (cna, 0x1078, 15 << 16 | 15),
            (cna, 0x107c, 4 * width),
            (
                cna,
                0x1080,
                (positions as i32 - 4 * width as i32) as u32 & 0xfff_ffff,
            ),
            (cna, 0x1084, width << 16 | height),
            (cna, 0x1088, k),
            (cna, 0x1110, WEIGHTS),
            (core, 0x3010, code << 8 | 1),
            (core, 0x3014, (height - 1) << 16 | (width - 1)),
            (core, 0x3018, n - 1),
            (core, 0x301c, 0),
            (core, 0x3030, 0),
            (dpu, 0x400c, 15 << 5 | 2 << 1),
            (dpu, 0x4010, out << 29 | code << 26 | code),
            (dpu, 0x4014, 0),
            (dpu, 0x4020, RESULTS),
            (dpu, 0x4024, positions * 16),
            (dpu, 0x4030, width - 1),
            (dpu, 0x4034, height - 1),
            (dpu, 0x4038, 0),
            (dpu, 0x403c, (n - 1) << 16 | (n - 1)),
            (dpu, 0x4040, 0x53),
            (dpu, 0x4050, size_e << 8 | size_e << 5 | size_e << 2 | 2),
            (dpu, 0x4054, 0),
            (dpu, 0x4058, n - 1),
            (dpu, 0x405c, (height - 1) << 16 | (width - 1)),
            (dpu, 0x4060, 0x53),
            (dpu, 0x4070, 0x383),
            (dpu, 0x4080, 0),
            (dpu, 0x4084, 1),
            (dpu, 0x4088, 0),
            (dpu, 0x40c0, positions * 16 * surfaces),
            (dpu, 0x40c4, 0),
        ]
    }

    /// Returns the memory with the registers' stream, and features and weights by their index.
    fn memory(self, registers: &[(u16, u16, u32)]) -> (Flat, Program) {
        let mut memory = vec![0; END];
        let mut stream: Vec<u64> = registers
            .iter()
            .map(|(target, offset, value)| {
                u64::from(*target) << 48 | u64::from(*value) << 16 | u64::from(*offset)
            })
            .collect();
        let words = u32::try_from(stream.len()).unwrap();
        stream.extend([
            0,
            0x0101_0000_0000_0014,
            0x0041_0000_0000_0000,
            0x0081_0000_000d_0008,
        ]);
        for (place, word) in memory.as_chunks_mut::<8>().0.iter_mut().zip(stream) {
            *place = word.to_le_bytes();
        }
        let program = Program {
            address: STREAM.into(),
            words,
        };
        let mut put = |base: u32, index: u32, value: i8| {
            let base = base as usize;
            if self.half {
                let half = f16::from_f32(value.into()).to_le_bytes();
                memory[base + 2 * index as usize..][..2].copy_from_slice(&half);
            } else {
                memory[base + index as usize] = value.to_ne_bytes()[0];
            }
        };
        let (positions, atom, group) = (
            self.width * self.height,
            if self.half { 8 } else { 16 },
            self.group(),
        );
        for k in 0..self.k {
            for m in 0..positions {
                put(
                    FEATURES,
                    (k / atom * positions + m) * atom + k % atom,
                    feature(m, k),
                );
            }
            for n in 0..self.n {
                let line = (n / group * (self.k / 32) + k / 32) * group + n % group;
                put(WEIGHTS, line * 32 + k % 32, weight(k, n));
            }
        }
        (Flat(RefCell::new(memory)), program)
    }

    /// Fails where a result is not the product of the two functions below.
    fn check(self, memory: &Flat) {
        let memory = memory.0.borrow();
        let positions = self.width * self.height;
        for m in 0..positions {
            for n in 0..self.n {
                let product = |k| i32::from(feature(m, k)) * i32::from(weight(k, n));
                let want: i32 = (0..self.k).map(product).sum();
                let place = RESULTS as usize + (((n / 4) * positions + m) * 4 + n % 4) as usize * 4;
                let bytes = memory[place..place + 4].try_into().unwrap();
                if self.half {
                    assert_eq!(
                        f32::from_le_bytes(bytes),
                        want as f32,
                        "position {m}, kernel {n}"
                    );
                } else {
                    assert_eq!(i32::from_le_bytes(bytes), want, "position {m}, kernel {n}");
                }
            }
        }
    }
}

fn feature(m: u32, k: u32) -> i8 {
    i8::try_from((m * 7 + k * 3) % 11).unwrap() - 5
}

fn weight(k: u32, n: u32) -> i8 {
    i8::try_from((k * 5 + n * 2) % 13).unwrap() - 6
}

/// Returns products in FP16 and INT8, with positions in one line, in one column and in both.
fn cases() -> impl Iterator<Item = Case> {
    [false, true].into_iter().flat_map(|half| {
        [(1, 1), (8, 1), (1, 8), (4, 8)].map(|(width, height)| Case {
            half,
            width,
            height,
            k: 96,
            n: 64,
        })
    })
}

/// Returns the error of a stream in which one register has another value, or (`None`) is missing.
fn error(offset: u16, value: Option<u32>) -> Error {
    let case = Case {
        half: false,
        width: 4,
        height: 1,
        k: 32,
        n: 32,
    };
    let mut registers = case.registers();
    match value {
        Some(value) => registers
            .iter_mut()
            .filter(|word| word.1 == offset)
            .for_each(|word| word.2 = value),
        None => registers.retain(|word| word.1 != offset),
    }
    let (memory, program) = case.memory(&registers);
    run(&memory, program).unwrap_err()
}

#[test]
fn products_of_both_arithmetics_are_exact() {
    for case in cases() {
        let (memory, program) = case.memory(&case.registers());
        assert_eq!(run(&memory, program), Ok(None));
        case.check(&memory);
    }
}

#[test]
fn lines_apart_give_the_same_as_packed_ones() {
    // The right half of the positions in a surface of 8 × 1. Each line skips the positions of the
    // left half.
    let whole = Case {
        half: true,
        width: 8,
        height: 1,
        k: 64,
        n: 32,
    };
    let part = Case { width: 4, ..whole };
    let mut stream = part.registers();
    for (_, offset, value) in &mut stream {
        match *offset {
            0x100c => *value |= 1 << 29,
            0x1070 => *value += 4 * 16,
            0x107c => *value = 8,
            0x1080 => *value = 8 - 4,
            0x4020 => *value += 4 * 16,
            0x4024 => *value = 8 * 16,
            0x4038 => *value = 4 << 16 | 4,
            0x40c0 => *value = 8 * 16 * 4,
            _ => {}
        }
    }
    let (memory, program) = whole.memory(&whole.registers());
    run(&memory, program).unwrap();
    let want = memory.0.borrow().clone();
    let (memory, _) = whole.memory(&stream);
    run(&memory, program).unwrap();
    let have = memory.0.borrow();
    for surface in 0..8 {
        let right = RESULTS as usize + surface * 128 + 64;
        assert_eq!(have[right..right + 64], want[right..right + 64]);
        assert_eq!(have[right - 64..right], [0; 64]);
    }
}

#[test]
fn one_row_with_a_stride_that_was_cut_at_0_is_wrong() {
    // On boards, a program that does this gets wrong results in every precision (gregordinary's
    // notes: "M == 1").
    let case = Case {
        half: false,
        width: 1,
        height: 1,
        k: 96,
        n: 64,
    };
    let mut registers = case.registers();
    let stride = registers.iter_mut().find(|word| word.1 == 0x1080).unwrap();
    assert_eq!(stride.2, 0xfff_fffd, "1 - 4 atoms");
    stride.2 = 0;
    let (memory, program) = case.memory(&registers);
    assert_eq!(run(&memory, program), Ok(None));
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.check(&memory)));
    assert!(wrong.is_err());
}

#[test]
fn a_reader_that_may_never_end_is_refused() {
    let case = Case {
        half: false,
        width: 4,
        height: 1,
        k: 32,
        n: 32,
    };
    let reader = [
        (0x500c, 3),
        (0x5010, 0),
        (0x5014, 31),
        (0x501c, 0),
        (0x5028, 0),
        (0x5034, 1),
        (0x5044, 0x7810),
    ];
    let run_with = |reader: &[(u16, u32)]| {
        let mut registers = case.registers();
        registers.extend(
            reader
                .iter()
                .map(|(offset, value)| (0x2001, *offset, *value)),
        );
        let (memory, program) = case.memory(&registers);
        let start = (program.words as usize + 3) * 8;
        let word = 0x0081_0000_001d_0008u64.to_le_bytes();
        memory.0.borrow_mut()[start..start + 8].copy_from_slice(&word);
        run(&memory, program)
    };
    assert_eq!(run_with(&reader), Ok(None));
    for left_out in [0, 5, 6] {
        let rest = reader.iter().copied().enumerate();
        let rest: Vec<_> = rest
            .filter(|(i, _)| *i != left_out)
            .map(|it| it.1)
            .collect();
        assert!(matches!(run_with(&rest), Err(Error::Unwritten { .. })));
    }
    let mut enabled = reader;
    enabled[6].1 = 0x7800;
    let text = run_with(&enabled).unwrap_err().to_string();
    assert!(text.starts_with("RDMA_FEATURE_MODE_CFG"), "{text}");
}

#[test]
fn the_next_stream_is_the_one_that_the_last_words_name() {
    let case = Case {
        half: false,
        width: 1,
        height: 1,
        k: 32,
        n: 32,
    };
    let mut registers = case.registers();
    registers.extend([(0x101, 0x10, 0x8000), (0x101, 0x14, 55)]);
    let (memory, program) = case.memory(&registers);
    // A complete stream ends with a word for "nothing follows". This stream lacks it.
    memory.0.borrow_mut()[(program.words as usize + 1) * 8..][..8].fill(0);
    let next = Program {
        address: 0x8000,
        words: 108,
    };
    assert_eq!(run(&memory, program), Ok(Some(next)));
}

#[test]
fn a_register_that_is_not_known_is_named() {
    let case = Case {
        half: false,
        width: 1,
        height: 1,
        k: 32,
        n: 32,
    };
    let mut registers = case.registers();
    registers.push((0x801, 0x3034, 1));
    let (memory, program) = case.memory(&registers);
    let text = run(&memory, program).unwrap_err().to_string();
    assert_eq!(text, "Core has no known register at 0x3034 (value 0x1)");
}

#[test]
fn what_is_no_plain_product_is_refused_by_name() {
    // Values of rkt_regcmd.c for features that are not supported: depthwise, a bias, compressed
    // weights, a stride of 2, a first layer, reuse, zero points.
    for (offset, value, name) in [
        (0x3010, 3, "CORE_MISC_CFG"),
        (0x4040, 0x2_0150, "DPU_BS_CFG"),
        (0x1100, 1, "CNA_DCOMP_CTRL"),
        (0x1014, 2 << 3 | 2, "CNA_CONV_CON3"),
        (0x100c, 1 << 30 | 1 << 29 | 8 << 12, "CNA_CONV_CON1"),
        (0x1040, 1 << 13 | 11 << 4 | 1, "CNA_CBUF_CON0"),
        (0x4054, 0x80, "DPU_BS_OW_OP"),
        (0x4084, 0x4000, "DPU_OUT_CVT_SCALE"),
        (0x4010, 0, "DPU_DATA_FORMAT"),
        (0x1030, 1023, "CNA_WEIGHT_SIZE0"),
        (0x40c0, 64, "DPU_SURFACE_ADD"),
    ] {
        let text = error(offset, Some(value)).to_string();
        assert!(text.starts_with(name), "{offset:#x}: {text}");
    }
}

#[test]
fn what_a_stream_leaves_out_is_refused_by_name() {
    for (offset, name) in [
        (0x1068, "CNA_PAD_CON0"),
        (0x1020, "CNA_DATA_SIZE0"),
        (0x4020, "DPU_DST_BASE_ADDR"),
    ] {
        assert_eq!(error(offset, None), Error::Unwritten { name });
    }
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let end = u32::try_from(END).unwrap();
    for offset in [0x1070, 0x1110, 0x4020] {
        assert!(matches!(error(offset, Some(end)), Error::Address { .. }));
    }
}
