//! Any bytes are refused as a pack file, or read as one whose payloads are inside the file and do
//! not overlap. A weight that is read from it has the file's bytes, whatever happens to the file
//! meanwhile. The hash of the head and the lengths are corrected in the input, and every other time
//! the hashes of the tensors, so that the code after these checks is reached.
#![no_main]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::packfile::{ChunkHash, Entry, PackTable, Packs, SourceHash, Wanted, sampled};
use ggml_rust_npu_fuzz::check_message;
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Longest file that is made.
const FILE_BYTES: usize = 1 << 16;
const HEAD_BYTES: usize = 56;

/// A file in memory, where there is such a folder.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() {
        memory.to_path_buf()
    } else {
        std::env::temp_dir()
    };
    folder.join(format!("ggml-rust-npu-fuzz-{}.npu", std::process::id()))
});

/// The number at an offset, if the offset is inside of the bytes and the number is small.
fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let number = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
    usize::try_from(number)
        .ok()
        .filter(|number| *number <= FILE_BYTES)
}

/// Corrects the lengths and the hash of the head.
fn mend_head(bytes: &mut Vec<u8>) {
    if let (Some(table), Some(file)) = (number(bytes, 24), number(bytes, 32)) {
        bytes.resize(file, 0);
        if let Some(end) = bytes.get(HEAD_BYTES..HEAD_BYTES + table) {
            let hash = xxh3_128(&[&bytes[..40], end].concat());
            bytes[40..HEAD_BYTES].copy_from_slice(&hash.to_le_bytes());
        }
    }
}

/// Replaces `old` by `new` where the table names it first.
fn replace(bytes: &mut [u8], table: usize, old: u128, new: u128) {
    let (old, new) = (old.to_le_bytes(), new.to_le_bytes());
    let end = HEAD_BYTES + table;
    if let Some(at) = bytes[HEAD_BYTES..end]
        .windows(16)
        .position(|window| window == old)
    {
        bytes[HEAD_BYTES + at..][..16].copy_from_slice(&new);
    }
}

fn payload<'a>(bytes: &'a [u8], entry: &Entry) -> (&'a [u8], &'a [u8]) {
    let [start, length, all] =
        [entry.offset, entry.bytes, entry.payload_bytes()].map(|n| usize::try_from(n).unwrap());
    bytes[start..start + all].split_at(length)
}

/// Bytes of a tensor's source, if they are few.
fn source(entry: &Entry) -> Option<Vec<u8>> {
    let ne = entry.source.ne.map(|n| usize::try_from(n).unwrap());
    let row = GgmlType::from_number(entry.source.dtype)?.row_bytes(ne[0])?;
    let bytes = ne[1..].iter().try_fold(row, |all, n| all.checked_mul(*n))?;
    (bytes <= FILE_BYTES).then(|| vec![0x5a; bytes])
}

/// Sets the hashes of the tensors to those of their payloads and sources.
fn mend_tensors(bytes: &mut Vec<u8>, entries: &[Entry]) {
    let table = number(bytes, 24).unwrap();
    for entry in entries {
        let (packed, scales) = payload(bytes, entry);
        let mut hash = ChunkHash::default();
        hash.update(packed);
        hash.end_chunk();
        hash.update(scales);
        replace(bytes, table, entry.payload, hash.digest());
        if let Some(source) = source(entry) {
            replace(bytes, table, entry.source.sampled, sampled(&source));
            replace(bytes, table, entry.source.full, SourceHash::of(&source));
        }
    }
    mend_head(bytes);
}

/// Loads all tensors of a file that was accepted. It may be damaged between its opening and the
/// reading.
fn load(bytes: &[u8], entries: &[Entry], decisions: u64) {
    fs::write(&*FILE, bytes).unwrap();
    let (packs, failed) = Packs::open(&FILE, decisions & 2 != 0);
    assert!(failed.is_empty() && packs.len() == 1, "{failed:?}");
    let mut now = bytes.to_vec();
    if decisions & 4 != 0 {
        let file = OpenOptions::new().write(true).open(&*FILE).unwrap();
        let at = usize::try_from(decisions >> 8).unwrap() % now.len();
        if decisions & 8 != 0 {
            file.set_len(at as u64).unwrap();
            now.truncate(at);
        } else {
            now[at] ^= 0x11;
            file.write_all_at(&now[at..=at], at as u64).unwrap();
        }
    }
    for entry in entries {
        let (Some(source), Some(dtype)) =
            (source(entry), GgmlType::from_number(entry.source.dtype))
        else {
            continue;
        };
        let (dtype, format) = dtype.tensor_type();
        let wanted = Wanted {
            name: &entry.source.name,
            dtype,
            format,
            ne: entry.source.ne.map(|n| usize::try_from(n).unwrap()),
            source: &source,
            layout: entry.layout,
        };
        assert!(packs.has(wanted.name, &wanted.layout));
        let (packed, scales) = payload(bytes, entry);
        let mut out = vec![0; packed.len()];
        let mut numbers = vec![0.0f32; scales.len() / 4];
        if packs.take(&wanted, &mut out, &mut numbers) {
            assert!(out == packed && bytemuck::cast_slice::<f32, u8>(&numbers) == scales);
            let end = usize::try_from(entry.offset + entry.payload_bytes()).unwrap();
            assert!(entry.payload_bytes() == 0 || now.len() >= end);
        }
        if scales.is_empty() {
            let mut pieces = vec![0; packed.len()];
            let put = |at: usize, piece: &[u8]| pieces[at..][..piece.len()].copy_from_slice(piece);
            if packs.take_pieces(&wanted, packed.len(), put) {
                assert!(pieces == packed);
            }
        }
        let mut other = wanted.layout;
        other.words[0] ^= 1;
        let other = Wanted {
            layout: other,
            ..wanted
        };
        assert!(!packs.take(&other, &mut out, &mut numbers));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = PackTable::parse(bytes);
    let decisions = xxh3_64(bytes);
    let mut bytes = bytes.to_vec();
    mend_head(&mut bytes);
    let mut table = match PackTable::parse(&bytes) {
        Ok(table) => table,
        Err(error) => return check_message(&error),
    };
    let mut end = HEAD_BYTES;
    for entry in &table.entries {
        let start = usize::try_from(entry.offset).unwrap();
        let payload = usize::try_from(entry.payload_bytes()).unwrap();
        assert!(end <= start && start % 4096 == 0);
        end = start + payload;
        assert_eq!(bytes[start..end].len(), payload);
        assert!(entry.error.is_finite() && !entry.source.name.is_empty());
        let _ = entry.layout.to_string();
    }
    if decisions & 1 != 0 {
        mend_tensors(&mut bytes, &table.entries);
        // The mended bytes may also occur as a name. Then it is another file, or none.
        let Ok(mended) = PackTable::parse(&bytes) else {
            return;
        };
        table = mended;
    }
    load(&bytes, &table.entries, decisions);
});
