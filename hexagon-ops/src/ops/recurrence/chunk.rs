//! GATED_DELTA_NET of many tokens: 64 tokens of a head at a time, by products on the matrix unit.
//!
//! With `D` the decay from one token to another, and S the state before the chunk, the changes δ of
//! the state by its tokens solve a triangular system, which is the rule of the tokens written at
//! once:
//!
//! ```text
//! δ_t = beta_t · (v_t - D_t S k_t - Σ D_ts (k_s · k_t) δ_s)     s < t
//!
//! vector units   split keys, queries and values, and transpose keys
//! matrix unit    K Kᵀ, Q Kᵀ, W = [beta] V - [beta · D] K Sᵀ           [x] is the diagonal matrix of x
//! vector units   A = beta · D · K Kᵀ below the diagonal, and of each 32 tokens (I + A)⁻¹ row by row
//! matrix unit    the rest of (I + A)⁻¹, from them; δ = (I + A)⁻¹ W
//!                √S y = [D] Q Sᵀ + (D · Q Kᵀ) δ, and S'ᵀ = D Sᵀ + Kᵀ [D] δ
//! vector units   write y
//! ```
//!
//! 1. **Two halves.** FP16 alone would leave errors of 2^-11 in states that thousands of tokens
//!    change, so matrices are two halves ([`crate::ops::halves`]). A product's two halves are an
//!    operand of the next product, so that vector units touch only matrices that come from
//!    memory, go there, or are not products; the state stays in halves from one chunk to the next.
//! 2. **Transposed state.** The state has a row for each element of a key, so that products with it
//!    take it as weights or results without moving it. It is transposed when the first chunk
//!    begins, and after the last one.
//! 3. **Range.** Where an operand is so large that FP16 does not hold a product, or so small that
//!    its low half is lost, tokens are computed one by one instead ([`super::state`]).

mod head;
mod space;
#[cfg(test)]
mod tests;
mod vectors;

use self::head::Head;
use self::space::Space;
pub(in crate::ops) use self::vectors::SplitRows;
use super::{Inputs, MAX_TASKS, Recurrence};
use crate::error::Result;
use crate::hmx::{Form, Hmx, ScaleBlock};
use crate::layout::Tile;
use crate::ops::halves::{Unit, on_diagonal};
use crate::rt::{Arena, Engine, SharedColumns};

/// Tokens of a chunk.
const TOKENS: usize = 64;
/// Fewest tokens of a sequence that are computed in chunks; fewer are at least as fast one by one.
const FEWEST: usize = 12;

/// Computes the operation if it has enough tokens, one decay for each, and the state after the last
/// one only. Returns `false` if `outputs` and `states` are to be computed token by token.
pub(super) fn chunked(
    engine: &Engine,
    vtcm: &mut [Tile],
    hmx: Option<&mut Hmx>,
    inputs: &Inputs<'_>,
    outputs: &mut [f32],
    states: &mut [f32],
) -> Result<bool> {
    let sizes = &inputs.sizes;
    let is_supported = inputs.kind == Recurrence::GatedDelta(1)
        && inputs.src[3].shape.ne[0] == 1
        && sizes.tokens >= FEWEST
        && inputs.whole_state(0, 0).is_some();
    let has_unit = |hmx: &&mut Hmx| hmx.form() != Form::Vectors;
    let Some(hmx) = hmx.filter(has_unit).filter(|_| is_supported) else {
        return Ok(false);
    };
    match sizes.columns {
        64 => heads::<2, 64>(engine, vtcm, hmx, inputs, outputs, states),
        128 => heads::<4, 128>(engine, vtcm, hmx, inputs, outputs, states),
        _ => Ok(false),
    }
}

/// Takes as many heads of `E = 32 · L` columns at a time through all tokens as there are threads.
fn heads<const L: usize, const E: usize>(
    engine: &Engine,
    vtcm: &mut [Tile],
    hmx: &mut Hmx,
    inputs: &Inputs<'_>,
    outputs: &mut [f32],
    states: &mut [f32],
) -> Result<bool> {
    let sizes = &inputs.sizes;
    let token_elems = sizes.heads * sizes.rows;
    let mut outputs = SharedColumns::new(outputs, token_elems);
    let mut states = SharedColumns::new(states, token_elems * sizes.columns);
    let mut arena = Arena::new(vtcm);
    let Ok(&mut [ref mut negated, ref mut ones, ref mut scale]) = arena.tiles("unit matrix", 3)
    else {
        return Ok(false);
    };
    let scale: &mut [ScaleBlock] = bytemuck::cast_slice_mut(core::slice::from_mut(scale));
    scale[0] = hmx.form().unchanged();
    on_diagonal(negated, 0xbc00);
    on_diagonal(ones, 0xffff);
    let most = engine.threads().min(MAX_TASKS).min(sizes.heads);
    let mut spaces: [Option<Space<'_, L>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut n_tasks = 0;
    for space in spaces.iter_mut().take(most) {
        let Ok(made) = Space::new(&mut arena) else {
            break;
        };
        *space = Some(made);
        n_tasks += 1;
    }
    if n_tasks == 0 {
        return Ok(false);
    }
    hmx.take_fault();
    let mut unit = Unit { hmx, negated };
    engine.on_matrix_thread(|| {
        unit.hmx.clear();
        unit.hmx.load_scale(&scale[0]);
    });
    let mut is_exact = true;
    for start in (0..sizes.heads).step_by(n_tasks) {
        let mut tasks: [Option<Head<'_, '_, L, E>>; MAX_TASKS] = [const { None }; MAX_TASKS];
        let heads = start..sizes.heads.min(start + n_tasks);
        let n = heads.len();
        for ((task, space), head) in tasks.iter_mut().zip(&mut spaces).zip(heads) {
            *task = space.as_mut().map(|space| Head {
                head,
                outputs: outputs.split_off(sizes.rows),
                states: states.split_off(sizes.rows * sizes.columns),
                space,
                ones,
            });
        }
        let tasks = &mut tasks[..n];
        for sequence in 0..sizes.sequences {
            run(engine, &mut unit, tasks, inputs, sequence);
        }
        is_exact &= tasks
            .iter()
            .flatten()
            .all(|task| task.space.largest.is_exact());
    }
    is_exact &= hmx.take_fault().is_none();
    Ok(is_exact)
}

/// Takes heads through the tokens of a sequence.
fn run<const L: usize, const E: usize>(
    engine: &Engine,
    unit: &mut Unit<'_>,
    tasks: &mut [Option<Head<'_, '_, L, E>>],
    inputs: &Inputs<'_>,
    sequence: usize,
) {
    for first in (0..inputs.sizes.tokens).step_by(TOKENS) {
        let at = [first, sequence];
        engine.step(None, tasks, |task| {
            task.iter_mut().for_each(|task| {
                if first == 0 {
                    task.begin(inputs, sequence);
                }
                task.read(inputs, at);
            });
        });
        engine.on_matrix_thread(|| {
            tasks
                .iter_mut()
                .flatten()
                .for_each(|head| head.read_old(unit))
        });
        engine.step(None, tasks, |task| task.iter_mut().for_each(Head::solve));
        engine.on_matrix_thread(|| {
            tasks
                .iter_mut()
                .flatten()
                .for_each(|head| head.change(unit))
        });
        engine.step(None, tasks, |task| {
            task.iter_mut().for_each(|task| {
                task.finish(inputs, at);
                if first + TOKENS >= inputs.sizes.tokens {
                    task.end(sequence);
                }
            });
        });
    }
}
