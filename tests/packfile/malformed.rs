//! Head and table: valid ones are read, invalid ones are refused by name.

use ggml_rust_npu::packfile::{Error, PackTable};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_128;

use super::raw::Raw;

#[test]
fn a_good_file_is_read() {
    let table = PackTable::parse(&Raw::good().bytes()).unwrap();
    assert_eq!(
        (&table.chip[..], &table.options[..]),
        ("rk3588", "--rules x=int8")
    );
    let [a, b] = &table.entries[..] else {
        panic!("{table:?}")
    };
    assert_eq!(
        (a.source.name.as_str(), b.source.name.as_str()),
        ("a.weight", "b.weight")
    );
    assert_eq!(
        (a.offset, a.bytes, a.scales, a.payload_bytes()),
        (4096, 100, 3, 112)
    );
    assert_eq!((a.source.sampled, a.source.full, a.payload), (7, 8, 9));
    assert_eq!(a.layout.words, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(a.error.to_bits(), 0.25f64.to_bits());
    // One payload ends exactly where the next one begins.
    let mut raw = Raw::good();
    (raw.entries[0].bytes, raw.entries[0].scales) = (4096, 0);
    let table = PackTable::parse(&raw.bytes()).unwrap();
    assert_eq!(table.entries[1].offset, 8192);
}

/// Words that the error must contain, and the change that causes it.
type Malformed = (&'static [&'static str], fn(&mut Raw));

const MALFORMED: &[Malformed] = &[
    (&["magic", "not a pack file"], |raw| {
        raw.magic = *b"GGUF\x03\0\0\0"
    }),
    (&["version", "is 2", "version 1 is read"], |raw| {
        raw.version = 2
    }),
    (&["version", "is 0"], |raw| raw.version = 0),
    (&["version", "16777216"], |raw| {
        raw.version = 1u32.swap_bytes()
    }),
    (&["reserved number", "1"], |raw| raw.reserved = 1),
    (&["number of tensors", "18446744073709551615"], |raw| {
        raw.tensors = Some(u64::MAX)
    }),
    (&["number of tensors", "is 4", "cannot hold"], |raw| {
        raw.tensors = Some(4)
    }),
    (&["name of tensor 2", "truncated", "63"], |raw| {
        raw.tensors = Some(3);
        // A table of this length has room for three.
        raw.chip = vec![b'c'; 200];
        raw.behind_table = [&63u32.to_le_bytes()[..], &[b'n'; 20]].concat();
    }),
    (&["truncated", "the table", "9223372036854775807"], |raw| {
        raw.table_bytes = Some(i64::MAX.cast_unsigned());
    }),
    (&["bytes of the table", "33554433", "at most"], |raw| {
        raw.table_bytes = Some((1 << 25) + 1);
        raw.data_bytes = 1 << 25;
    }),
    (&["bytes of the table", "end at"], |raw| {
        raw.behind_table = vec![0; 5]
    }),
    (&["truncated", "the file", "99999"], |raw| {
        raw.file_bytes = Some(99_999)
    }),
    (&["bytes of the file", "12287", "12288"], |raw| {
        raw.file_bytes = Some(12_287)
    }),
    (&["corrupted", "head and table"], |raw| {
        raw.hash_change = 1 << 77
    }),
    (&["chip", "UTF-8"], |raw| raw.chip = vec![b'r', 0xff]),
    (&["name of tensor 0", "empty"], |raw| {
        raw.entries[0].name.clear()
    }),
    (&["name of tensor 1", "64", "at most 63"], |raw| {
        raw.entries[1].name = vec![b'x'; 64]
    }),
    (&["name of tensor 1", "UTF-8"], |raw| {
        raw.entries[1].name = vec![0xc0, 0x80]
    }),
    (&["twice", "a.weight"], |raw| {
        raw.entries[1].name = b"a.weight".to_vec()
    }),
    (
        &["type of tensor \"b.weight\"", "4", "no such type"],
        |raw| raw.entries[1].dtype = 4,
    ),
    (&["shape of tensor \"a.weight\"", "0"], |raw| {
        raw.entries[0].ne[1] = 0
    }),
    (&["shape of tensor \"a.weight\"", "63 bits"], |raw| {
        raw.entries[0].ne = [1 << 32; 4]
    }),
    (
        &["offset of tensor \"a.weight\"", "4097", "multiple of 4096"],
        |raw| raw.entries[0].offset = 4097,
    ),
    (
        &["offset of tensor \"a.weight\"", "in front of it"],
        |raw| raw.entries[0].offset = 0,
    ),
    (
        &["offset of tensor \"b.weight\"", "4096", "ends at 4208"],
        |raw| raw.entries[1].offset = 4096,
    ),
    (
        &["offset of tensor \"b.weight\"", "not inside the file"],
        |raw| raw.entries[1].offset = 1 << 40,
    ),
    (
        &["offset of tensor \"b.weight\"", "4097 bytes", "not inside"],
        |raw| raw.entries[1].bytes = 4097,
    ),
    (&["offset of tensor \"b.weight\"", "not inside"], |raw| {
        raw.entries[1].bytes = u64::MAX
    }),
    (
        &["offset of tensor \"b.weight\"", "1 scales", "not inside"],
        |raw| raw.entries[1].scales = 1,
    ),
    (&["offset of tensor \"b.weight\"", "not inside"], |raw| {
        raw.entries[1].scales = 1 << 62
    }),
    (&["error of tensor \"a.weight\"", "NaN"], |raw| {
        raw.entries[0].error = f64::NAN
    }),
    (&["error of tensor \"a.weight\"", "-1"], |raw| {
        raw.entries[0].error = -1.0
    }),
];

#[test]
fn each_malformed_file_is_refused_by_the_name_of_the_field() {
    for (words, change) in MALFORMED {
        let mut raw = Raw::good();
        change(&mut raw);
        let error = PackTable::parse(&raw.bytes()).unwrap_err().to_string();
        for word in *words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
}

/// Regression: a chip's name and options may have 64 KiB, and a log line had all of them, including
/// terminal commands.
#[test]
fn a_message_has_only_the_beginning_of_a_long_text() {
    let mut raw = Raw::good();
    raw.chip = [&b"\x1b[2J".repeat(700)[..], &[0xff]].concat();
    let text = PackTable::parse(&raw.bytes()).unwrap_err().to_string();
    assert!(text.contains("chip") && text.len() < 900, "{text}");
    assert!(!text.contains(char::is_control), "{text}");
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = Raw::good().bytes();
    for len in 0..bytes.len() {
        assert!(PackTable::parse(&bytes[..len]).is_err(), "{len} bytes");
    }
    let words = [
        "magic",
        "version",
        "reserved",
        "number of tensors",
        "bytes of the table",
        "bytes of the file",
    ];
    for (len, word) in [0, 9, 13, 17, 25, 33].into_iter().zip(words) {
        let error = PackTable::parse(&bytes[..len]).unwrap_err();
        assert!(
            matches!(&error, Error::Truncated { field, .. } if field.contains(word)),
            "{error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_are_refused_or_read(at in 0usize..508, value in any::<u8>(), seal in any::<bool>()) {
        let mut bytes = Raw::good().bytes();
        let change = bytes[at] != value;
        bytes[at] = value;
        if seal {
            // The hash is corrected, so that the checks after it are reached.
            let table = usize::try_from(u64::from_le_bytes(*bytes[24..].first_chunk().unwrap())).unwrap_or(0);
            let end = 56usize.saturating_add(table).min(bytes.len());
            let hash = xxh3_128(&[&bytes[..40], &bytes[56..end]].concat());
            bytes[40..56].copy_from_slice(&hash.to_le_bytes());
            let _ = PackTable::parse(&bytes);
        } else {
            // The table ends at 508, and the hash covers everything before that except itself.
            prop_assert_eq!(PackTable::parse(&bytes).is_err(), change);
        }
    }
}
