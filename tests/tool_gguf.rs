//! Proves that the reader of GGUF files refuses every kind of malformed file with the name of the
//! field, never panics on damaged ones, and that the writer's output is read back with its metadata
//! byte for byte.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use ggml_rust_npu::gguf::{Error, File, GgmlType, Header, TensorInfo, TensorPlan, Value, Writer};
use proptest::prelude::*;

/// A file written by hand, so that the reader is not tested with the writer of the same project
/// only.
#[derive(Clone)]
struct Raw {
    version: u32,
    n_tensors: Option<u64>,
    n_entries: Option<u64>,
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    alignment: usize,
    data_bytes: usize,
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.bytes());
    bytes
}

fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [text(key), kind.to_le_bytes().to_vec(), value.to_vec()].concat()
}

fn tensor(name: &str, ne: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name);
    bytes.extend(u32::try_from(ne.len()).unwrap().to_le_bytes());
    ne.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

impl Raw {
    /// Four kinds of metadata, an F32 vector at 0, a Q4_0 matrix of 2 rows of 64 at 64.
    fn good() -> Self {
        let strings = [text("a"), text("bc")].concat();
        let array = [
            8u32.to_le_bytes().to_vec(),
            2u64.to_le_bytes().to_vec(),
            strings,
        ]
        .concat();
        Self {
            version: 3,
            n_tensors: None,
            n_entries: None,
            entries: vec![
                entry("general.architecture", 8, &text("llama")),
                entry("llama.block_count", 4, &7u32.to_le_bytes()),
                entry("tokenizer.ggml.tokens", 9, &array),
                entry("llama.epsilon", 6, &0.5f32.to_le_bytes()),
            ],
            tensors: vec![
                tensor("norm.weight", &[10], 0, 0),
                tensor("matrix.weight", &[64, 2], 2, 64),
            ],
            alignment: 32,
            data_bytes: 64 + 4 * 18,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let count = |set: Option<u64>, len: usize| set.unwrap_or(len as u64).to_le_bytes();
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(count(self.n_tensors, self.tensors.len()));
        bytes.extend(count(self.n_entries, self.entries.len()));
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        let first = bytes.len();
        bytes.extend((0..self.data_bytes).map(|i| u8::try_from(i % 251).unwrap()));
        assert_eq!(bytes.len(), first + self.data_bytes);
        bytes
    }
}

#[test]
fn a_good_file_is_read() {
    let raw = Raw::good();
    let bytes = raw.bytes();
    let header = Header::parse(&bytes).unwrap();
    assert_eq!(
        header.get("general.architecture").unwrap().as_str(),
        Some("llama")
    );
    assert_eq!(header.get("llama.block_count").unwrap().as_usize(), Some(7));
    assert_eq!(header.get("llama.epsilon"), Some(&Value::Float(0.5)));
    let tokens = header.get("tokenizer.ggml.tokens");
    assert_eq!(tokens, Some(&Value::Array { kind: 8, len: 2 }));
    let matrix = header.tensor("matrix.weight").unwrap();
    assert_eq!((matrix.dtype, matrix.ne), (GgmlType::Q4_0, [64, 2, 1, 1]));
    assert_eq!(matrix.range, bytes.len() - 72..bytes.len());
}

/// Words that the error must contain, and the change that causes it.
type Malformed = (&'static [&'static str], fn(&mut Raw));

#[test]
fn each_malformed_file_is_refused_by_the_name_of_the_field() {
    let cases: &[Malformed] = &[
        (&["version", "1", "2 to 3"], |raw| raw.version = 1),
        (&["version", "4"], |raw| raw.version = 4),
        (&["version", "big-endian"], |raw| {
            raw.version = 3u32.swap_bytes()
        }),
        (&["number of tensors", "18446744073709551615"], |raw| {
            raw.n_tensors = Some(u64::MAX)
        }),
        (&["number of metadata entries", "1099511627776"], |raw| {
            raw.n_entries = Some(1 << 40)
        }),
        (&["name of tensor 2", "empty"], |raw| {
            raw.n_tensors = Some(3)
        }),
        (&["metadata key", "llama.block_count", "twice"], |raw| {
            raw.entries.push(entry("llama.block_count", 4, &[0; 4]));
        }),
        (&["tensor", "norm.weight", "twice"], |raw| {
            raw.tensors[1] = tensor("norm.weight", &[64, 2], 2, 64);
        }),
        (&["kind of llama.bad", "13"], |raw| {
            raw.entries.push(entry("llama.bad", 13, &[0; 8]))
        }),
        (&["kind of the elements of llama.bad", "9"], |raw| {
            raw.entries
                .push(entry("llama.bad", 9, &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]));
        }),
        (&["number of elements of llama.bad", "too many"], |raw| {
            let array = [&6u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()[..]].concat();
            raw.entries.push(entry("llama.bad", 9, &array));
        }),
        (&["number of elements of llama.bad", "cannot hold"], |raw| {
            let array = [&8u32.to_le_bytes()[..], &(1u64 << 60).to_le_bytes()[..]].concat();
            raw.entries.push(entry("llama.bad", 9, &array));
        }),
        (
            &["truncated", "value of llama.bad", "9223372036854775807"],
            |raw| {
                raw.entries
                    .push(entry("llama.bad", 8, &i64::MAX.to_le_bytes()));
            },
        ),
        (&["general.alignment", "power of two"], |raw| {
            raw.entries
                .push(entry("general.alignment", 4, &24u32.to_le_bytes()));
        }),
        (
            &["general.alignment", "2147483648", "at most 2097152"],
            |raw| {
                let alignment = (1u32 << 31).to_le_bytes();
                raw.entries.push(entry("general.alignment", 4, &alignment));
            },
        ),
        (
            &["general.alignment", "1099511627776", "at most 2097152"],
            |raw| {
                let alignment = (1u64 << 40).to_le_bytes();
                raw.entries.push(entry("general.alignment", 10, &alignment));
            },
        ),
        (&["general.alignment", "power of two"], |raw| {
            raw.entries.push(entry("general.alignment", 4, &[0; 4]));
        }),
        (&["type", "matrix.weight", "4"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[64, 2], 4, 64);
        }),
        (&["number of dimensions", "matrix.weight", "5"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[1; 5], 0, 64);
        }),
        (
            &["dimension 0", "matrix.weight", "48", "blocks of 32"],
            |raw| {
                raw.tensors[1] = tensor("matrix.weight", &[48, 2], 2, 64);
            },
        ),
        (
            &["dimension 1", "matrix.weight", "18446744073709551615"],
            |raw| {
                raw.tensors[1] = tensor("matrix.weight", &[64, u64::MAX], 2, 64);
            },
        ),
        (&["shape", "matrix.weight", "63 bits"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[1 << 32, 1 << 32], 0, 64);
        }),
        (&["shape", "matrix.weight", "63 bits"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[0, 1 << 40, 1 << 40], 0, 64);
        }),
        // There are fewer bytes than elements.
        (&["shape", "matrix.weight", "63 bits"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[1 << 32, 1 << 32], 34, 64);
        }),
        (&["offset", "matrix.weight", "68", "alignment"], |raw| {
            raw.tensors[1] = tensor("matrix.weight", &[64, 2], 2, 68);
        }),
        (
            &[
                "offset",
                "matrix.weight",
                "18446744073709551584",
                "inside the file",
            ],
            |raw| {
                raw.tensors[1] = tensor("matrix.weight", &[64, 2], 2, u64::MAX - 31);
            },
        ),
        (
            &["offset", "matrix.weight", "overlaps", "norm.weight"],
            |raw| {
                raw.tensors[1] = tensor("matrix.weight", &[64, 2], 2, 32);
            },
        ),
        (&["offset", "matrix.weight", "inside the file"], |raw| {
            raw.data_bytes -= 1
        }),
        (&["name of tensor 1", "64 bytes"], |raw| {
            raw.tensors[1] = tensor(&"n".repeat(64), &[64, 2], 2, 64);
        }),
        (&["key of metadata entry 4", "empty"], |raw| {
            raw.entries.push(entry("", 7, &[1]))
        }),
    ];
    for (words, damage) in cases {
        let mut raw = Raw::good();
        damage(&mut raw);
        let error = Header::parse(&raw.bytes())
            .expect_err(&words.join(" "))
            .to_string();
        for word in *words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
    let not_utf8 = |range: usize| {
        let mut bytes = Raw::good().bytes();
        let place = bytes.windows(4).position(|part| part == b"norm").unwrap();
        bytes[place + range] = 0xff;
        Header::parse(&bytes).unwrap_err().to_string()
    };
    assert!(not_utf8(1).contains("name of tensor 0"), "{}", not_utf8(1));
    let magic = Header::parse(b"GGML----------------").unwrap_err();
    assert!(magic.to_string().contains("magic"), "{magic}");
}

#[test]
fn values_of_every_kind_are_read() {
    let large = 1u64 << 40;
    let scalars: [(u32, &[u8], Value); 15] = [
        (0, &[200], Value::Unsigned(200)),
        (1, &[200], Value::Signed(-56)),
        (2, &0xff00u16.to_le_bytes(), Value::Unsigned(0xff00)),
        (3, &(-300i16).to_le_bytes(), Value::Signed(-300)),
        (4, &u32::MAX.to_le_bytes(), Value::Unsigned(0xffff_ffff)),
        (5, &(-70_000i32).to_le_bytes(), Value::Signed(-70_000)),
        (6, &0.5f32.to_le_bytes(), Value::Float(0.5)),
        (7, &[0], Value::Bool(false)),
        (7, &[1], Value::Bool(true)),
        (7, &[2], Value::Bool(true)),
        (10, &large.to_le_bytes(), Value::Unsigned(large)),
        (11, &(-5i64).to_le_bytes(), Value::Signed(-5)),
        (12, &0.1f64.to_le_bytes(), Value::Float(0.1)),
        (8, &text("ab"), Value::String("ab".into())),
        (8, &text(""), Value::String(String::new())),
    ];
    let mut raw = Raw::good();
    for (index, (kind, bytes, _)) in scalars.iter().enumerate() {
        let key = format!("scalar.{index}");
        raw.entries.push(entry(&key, *kind, bytes));
        // The reader finds the entry after an array only if it knows the right size of the
        // elements.
        let head = [&kind.to_le_bytes()[..], &3u64.to_le_bytes()[..]].concat();
        let array = [&head[..], bytes, bytes, bytes].concat();
        raw.entries
            .push(entry(&format!("array.{index}"), 9, &array));
    }
    let header = Header::parse(&raw.bytes()).unwrap();
    for (index, (kind, bytes, want)) in scalars.into_iter().enumerate() {
        assert_eq!(header.get(&format!("scalar.{index}")), Some(&want));
        let array = Value::Array { kind, len: 3 };
        assert_eq!(
            header.get(&format!("array.{index}")),
            Some(&array),
            "{bytes:?}"
        );
        let size = match want {
            Value::Unsigned(number) => usize::try_from(number).ok(),
            _ => None,
        };
        assert_eq!(want.as_usize(), size, "{want:?}");
    }
    assert_eq!(Value::Signed(7).as_usize(), Some(7));
    assert_eq!(header.get("no such key"), None);
    assert!(header.tensor("no such tensor").is_none());
}

/// As many entries and tensors as the rest of a file can hold at best, and one more.
#[test]
fn a_count_is_refused_if_the_rest_of_the_file_cannot_hold_as_many() {
    let error = |n_tensors: u64, n_entries: u64, rest: usize| {
        let (tensors, entries) = (n_tensors.to_le_bytes(), n_entries.to_le_bytes());
        let head = [b"GGUF", &3u32.to_le_bytes()[..], &tensors, &entries].concat();
        let bytes = [head, vec![0; rest]].concat();
        Header::parse(&bytes).unwrap_err().to_string()
    };
    // An entry has at least 13 bytes, and a tensor 24.
    let entries = |count| error(0, count, 13 * 50 + 12);
    assert!(
        entries(50).contains("key of metadata entry 0"),
        "{}",
        entries(50)
    );
    let want = "number of metadata entries is 51: the 662 bytes that are left cannot hold as many";
    assert_eq!(entries(51), want);
    let tensors = |count| error(count, 0, 24 * 50 + 23);
    assert!(tensors(50).contains("name of tensor 0"), "{}", tensors(50));
    let want = "number of tensors is 51: the 1223 bytes that are left cannot hold as many";
    assert_eq!(tensors(51), want);
}

#[test]
fn limits_of_the_format_are_inclusive() {
    let mut raw = Raw::good();
    let name = "n".repeat(63);
    raw.tensors[1] = tensor(&name, &[64, 1, 2, 1], 2, 64);
    raw.tensors.push(tensor("empty", &[64, 0, 3], 2, 1 << 20));
    raw.entries
        .push(entry("general.alignment", 4, &(2u32 << 20).to_le_bytes()));
    raw.tensors[1] = tensor(&name, &[64, 1, 2, 1], 2, 2 << 20);
    raw.tensors[2] = tensor("empty", &[64, 0, 3], 2, 4 << 20);
    (raw.alignment, raw.data_bytes) = (2 << 20, (2 << 20) + 4 * 18);
    let bytes = raw.bytes();
    let header = Header::parse(&bytes).unwrap();
    assert_eq!(header.alignment, 2 << 20);
    let matrix = header.tensor(&name).unwrap();
    assert_eq!((matrix.dims, matrix.rows()), (4, 2));
    assert_eq!(matrix.range, bytes.len() - 72..bytes.len());
    assert_eq!(header.tensor("empty").unwrap().range, 0..0);
    let cube = TensorInfo {
        ne: [64, 2, 3, 5],
        ..matrix.clone()
    };
    assert_eq!(cube.rows(), 30);
    // One tensor begins exactly where the previous one ends.
    let mut raw = Raw::good();
    raw.tensors[0] = tensor("norm.weight", &[16], 0, 0);
    assert_eq!(Header::parse(&raw.bytes()).unwrap().tensors.len(), 2);
}

/// A key may have 64 KiB. Regression: the message had all of them.
#[test]
fn a_message_has_only_the_beginning_of_a_long_text() {
    let mut raw = Raw::good();
    raw.entries[0] = entry(&"k".repeat(50_000), 99, &[]);
    let text = Header::parse(&raw.bytes()).unwrap_err().to_string();
    assert!(text.contains("kkk") && text.len() < 400, "{text}");
    // The same for files that end after the key, or that have the key twice; the key contains
    // terminal commands.
    let key = "\x1b[2J\n".repeat(10_000);
    let mut raw = Raw::good();
    raw.entries[0] = entry(&key, 8, &u64::MAX.to_le_bytes());
    let cut = Header::parse(&raw.bytes()).unwrap_err().to_string();
    assert!(cut.contains("truncated"), "{cut}");
    raw.entries[0] = entry(&key, 7, &[1]);
    raw.entries[1] = entry(&key, 7, &[1]);
    let twice = Header::parse(&raw.bytes()).unwrap_err().to_string();
    assert!(twice.contains("twice"), "{twice}");
    for text in [cut, twice] {
        assert!(
            text.len() < 900 && !text.contains(char::is_control),
            "{text}"
        );
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = Raw::good().bytes();
    for end in 0..bytes.len() {
        let error = Header::parse(&bytes[..end]).expect_err("a part of a file was accepted");
        let named = matches!(error, Error::Truncated { .. } | Error::Field { .. });
        assert!(named, "{end}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn damaged_files_never_panic_and_ranges_stay_inside(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6),
        cut in any::<prop::sample::Index>(),
        shorten in any::<bool>(),
    ) {
        let mut bytes = Raw::good().bytes();
        for (index, value, how) in changes {
            let place = index.index(bytes.len());
            match how {
                0 => bytes[place] = value,
                1 => bytes[place] ^= 1 << (value % 8),
                _ => bytes[place..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
            }
        }
        if shorten {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(header) = Header::parse(&bytes) {
            for tensor in &header.tensors {
                let want = tensor.dtype.row_bytes(tensor.ne[0]).unwrap() * tensor.rows();
                prop_assert_eq!(bytes[tensor.range.clone()].len(), want);
            }
            for entry in &header.entries {
                prop_assert!(bytes.get(entry.range.clone()).is_some());
            }
        }
    }
}

/// An empty folder for one test.
fn folder(name: &str) -> std::path::PathBuf {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn what_is_written_is_read_back_with_the_same_metadata() {
    let folder = folder("tool_gguf_write");
    let (from, to) = (folder.join("from.gguf"), folder.join("to.gguf"));
    let mut raw = Raw::good();
    raw.entries
        .push(entry("general.alignment", 4, &64u32.to_le_bytes()));
    raw.alignment = 64;
    std::fs::write(&from, raw.bytes()).unwrap();
    let source = File::open(&from).unwrap();
    let plans = [
        ("norm.weight", GgmlType::F32, vec![10]),
        ("matrix.weight", GgmlType::Q8_0, vec![64, 2]),
    ]
    .map(|(name, dtype, ne)| TensorPlan {
        name: name.into(),
        dtype,
        ne,
    });
    let updates = [
        ("llama.block_count", Value::Unsigned(8)),
        ("general.quantized_by", Value::String("test".into())),
    ];
    let begin = || Writer::create(&to, source.header(), source.bytes(), &updates, &plans).unwrap();

    let mut writer = begin();
    let norm = source.data(&source.header().tensors[0]);
    writer.tensor([norm]).unwrap();
    let short = writer.tensor([[0u8; 135]]).unwrap_err().to_string();
    assert!(
        short.contains("matrix.weight") && short.contains("135") && short.contains("136"),
        "{short}"
    );
    drop(writer);
    let missing = begin().finish().unwrap_err();
    assert!(
        matches!(missing, Error::TensorCount { have: 0, want: 2 }),
        "{missing}"
    );
    let left: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(left, ["from.gguf"], "an unfinished file was left behind");

    let mut writer = begin();
    writer.tensor([norm]).unwrap();
    writer.tensor([[1u8; 100].as_slice(), &[2; 36]]).unwrap();
    let more = writer.tensor([norm]).unwrap_err();
    assert!(
        matches!(more, Error::TensorCount { have: 3, want: 2 }),
        "{more}"
    );
    writer.finish().unwrap();
    let written = File::open(&to).unwrap();
    let header = written.header();
    assert_eq!(header.alignment, 64);
    assert_eq!(header.get("llama.block_count").unwrap().as_usize(), Some(8));
    assert_eq!(
        header.get("general.quantized_by").unwrap().as_str(),
        Some("test")
    );
    assert_eq!(written.data(&header.tensors[0]), norm);
    assert_eq!(written.data(&header.tensors[1])[99..101], [1, 2]);
    for (old, new) in source.header().entries.iter().zip(&header.entries) {
        if old.key != "llama.block_count" {
            let bytes = source.bytes()[old.range.clone()].to_vec();
            assert_eq!(bytes, written.bytes()[new.range.clone()], "{}", old.key);
        }
    }
}

#[test]
fn a_file_that_is_not_there_or_empty_is_an_error_with_its_name() {
    let folder = folder("tool_gguf_open");
    let error = File::open(&folder.join("nothing.gguf")).unwrap_err();
    assert!(error.to_string().contains("nothing.gguf"), "{error}");
    std::fs::write(folder.join("empty.gguf"), []).unwrap();
    let error = File::open(&folder.join("empty.gguf")).unwrap_err();
    assert!(error.to_string().contains("magic"), "{error}");
}

/// Returns the KiB of a map of this process that are in memory.
fn resident_kib(address: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_it = false;
    for line in maps.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((start, end)) = first.split_once('-') {
            let bounds = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
            is_it = (bounds[0]..bounds[1]).contains(&address);
        } else if is_it && first == "Rss:" {
            let count = line.split_whitespace().nth(1).unwrap();
            return count.parse().unwrap();
        }
    }
    panic!("no map has the address")
}

#[test]
fn a_released_part_of_a_tensor_leaves_memory_and_is_read_again() {
    let folder = folder("tool_gguf_release");
    let path = folder.join("large.gguf");
    const MIB: usize = 1 << 20;
    let mut raw = Raw::good();
    raw.entries
        .push(entry("general.alignment", 4, &65536u32.to_le_bytes()));
    raw.tensors = vec![
        tensor("first", &[6 * MIB as u64], 24, 0),
        tensor("second", &[12 * MIB as u64], 24, 6 * MIB as u64),
    ];
    (raw.alignment, raw.data_bytes) = (65536, 18 * MIB);
    std::fs::write(&path, raw.bytes()).unwrap();
    let file = File::open(&path).unwrap();
    let second = file.header().tensor("second").unwrap();
    let sum = || {
        file.bytes()
            .iter()
            .map(|byte| u64::from(*byte))
            .sum::<u64>()
    };
    let before = sum();
    let address = file.bytes().as_ptr().addr();
    let all = resident_kib(address);
    assert!(all >= 18 * 1024, "{all}");
    file.release(second, 4 * MIB..6 * MIB);
    // The system releases pages of 2 MiB as a whole.
    let released = all - resident_kib(address);
    assert!((2048..=6144).contains(&released), "{released}");
    assert_eq!(sum(), before);
}
