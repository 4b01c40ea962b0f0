//! Rules of a chip's library: the checks of `rknn_matmul_create`.
//!
//! Log texts are the strings of librknnrt 2.3.2 where it has one. Which return code belongs to
//! which text is not documented, and `PARAM_INVALID` is assumed.

use std::ffi::c_int;

use super::{Options, vendor_error};
use crate::ffi::{Layout, MatmulInfo, MatmulShape, MatmulType, QuantType, code};
use crate::layout::{Elem, MatmulLayout, Soc};

/// A shape that passed the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dims {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
}

/// A request that passed the checks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepted {
    pub(super) layout: MatmulLayout,
    pub(super) b_layout: Layout,
    pub(super) native_ac: bool,
    /// `true` if the library accepts the request and its runs give zeros.
    pub(super) zeros: bool,
}

/// Checks all parameters but the shapes.
pub(super) fn check_info(options: &Options, info: &MatmulInfo) -> Result<Accepted, c_int> {
    let soc = options.soc;
    let Some(mut layout) = MatmulLayout::of(soc, info.matmul_type) else {
        vendor_error!(
            "rknn_matmul_create_dynamic_shape, unsupported matmul dtype : {} in this platform",
            type_name(info.matmul_type)
        );
        return Err(code::PARAM_INVALID);
    };
    let mut tiles = options.tiles.iter();
    if let Some((_, tile)) = tiles.find(|(matmul_type, _)| *matmul_type == info.matmul_type) {
        (layout.b.gn, layout.b.gk) = *tile;
    }
    let native_ac = match info.ac_layout {
        Layout::NORM => false,
        Layout::NATIVE => true,
        other => {
            vendor_error!("unsupported AC layout: {}", other.0);
            return Err(code::PARAM_INVALID);
        }
    };
    let b_known = match info.b_layout {
        Layout::NORM | Layout::NATIVE => true,
        // SOURCE: User Guide 2.3.0: not on RK3566/68; librknnrt's strings say "three types", and
        // which ones is a guess.
        Layout::TP_NORM => {
            !matches!(soc, Soc::Rk3562 | Soc::Rk3566)
                && matches!(
                    info.matmul_type,
                    MatmulType::F16_F16_F32 | MatmulType::I8_I8_I32 | MatmulType::F16_F16_F16
                )
        }
        _ => false,
    };
    if !b_known {
        vendor_error!("unsupported B layout: {}", info.b_layout.0);
        return Err(code::PARAM_INVALID);
    }
    if !(0..16).contains(&info.iommu_domain_id) {
        // Only logged, as the library does; afterwards the driver refuses every allocation and job.
        vendor_error!(
            "invalid iommu domain id: {}, reuse domain id: 0",
            info.iommu_domain_id
        );
    }
    Ok(Accepted {
        layout,
        b_layout: info.b_layout,
        native_ac,
        zeros: check_quantization(soc, info, native_ac)?,
    })
}

/// Checks the quantization granularity. Returns `true` if the library would compute zeros with it.
///
/// SOURCE: rknn-toolkit2 issue 550 (type 9, and type 2 with per-channel scales, on RK3588); strings
/// of librknnrt 2.3.2.
fn check_quantization(soc: Soc, info: &MatmulInfo, native_ac: bool) -> Result<bool, c_int> {
    let float_out = info.matmul_type == MatmulType::I8_I8_F32;
    if info.ac_quant_type != QuantType::PER_LAYER_SYM {
        vendor_error!("unsupported AC quant type: {}", info.ac_quant_type.0);
        return Err(code::PARAM_INVALID);
    }
    match info.b_quant_type {
        QuantType::PER_LAYER_SYM => Ok(float_out),
        QuantType::PER_CHANNEL_SYM
            if soc == Soc::Rk3588 && info.matmul_type == MatmulType::I8_I8_I32 =>
        {
            Ok(true)
        }
        QuantType::PER_CHANNEL_SYM
            if soc == Soc::Rk3576 && info.matmul_type == MatmulType::I8_I8_I32 =>
        {
            vendor_error!("Not implement 3576 int8 perchannel matmul");
            Err(code::PARAM_INVALID)
        }
        QuantType::PER_GROUP_SYM
            if float_out && native_ac && info.b_layout == Layout::NATIVE && info.group_size > 0 =>
        {
            if info.k % c_int::from(info.group_size) != 0 {
                vendor_error!("K: {} must align group size: {}", info.k, info.group_size);
                return Err(code::PARAM_INVALID);
            }
            Ok(true)
        }
        other => {
            vendor_error!("unsupported B quant type: {}", other.0);
            Err(code::PARAM_INVALID)
        }
    }
}

/// Checks one shape.
pub(super) fn check_shape(
    options: &Options,
    layout: &MatmulLayout,
    shape: MatmulShape,
) -> Result<Dims, c_int> {
    let positive = |value: c_int| usize::try_from(value).ok().filter(|value| *value > 0);
    let (Some(m), Some(k), Some(n)) = (positive(shape.m), positive(shape.k), positive(shape.n))
    else {
        vendor_error!(
            "invalid shape M = {}, K = {}, N = {}",
            shape.m,
            shape.k,
            shape.n
        );
        return Err(code::PARAM_INVALID);
    };
    if k % layout.k_align != 0 {
        vendor_error!("matmul K:{k} must be align with {}!", layout.k_align);
        return Err(code::PARAM_INVALID);
    }
    if n % layout.n_align != 0 {
        vendor_error!("matmul N:{n} must be align with {}!", layout.n_align);
        return Err(code::PARAM_INVALID);
    }
    if let Some(limit) = layout.k_max.filter(|limit| k > *limit) {
        vendor_error!("rknn_matmul_create, K({k}) > limit: {limit}");
        return Err(code::PARAM_INVALID);
    }
    if let Some(limit) = layout
        .n_max_documented
        .filter(|limit| options.documented_limits && n > *limit)
    {
        vendor_error!("rknn_matmul_create, N({n}) > limit: {limit}");
        return Err(code::PARAM_INVALID);
    }
    let shape = Dims { m, k, n };
    // Sizes are 32 bits in the ABI, and jobs address at most 4 GiB.
    let sizes = [
        layout.a.bytes(m, k),
        layout.b.bytes(k, n),
        layout.c.bytes(m, n),
    ];
    if sizes.iter().any(|size| u32::try_from(*size).is_err()) {
        vendor_error!(
            "need kernel tile for M = {m}, K = {k}, N = {n}, matmul type = {}, but not support kernel tile currently!",
            layout.a.elem.name()
        );
        return Err(code::PARAM_INVALID);
    }
    Ok(shape)
}

/// Returns `true` if the vendor's library ends the process when it gets this shape.
///
/// SOURCE: one open backend reports it for FP16 with 16384 < K < 18432 on RK3588, librknnrt 2.3.2.
pub(super) fn ends_the_process(soc: Soc, layout: &MatmulLayout, shape: Dims) -> bool {
    soc == Soc::Rk3588 && layout.a.elem == Elem::F16 && (16385..18432).contains(&shape.k)
}

/// Returns the vendor's name of a matmul type, for log texts.
fn type_name(matmul_type: MatmulType) -> String {
    let name = match matmul_type {
        MatmulType::F16_F16_F32 => "RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT32",
        MatmulType::I8_I8_I32 => "RKNN_INT8_MM_INT8_TO_INT32",
        MatmulType::I8_I8_I8 => "RKNN_INT8_MM_INT8_TO_INT8",
        MatmulType::F16_F16_F16 => "RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT16",
        MatmulType::F16_I8_F32 => "RKNN_FLOAT16_MM_INT8_TO_FLOAT32",
        MatmulType::F16_I8_F16 => "RKNN_FLOAT16_MM_INT8_TO_FLOAT16",
        MatmulType::F16_I4_F32 => "RKNN_FLOAT16_MM_INT4_TO_FLOAT32",
        MatmulType::F16_I4_F16 => "RKNN_FLOAT16_MM_INT4_TO_FLOAT16",
        MatmulType::I8_I8_F32 => "RKNN_INT8_MM_INT8_TO_FLOAT32",
        MatmulType::I4_I4_I16 => "RKNN_INT4_MM_INT4_TO_INT16",
        MatmulType::I8_I4_I32 => "RKNN_INT8_MM_INT4_TO_INT32",
        other => return other.0.to_string(),
    };
    name.to_owned()
}
