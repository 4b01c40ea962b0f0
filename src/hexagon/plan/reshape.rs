//! Changes the shape of operations whose kernels expect another shape than ggml's. Elements and
//! their places stay the same.

use crate::graph::{Op, Operation, Tensor};
use crate::tensor::Shape;

/// Returns the operation in the form that its kernel expects.
pub fn as_kernel_takes<'a>(operation: &Operation<'a>) -> Operation<'a> {
    match operation.op {
        Op::Concat => concat(operation),
        Op::RwkvWkv6 => wkv6(operation),
        Op::GroupNorm => group_norm(operation),
        _ => *operation,
    }
}

/// Returns a shape without gaps of elements of `bytes`.
fn dense(bytes: usize, ne: [usize; 4]) -> Shape {
    let rows = bytes * ne[0] * ne[1];
    let nb = [bytes, bytes * ne[0], rows, rows * ne[2]];
    Shape { ne, nb }
}

/// CONCAT with a source that has no elements is a copy of the other.
fn concat<'a>(operation: &Operation<'a>) -> Operation<'a> {
    let mut copy = *operation;
    let empty = |tensor: &Option<Tensor>| {
        (tensor.as_ref()).is_some_and(|tensor| tensor.shape.ne.contains(&0))
    };
    if let Some(index) = operation.src[..2].iter().position(empty) {
        copy.op = Op::Cpy;
        copy.src[index] = None;
    }
    copy
}

/// GROUP_NORM of whole groups without gaps is the NORM of a row for each group.
fn group_norm<'a>(operation: &Operation<'a>) -> Operation<'a> {
    let [groups, eps, ..] = operation.params;
    let Some(source) = &operation.src[0] else {
        return *operation;
    };
    let [width, height, channels, batch] = source.shape.ne;
    let groups = usize::try_from(groups).unwrap_or(0);
    let whole = groups > 0 && channels % groups == 0;
    let ne = [width, height, channels, batch];
    if !whole || source.shape != dense(4, ne) || operation.dst.shape != source.shape {
        return *operation;
    }
    let mut norm = *operation;
    norm.op = Op::Norm;
    norm.params[0] = eps;
    let rows = dense(4, [width * height * (channels / groups), groups, batch, 1]);
    for tensor in [&mut norm.dst]
        .into_iter()
        .chain(norm.src.iter_mut().flatten())
    {
        tensor.shape = rows;
    }
    norm
}

/// Returns RWKV_WKV6; for the loader's question, with sizes that fit.
///
/// SOURCE: llama.cpp 0.5.0, llama-model-loader.cpp, `weight_buft_supported`: 123 heads of 123
/// elements whatever the weight's shape is, and a state of four dimensions, which no graph has.
fn wkv6<'a>(operation: &Operation<'a>) -> Operation<'a> {
    let mut real = *operation;
    if let [Some(k), _, _, Some(first), _, Some(state), ..] = &mut real.src
        && state.shape.ne[2..] != [1, 1]
    {
        let [s, heads, ..] = k.shape.ne;
        let [_, sequences, ..] = state.shape.ne;
        first.shape = dense(4, [s, heads, 1, 1]);
        state.shape = dense(4, [s * s * heads, sequences, 1, 1]);
    }
    real
}

#[cfg(test)]
mod tests {
    use hexagon_ops::wire;

    use super::super::{Command, command};
    use super::*;
    use crate::graph::{PARAMS, Place, Role, sources};
    use crate::tensor::DType;

    fn tensor<'a>(ne: [usize; 4]) -> Tensor<'a> {
        Tensor {
            name: "",
            dtype: DType::F32,
            format: None,
            shape: dense(4, ne),
            place: Place::Device,
            role: Role::State,
            memory: None,
            packed_offset: 0,
            dequantize: None,
        }
    }

    #[test]
    fn joining_nothing_to_a_tensor_copies_it() {
        let (nothing, all) = ([256, 0, 1, 1], [256, 8, 1, 1]);
        for (a, b, source) in [(nothing, all, 2), (all, nothing, 1)] {
            let operation = Operation {
                op: Op::Concat,
                params: [1; PARAMS],
                dst: tensor(all),
                src: sources(&[tensor(a), tensor(b)]),
            };
            let Ok(Command::Tensor(body)) = command(8 << 20, &operation, false) else {
                panic!("{a:?} and {b:?}")
            };
            assert_eq!(body.kernel, wire::KERNEL_COPY);
            assert_eq!(body.src.map(|src| src.buffer), [source, 0, 0]);
        }
    }
}
