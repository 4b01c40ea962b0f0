//! Proves that pack files are read as they were written, that every kind of malformed file is refused by the name of the field,
//! that damaged ones never cause a panic, and that damaged payloads are never taken.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};

use ggml_rust_npu::packfile::{
    CHUNK_BYTES, ChunkHash, Entry, Error, Fingerprint, LayoutTag, Pack, Table, Writer, sampled,
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_128;

/// A file written by hand, so that the reader has another author than the writer.
#[derive(Clone)]
struct Raw {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    tensors: Option<u64>,
    table_bytes: Option<u64>,
    file_bytes: Option<u64>,
    hash_change: u128,
    chip: Vec<u8>,
    entries: Vec<RawEntry>,
    behind_table: Vec<u8>,
    data_bytes: usize,
}

#[derive(Clone)]
struct RawEntry {
    name: Vec<u8>,
    dtype: u32,
    ne: [u64; 4],
    offset: u64,
    bytes: u64,
    scales: u64,
    error: f64,
}

fn text(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat()
}

impl RawEntry {
    fn bytes(&self) -> Vec<u8> {
        let mut out = text(&self.name);
        out.extend(self.dtype.to_le_bytes());
        out.extend(0x4858_0201u32.to_le_bytes());
        self.ne
            .iter()
            .for_each(|size| out.extend(size.to_le_bytes()));
        (0..10u64).for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(7u128.to_le_bytes());
        out.extend(8u128.to_le_bytes());
        for number in [self.offset, self.bytes, self.scales] {
            out.extend(number.to_le_bytes());
        }
        out.extend(9u128.to_le_bytes());
        out.extend(self.error.to_le_bytes());
        out
    }
}

impl Raw {
    /// Two tensors, of 100 bytes with 3 scales and of 4096 bytes.
    fn good() -> Self {
        let entry = |name: &[u8], offset, bytes, scales| RawEntry {
            name: name.into(),
            dtype: 2,
            ne: [64, 2, 1, 1],
            offset,
            bytes,
            scales,
            error: 0.25,
        };
        Self {
            magic: *b"\x89NPUPACK",
            version: 1,
            reserved: 0,
            tensors: None,
            table_bytes: None,
            file_bytes: None,
            hash_change: 0,
            chip: b"rk3588".to_vec(),
            entries: vec![
                entry(b"a.weight", 4096, 100, 3),
                entry(b"b.weight", 8192, 4096, 0),
            ],
            behind_table: Vec::new(),
            data_bytes: 8192,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let entries: Vec<u8> = self.entries.iter().flat_map(RawEntry::bytes).collect();
        let table = [
            text(&self.chip),
            text(b"--rules x=int8"),
            entries,
            self.behind_table.clone(),
        ]
        .concat();
        let len = |set: Option<u64>, len: usize| set.unwrap_or(len as u64).to_le_bytes();
        let mut head = self.magic.to_vec();
        head.extend(self.version.to_le_bytes());
        head.extend(self.reserved.to_le_bytes());
        head.extend(len(self.tensors, self.entries.len()));
        head.extend(len(self.table_bytes, table.len()));
        head.extend(len(self.file_bytes, 4096 + self.data_bytes));
        let hash = xxh3_128(&[&head[..], &table].concat()) ^ self.hash_change;
        let mut file = [&head[..], &hash.to_le_bytes(), &table].concat();
        assert!(file.len() <= 4096);
        file.resize(4096, 0);
        file.extend((0..self.data_bytes).map(|i| u8::try_from(i % 251).unwrap()));
        file
    }
}

#[test]
fn a_good_file_is_read() {
    let table = Table::parse(&Raw::good().bytes()).unwrap();
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
}

/// What the error must name, and the change that causes it.
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
    (&["name of tensor 2", "truncated", "63"], |raw| {
        raw.tensors = Some(3);
        // So long a table could hold three.
        raw.chip = vec![b'c'; 200];
        raw.behind_table = [&63u32.to_le_bytes()[..], &[b'n'; 20]].concat();
    }),
    (&["truncated", "the table", "9223372036854775807"], |raw| {
        raw.table_bytes = Some(i64::MAX.cast_unsigned());
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
        let error = Table::parse(&raw.bytes()).unwrap_err().to_string();
        for word in *words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = Raw::good().bytes();
    for len in 0..bytes.len() {
        assert!(Table::parse(&bytes[..len]).is_err(), "{len} bytes");
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
        let error = Table::parse(&bytes[..len]).unwrap_err();
        assert!(
            matches!(&error, Error::Truncated { field, .. } if field.contains(word)),
            "{error}"
        );
    }
}

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn entry(name: &str, bytes: usize, scales: usize) -> Entry {
    Entry {
        source: Fingerprint {
            name: name.into(),
            dtype: 8,
            ne: [32, 3, 1, 1],
            sampled: 1 << 100,
            full: 2 << 100,
        },
        layout: LayoutTag {
            id: 0x524b_0101,
            words: [3; 10],
        },
        offset: 0,
        bytes: bytes as u64,
        scales: scales as u64,
        payload: 0,
        error: 1e-5,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read(
        tensors in prop::collection::vec((0usize..3 * CHUNK_BYTES, 0usize..50, 1usize..300_000), 0..4),
        seed in any::<u8>(),
    ) {
        let path = folder("packfile_round_trip").join("x.npu");
        let names: Vec<String> = (0..tensors.len()).map(|i| format!("tensor.{i}")).collect();
        let mut writer = Writer::create(&path, "rk3588", "", names.iter().map(String::as_str)).unwrap();
        let content = |i: usize, bytes: usize| -> Vec<u8> {
            (0..bytes).map(|at| (at / 7 + i).to_le_bytes()[0] ^ seed).collect()
        };
        let scale = |i: usize| f32::from(u8::try_from(i).unwrap()) + 0.5;
        for (i, (bytes, scales, step)) in tensors.iter().enumerate() {
            for piece in content(i, *bytes).chunks(*step) {
                writer.bytes(piece).unwrap();
            }
            let scales: Vec<f32> = (0..*scales).map(scale).collect();
            writer.end(entry(&names[i], *bytes, scales.len()), &scales).unwrap();
        }
        prop_assert!(!path.exists());
        writer.finish().unwrap();
        let pack = Pack::open(&path).unwrap();
        prop_assert_eq!(pack.table().entries.len(), tensors.len());
        for (i, (bytes, scales, _)) in tensors.iter().enumerate() {
            let entry = pack.entry(&names[i]).unwrap();
            let (mut out, mut have) = (vec![0; *bytes], vec![0.0; *scales]);
            pack.copy(entry, &mut out, &mut have).unwrap();
            pack.check(entry).unwrap();
            prop_assert!(out == content(i, *bytes));
            prop_assert_eq!(have, (0..*scales).map(scale).collect::<Vec<f32>>());
            prop_assert!(entry.offset % 4096 == 0);
        }
        prop_assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn damaged_files_are_refused_or_read(at in 0usize..508, value in any::<u8>(), seal in any::<bool>()) {
        let mut bytes = Raw::good().bytes();
        let change = bytes[at] != value;
        bytes[at] = value;
        if seal {
            // As if it had been written so: what is behind the hash is reached.
            let table = usize::try_from(u64::from_le_bytes(*bytes[24..].first_chunk().unwrap())).unwrap_or(0);
            let end = 56usize.saturating_add(table).min(bytes.len());
            let hash = xxh3_128(&[&bytes[..40], &bytes[56..end]].concat());
            bytes[40..56].copy_from_slice(&hash.to_le_bytes());
            let _ = Table::parse(&bytes);
        } else {
            // The table ends at 508, and the hash covers all in front of that but itself.
            prop_assert_eq!(Table::parse(&bytes).is_err(), change);
        }
    }

    #[test]
    fn chunks_are_hashed_alike_however_they_come(bytes in 0usize..3 * CHUNK_BYTES, step in 1usize..400_000, scales in 0usize..99) {
        let source: Vec<u8> = (0..bytes + scales).map(|i| (i * i / 3).to_le_bytes()[0]).collect();
        let (first, second) = source.split_at(bytes);
        let mut hash = ChunkHash::default();
        first.chunks(step).for_each(|piece| hash.update(piece));
        hash.end_chunk();
        second.chunks(step).for_each(|piece| hash.update(piece));
        let (mut a, mut b) = (vec![0; bytes], vec![0; scales]);
        let mut copied = ChunkHash::default();
        copied.copy_part(first, &mut a);
        copied.copy_part(second, &mut b);
        prop_assert_eq!(hash.digest(), copied.digest());
        prop_assert!(a == first && b == second);
    }
}

#[test]
fn the_writer_refuses_another_number_of_bytes_scales_or_tensors() {
    let path = folder("packfile_writer").join("x.npu");
    let begin = || Writer::create(&path, "", "", ["a"]).unwrap();
    let mut writer = begin();
    writer.bytes(&[0; 9]).unwrap();
    let error = writer.end(entry("a", 10, 0), &[]).unwrap_err().to_string();
    assert!(
        error.contains("packed bytes of \"a\"") && error.contains('9'),
        "{error}"
    );
    let error = begin()
        .end(entry("a", 0, 2), &[1.0])
        .unwrap_err()
        .to_string();
    assert!(error.contains("scales of \"a\""), "{error}");
    let error = begin().finish().unwrap_err().to_string();
    assert!(error.contains("bytes of the table"), "{error}");
    let error = Writer::create(&path, &"x".repeat(1 << 17), "", [])
        .unwrap_err()
        .to_string();
    assert!(error.contains("length of chip"), "{error}");
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        0
    );
}

#[test]
fn a_flipped_bit_in_a_payload_is_found() {
    let path = folder("packfile_corrupted").join("x.npu");
    let mut writer = Writer::create(&path, "", "", ["first", "second"]).unwrap();
    for name in ["first", "second"] {
        writer.bytes(&vec![7; CHUNK_BYTES + 100]).unwrap();
        writer
            .end(entry(name, CHUNK_BYTES + 100, 5), &[1.0; 5])
            .unwrap();
    }
    writer.finish().unwrap();
    let good = std::fs::read(&path).unwrap();
    let table = Table::parse(&good).unwrap();
    let (mut out, mut scales) = (vec![0; CHUNK_BYTES + 100], [0.0; 5]);
    for (index, name) in ["first", "second"].into_iter().enumerate() {
        let start = usize::try_from(table.entries[index].offset).unwrap();
        for at in [
            0,
            CHUNK_BYTES,
            CHUNK_BYTES + 99,
            CHUNK_BYTES + 100,
            CHUNK_BYTES + 119,
        ] {
            let mut bad = good.clone();
            bad[start + at] ^= 4;
            std::fs::write(&path, &bad).unwrap();
            let pack = Pack::open(&path).unwrap();
            for (other, entry) in table.entries.iter().enumerate() {
                let copied = pack.copy(entry, &mut out, &mut scales);
                assert_eq!(copied.is_err(), other == index, "{at}");
                assert_eq!(pack.check(entry).is_err(), other == index, "{at}");
            }
            let error = pack
                .copy(&table.entries[index], &mut out, &mut scales)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("corrupted") && error.contains(name),
                "{error}"
            );
        }
    }
}

#[test]
fn samples_see_the_ends_the_length_and_every_part() {
    let bytes = vec![1u8; 5_000_000];
    let want = sampled(&bytes);
    assert_ne!(want, sampled(&bytes[1..]));
    for at in [0, bytes.len() - 1] {
        let mut other = bytes.clone();
        other[at] = 2;
        assert_ne!(want, sampled(&other), "{at}");
    }
    for part in 0..20 {
        let mut other = bytes.clone();
        other[part * 250_000..][..250_000].fill(2);
        assert_ne!(want, sampled(&other), "part {part}");
    }
    // Small ones are hashed whole.
    assert_eq!(sampled(&bytes[..131_072]), xxh3_128(&bytes[..131_072]));
}
