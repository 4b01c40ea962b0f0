//! Attributes of the three tensors, as a library reports them.

use std::ffi::c_char;

use super::{IoAttr, TensorAttr, TensorType};
use crate::layout::{Elem, MatmulLayout};

/// Returns the attributes of native operands of a product of `[m, k, n]`, whose sizes fit into 32
/// bits.
pub(crate) fn native(layout: &MatmulLayout, [m, k, n]: [usize; 3]) -> IoAttr {
    let MatmulLayout { a, b, c, .. } = *layout;
    IoAttr {
        a: attr(b'A', &a.dims(m, k), a.bytes(m, k), a.elem),
        b: attr(b'B', &b.dims(k, n), b.bytes(k, n), b.elem),
        c: attr(b'C', &c.dims(m, n), c.bytes(m, n), c.elem),
    }
}

/// Returns the attribute of one tensor.
pub(crate) fn attr(name: u8, dims: &[usize], size: usize, elem: Elem) -> TensorAttr {
    // Callers have refused larger numbers.
    let to_u32 = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let mut attr = TensorAttr {
        n_dims: to_u32(dims.len()),
        size: to_u32(size),
        tensor_type: match elem {
            Elem::I4 => TensorType::I4,
            Elem::I8 => TensorType::I8,
            Elem::I16 => TensorType::I16,
            Elem::F16 => TensorType::F16,
            Elem::I32 => TensorType::I32,
            Elem::F32 => TensorType::F32,
        },
        ..TensorAttr::ZERO
    };
    attr.name[0] = c_char::from_ne_bytes([name]);
    for (to, from) in attr.dims.iter_mut().zip(dims) {
        *to = to_u32(*from);
    }
    attr
}
