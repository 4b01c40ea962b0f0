//! The state of heads in VTCM, and how a token changes it.
//!
//! [`HeadState::step_rows`]: an output for each row m of the state, with `D` the decay, `u` the
//! addend, `q` the reading vector, and `x` the row's value:
//!
//! ```text
//! c  = beta · (x - m · (D k))     without the second part where the old state is not taken
//! y  = m · (D q) + c · (u q)      is m' · q, because m' = D m + c u
//! ```
//!
//! [`HeadState::step_columns`]: an output for each column; row i is scaled by `d_i` and gets `k_i · v`:
//!
//! ```text
//! y  = Σ e_i m_i + v · own
//! m' = d_i m_i + k_i v
//! ```
//!
//! Kernels are short and each reads its vectors from memory, so that no qfloat value is kept across
//! a call.

use crate::hvx::{self, Accumulator, LinePlanes, Vector, add_f32, max_f32, mul_f32, splat_f32};
use crate::layout::{LINE_BYTES, Line};
use crate::ops::fold::{GROUPS, Products, last_folds};
use crate::ops::math;
use crate::ops::rows::{all_lanes, first_lane};
use crate::rt::cache;

/// f32 of a line, and rows whose outputs are computed together.
const LANES: usize = LINE_BYTES / size_of::<f32>();

/// Numbers of a token, in addition to the vectors in [`HeadState`].
pub(super) struct RowForm {
    /// `u · q`.
    pub(super) own: f32,
    /// Factor of the outputs.
    pub(super) scale: f32,
    /// Decay of all columns. 1 if the probes already include the decay.
    pub(super) decay: f32,
    /// `true` if the value is replaced by its difference from the old state's.
    pub(super) takes_old: bool,
    /// `b · q`, if the second vector times the old state's is added, too.
    pub(super) second: Option<f32>,
}

impl Default for RowForm {
    fn default() -> Self {
        Self {
            own: 0.0,
            scale: 1.0,
            decay: 1.0,
            takes_old: false,
            second: None,
        }
    }
}

/// The state of heads, and vectors of a token.
pub(super) struct HeadState<'a> {
    /// Rows in use.
    rows: usize,
    columns: usize,
    state: &'a mut [Line],
    /// Decay of each column; of each row in `step_columns`.
    pub(super) decay: &'a mut [Line],
    /// Two vectors that read the state.
    pub(super) probes: &'a mut [Line],
    /// A vector that is added, times a factor for each row.
    pub(super) add: &'a mut [Line],
    /// A second one.
    pub(super) second: &'a mut [Line],
    /// A constant.
    pub(super) ones: &'a mut [Line],
    /// A line: factor of the values.
    pub(super) beta: &'a mut [Line],
    /// Sums of the probes, and outputs: three lines.
    sums: &'a mut [Line],
    /// The value of each row.
    values: &'a mut [Line],
}

impl<'a> HeadState<'a> {
    /// Returns the number of lines for states of at most `rows` rows.
    pub(super) fn lines(rows: usize, columns: usize) -> usize {
        let (groups, lines) = (rows.div_ceil(LANES), columns.div_ceil(LANES));
        groups * LANES * lines + 6 * lines + 4 + groups
    }

    /// Cuts [`Self::lines`] lines into parts.
    pub(super) fn new(memory: &'a mut [Line], rows: usize, columns: usize) -> Self {
        let (groups, lines) = (rows.div_ceil(LANES), columns.div_ceil(LANES));
        let mut rest = memory;
        let mut take = |count: usize| {
            let (taken, others) = core::mem::take(&mut rest).split_at_mut(count);
            rest = others;
            taken
        };
        Self {
            rows,
            columns,
            state: take(groups * LANES * lines),
            decay: take(lines),
            probes: take(2 * lines),
            add: take(lines),
            second: take(lines),
            ones: take(lines),
            beta: take(1),
            sums: take(3),
            values: take(groups),
        }
    }

    /// Begins a state of `rows` rows of zeros.
    pub(super) fn begin(&mut self, rows: usize) {
        self.rows = rows;
        hvx::clear(self.state);
        hvx::clear(self.values);
    }

    /// Returns a row of the state.
    fn row(&mut self, row: usize) -> &mut [Line] {
        let lines = self.decay.len();
        let range = row * lines..(row + 1) * lines;
        self.state.get_mut(range).unwrap_or_default()
    }

    /// Multiplies a row of the state by `exp(rates · time)`, where `beta` has the rows' times:
    /// those of a head of more than 32 rows are the same.
    pub(super) fn decay_row(&mut self, row: usize, rates: &[f32]) {
        fill(self.second, rates);
        let times: &[f32] = bytemuck::cast_slice(self.beta);
        let time = times.get(row % 32).copied().unwrap_or_default();
        let lines = self.decay.len();
        let row = self.state.get_mut(row * lines..(row + 1) * lines);
        hvx::widest(DecayRow {
            row: row.unwrap_or_default(),
            rates: self.second,
            time,
        });
    }

    /// Sets a row of the state.
    pub(super) fn set_row(&mut self, row: usize, elems: &[f32]) {
        fill(self.row(row), elems);
    }

    /// Copies the state.
    pub(super) fn copy_state(&mut self, to: &mut [f32]) {
        for (row, to) in to.chunks_exact_mut(self.columns).enumerate() {
            hvx::copy_f32(to, bytemuck::cast_slice(self.row(row)));
        }
    }

    /// Sets the values of rows from `row` on.
    pub(super) fn set_values(&mut self, row: usize, elems: &[f32]) {
        let values: &mut [f32] = bytemuck::cast_slice_mut(self.values);
        hvx::copy_f32(values.get_mut(row..).unwrap_or_default(), elems);
    }

    /// Computes a token by rows of the state.
    pub(super) fn step_rows(&mut self, form: &RowForm, out: &mut [f32]) {
        let lines = self.decay.len();
        let reads_old = form.takes_old || form.second.is_some();
        for (group, out) in out.chunks_mut(LANES).enumerate() {
            let rows = group * LANES * lines..(group + 1) * LANES * lines;
            let Some(columns) = self.state.get_mut(rows) else {
                return;
            };
            hvx::clear(self.sums);
            let first = usize::from(!reads_old);
            hvx::widest(Products {
                rows: &self.probes[first * lines..],
                columns,
                sums: &mut self.sums[first..2],
            });
            let [old, new, result] = &mut *self.sums else {
                return;
            };
            let value = &mut self.values[group];
            hvx::widest(CombineRows {
                form,
                beta: &self.beta[0],
                old,
                new,
                value,
                result,
            });
            let used = out.len() * lines;
            hvx::widest(Update {
                rows: &mut columns[..used],
                decay: self.decay,
                add: self.add,
                factors: bytemuck::cast_slice(core::slice::from_ref(&*value)),
            });
            if form.second.is_some() {
                hvx::widest(Update {
                    rows: &mut columns[..used],
                    decay: self.ones,
                    add: self.second,
                    factors: bytemuck::cast_slice(core::slice::from_ref(&*old)),
                });
            }
            hvx::copy_f32(out, bytemuck::cast_slice(core::slice::from_ref(&*result)));
        }
    }

    /// Computes a token of a head with `32 · L` columns, and rows in whole groups of 32, by rows of
    /// the state.
    ///
    /// - `from`: the state before the token, if it is not here yet
    /// - `to`: memory of the state after the token; without it, the state is kept here
    pub(super) fn step_square<const L: usize>(
        &mut self,
        form: &RowForm,
        from: Option<&[f32]>,
        mut to: Option<&mut [f32]>,
        out: &mut [f32],
    ) {
        let [old, new, result] = &mut *self.sums else {
            return;
        };
        let vectors = [&*self.probes, &*self.decay, &*self.add].map(|lines| lines.as_chunks().0);
        let [[keys, queries, ..], [decay, ..], [add, ..]] = vectors else {
            return;
        };
        let Some(second) = self.second.first_chunk::<L>() else {
            return;
        };
        let state = squares_mut::<L>(bytemuck::cast_slice_mut(self.state));
        let groups = state.iter_mut().zip(&mut *self.values);
        for (group, ((kept, value), out)) in groups.zip(out.chunks_mut(LANES)).enumerate() {
            let from = from.and_then(|from| {
                let mut rest = squares::<L>(from).get(group..)?.iter();
                let from = rest.next();
                if let Some(next) = rest.next() {
                    cache::fetch(next.as_ptr().cast(), size_of_val(next));
                }
                from
            });
            let rows = from.unwrap_or(kept);
            if form.takes_old || form.second.is_some() {
                hvx::widest(ReadRows {
                    rows,
                    vectors: [keys, queries],
                    sums: [old, new],
                });
            } else {
                hvx::widest(ReadRowsOnce {
                    rows,
                    vector: queries,
                    sum: new,
                });
            }
            hvx::widest(CombineRows {
                form,
                beta: &self.beta[0],
                old,
                new,
                value,
                result,
            });
            let factors: &[f32; LANES] = bytemuck::cast_ref(value);
            let vectors = [decay, add];
            let to = to
                .as_deref_mut()
                .and_then(|to| squares_mut::<L>(to).get_mut(group));
            match (from, to) {
                (from, to) if form.second.is_some() => {
                    hvx::widest(UpdateTwice {
                        from,
                        rows: kept,
                        vectors: [decay, add, second],
                        factors: [factors, bytemuck::cast_ref(&*old)],
                    });
                    if let Some(to) = to {
                        to.copy_from_slice(kept);
                    }
                }
                (None, None) => hvx::widest(UpdateRows {
                    rows: kept,
                    vectors,
                    factors,
                }),
                (from, to) => {
                    let (from, to) = match (from, to) {
                        (Some(from), Some(to)) => (from, to),
                        (Some(from), None) => (from, kept),
                        (None, Some(to)) => (&*kept, to),
                        (None, None) => return,
                    };
                    hvx::widest(WriteRows {
                        from,
                        to,
                        vectors,
                        factors,
                    });
                }
            }
            hvx::copy_f32(out, bytemuck::cast_slice(core::slice::from_ref(&*result)));
        }
    }

    /// Computes a token by columns of the state; the values have the length of a row.
    pub(super) fn step_columns(&mut self, own: f32, out: &mut [f32]) {
        let lines = self.decay.len();
        hvx::widest(ColumnStep {
            state: &mut self.state[..self.rows * lines],
            weights: bytemuck::cast_slice(self.probes),
            decay: bytemuck::cast_slice(self.decay),
            keys: bytemuck::cast_slice(self.add),
            values: self.values,
            own,
            outputs: self.ones,
        });
        hvx::copy_f32(out, bytemuck::cast_slice(self.ones));
    }
}

/// Fills lines with elements, then with zeros.
pub(super) fn fill(lines: &mut [Line], elems: &[f32]) {
    let to: &mut [f32] = bytemuck::cast_slice_mut(lines);
    let count = elems.len().min(to.len());
    hvx::copy_f32(to, elems);
    if count < to.len() {
        to[count..].fill(0.0);
    }
}

/// Fills lines with a number.
pub(super) fn splat(lines: &mut [Line], value: f32) {
    for line in lines {
        hvx::store(line, splat_f32(value));
    }
}

/// Multiplies lines.
pub(super) fn multiply(lines: &mut [Line], by: &[Line]) {
    hvx::widest(MultiplyLines { lines, by });
}

struct MultiplyLines<'a> {
    lines: &'a mut [Line],
    by: &'a [Line],
}

impl hvx::Kernel for MultiplyLines<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (line, by) in self.lines.iter_mut().zip(self.by) {
            hvx::store(line, mul_f32(hvx::load(line), hvx::load(by)));
        }
    }
}

/// Replaces lines by their exponentials.
pub(super) fn exp(lines: &mut [Line]) {
    for line in lines {
        hvx::widest(Exp { line });
    }
}

/// Fills lines with the exponential of a number, and returns it.
pub(super) fn splat_exp(lines: &mut [Line], value: f32) -> f32 {
    let Some((first, rest)) = lines.split_first_mut() else {
        return 1.0;
    };
    hvx::store(first, splat_f32(value));
    hvx::widest(Exp { line: first });
    for line in rest {
        hvx::copy(core::slice::from_mut(line), core::slice::from_ref(first));
    }
    let lanes: &[f32; LANES] = bytemuck::cast_ref(first);
    lanes[0]
}

/// One line at a time: constants that are computed before a loop would be copied as qfloat.
struct Exp<'a> {
    line: &'a mut Line,
}

impl hvx::Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        hvx::store(self.line, exp_or_nan(hvx::load(self.line)));
    }
}

/// Returns the product of two vectors.
pub(super) fn dot(a: &[Line], b: &[Line]) -> f32 {
    hvx::widest(DotOfLines { a, b })
}

struct DotOfLines<'a> {
    a: &'a [Line],
    b: &'a [Line],
}

impl hvx::Kernel for DotOfLines<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let mut sum = hvx::splat_w(0);
        for (a, b) in self.a.iter().zip(self.b) {
            sum = add_f32(sum, mul_f32(hvx::load(a), hvx::load(b)));
        }
        first_lane(all_lanes(sum, add_f32))
    }
}

/// Replaces the steps of time by `ln(1 + e^x)` of them, and writes `exp(time · rate)` to `decay`.
pub(super) fn gate(time: &mut [Line], rate: Option<&Line>, decay: &mut [Line]) {
    hvx::widest(Gate { time, rate, decay });
}

struct Gate<'a> {
    time: &'a mut [Line],
    rate: Option<&'a Line>,
    decay: &'a mut [Line],
}

impl hvx::Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [time] = self.time else { return };
        hvx::store(time, log_of_sum(hvx::load(time)));
        let Some(rate) = self.rate else { return };
        let decay = exp_or_nan(mul_f32(hvx::load(time), hvx::load(rate)));
        for line in self.decay {
            hvx::store(line, decay);
        }
    }
}

/// Returns `e^x`, NaN of NaN.
#[inline(always)]
fn exp_or_nan(x: Vector) -> Vector {
    math::or_nan(x, math::exp(x))
}

/// Returns `ln(1 + e^x)`, NaN of NaN.
#[inline(always)]
fn log_of_sum(x: Vector) -> Vector {
    let small = math::exp(math::neg(math::abs(x)));
    math::or_nan(x, add_f32(max_f32(x, hvx::splat_w(0)), math::ln_1p(small)))
}

/// Multiplies a row by `exp(rates · time)`.
struct DecayRow<'a> {
    row: &'a mut [Line],
    rates: &'a [Line],
    time: f32,
}

impl hvx::Kernel for DecayRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let time = splat_f32(self.time);
        for (m, rate) in self.row.iter_mut().zip(self.rates) {
            let decay = exp_or_nan(mul_f32(hvx::load(rate), time));
            hvx::store(m, mul_f32(hvx::load(m), decay));
        }
    }
}

/// Turns sums of 32 rows into outputs, and values into factors for the rows' addends.
struct CombineRows<'a> {
    form: &'a RowForm,
    beta: &'a Line,
    old: &'a Line,
    new: &'a Line,
    value: &'a mut Line,
    result: &'a mut Line,
}

impl hvx::Kernel for CombineRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut value = hvx::load(self.value);
        let mut new = hvx::load(self.new);
        if self.form.takes_old {
            let decay = splat_f32(self.form.decay);
            new = mul_f32(new, decay);
            value = hvx::sub_f32(value, mul_f32(hvx::load(self.old), decay));
        }
        let factor = mul_f32(value, hvx::load(self.beta));
        hvx::store(self.value, factor);
        let mut out = add_f32(new, mul_f32(factor, splat_f32(self.form.own)));
        if let Some(second) = self.form.second {
            out = add_f32(out, mul_f32(hvx::load(self.old), splat_f32(second)));
        }
        hvx::store(self.result, mul_f32(out, splat_f32(self.form.scale)));
    }
}

/// `m · decay + add · factor` for each row m.
struct Update<'a> {
    rows: &'a mut [Line],
    decay: &'a [Line],
    add: &'a [Line],
    factors: &'a [f32],
}

impl hvx::Kernel for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.rows.chunks_exact_mut(self.decay.len());
        for (row, factor) in rows.zip(self.factors) {
            let factor = splat_f32(*factor);
            for ((m, decay), add) in row.iter_mut().zip(self.decay).zip(self.add) {
                let kept = Accumulator::product(hvx::load(m), hvx::load(decay));
                hvx::store(m, kept.mul_add(hvx::load(add), factor).to_f32());
            }
        }
    }
}

/// 32 rows of `L` lines each.
type Rows<const L: usize> = [[[f32; LANES]; L]; LANES];

/// Returns elements as groups of 32 rows.
fn squares<const L: usize>(elems: &[f32]) -> &[Rows<L>] {
    elems.as_chunks().0.as_chunks().0.as_chunks().0
}

fn squares_mut<const L: usize>(elems: &mut [f32]) -> &mut [Rows<L>] {
    elems.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0
}

/// Writes the products of two vectors with each of 32 rows.
struct ReadRows<'a, const L: usize> {
    rows: &'a Rows<L>,
    vectors: [&'a [Line; L]; 2],
    sums: [&'a mut Line; 2],
}

impl<const L: usize> hvx::Kernel for ReadRows<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (low, high) = self.rows.split_at(2 * GROUPS);
        let ((a, b), (c, d)) = (low.split_at(GROUPS), high.split_at(GROUPS));
        let rows = a.iter().zip(b).zip(c.iter().zip(d));
        let mut folded = LinePlanes::<GROUPS>::unfilled();
        folded.fill(rows.map(|((a, b), (c, d))| {
            let (first, second) = fold_rows([a, b, c, d], self.vectors);
            [[first], [second]]
        }));
        for (sum, folded) in self.sums.into_iter().zip(folded.lines()) {
            if let Some(folded) = folded.first_chunk() {
                hvx::store(sum, last_folds(folded));
            }
        }
    }
}

/// Writes the products of a vector with each of 32 rows.
struct ReadRowsOnce<'a, const L: usize> {
    rows: &'a Rows<L>,
    vector: &'a [Line; L],
    sum: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for ReadRowsOnce<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (low, high) = self.rows.split_at(2 * GROUPS);
        let ((a, b), (c, d)) = (low.split_at(GROUPS), high.split_at(GROUPS));
        let rows = a.iter().zip(b).zip(c.iter().zip(d));
        let x = self.vector.each_ref().map(hvx::load);
        let mut folded = LinePlanes::<GROUPS>::unfilled();
        folded.fill_first(rows.map(|((a, b), (c, d))| {
            let rows = [a, b, c, d];
            let mut sums = rows.map(|row| Accumulator::product(hvx::load_f32(&row[0]), x[0]));
            for line in 1..L {
                let [s0, s1, s2, s3] = sums;
                let [a, b, c, d] = rows.map(|row| hvx::load_f32(&row[line]));
                sums = [
                    s0.mul_add(a, x[line]),
                    s1.mul_add(b, x[line]),
                    s2.mul_add(c, x[line]),
                    s3.mul_add(d, x[line]),
                ];
            }
            [fold_four(sums)]
        }));
        let [folded, _] = folded.lines();
        if let Some(folded) = folded.first_chunk() {
            hvx::store(self.sum, last_folds(folded));
        }
    }
}

/// Returns the products of each of two vectors with four rows, in lanes that [`last_folds`] adds.
#[inline(always)]
fn fold_rows<const L: usize>(
    [a, b, c, d]: [&[[f32; LANES]; L]; 4],
    [x, y]: [&[Line; L]; 2],
) -> (Vector, Vector) {
    let load = |line: usize| {
        let rows = [a, b, c, d].map(|row| hvx::load_f32(&row[line]));
        (hvx::load(&x[line]), hvx::load(&y[line]), rows)
    };
    let (x, y, [a, b, c, d]) = load(0);
    let mut first = [a, b, c, d].map(|row| Accumulator::product(row, x));
    let mut second = [a, b, c, d].map(|row| Accumulator::product(row, y));
    for line in 1..L {
        let (x, y, [a, b, c, d]) = load(line);
        let [s0, s1, s2, s3] = first;
        first = [
            s0.mul_add(a, x),
            s1.mul_add(b, x),
            s2.mul_add(c, x),
            s3.mul_add(d, x),
        ];
        let [s0, s1, s2, s3] = second;
        second = [
            s0.mul_add(a, y),
            s1.mul_add(b, y),
            s2.mul_add(c, y),
            s3.mul_add(d, y),
        ];
    }
    (fold_four(first), fold_four(second))
}

/// Adds halves and quarters of four vectors.
#[inline(always)]
fn fold_four(sums: [Accumulator; 4]) -> Vector {
    let [a, b, c, d] = sums.map(Accumulator::to_f32);
    hvx::fold_f32::<8>(hvx::fold_f32::<16>(a, c), hvx::fold_f32::<16>(b, d))
}

/// `m · decay + add · factor` for each row m, with the vectors decay and add.
struct UpdateRows<'a, const L: usize> {
    rows: &'a mut Rows<L>,
    vectors: [&'a [Line; L]; 2],
    factors: &'a [f32; LANES],
}

impl<const L: usize> hvx::Kernel for UpdateRows<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [decay, add] = self.vectors.map(|lines| lines.each_ref().map(hvx::load));
        for (row, factor) in self.rows.iter_mut().zip(self.factors) {
            let factor = splat_f32(*factor);
            for ((m, decay), add) in row.iter_mut().zip(decay).zip(add) {
                let kept = Accumulator::product(hvx::load_f32(m), decay);
                hvx::store_f32(m, kept.mul_add(add, factor).to_f32());
            }
        }
    }
}

/// `m · decay + add · factor + second · old` for each row m, with numbers of the row.
struct UpdateTwice<'a, const L: usize> {
    /// The rows, if they are not in `rows`.
    from: Option<&'a Rows<L>>,
    rows: &'a mut Rows<L>,
    vectors: [&'a [Line; L]; 3],
    factors: [&'a [f32; LANES]; 2],
}

impl<const L: usize> hvx::Kernel for UpdateTwice<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [decay, add, second] = self.vectors.map(|lines| lines.each_ref().map(hvx::load));
        let numbers = self.factors[0].iter().zip(self.factors[1]);
        for (i, (row, (factor, old))) in self.rows.iter_mut().zip(numbers).enumerate() {
            let (factor, old) = (splat_f32(*factor), splat_f32(*old));
            let from = self.from.map(|from| &from[i]);
            for (line, to) in row.iter_mut().enumerate() {
                let before = hvx::load_f32(from.map_or(&*to, |from| &from[line]));
                let kept = Accumulator::product(before, decay[line]);
                let kept = kept.mul_add(add[line], factor);
                hvx::store_f32(to, kept.mul_add(second[line], old).to_f32());
            }
        }
    }
}

/// `m · decay + add · factor` for each row m, from one memory to another.
struct WriteRows<'a, const L: usize> {
    from: &'a Rows<L>,
    to: &'a mut Rows<L>,
    vectors: [&'a [Line; L]; 2],
    factors: &'a [f32; LANES],
}

impl<const L: usize> hvx::Kernel for WriteRows<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [decay, add] = self.vectors.map(|lines| lines.each_ref().map(hvx::load));
        for ((from, to), factor) in self.from.iter().zip(self.to).zip(self.factors) {
            let factor = splat_f32(*factor);
            for (((m, to), decay), add) in from.iter().zip(to).zip(decay).zip(add) {
                let kept = Accumulator::product(hvx::load_f32(m), decay);
                hvx::store_f32(to, kept.mul_add(add, factor).to_f32());
            }
        }
    }
}

/// One token by columns, as described at the top of this module.
struct ColumnStep<'a> {
    state: &'a mut [Line],
    weights: &'a [f32],
    decay: &'a [f32],
    keys: &'a [f32],
    values: &'a [Line],
    own: f32,
    outputs: &'a mut [Line],
}

impl hvx::Kernel for ColumnStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let lines = self.outputs.len();
        for (i, (output, value)) in self.outputs.iter_mut().zip(self.values).enumerate() {
            let value = hvx::load(value);
            let mut sum = Accumulator::product(value, splat_f32(self.own));
            let numbers = self.weights.iter().zip(self.decay).zip(self.keys);
            let rows = self.state.get_mut(i..).unwrap_or_default();
            for (m, ((weight, decay), key)) in rows.iter_mut().step_by(lines).zip(numbers) {
                let old = hvx::load(m);
                sum = sum.mul_add(old, splat_f32(*weight));
                let kept = Accumulator::product(old, splat_f32(*decay));
                hvx::store(m, kept.mul_add(value, splat_f32(*key)).to_f32());
            }
            hvx::store(output, sum.to_f32());
        }
    }
}
