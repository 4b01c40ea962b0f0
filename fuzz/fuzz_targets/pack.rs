//! Any bytes are refused as a pack file, or read as one whose payloads lie in the file, apart from each other. The hash of
//! the head is made to fit, and the file as long as it says, so that what is behind these checks is reached.
#![no_main]

use ggml_rust_npu::packfile::Table;
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_128;

/// Longest file that is made.
const FILE_BYTES: usize = 1 << 16;

/// The number at an offset, if it is there and small.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let number = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
    usize::try_from(number).ok().filter(|number| *number <= FILE_BYTES)
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Table::parse(bytes);
    let mut bytes = bytes.to_vec();
    if let (Some(table), Some(file)) = (number(&bytes, 24), number(&bytes, 32)) {
        bytes.resize(file, 0);
        if let Some(end) = bytes.get(56..56 + table) {
            let hash = xxh3_128(&[&bytes[..40], end].concat());
            bytes[40..56].copy_from_slice(&hash.to_le_bytes());
        }
    }
    let Ok(table) = Table::parse(&bytes) else {
        return;
    };
    let mut end = 56;
    for entry in &table.entries {
        let start = usize::try_from(entry.offset).unwrap();
        let payload = usize::try_from(entry.payload_bytes()).unwrap();
        assert!(end <= start && start % 4096 == 0);
        end = start + payload;
        assert_eq!(bytes[start..end].len(), payload);
        assert!(entry.error.is_finite() && !entry.source.name.is_empty());
        let _ = entry.layout.to_string();
    }
});
