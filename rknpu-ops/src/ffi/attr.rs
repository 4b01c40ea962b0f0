//! Attributes of the three tensors, as a library reports them.

use std::ffi::c_char;

use super::{IoAttr, Layout, TensorAttr, TensorType};
use crate::layout::{Elem, MatmulLayout};

/// Returns the attributes of the operands of a product of `[m, k, n]`, whose sizes fit into 32
/// bits.
///
/// - `ac`: the layout of A and C; `b`: that of B
pub(crate) fn io(
    layout: &MatmulLayout,
    [m, k, n]: [usize; 3],
    ac: Layout,
    b_layout: Layout,
) -> IoAttr {
    let MatmulLayout { a, b, c, .. } = *layout;
    let attr_a = |dims: &[usize]| attr(b'A', dims, a.bytes(m, k), a.elem);
    let attr_b = |dims: &[usize], size| attr(b'B', dims, size, b.elem);
    let attr_c = |dims: &[usize]| attr(b'C', dims, c.bytes(m, n), c.elem);
    let (attr_a, attr_c) = if ac == Layout::NATIVE {
        (attr_a(&a.dims(m, k)), attr_c(&c.dims(m, n)))
    } else {
        (attr_a(&[m, k]), attr_c(&[m, n]))
    };
    let attr_b = match b_layout {
        Layout::NATIVE => attr_b(&b.dims(k, n), b.bytes(k, n)),
        Layout::TP_NORM => attr_b(&[n, k], b.elem.bytes(k * n)),
        _ => attr_b(&[k, n], b.elem.bytes(k * n)),
    };
    IoAttr {
        a: attr_a,
        b: attr_b,
        c: attr_c,
    }
}

/// Returns the attribute of one tensor.
fn attr(name: u8, dims: &[usize], size: usize, elem: Elem) -> TensorAttr {
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
