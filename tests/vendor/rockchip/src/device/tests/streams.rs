//! The streams of `rknpu_ops::stream`, executed: results are those of the stand-in for librknnrt.

use std::cell::RefCell;

use ggml_rust_npu::rockchip::driver::Rknn;
use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::Soc;
use rknpu_ops::sim;
use rknpu_ops::stream::{Arithmetic, BODY_WORDS, Family, Plan, STREAM_WORDS, Task};
use test_kit::Numbers;

use super::super::{Computes, Error, Program, run};
use super::Flat;
use crate::operands::Operands;

const A: u32 = 0x1_0000;

impl Operands {
    /// Returns native C, as the emulated NPU computes it from streams.
    fn of_streams(&self) -> Vec<u8> {
        let [m, k, n] = self.shape;
        let layout = self.arithmetic.layout;
        let plan = Plan::new(self.arithmetic, self.shape).unwrap();
        let [a_bytes, c_bytes] = if plan.is_in_place() {
            [layout.a.bytes(m, k), layout.c.bytes(m, n)]
        } else {
            plan.cube_bytes()
        };
        let mut a = vec![0x55; a_bytes];
        if plan.is_in_place() {
            a.copy_from_slice(&self.a);
        } else {
            plan.fill_cubes(&self.a, &mut a);
        }
        let [a_end, b_end] = [a.len(), a.len() + self.b.len()].map(|end| A as usize + end);
        let addresses = [A, a_end.try_into().unwrap(), b_end.try_into().unwrap()];
        let streams = (b_end + c_bytes).next_multiple_of(16);
        let tasks: Vec<Task> = plan.tasks(addresses).collect();
        let mut memory = vec![0; streams + tasks.len() * STREAM_WORDS * 8];
        memory[A as usize..a_end].copy_from_slice(&a);
        memory[a_end..b_end].copy_from_slice(&self.b);
        let at = |index: usize| u32::try_from(streams + index * STREAM_WORDS * 8).unwrap();
        let mut words = Vec::new();
        for (index, task) in tasks.iter().enumerate() {
            let next = (index + 1 < tasks.len()).then(|| at(index + 1));
            task.stream(next, &mut words).unwrap();
        }
        for (place, word) in memory[streams..]
            .as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(words)
        {
            *place = word.to_le_bytes();
        }
        let memory = Flat(RefCell::new(memory));
        let first = Program {
            address: at(0).into(),
            words: BODY_WORDS.try_into().unwrap(),
        };
        let (mut next, mut count) = (Some(first), 0);
        while let Some(program) = next {
            next = run(&memory, program, Computes::Proven).unwrap();
            count += 1;
        }
        assert_eq!(count, tasks.len());
        let memory = memory.0.into_inner();
        let results = &memory[b_end..b_end + c_bytes];
        let mut c = vec![0; layout.c.bytes(m, n)];
        if plan.is_in_place() {
            c.copy_from_slice(results);
        } else {
            plan.empty_cubes(results, &mut c);
        }
        c
    }
}

#[test]
fn every_arithmetic_gives_the_bytes_of_the_stand_in() {
    let rknn = Rknn::simulate(sim::Options::new(Soc::Rk3588)).unwrap();
    let mut numbers = Numbers::new(49);
    let shapes = [
        [1, 64, 64],
        [2, 96, 128],
        [3, 544, 64],
        [4, 64, 320],
        [7, 96, 64],
        [16, 128, 192],
        [33, 576, 320],
        [130, 320, 64],
        [260, 64, 64],
        [301, 576, 128],
    ];
    for matmul_type in [
        MatmulType::I8_I8_I32,
        MatmulType::F16_F16_F32,
        MatmulType::I4_I4_I16,
        MatmulType::F16_F16_F16,
    ] {
        for shape in shapes {
            let operands = Operands::random(matmul_type, shape, &mut numbers);
            let want = operands.of_library(&rknn);
            // Equal for FP16, too, because both sum groups of 32 exactly.
            assert!(
                operands.of_streams() == want,
                "matmul type {}, {shape:?}",
                matmul_type.0
            );
        }
    }
    // Long K, for which few rows fit, and N that needs several tasks.
    for (matmul_type, shape) in [
        (MatmulType::I8_I8_I32, [5, 8192, 64]),
        (MatmulType::I8_I8_I32, [20, 4096, 3136]),
        (MatmulType::F16_F16_F32, [37, 4096, 96]),
    ] {
        let operands = Operands::random(matmul_type, shape, &mut numbers);
        assert!(
            operands.of_streams() == operands.of_library(&rknn),
            "{shape:?}"
        );
    }
}

#[test]
fn int8_results_in_fp32_are_the_rounded_sums() {
    // The stand-in computes zeros for this type, as librknnrt 2.3.2 does.
    let mut numbers = Numbers::new(50);
    for shape in [[1, 64, 64], [8, 8192, 32], [33, 576, 320]] {
        let mut operands = Operands::random(MatmulType::I8_I8_I32, shape, &mut numbers);
        let sums = operands.of_streams();
        operands.arithmetic = Arithmetic::of(MatmulType::I8_I8_F32).unwrap();
        let floats = operands.of_streams();
        let pairs = sums
            .as_chunks::<4>()
            .0
            .iter()
            .zip(floats.as_chunks::<4>().0);
        for (sum, float) in pairs {
            assert_eq!(f32::from_le_bytes(*float), i32::from_le_bytes(*sum) as f32);
        }
    }
}

#[test]
fn rows_of_rows_are_multiplied_as_native_ones() {
    let (rows, k, n, all) = (9, 96, 64, 128);
    let mut numbers = Numbers::new(51);
    let operands = Operands::random(MatmulType::I8_I8_I32, [rows, k, n], &mut numbers);
    let native = operands.of_streams();
    let layout = operands.arithmetic.layout;
    let (a, b, c, stream) = (0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000);
    let mut memory = vec![0; 0x5_0000];
    for m in 0..rows {
        for i in 0..k {
            memory[a + m * k + i] = operands.a[layout.a.index(m, i, rows)];
        }
    }
    memory[b..][..operands.b.len()].copy_from_slice(&operands.b);
    // The right half of C.
    let skipped = 4 * (all - n);
    let task = Task {
        arithmetic: operands.arithmetic,
        family: Family::RowMajor,
        rows,
        all_rows: rows,
        k,
        columns: n,
        all_columns: all,
        a: a.try_into().unwrap(),
        b: b.try_into().unwrap(),
        c: (c + skipped).try_into().unwrap(),
    };
    let mut words = Vec::new();
    task.stream(None, &mut words).unwrap();
    for (place, word) in memory[stream..]
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(words)
    {
        *place = word.to_le_bytes();
    }
    let memory = Flat(RefCell::new(memory));
    let program = Program {
        address: stream.try_into().unwrap(),
        words: BODY_WORDS.try_into().unwrap(),
    };
    assert_eq!(run(&memory, program, Computes::Proven), Ok(None));
    let memory = memory.0.into_inner();
    for m in 0..rows {
        let row = &memory[c + m * 4 * all..][..4 * all];
        assert!(row[..skipped].iter().all(|byte| *byte == 0));
        for i in 0..n {
            let at = 4 * layout.c.index(m, i, rows);
            assert_eq!(row[skipped + 4 * i..][..4], native[at..at + 4], "{m}, {i}");
        }
    }
}

#[test]
fn each_rule_of_the_buffer_is_checked_by_the_device_too() {
    // The builder refuses values that are out of range, so words are changed afterwards.
    let int8 = [
        (0x1040, 11 << 4 | 1, "need 2"),
        (0x1040, 1 << 8 | 10 << 4 | 2, "has more than banks"),
        (0x1040, 2, "of weights"),
        (0x1040, 15 << 4 | 2, "of weights"),
        (0x1044, 1, "entries"),
        (0x1010, 0, "no line"),
    ];
    let operands = Operands::random(MatmulType::I8_I8_I32, [8, 128, 64], &mut Numbers::new(52));
    let column = Task {
        arithmetic: operands.arithmetic,
        family: Family::Column,
        rows: 8,
        all_rows: 8,
        k: 128,
        columns: 64,
        all_columns: 64,
        a: A,
        b: A,
        c: 2 * A,
    };
    let outside = |task: Task, change: (u64, u64)| {
        let mut words = Vec::new();
        task.stream(None, &mut words).unwrap();
        let word = words.iter_mut().find(|word| **word & 0xffff == change.0);
        let word = word.unwrap();
        *word = *word >> 48 << 48 | change.1 << 16 | change.0;
        let mut memory = vec![0; 0x4_0000];
        for (place, word) in memory.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        let program = Program {
            address: 0,
            words: BODY_WORDS.try_into().unwrap(),
        };
        run(&Flat(RefCell::new(memory)), program, Computes::Proven).map(drop)
    };
    assert_eq!(outside(column, (0x1010, 9 << 4)), Ok(()));
    for (offset, value, text) in int8 {
        let error = outside(column, (offset, value)).unwrap_err();
        assert!(
            matches!(&error, Error::Unproven(what) if what.contains(text)),
            "{error}"
        );
    }
}
