//! Proves that blocks become the values that llama.cpp's own Python code gives
//! (`scripts/golden.py`), bit for bit.

use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;

/// Types with a dequantizer, all of them in the golden file.
const TYPES: usize = 13;

#[test]
fn blocks_become_the_values_of_ggmls_own_conversion() {
    let mut rest = &include_bytes!("golden/dequantize.bin")[..];
    let word = |rest: &mut &[u8]| {
        let (word, after) = rest.split_first_chunk().unwrap();
        *rest = after;
        u32::from_le_bytes(*word)
    };
    let mut seen = 0;
    while !rest.is_empty() {
        let (number, bytes) = (word(&mut rest), word(&mut rest) as usize);
        let dtype = GgmlType::from_number(number).unwrap();
        let elems = bytes / dtype.block_bytes() * dtype.block_elems();
        let (blocks, after) = rest.split_at(bytes);
        let (values, after) = after.split_at(elems * 4);
        rest = after;
        let mut out = vec![f32::NAN; elems];
        dequantize::of(dtype).unwrap().dequantize(blocks, &mut out);
        let want = values.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
        for (index, (have, want)) in out.iter().zip(want).enumerate() {
            let (have_bits, want_bits) = (have.to_bits(), want.to_bits());
            // The compiler may choose either sign for a zero, here and in ggml.
            let same = have_bits == want_bits || (*have == 0.0 && want == 0.0);
            assert!(same, "{} {index}: {have} is not {want}", dtype.name());
        }
        seen += 1;
    }
    assert_eq!(seen, TYPES);
}

#[test]
fn types_without_a_way_say_so() {
    let known = |number| {
        let dtype = GgmlType::from_number(number)?;
        dequantize::of(dtype).map(|_| dtype.name())
    };
    // F32 and BF16 are in addition to the quantized types.
    assert_eq!((0..64).filter_map(known).count(), TYPES + 2);
    assert!(dequantize::of(GgmlType::F16).is_none());
}
