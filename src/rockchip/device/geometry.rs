//! The library's own description of its native layouts, queried before any weight is packed.

use std::sync::Arc;

use half::f16;
use rknpu_ops::ffi::MatmulInfo;
use rknpu_ops::layout::{Elem, MatmulLayout};

use crate::error::{Error, Result};
use crate::rockchip::caps::{self, Precision, RkCaps};
use crate::rockchip::driver::{Context, Memory, Rknn, RunOperands};

/// Tiles of B that some version of the library has on some chip: columns and elements of K.
///
/// SOURCE: rknn_matmul_api.h 2.3.2 and RKNN SDK User Guide 2.3.0 section 3.5, which differ for INT4
/// on RK3576.
const TILES: [(usize, usize); 5] = [(64, 32), (32, 32), (16, 32), (8, 32), (8, 16)];

/// A shape that every chip and arithmetic accepts, with more than one tile in each direction.
const M: i32 = 4;
const K: i32 = 128;
const N: i32 = 128;

/// Asks the library for the layouts of `precisions` and returns the chip with the tiles that it
/// has.
///
/// - `anchor`: the context that memory is made with
///
/// # Errors
/// `Geometry` if a layout is not known, `Vendor` if the library does not create a context.
pub(super) fn learn(
    rknn: &Arc<Rknn>,
    anchor: &Arc<Context>,
    caps: &'static RkCaps,
    precisions: &[Precision],
    library: (u32, u32, u32),
) -> Result<&'static RkCaps> {
    let mut tiles = caps.tiles.to_vec();
    for &precision in precisions {
        let Some(native) = caps.native(precision) else {
            continue;
        };
        let info = MatmulInfo::native(precision.matmul_type(), M, K, N);
        let context = Context::new(rknn, info, None)?;
        let Err(unlike) = context.expect(&native) else {
            continue;
        };
        let known = context.tile_of_b().filter(|tile| TILES.contains(tile));
        let Some((gn, gk)) = known else {
            return Err(unlike);
        };
        let mut other = native;
        (other.b.gn, other.b.gk) = (gn, gk);
        context.expect(&other)?;
        log::info!("{precision}: the library's tiles of weights are {gn} x {gk}: {unlike}");
        tiles.retain(|(known, _)| known.matmul_type() != precision.matmul_type());
        tiles.push((precision, (gn, gk)));
    }
    let learned = if tiles == caps.tiles {
        *caps
    } else {
        caps.with_tiles(tiles)
    };
    let n_wide = if library < caps::MIN_RKNNRT_WIDE {
        caps.n_max
    } else {
        widest(rknn, anchor, &learned, precisions)?
    };
    if learned.tiles == caps.tiles && n_wide == caps.n_wide {
        return Ok(caps);
    }
    Ok(RkCaps { n_wide, ..learned }.keep())
}

/// Returns the largest N of an INT8 or FP16 call: more than the documented one if the library
/// accepts it, lays it out as expected and computes it.
///
/// # Errors
/// As [`multiply_ones`], for the usual N.
fn widest(
    rknn: &Arc<Rknn>,
    anchor: &Arc<Context>,
    caps: &RkCaps,
    precisions: &[Precision],
) -> Result<usize> {
    if caps.n_wide <= caps.n_max {
        return Ok(caps.n_max);
    }
    let size = |size: usize| i32::try_from(size).unwrap_or(i32::MAX);
    let m = size(caps::MAX_RESULTS / caps.n_wide);
    let natives = precisions
        .iter()
        .filter(|precision| !precision.is_int4())
        .filter_map(|precision| Some((precision, caps.native(*precision)?)));
    let context = |precision: &Precision, m, n| {
        let info = MatmulInfo::native(precision.matmul_type(), m, K, n);
        Context::new(rknn, info, None)
    };
    // First try the usual N: if that fails, the wide N is not the cause. Wrong results are left to
    // the self-test.
    for (precision, native) in natives.clone() {
        match multiply_ones(context(precision, M, N)?, anchor, &native, N) {
            Err(Error::SelfTest { .. }) => {}
            other => other?,
        }
    }
    let n = size(caps.n_wide);
    for (precision, native) in natives {
        let checked = context(precision, m, n)
            .and_then(|context| context.expect(&native))
            .and_then(|()| context(precision, M, n))
            .and_then(|context| multiply_ones(context, anchor, &native, n));
        if let Err(error) = checked {
            log::info!("{precision}: N is at most {}: {error}", caps.n_max);
            return Ok(caps.n_max);
        }
    }
    Ok(caps.n_wide)
}

/// Multiplies matrices of ones, which look the same in any layout, with the shape [`M`], [`K`],
/// `n`.
///
/// # Errors
/// `SelfTest` if a result is not K, `Vendor`, or a lack of memory.
fn multiply_ones(
    mut context: Context,
    anchor: &Arc<Context>,
    native: &MatmulLayout,
    n: i32,
) -> Result<()> {
    let [m, k, n] = [M, K, n].map(|size| usize::try_from(size).unwrap_or(0));
    let of_ones = |elem, bytes| {
        let mut memory = Memory::new(anchor, bytes)?;
        match elem {
            Elem::F16 => bytemuck::cast_slice_mut(memory.bytes_mut()).fill(f16::ONE),
            _ => memory.bytes_mut().fill(1),
        }
        memory.sync_to_device()?;
        Ok::<_, Error>(memory)
    };
    let a = of_ones(native.a.elem, native.a.bytes(m, k))?;
    let b = of_ones(native.b.elem, native.b.bytes(k, n))?;
    let b = b.view(0, native.b.bytes(k, n))?;
    let c_bytes = native.c.bytes(m, n);
    let mut c = Memory::for_results(anchor, c_bytes)?;
    context.bind_and_run(RunOperands {
        a: &a,
        b: &b,
        c: &mut c,
    })?;
    c.sync_from_device()?;
    let want = match native.c.elem {
        Elem::F32 => (K as f32).to_ne_bytes(),
        _ => K.to_ne_bytes(),
    };
    let (values, _) = c.bytes()[..c_bytes].as_chunks();
    let wrong = (m * n).saturating_sub(values.iter().filter(|value| **value == want).count());
    if wrong == 0 {
        return Ok(());
    }
    Err(Error::SelfTest {
        test: format!("{wrong} of {} sums with N={n}", m * n),
        have: 1.0,
        limit: 0.0,
    })
}
