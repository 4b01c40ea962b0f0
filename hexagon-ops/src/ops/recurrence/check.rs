//! Sizes of a recurrence, and whether its operands have them.

use super::{Inputs, Recurrence};
use crate::error::{Error, Result};
use crate::layout::LINE_BYTES;
use crate::ops::tensor::{Shape, Source, Type};
use crate::wire::{STATE_BYTES, WIDE_SOURCES};

/// Rows whose outputs fill a line.
const GROUP: usize = 32;

/// Sizes of a recurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Rows of a head's state.
    pub(super) rows: usize,
    /// Columns of a head's state.
    pub(super) columns: usize,
    pub(super) heads: usize,
    /// Tokens of a sequence.
    pub(super) tokens: usize,
    pub(super) sequences: usize,
    /// States that are returned.
    pub(super) kept: usize,
    /// Heads in a row that may be in one matrix.
    pub(super) together: usize,
}

impl Sizes {
    /// Returns the end of the heads that are in one matrix, which begin with `head`.
    pub(super) fn unit_end(&self, head: usize) -> usize {
        let most = self.unit_heads();
        let rest = self.together - head % self.together;
        head + most.min(rest)
    }

    /// Returns the most heads of a matrix: their rows do not exceed a line of outputs.
    fn unit_heads(&self) -> usize {
        (GROUP / self.rows).clamp(1, self.together)
    }

    /// Returns the most rows of a matrix.
    pub(super) fn unit_rows(&self) -> usize {
        self.rows * self.unit_heads()
    }

    /// Returns the number of elements of the result; `None` if that overflows.
    fn elems(&self) -> Option<usize> {
        let product = |sizes: &[usize]| sizes.iter().try_fold(1, |p: usize, n| p.checked_mul(*n));
        let token = product(&[self.rows, self.heads, self.sequences])?;
        let outputs = product(&[token, self.tokens])?;
        outputs.checked_add(product(&[token, self.columns, self.kept])?)
    }

    /// Returns the bytes of a head's state; `None` if that overflows.
    fn state_bytes(&self) -> Option<usize> {
        let line = LINE_BYTES / size_of::<f32>();
        let row = self.columns.div_ceil(line).checked_mul(LINE_BYTES)?;
        row.checked_mul(self.rows.checked_next_multiple_of(GROUP)?)
    }
}

/// Checks the operands of a recurrence.
///
/// # Errors
/// `Operand` if one is missing, or its type, shape or strides are wrong.
pub(super) fn check<'a>(
    kind: Recurrence,
    dst: &Shape,
    src: &[Source<'a>; WIDE_SOURCES],
) -> Result<Inputs<'a>> {
    let count = match kind {
        Recurrence::GatedLinear(_) => 5,
        Recurrence::GatedDelta(_) | Recurrence::Wkv6 => 6,
        Recurrence::SsmScan(_) | Recurrence::Wkv7 => 7,
    };
    let mut views = [src[0].apart()?; WIDE_SOURCES];
    for (i, (view, src)) in views.iter_mut().zip(src).enumerate() {
        match src {
            Source::Apart(given) if i < count => *view = *given,
            Source::None if i >= count => {}
            _ => return Err(Error::Operand),
        }
    }
    let ids = matches!(kind, Recurrence::SsmScan(_)).then_some(6);
    for (i, view) in views.iter().enumerate().take(count) {
        let dtype = if Some(i) == ids { Type::I32 } else { Type::F32 };
        if view.shape.dtype != dtype || !view.shape.has_dense_rows() {
            return Err(Error::Operand);
        }
    }
    let sizes = sizes(kind, &views.map(|view| view.shape.ne)).ok_or(Error::Operand)?;
    let is_result = dst.dtype == Type::F32 && dst.is_gapless();
    let fits = sizes
        .state_bytes()
        .is_some_and(|bytes| bytes <= STATE_BYTES);
    if !is_result || !fits || sizes.elems() != Some(dst.elems()) {
        return Err(Error::Operand);
    }
    Ok(Inputs {
        kind,
        sizes,
        src: views,
    })
}

/// Returns the sizes that the sources agree on.
fn sizes(kind: Recurrence, ne: &[[usize; 4]; WIDE_SOURCES]) -> Option<Sizes> {
    match kind {
        Recurrence::SsmScan(kept) => ssm_scan(kept, ne),
        Recurrence::GatedDelta(kept) => gated_delta(kept, ne),
        Recurrence::GatedLinear(_) => linear(ne, [0, 1, 2, 3].as_slice(), 4),
        Recurrence::Wkv6 => {
            let [s, heads, ..] = ne[0];
            let first = ne[3] == [s, heads, 1, 1];
            linear(ne, [0, 1, 2, 4].as_slice(), 5).filter(|_| first)
        }
        Recurrence::Wkv7 => linear(ne, [0, 1, 2, 3, 4, 5].as_slice(), 6),
    }
}

fn ssm_scan(kept: usize, ne: &[[usize; 4]; WIDE_SOURCES]) -> Option<Sizes> {
    let [s, x, dt, a, b, c, ids] = *ne;
    let [columns, rows, heads, _] = s;
    let [_, _, tokens, sequences] = x;
    let groups = b[1];
    let agree = x[..2] == [rows, heads]
        && dt == [heads, tokens, sequences, 1]
        && (a == [1, heads, 1, 1] || (a == [columns, heads, 1, 1] && kept == 1))
        && b == [columns, groups, tokens, sequences]
        && c == b
        && ids == [sequences, 1, 1, 1]
        && kept > 0;
    let per_group = heads.checked_div(groups).filter(|n| n * groups == heads)?;
    agree.then_some(Sizes {
        rows,
        columns,
        heads,
        tokens,
        sequences,
        kept,
        // With a single decay, a head's state is decayed as it is updated.
        together: if a[0] == 1 { 1 } else { per_group },
    })
}

fn gated_delta(kept: usize, ne: &[[usize; 4]; WIDE_SOURCES]) -> Option<Sizes> {
    let [q, k, v, g, beta, state, _] = *ne;
    let [s, heads, tokens, sequences] = v;
    let shares = |source: [usize; 4]| {
        [source[0], source[2]] == [s, tokens] && sequences.is_multiple_of(source[3])
    };
    let agree = shares(q)
        && shares(k)
        && (g[0] == 1 || g[0] == s)
        && g[1..] == v[1..]
        && beta == [1, heads, tokens, sequences]
        && state == [s, s, heads, sequences]
        && kept > 0;
    agree.then_some(Sizes {
        rows: s,
        columns: s,
        heads,
        tokens,
        sequences,
        kept,
        together: 1,
    })
}

/// Returns the sizes of an operation whose sources `same` have one shape, and whose state is source
/// `state`.
fn linear(ne: &[[usize; 4]; WIDE_SOURCES], same: &[usize], state: usize) -> Option<Sizes> {
    let [s, heads, all_tokens, _] = ne[same[0]];
    let [elems, sequences, d2, d3] = ne[state];
    let agree = same.iter().all(|i| ne[*i] == [s, heads, all_tokens, 1])
        && Some(elems) == s.checked_mul(s).and_then(|n| n.checked_mul(heads))
        && [d2, d3] == [1, 1]
        && all_tokens.is_multiple_of(sequences);
    agree.then_some(Sizes {
        rows: s,
        columns: s,
        heads,
        tokens: all_tokens / sequences,
        sequences,
        kept: 1,
        together: 1,
    })
}
