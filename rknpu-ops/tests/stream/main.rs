//! Command streams: the value of every register, and a check that every task is one that is known
//! to run on boards.
//!
//! Results of streams are tested where the emulated NPU is: tests/vendor/rockchip.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::{BTreeMap, BTreeSet};

use rknpu_ops::ffi::MatmulType;
use rknpu_ops::stream::{
    Arithmetic, BODY_WORDS, Banks, Family, Outside, Plan, Rule, STREAM_WORDS, Task,
};

const A: u32 = 0x10_0000;
const B: u32 = 0x200_0000;
const C: u32 = 0x400_0000;

const TYPES: [(&str, MatmulType); 5] = [
    ("f16_f32", MatmulType::F16_F16_F32),
    ("f16_f16", MatmulType::F16_F16_F16),
    ("i8_i32", MatmulType::I8_I8_I32),
    ("i8_f32", MatmulType::I8_I8_F32),
    ("i4_i16", MatmulType::I4_I4_I16),
];

const FAMILIES: [(&str, Family); 4] = [
    ("column", Family::Column),
    ("line", Family::Line),
    ("part", Family::Part),
    ("row-major", Family::RowMajor),
];

/// Rows that the text must have. Without this check, a truncated file would test nothing.
const EXPECTATIONS: usize = 55;

fn named<T: Copy>(table: &[(&str, T)], name: &str) -> T {
    table.iter().find(|row| row.0 == name).unwrap().1
}

fn task(matmul_type: MatmulType, family: Family, rows: usize, k: usize, columns: usize) -> Task {
    Task {
        arithmetic: Arithmetic::of(matmul_type).unwrap(),
        family,
        rows,
        all_rows: rows,
        k,
        columns,
        all_columns: columns,
        a: A,
        b: B,
        c: C,
    }
}

/// Returns the words of a stream.
fn words(task: &Task, next: Option<u32>) -> Vec<u64> {
    let mut words = Vec::new();
    task.stream(next, &mut words).unwrap();
    words
}

/// Splits a word into target, value and offset.
fn split(word: u64) -> (u64, u64, u64) {
    (word >> 48, word >> 16 & 0xffff_ffff, word & 0xffff)
}

/// Returns the values that a stream's body gives to registers, each once.
fn registers(words: &[u64]) -> BTreeMap<u64, u64> {
    let mut values = BTreeMap::new();
    for word in words[..BODY_WORDS].iter().filter(|word| **word != 0) {
        let (_, value, offset) = split(*word);
        assert_eq!(
            values.insert(offset, value),
            None,
            "{offset:#x} is written twice"
        );
    }
    values
}

#[test]
fn registers_have_the_values_of_streams_that_ran_on_boards() {
    let mut rows = 0;
    for line in include_str!("expected.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
    {
        let (shape, values) = line.split_once(" | ").unwrap();
        let mut shape = shape.split(' ');
        let (family, matmul_type) = (shape.next().unwrap(), shape.next().unwrap());
        let sizes: Vec<usize> = shape.map(|size| size.parse().unwrap()).collect();
        let [rows_of_task, all_rows, k, columns, all_columns] = sizes[..].try_into().unwrap();
        let (family, matmul_type) = (named(&FAMILIES, family), named(&TYPES, matmul_type));
        let task = Task {
            all_rows,
            all_columns,
            ..task(matmul_type, family, rows_of_task, k, columns)
        };
        let have = registers(&words(&task, None));
        for value in values.split(' ') {
            let (offset, value) = value.split_once('=').unwrap();
            let [offset, value] = [offset, value].map(|hex| u64::from_str_radix(hex, 16).unwrap());
            assert_eq!(have[&offset], value, "{offset:#x} of {line}");
        }
        rows += 1;
    }
    assert_eq!(rows, EXPECTATIONS);
}

#[test]
fn every_stream_writes_the_same_registers_and_says_what_follows() {
    let mut seen = BTreeSet::new();
    for (_, matmul_type) in TYPES {
        let task = task(matmul_type, Family::Column, 8, 128, 64);
        let last = words(&task, None);
        assert_eq!(last.len(), STREAM_WORDS);
        let tail = [
            0,
            0x0101_0000_0000_0014,
            0x0041_0000_0000_0000,
            0x0081_0000_001d_0008,
        ];
        assert_eq!(last[BODY_WORDS..], tail);
        let chained = words(&task, Some(0x1234_5670));
        assert_eq!(chained[..BODY_WORDS], last[..BODY_WORDS]);
        assert_eq!(split(chained[BODY_WORDS]), (0x0101, 0x1234_5670, 0x10));
        // As both kernels compute it: (body + tail + 1) / 2 - 1.
        let amount = (STREAM_WORDS as u64).div_ceil(2) - 1;
        assert_eq!(split(chained[BODY_WORDS + 1]), (0x0101, amount, 0x14));
        seen.insert(registers(&last).into_keys().collect::<Vec<_>>());
    }
    assert_eq!(seen.len(), 1);
    // Streams follow one another, and each must begin at a multiple of 16 bytes.
    const { assert!(STREAM_WORDS.is_multiple_of(2)) };
}

#[test]
fn int8_columns_get_a_bank_beyond_their_features() {
    let banks = |matmul_type, family| task(matmul_type, family, 144, 672, 64).banks();
    let (exact, more) = (
        Banks {
            features: 3,
            weights: 9,
        },
        Banks {
            features: 4,
            weights: 8,
        },
    );
    assert_eq!(banks(MatmulType::I8_I8_I32, Family::Column), more);
    assert_eq!(banks(MatmulType::I8_I8_F32, Family::Column), more);
    assert_eq!(banks(MatmulType::I8_I8_I32, Family::Line), exact);
    assert_eq!(banks(MatmulType::I4_I4_I16, Family::Column).features, 2);
    assert_eq!(banks(MatmulType::F16_F16_F32, Family::Column).features, 6);
}

/// Returns the rule that a task breaks; its stream must not be written then.
fn broken(task: Task) -> Rule {
    let mut words = vec![1];
    let outside = task.stream(None, &mut words).unwrap_err();
    assert_eq!(words, [1], "{outside}");
    assert!(!outside.to_string().is_empty());
    outside.rule
}

#[test]
fn each_rule_that_is_broken_once_is_named() {
    use Family::{Column, Line, Part, RowMajor};
    let f16 = task(MatmulType::F16_F16_F32, Column, 8, 128, 64);
    let i8 = task(MatmulType::I8_I8_I32, Column, 8, 128, 64);
    let i4 = task(MatmulType::I4_I4_I16, Column, 8, 128, 64);
    let line = Task { family: Line, ..i8 };
    let part = Task {
        family: Part,
        all_rows: 12,
        ..i8
    };
    let by_rows = Task {
        family: RowMajor,
        ..i8
    };
    for task in [f16, i8, i4, line, part, by_rows] {
        assert_eq!(task.check(), Ok(()));
    }
    let size = |task: Task, rows| Task {
        rows,
        all_rows: task.all_rows.max(rows),
        ..task
    };
    for (task, rule) in [
        (Task { k: 144, ..f16 }, Rule::KOfLines),
        (Task { columns: 72, ..f16 }, Rule::ColumnsOfGroups),
        (Task { columns: 96, ..i4 }, Rule::ColumnsOfGroups),
        (Task { a: A + 8, ..f16 }, Rule::Address),
        (Task { b: B + 8, ..f16 }, Rule::Address),
        (Task { c: C + 8, ..f16 }, Rule::Address),
        (size(f16, 260), Rule::Rows),
        (
            Task {
                rows: 0,
                all_rows: 0,
                ..f16
            },
            Rule::Rows,
        ),
        (size(f16, 9), Rule::RowsOfFour),
        (
            Task {
                rows: 1,
                all_rows: 1,
                ..i8
            },
            Rule::RowsOfFour,
        ),
        (
            Task {
                all_rows: 12,
                ..f16
            },
            Rule::RowsInMemory,
        ),
        (
            Task {
                columns: 272,
                ..f16
            },
            Rule::Columns,
        ),
        (Task { columns: 0, ..f16 }, Rule::Columns),
        (
            Task {
                k: 4128,
                rows: 4,
                all_rows: 4,
                columns: 16,
                ..f16
            },
            Rule::K,
        ),
        (
            Task {
                k: 8224,
                rows: 4,
                all_rows: 4,
                columns: 32,
                ..i8
            },
            Rule::K,
        ),
        (Task { k: 672, ..i4 }, Rule::K),
        (
            Task {
                k: 4096,
                columns: 32,
                ..size(f16, 20)
            },
            Rule::Banks,
        ),
        // The extra bank for INT8 features makes this task too large.
        (
            Task {
                k: 2048,
                columns: 128,
                ..size(i8, 64)
            },
            Rule::Banks,
        ),
        (
            Task {
                family: Line,
                ..f16
            },
            Rule::Arithmetic,
        ),
        (
            Task {
                family: RowMajor,
                ..i4
            },
            Rule::Arithmetic,
        ),
        (
            task(MatmulType::I8_I8_F32, Line, 8, 128, 64),
            Rule::Arithmetic,
        ),
        (size(line, 129), Rule::Rows),
        (
            Task {
                all_rows: 9,
                ..line
            },
            Rule::RowsInMemory,
        ),
        (
            Task {
                all_rows: 7,
                ..part
            },
            Rule::RowsInMemory,
        ),
        (
            Task {
                columns: 3104,
                ..line
            },
            Rule::Columns,
        ),
        (
            Task {
                k: 8224,
                rows: 1,
                all_rows: 1,
                ..line
            },
            Rule::K,
        ),
        (
            Task {
                k: 4096,
                ..size(line, 33)
            },
            Rule::FeatureBanks,
        ),
        (size(by_rows, 129), Rule::Rows),
        (
            Task {
                k: 3840,
                ..size(by_rows, 5)
            },
            Rule::Rows,
        ),
        (
            Task {
                k: 6144,
                ..size(by_rows, 33)
            },
            Rule::Rows,
        ),
        (
            Task {
                k: 6176,
                rows: 1,
                ..by_rows
            },
            Rule::K,
        ),
        (
            Task {
                columns: 3104,
                ..by_rows
            },
            Rule::Columns,
        ),
        (
            Task {
                all_columns: 32772,
                ..by_rows
            },
            Rule::ColumnsInMemory,
        ),
        (
            Task {
                all_columns: 66,
                ..by_rows
            },
            Rule::ColumnsOfGroups,
        ),
        (
            Task {
                k: 4096,
                ..size(by_rows, 65)
            },
            Rule::FeatureBanks,
        ),
    ] {
        assert_eq!(broken(task), rule, "{task:?}");
    }
}

#[test]
fn products_that_no_cut_can_save_are_refused() {
    let plan = |matmul_type, shape| Plan::new(Arithmetic::of(matmul_type).unwrap(), shape);
    for (matmul_type, shape, rule) in [
        // Results in FP16 of several passes would be rounded more than once.
        (MatmulType::F16_F16_F16, [1, 4128, 32], Rule::K),
        (MatmulType::F16_F16_F32, [1, 0, 32], Rule::K),
        (MatmulType::I8_I8_I32, [1, 48, 32], Rule::KOfLines),
        (MatmulType::I4_I4_I16, [1, 64, 32], Rule::ColumnsOfGroups),
        (MatmulType::I8_I8_I32, [0, 64, 32], Rule::Rows),
        (MatmulType::I8_I8_I32, [1, 64, 0], Rule::ColumnsOfGroups),
    ] {
        let outside: Outside = plan(matmul_type, shape).unwrap_err();
        assert_eq!(outside.rule, rule, "{shape:?}");
    }
    // RK3576's library has this type, but no stream for it is known.
    assert_eq!(Arithmetic::of(MatmulType::F16_I8_F32), None);
}

/// Width, inner width of the network, and rows of query and key of twelve models.
// SOURCE: config.json of each model on huggingface.co.
const MODELS: [(&str, [usize; 4]); 12] = [
    ("Qwen3-0.6B", [1024, 3072, 2048, 1024]),
    ("Qwen3-1.7B", [2048, 6144, 2048, 1024]),
    ("Qwen3-4B", [2560, 9728, 4096, 1024]),
    ("Qwen3.5-4B", [2560, 9216, 4096, 1024]),
    ("Llama-3.2-1B", [2048, 8192, 2048, 512]),
    ("Llama-3.2-3B", [3072, 8192, 3072, 1024]),
    ("Qwen2.5-1.5B", [1536, 8960, 1536, 256]),
    ("Qwen2.5-3B", [2048, 11008, 2048, 256]),
    ("Gemma-3-1B", [1152, 6912, 1024, 256]),
    ("Gemma-4-E2B", [1536, 12288, 4096, 512]),
    ("Phi-3-mini", [3072, 8192, 3072, 3072]),
    ("gpt-oss-20b", [2880, 2880, 4096, 512]),
];

/// Returns the products that the models' weights make in an arithmetic: K in segments, N as one
/// call has it.
fn products(k_max: usize, group: usize) -> BTreeSet<(usize, usize)> {
    let pieces = |size: usize, max: usize| {
        let rest = size % max;
        [max.min(size), if rest == 0 { max.min(size) } else { rest }]
    };
    let mut found = BTreeSet::new();
    for (_, [width, inner, query, key]) in MODELS {
        for (k, n) in [
            (width, query),
            (width, key),
            (query, width),
            (width, inner),
            (inner, width),
        ] {
            for k in pieces(k, k_max) {
                for n in pieces(n.next_multiple_of(group), 4096) {
                    found.insert((k.next_multiple_of(32), n));
                }
            }
        }
    }
    found
}

#[test]
fn every_task_of_twelve_models_is_inside_of_the_envelope() {
    let mut tasks = 0usize;
    for (matmul_type, k_max) in [
        (MatmulType::F16_F16_F32, 4096),
        (MatmulType::I8_I8_I32, 8192),
        (MatmulType::I4_I4_I16, 576),
    ] {
        let arithmetic = Arithmetic::of(matmul_type).unwrap();
        for (k, n) in products(k_max, 64) {
            for m in 1..=512 {
                let plan = Plan::new(arithmetic, [m, k, n]).unwrap();
                let mut count = 0;
                for task in plan.tasks([A, B, C]) {
                    assert_eq!(task.check(), Ok(()), "M = {m}, K = {k}, N = {n}: {task:?}");
                    count += 1;
                }
                assert_eq!(count, plan.task_count());
                tasks += count;
            }
        }
    }
    assert!(tasks > 1_000_000, "{tasks}");
}

/// Counts an access to each of some atoms.
fn count(atoms: &mut [u8], start: usize, len: usize) {
    for atom in &mut atoms[start..start + len] {
        *atom += 1;
    }
}

#[test]
fn tasks_write_each_result_once_and_stay_inside_of_their_memory() {
    let mut plans = 0;
    for (_, matmul_type) in TYPES {
        let arithmetic = Arithmetic::of(matmul_type).unwrap();
        let layout = arithmetic.layout;
        for (m, k, n) in [
            (1, 64, 64),
            (4, 96, 320),
            (130, 576, 128),
            (301, 320, 3200),
            (512, 640, 64),
            // Several passes, and B in two parts.
            (6, 4096 + 640, 128),
            (301, 8192 + 1344, 192),
        ] {
            let Ok(plan) = Plan::new(arithmetic, [m, k, n]) else {
                assert_eq!((matmul_type, k > 4096), (MatmulType::F16_F16_F16, true));
                continue;
            };
            let [a_bytes, c_bytes] = if plan.is_in_place() {
                [layout.a.bytes(m, k), layout.c.bytes(m, n)]
            } else {
                plan.cube_bytes()
            };
            let mut read = vec![0u8; layout.b.bytes(k, n) / 16];
            let mut written = vec![0u8; c_bytes / 16];
            for task in plan.tasks([0, 0, 0]) {
                assert_eq!(task.check(), Ok(()), "{task:?}");
                let surfaces_of_a = layout.a.elem.bytes(task.k) / 16;
                let end = task.a as usize / 16 + (surfaces_of_a - 1) * task.all_rows + task.rows;
                assert!(end <= a_bytes / 16, "{task:?}");
                let b_bytes = task.columns * layout.b.elem.bytes(task.k);
                count(&mut read, task.b as usize / 16, b_bytes / 16);
                for surface in 0..task.columns / layout.c.t {
                    let start = task.c as usize / 16 + surface * task.all_rows;
                    count(&mut written, start, task.rows);
                }
            }
            let name = format!("{matmul_type:?} {m} {k} {n}");
            assert!(written.iter().all(|count| *count <= 1), "{name}");
            // Each pass writes whole columns, with the rows that fill a cube up.
            let is_in_lines = (matmul_type, layout.c.t) == (MatmulType::I8_I8_I32, 4);
            let rows = if is_in_lines {
                m
            } else {
                m.next_multiple_of(4)
            };
            let results = written
                .iter()
                .map(|count| usize::from(*count))
                .sum::<usize>();
            assert!(
                results > 0 && results.is_multiple_of(rows * n / layout.c.t),
                "{name}"
            );
            let tiles = plan.row_tiles().count();
            assert!(
                read.iter().all(|count| usize::from(*count) == tiles),
                "{name}"
            );
            let rows: usize = plan.row_tiles().map(|tile| tile.rows).sum();
            assert_eq!(rows, m);
            plans += 1;
        }
    }
    assert_eq!(plans, 7 * TYPES.len() - 2);
}
