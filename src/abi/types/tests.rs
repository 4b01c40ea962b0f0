//! Tests of the translation of C's tensors.

use super::*;

/// Writes the number of values to each value.
unsafe extern "C" fn count_values(_blocks: *const c_void, out: *mut f32, n: i64) {
    let n = usize::try_from(n).unwrap();
    // SAFETY: the caller promises that there are `n` values.
    let out = unsafe { std::slice::from_raw_parts_mut(out, n) };
    out.fill(n as f32);
}

/// A tensor of two rows of 256, as C fills it in.
fn filled(dtype: u32, format: u32, (block_elems, block_bytes): (u32, u32)) -> NpuTensor {
    // SAFETY: numbers, NULL pointers, and no function.
    let mut tensor: NpuTensor = unsafe { std::mem::zeroed() };
    (tensor.dtype, tensor.format) = (dtype, format);
    (tensor.block_elems, tensor.block_bytes) = (block_elems, block_bytes);
    let row = 256 / u64::from(block_elems.max(1)) * u64::from(block_bytes);
    tensor.ne = [256, 2, 1, 1];
    tensor.nb = [block_bytes.into(), row, 2 * row, 2 * row];
    tensor.to_float = (dtype == NPU_DTYPE_QUANTIZED).then_some(count_values);
    tensor
}

/// Types of tensors are those that the reader of GGUF files knows by the same names.
#[test]
fn a_tensor_has_the_type_and_the_format_that_ggml_names() {
    for (ggml, dtype, format) in [
        ("F32", NPU_DTYPE_F32, NPU_FORMAT_NONE),
        ("F16", NPU_DTYPE_F16, NPU_FORMAT_NONE),
        ("BF16", NPU_DTYPE_BF16, NPU_FORMAT_NONE),
        ("I32", NPU_DTYPE_I32, NPU_FORMAT_NONE),
        ("F64", NPU_DTYPE_OTHER, NPU_FORMAT_NONE),
        ("Q4_0", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q4_0),
        ("Q4_1", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q4_1),
        ("Q8_0", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q8_0),
        ("IQ4_NL", NPU_DTYPE_QUANTIZED, NPU_FORMAT_IQ4_NL),
        ("MXFP4", NPU_DTYPE_QUANTIZED, NPU_FORMAT_MXFP4),
        ("Q4_K", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q4_K),
        ("Q5_0", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q5_0),
        ("Q6_K", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q6_K),
        ("Q5_1", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q5_1),
        ("Q5_K", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q5_K),
        ("IQ4_XS", NPU_DTYPE_QUANTIZED, NPU_FORMAT_IQ4_XS),
        ("Q3_K", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q3_K),
        ("Q2_K", NPU_DTYPE_QUANTIZED, NPU_FORMAT_Q2_K),
        ("TQ1_0", NPU_DTYPE_QUANTIZED, NPU_FORMAT_NONE),
    ] {
        let mut types = (0..64).filter_map(GgmlType::from_number);
        let known = types.find(|known| known.name() == ggml).unwrap();
        let block =
            [known.block_elems(), known.block_bytes()].map(|size| u32::try_from(size).unwrap());
        let tensor = filled(dtype, format, block.into());
        let have = metadata(&tensor).unwrap();
        assert_eq!((have.dtype, have.format), known.tensor_type(), "{ggml}");
    }
    // Index tensors and caches, whose types cannot be weights.
    for (dtype, is, bytes) in [
        (NPU_DTYPE_I8, DType::I8, 1),
        (NPU_DTYPE_I16, DType::I16, 2),
        (NPU_DTYPE_I64, DType::I64, 8),
    ] {
        let tensor = filled(dtype, NPU_FORMAT_NONE, (1, bytes));
        assert_eq!(metadata(&tensor).unwrap().dtype, is);
    }
}

/// Blocks of no elements or bytes would be divided by, and a type without a function is read by
/// nobody.
#[test]
fn a_quantized_tensor_without_its_blocks_or_its_function_is_of_no_known_type() {
    let right = filled(NPU_DTYPE_QUANTIZED, NPU_FORMAT_NONE, (32, 18));
    for change in [
        (|tensor| tensor.block_elems = 0) as fn(&mut NpuTensor),
        |tensor| tensor.block_bytes = 0,
        |tensor| tensor.to_float = None,
    ] {
        let mut wrong = right;
        change(&mut wrong);
        assert_eq!(metadata(&wrong).unwrap().dtype, DType::Other);
    }
    let have = metadata(&right).unwrap();
    let mut values = [0.0; 64];
    have.dequantize.unwrap().dequantize(&[0; 36], &mut values);
    assert_eq!(values, [64.0; 64]);
}

#[test]
fn a_tensor_has_the_place_the_role_and_the_name_that_c_gives_it() {
    let mut tensor = filled(NPU_DTYPE_F32, NPU_FORMAT_NONE, (1, 4));
    for (place, is) in [
        (NPU_PLACE_NONE, Place::Unknown),
        (NPU_PLACE_HOST, Place::Host),
        (NPU_PLACE_PACKED, Place::Packed),
        (NPU_PLACE_DEVICE, Place::Device),
        (NPU_PLACE_OTHER, Place::Foreign),
        (99, Place::Foreign),
    ] {
        tensor.place = place;
        assert_eq!(metadata(&tensor).unwrap().place, is);
    }
    for (role, is) in [
        (NPU_ROLE_RESULT, Role::Result),
        (NPU_ROLE_WEIGHTS, Role::Weights),
        (NPU_ROLE_STATE, Role::State),
    ] {
        tensor.role = role;
        assert_eq!(metadata(&tensor).unwrap().role, is);
    }
    assert_eq!(name(&tensor), "?");
    for (bytes, is) in [
        (c"blk.0.attn_q.weight", "blk.0.attn_q.weight"),
        (c"\xff", "?"),
    ] {
        tensor.name = bytes.as_ptr();
        assert_eq!(name(&tensor), is);
    }
}
