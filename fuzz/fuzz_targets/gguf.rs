//! Any bytes are refused as a GGUF, or read as one whose tensors are inside of the file and do not
//! overlap.
#![no_main]

use ggml_rust_npu::gguf::Header;
use ggml_rust_npu_fuzz::check_message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let header = match Header::parse(bytes) {
        Ok(header) => header,
        Err(error) => return check_message(&error),
    };
    let mut ranges = Vec::new();
    for tensor in &header.tensors {
        assert!(std::ptr::eq(header.tensor(&tensor.name).unwrap(), tensor));
        let elements: usize = tensor.ne.iter().product();
        let row = tensor.dtype.row_bytes(tensor.ne[0]).unwrap();
        assert_eq!(row * tensor.rows(), tensor.range.len());
        assert_eq!(elements, tensor.ne[0] * tensor.rows());
        assert_eq!(bytes[tensor.range.clone()].len(), tensor.range.len());
        if !tensor.range.is_empty() {
            ranges.push(tensor.range.clone());
        }
    }
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    for entry in &header.entries {
        assert_eq!(bytes[entry.range.clone()].len(), entry.range.len());
        assert!(std::ptr::eq(header.get(&entry.key).unwrap(), &entry.value));
    }
});
