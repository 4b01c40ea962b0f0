//! COUNT_EQUAL: the number of equal elements of two tensors of i32.

use super::tensor::{Source, Type, View, ViewMut};
use crate::error::{Error, Result};
use crate::hvx::{self, or, shr_w, splat_w, sub_w};
use crate::rt::Engine;

/// Counts the different elements of two rows without gaps.
struct CountDifferent<'a> {
    a: &'a [i32],
    b: &'a [i32],
}

impl hvx::Kernel for CountDifferent<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let ((a, a_rest), (b, b_rest)) = (self.a.as_chunks::<32>(), self.b.as_chunks::<32>());
        let mut counts = splat_w(0);
        for (a, b) in a.iter().zip(b) {
            let load = |words: &[i32; 32]| hvx::load_f32(bytemuck::cast_ref(words));
            let (a, b) = (load(a), load(b));
            // If two numbers differ, one of the two differences is negative.
            let signs = or(sub_w(a, b), sub_w(b, a));
            counts = hvx::add_w(counts, shr_w(signs, 31));
        }
        let mut lanes = [0.0; 32];
        hvx::store_f32(&mut lanes, counts);
        let lanes: &[u32; 32] = bytemuck::cast_ref(&lanes);
        let rest = a_rest.iter().zip(b_rest).filter(|(a, b)| a != b).count();
        lanes.iter().map(|count| u64::from(*count)).sum::<u64>() + rest as u64
    }
}

/// Returns the number of different elements of row `at`.
fn different(a: &View<'_>, b: &View<'_>, at: [usize; 3]) -> u64 {
    if let (Some(a), Some(b)) = (a.words(at), b.words(at)) {
        return hvx::widest(CountDifferent { a, b });
    }
    let differs = |k: &usize| a.index(*k, at) != b.index(*k, at);
    (0..a.shape.ne[0]).filter(differs).count() as u64
}

/// Counts the elements at the same place that are equal.
///
/// - `src`: i32 of one shape
/// - `dst`: a single i64
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn count_equal(engine: &Engine, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let (a, b) = (src[0].apart()?, src[1].apart()?);
    let ne = a.shape.ne;
    let types = [a.shape.dtype, b.shape.dtype] == [Type::I32; 2];
    let result = dst.shape.dtype == Type::I64 && dst.shape.ne == [1; 4];
    if !types || !result || b.shape.ne != ne {
        return Err(Error::Operand);
    }
    // A single row.
    let packets = || 0;
    dst.for_rows(engine, packets, |mut row| {
        let mut equal = a.shape.elems() as u64;
        for i3 in 0..ne[3] {
            for i2 in 0..ne[2] {
                for i1 in 0..ne[1] {
                    equal -= different(&a, &b, [i1, i2, i3]);
                }
            }
        }
        row.write_number(equal.cast_signed());
    });
    Ok(())
}
