//! Questions that public sources leave open or answer differently. Each is a small job that is
//! not known to run on boards, and the answer is the device's reaction to the job.
//!
//! A job that a board does not end costs the driver's time-out, and a reset. The operands are small
//! whole numbers, so sums are exact in every arithmetic.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use half::f16;

use super::core::stream_address;
use super::driver::{Direction, Driver, Job, Object, Purpose};
use super::node::Kernel;
use crate::ffi::MatmulType;
use crate::layout::Elem;
use crate::stream::{ATOM_BYTES, Arithmetic, Family, STREAM_WORDS, Task};

/// A question's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The question, as a word.
    pub key: &'static str,
    /// The device's reaction, in words.
    pub text: String,
}

/// Bytes of a stream, and the most streams of a question.
const STREAM_BYTES: usize = STREAM_WORDS * 8;
const STREAMS: usize = 4;

/// Places of the operands and the results in their object.
const A: usize = 0;
const B: usize = 256 << 10;
const C: usize = 768 << 10;
const BYTES: usize = 1 << 20;

/// The byte that fills C before a job.
const UNWRITTEN: u8 = 0x5a;

/// A product whose columns are computed by some tasks.
#[derive(Clone, Copy, Debug)]
struct Case {
    arithmetic: Arithmetic,
    family: Family,
    m: usize,
    k: usize,
    n: usize,
    tasks: usize,
}

impl Case {
    fn new(matmul_type: MatmulType, family: Family, [m, k, n]: [usize; 3]) -> Option<Self> {
        Some(Self {
            arithmetic: Arithmetic::of(matmul_type)?,
            family,
            m,
            k,
            n,
            tasks: 1,
        })
    }

    fn is_row_major(&self) -> bool {
        self.family == Family::RowMajor
    }

    fn index_of_a(&self, m: usize, k: usize) -> usize {
        if self.is_row_major() {
            m * self.k + k
        } else {
            self.arithmetic.layout.a.index(m, k, self.m)
        }
    }

    fn index_of_c(&self, m: usize, n: usize) -> usize {
        if self.is_row_major() {
            m * self.n + n
        } else {
            self.arithmetic.layout.c.index(m, n, self.m)
        }
    }

    /// Returns the tasks, for an object at an address.
    fn tasks(&self, start: u32) -> impl Iterator<Item = Task> {
        let layout = self.arithmetic.layout;
        let columns = self.n / self.tasks;
        let at = move |place: usize| start.wrapping_add(u32::try_from(place).unwrap_or(u32::MAX));
        (0..self.tasks).map(move |index| {
            let first = index * columns;
            Task {
                arithmetic: self.arithmetic,
                family: self.family,
                rows: self.m,
                all_rows: self.m,
                k: self.k,
                columns,
                all_columns: self.n,
                a: at(A),
                b: at(B + layout.b.bytes(self.k, first)),
                c: at(C + first / layout.c.t * ATOM_BYTES * self.m),
            }
        })
    }
}

fn element_of_a(m: usize, k: usize) -> i8 {
    [-2, -1, 0, 1, 2][(m * 7 + k * 3) % 5]
}

fn element_of_b(k: usize, n: usize) -> i8 {
    [-3, -2, -1, 0, 1, 2, 3][(k * 5 + n * 11) % 7]
}

/// Writes an operand's element.
fn put(elem: Elem, bytes: &mut [u8], index: usize, value: i8, is_high_first: bool) {
    match elem {
        Elem::F16 => {
            bytes[2 * index..][..2].copy_from_slice(&f16::from_f32(value.into()).to_le_bytes());
        }
        Elem::I4 => {
            let is_high = (index % 2 == 1) != is_high_first;
            bytes[index / 2] |= (value.cast_unsigned() & 0xf) << if is_high { 4 } else { 0 };
        }
        _ => bytes[index] = value.cast_unsigned(),
    }
}

/// Reads a result.
fn get(elem: Elem, bytes: &[u8], index: usize) -> f64 {
    let half = || std::array::from_fn(|i| bytes[2 * index + i]);
    let word = || std::array::from_fn(|i| bytes[4 * index + i]);
    match elem {
        Elem::I16 => i16::from_le_bytes(half()).into(),
        Elem::F16 => f16::from_le_bytes(half()).into(),
        Elem::I32 => i32::from_le_bytes(word()).into(),
        _ => f32::from_le_bytes(word()).into(),
    }
}

/// Memory for the jobs of questions.
#[derive(Debug)]
struct Bench {
    driver: Arc<dyn Driver>,
    streams: Object,
    data: Object,
    own: Object,
}

impl Bench {
    fn new(driver: &Arc<dyn Driver>) -> io::Result<Self> {
        let create = |bytes, purpose| Arc::clone(driver).create(bytes, purpose);
        Ok(Self {
            driver: Arc::clone(driver),
            streams: create(STREAMS * STREAM_BYTES, Purpose::Data)?,
            data: create(BYTES, Purpose::Data)?,
            own: create(driver.own_bytes(STREAMS), Purpose::Jobs)?,
        })
    }

    /// Runs the tasks of a case on the operands that are there, with words changed by `patch`.
    fn run(&mut self, case: &Case, patch: impl Fn(&mut [u64])) -> io::Result<()> {
        self.data.bytes_mut()[C..].fill(UNWRITTEN);
        self.data.sync(0..BYTES, Direction::ToDevice)?;
        let chain = self.driver.chain();
        for (index, task) in case.tasks(self.data.address()).enumerate() {
            let is_last = (index + 1) % chain == 0 || index + 1 == case.tasks;
            let next = (!is_last).then(|| stream_address(&self.streams, index + 1));
            let mut words = Vec::with_capacity(STREAM_WORDS);
            task.unproven_stream(next, &mut words);
            patch(&mut words);
            let place = &mut self.streams.bytes_mut()[index * STREAM_BYTES..][..STREAM_BYTES];
            for (place, word) in place.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
                *place = word.to_le_bytes();
            }
        }
        let bytes = case.tasks * STREAM_BYTES;
        self.streams.sync(0..bytes, Direction::ToDevice)?;
        let job = Job {
            core: 0,
            streams: &self.streams,
            count: case.tasks,
            inputs: [&self.data, &self.data],
            result: &self.data,
        };
        self.driver.run(&mut self.own, &job)?;
        self.data.sync(C..BYTES, Direction::FromDevice)
    }

    /// Multiplies, and tells whether the results are right.
    ///
    /// - `high_first`: whether the first of two elements of 4 bits is the high half, in A and in B
    fn multiply(
        &mut self,
        case: &Case,
        high_first: [bool; 2],
        patch: impl Fn(&mut [u64]),
    ) -> String {
        let layout = case.arithmetic.layout;
        let bytes = self.data.bytes_mut();
        bytes[..C].fill(0);
        for m in 0..case.m {
            for k in 0..case.k {
                let (index, value) = (case.index_of_a(m, k), element_of_a(m, k));
                put(layout.a.elem, &mut bytes[A..B], index, value, high_first[0]);
            }
        }
        for n in 0..case.n {
            for k in 0..case.k {
                let (index, value) = (layout.b.index(k, n, case.k, case.n), element_of_b(k, n));
                put(layout.b.elem, &mut bytes[B..C], index, value, high_first[1]);
            }
        }
        if let Err(error) = self.run(case, patch) {
            return format!("does not run ({error})");
        }
        let bytes = &self.data.bytes_mut()[C..];
        let is_wrong = |m: usize, n: usize| {
            let products =
                (0..case.k).map(|k| i32::from(element_of_a(m, k)) * i32::from(element_of_b(k, n)));
            let sum = f64::from(products.sum::<i32>());
            get(layout.c.elem, bytes, case.index_of_c(m, n)) != sum
        };
        let places = (0..case.m).flat_map(|m| (0..case.n).map(move |n| (m, n)));
        match places.filter(|&(m, n)| is_wrong(m, n)).count() {
            0 => "right".into(),
            wrong => format!("WRONG in {wrong} of {} results", case.m * case.n),
        }
    }
}

/// Leaves the words as they are.
fn as_is(_: &mut [u64]) {}

/// A word's target, and the offset of its register.
fn place_of(word: u64) -> (u64, u64) {
    (word >> 48, word & 0xffff)
}

/// Returns a word with another value.
fn with_value(word: u64, value: u64) -> u64 {
    word >> 48 << 48 | value << 16 | word & 0xffff
}

/// Answers all questions, on the first core.
///
/// # Errors
/// The driver's, if it has no memory.
pub(super) fn ask(driver: &Arc<dyn Driver>) -> io::Result<Vec<Answer>> {
    use MatmulType as Type;
    let mut bench = Bench::new(driver)?;
    let case = |matmul_type, family, shape| {
        // Every type below has streams.
        Case::new(matmul_type, family, shape).ok_or(io::ErrorKind::Unsupported)
    };
    let mut answers = Vec::new();
    let mut add = |key, text| answers.push(Answer { key, text });
    // SOURCE: one project runs a single row so, another one reports that it is wrong; two and three
    // rows nobody has tried with the right stride.
    let mut text = String::new();
    for (name, matmul_type) in [("FP16", Type::F16_F16_F32), ("INT8", Type::I8_I8_I32)] {
        for m in 1..=3 {
            let few = case(matmul_type, Family::Column, [m, 128, 64])?;
            let answer = bench.multiply(&few, [false; 2], as_is);
            let separator = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{separator}{name} M={m} {answer}");
        }
    }
    add("few_rows", text);
    let chained = Case {
        tasks: STREAMS,
        ..case(Type::I8_I8_I32, Family::Column, [8, 128, 128])?
    };
    add(
        "chain",
        if driver.chain() < STREAMS {
            "none (this driver starts each task by itself)".into()
        } else {
            bench.multiply(&chained, [false; 2], as_is)
        },
    );
    add(
        "sums_on_chip",
        "none (not tried: no stream that adds to earlier sums of INT32 is known)".into(),
    );
    let half = case(Type::F16_F16_F32, Family::Column, [8, 128, 64])?;
    add(
        "without_rdma",
        match driver.kernel() {
            Kernel::Rknpu => "none (other projects' boards run it with this driver)".into(),
            Kernel::Rocket => bench.multiply(&half, [false; 2], without_rdma),
        },
    );
    let [int8, fp16] = [
        case(Type::I8_I8_I32, Family::Column, [8, 3840, 32])?,
        case(Type::F16_F16_F32, Family::Column, [4, 3840, 16])?,
    ]
    .map(|long| bench.multiply(&long, [false; 2], as_is));
    add("k_3840", format!("INT8 {int8}, FP16 {fp16}"));
    let rows = case(Type::F16_F16_F32, Family::RowMajor, [4, 512, 16])?;
    let few = bench.multiply(&rows, [false; 2], as_is);
    let many = bench.multiply(&rows, [false; 2], |words| grains(words, 80));
    add("row_major_fp16", format!("{few}, with 80 grains {many}"));
    let int4 = case(Type::I4_I4_I16, Family::Column, [4, 64, 64])?;
    let [alike, mixed] =
        [[false; 2], [false, true]].map(|order| bench.multiply(&int4, order, as_is));
    add(
        "int4",
        format!("A and B in one order {alike}, in two orders {mixed}"),
    );
    let special = case(Type::F16_F16_F32, Family::Column, [4, 32, 16])?;
    add("special", specials(&mut bench, &special));
    add("spaces", driver.spaces());
    Ok(answers)
}

/// Leaves out the registers of the reader of results, and does not start it.
fn without_rdma(words: &mut [u64]) {
    const RDMA: u64 = 0x2001;
    const START: (u64, u64) = (0x0081, 0x0008);
    for word in words {
        if place_of(*word).0 == RDMA {
            *word = 0;
        } else if place_of(*word) == START {
            *word = with_value(*word, 0xd);
        }
    }
}

/// Sets the lines of features that are fetched before the first product.
fn grains(words: &mut [u64], lines: u64) {
    const CNA_CONV_CON2: (u64, u64) = (0x0201, 0x1010);
    let found = words
        .iter_mut()
        .find(|word| place_of(**word) == CNA_CONV_CON2);
    if let Some(word) = found {
        *word = with_value(*word, lines << 4);
    }
}

/// Multiplies special halves with 1, in a row each, and infinity with 0.
fn specials(bench: &mut Bench, case: &Case) -> String {
    let rows = [
        ("inf", f16::INFINITY),
        ("NaN", f16::NAN),
        ("2^-24", f16::from_bits(1)),
        ("-0", f16::NEG_ZERO),
    ];
    let layout = case.arithmetic.layout;
    let bytes = bench.data.bytes_mut();
    bytes[..C].fill(0);
    let mut write = |place: Range<usize>, index: usize, value: f16| {
        bytes[place][2 * index..][..2].copy_from_slice(&value.to_le_bytes());
    };
    for (m, (_, value)) in rows.iter().enumerate() {
        write(A..B, case.index_of_a(m, 0), *value);
    }
    // The second column has a 0 where the others have 1.
    for n in (0..case.n).filter(|n| *n != 1) {
        write(B..C, layout.b.index(0, n, case.k, case.n), f16::ONE);
    }
    if let Err(error) = bench.run(case, as_is) {
        return format!("does not run ({error})");
    }
    let bytes = &bench.data.bytes_mut()[C..];
    let result = |m, n| get(layout.c.elem, bytes, case.index_of_c(m, n));
    let shown = rows.iter().enumerate();
    let shown: Vec<_> = shown
        .map(|(m, (name, _))| format!("{name} x 1 = {:e}", result(m, 0)))
        .collect();
    format!("{}, inf x 0 = {:e}", shown.join(", "), result(0, 1))
}
