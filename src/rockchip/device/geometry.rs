//! The library's own description of its native layouts, asked for before any weight is laid out.

use std::sync::Arc;

use rknpu_ops::ffi::MatmulInfo;

use crate::error::Result;
use crate::rockchip::caps::{self, Precision, RkCaps};
use crate::rockchip::driver::{Context, Rknn};

/// Tiles of B that some version of the library has on some chip: columns and elements of K.
///
/// SOURCE: rknn_matmul_api.h 2.3.2 and RKNN SDK User Guide 2.3.0 section 3.5, which differ for INT4 on RK3576.
const TILES: [(usize, usize); 5] = [(64, 32), (32, 32), (16, 32), (8, 32), (8, 16)];

/// A shape that every chip and arithmetic takes, with more than one tile in each direction.
const M: i32 = 4;
const K: i32 = 128;
const N: i32 = 128;

/// Asks the library for the layouts of `precisions` and returns the chip with the tiles that it has.
///
/// # Errors
/// `Geometry` if a layout is not known, `Vendor` if the library does not create a context.
pub(super) fn learn(
    rknn: &Arc<Rknn>,
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
        log::info!("{precision:?}: the library's tiles of weights are {gn} x {gk}: {unlike}");
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
        widest(rknn, &learned, precisions)
    };
    if learned.tiles == caps.tiles && n_wide == caps.n_wide {
        return Ok(caps);
    }
    Ok(RkCaps { n_wide, ..learned }.keep())
}

/// Returns the largest N of an INT8 or FP16 call: more than the documented one if the library takes
/// it, and lays it out as expected.
fn widest(rknn: &Arc<Rknn>, caps: &RkCaps, precisions: &[Precision]) -> usize {
    if caps.n_wide <= caps.n_max {
        return caps.n_max;
    }
    let size = |size: usize| i32::try_from(size).unwrap_or(i32::MAX);
    let m = size(caps::MAX_RESULTS / caps.n_wide);
    for &precision in precisions.iter().filter(|precision| !precision.is_int4()) {
        let Some(native) = caps.native(precision) else {
            continue;
        };
        let info = MatmulInfo::native(precision.matmul_type(), m, K, size(caps.n_wide));
        let checked = Context::new(rknn, info, None).and_then(|context| context.expect(&native));
        if let Err(error) = checked {
            log::info!("{precision:?}: N is at most {}: {error}", caps.n_max);
            return caps.n_max;
        }
    }
    caps.n_wide
}
