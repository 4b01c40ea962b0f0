//! Payloads are read as they were written, and refused if they were damaged since.

use std::path::{Path, PathBuf};

use ggml_rust_npu::packfile::{
    CHUNK_BYTES, ChunkHash, Entry, Fingerprint, LayoutTag, Pack, PackTable, PackWriter, sampled,
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_128;

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
        let mut writer = PackWriter::create(&path, "rk3588", "", names.iter().map(String::as_str)).unwrap();
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
            prop_assert!(entry.offset.is_multiple_of(4096));
        }
        prop_assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
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
        for (part, out) in [(first, &mut a), (second, &mut b)] {
            let read = |at: usize, chunk: &mut [u8]| {
                chunk.copy_from_slice(&part[at..][..chunk.len()]);
                Ok(())
            };
            copied.read_part(out, read).unwrap();
        }
        prop_assert_eq!(hash.digest(), copied.digest());
        prop_assert!(a == first && b == second);
    }
}

#[test]
fn the_writer_refuses_another_number_of_bytes_scales_or_tensors() {
    let path = folder("packfile_writer").join("x.npu");
    let begin = || PackWriter::create(&path, "", "", ["a"]).unwrap();
    let mut writer = begin();
    writer.bytes(&[0; 9]).unwrap();
    let error = writer.end(entry("a", 10, 0), &[]).unwrap_err().to_string();
    assert!(
        error.contains("packed bytes of \"a\"") && error.contains('9'),
        "{error}"
    );
    drop(writer);
    let error = begin()
        .end(entry("a", 0, 2), &[1.0])
        .unwrap_err()
        .to_string();
    assert!(error.contains("scales of \"a\""), "{error}");
    let error = begin().finish().unwrap_err().to_string();
    assert!(error.contains("bytes of the table"), "{error}");
    let error = PackWriter::create(&path, &"x".repeat(1 << 17), "", [])
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
    let mut writer = PackWriter::create(&path, "", "", ["first", "second"]).unwrap();
    for name in ["first", "second"] {
        writer.bytes(&vec![7; CHUNK_BYTES + 100]).unwrap();
        writer
            .end(entry(name, CHUNK_BYTES + 100, 5), &[1.0; 5])
            .unwrap();
    }
    writer.finish().unwrap();
    let good = std::fs::read(&path).unwrap();
    let table = PackTable::parse(&good).unwrap();
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

fn write(path: &Path, byte: u8) {
    let mut writer = PackWriter::create(path, "", "", ["a"]).unwrap();
    writer.bytes(&vec![byte; 3 * CHUNK_BYTES]).unwrap();
    let entry = entry("a", 3 * CHUNK_BYTES, 5);
    writer.end(entry, &[1.0; 5]).unwrap();
    writer.finish().unwrap();
}

/// Regression: such a file ended the process with SIGBUS, at any time until its end.
#[test]
fn a_pack_that_is_shortened_or_copied_over_while_it_is_used_is_an_error() {
    let folder = folder("packfile_changing");
    let (path, other) = (folder.join("x.npu"), folder.join("y.npu"));
    write(&path, 7);
    write(&other, 8);
    let pack = Pack::open(&path).unwrap();
    let entry = pack.entry("a").unwrap();
    let (mut out, mut scales) = (vec![0; 3 * CHUNK_BYTES], [0.0; 5]);
    pack.copy(entry, &mut out, &mut scales).unwrap();
    let mut expect = |word: &str| {
        let errors = [
            pack.copy(entry, &mut out, &mut scales).unwrap_err(),
            pack.check(entry).unwrap_err(),
            pack.payload(entry).unwrap_err(),
        ];
        for error in errors.map(|error| error.to_string()) {
            assert!(error.contains(word) && error.contains("\"a\""), "{error}");
        }
    };
    // As after `cp other path`: the file is the same, but has other bytes.
    std::fs::write(&path, std::fs::read(&other).unwrap()).unwrap();
    expect("corrupted");
    for len in [3 * CHUNK_BYTES as u64, 4097, 0] {
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(len).unwrap();
        expect("truncated");
    }
}

/// Regression: a FIFO blocked every program at its start until another program wrote to it.
#[test]
fn what_is_not_a_regular_file_is_refused_at_once() {
    use ggml_rust_npu::packfile::Packs;
    let folder = folder("packfile_special");
    write(&folder.join("good.npu"), 7);
    std::fs::create_dir(folder.join("folder.npu")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.join("device.npu")).unwrap();
    let fifo = folder.join("fifo.npu");
    test_kit::make_fifo(&fifo);
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let whole = Packs::open(&folder, false);
        let single = Packs::open(&fifo, false);
        send.send([whole, single]).unwrap();
    });
    let minute = std::time::Duration::from_secs(60);
    let [(packs, failed), (_, single)] = receive.recv_timeout(minute).expect("it hangs");
    assert_eq!((packs.len(), failed.len(), single.len()), (1, 3, 1));
    for (path, error) in failed.iter().chain(&single) {
        let error = error.to_string();
        assert!(
            error.contains("regular file"),
            "{}: {error}",
            path.display()
        );
    }
}

/// Layout and fingerprint are the requested ones, but the sizes are not. Another program wrote the
/// file.
#[test]
fn a_payload_of_another_size_is_not_taken() {
    use ggml_rust_npu::packfile::{Packs, Wanted};
    use ggml_rust_npu::tensor::{DType, Format};
    let folder = folder("packfile_sizes");
    let source = [5u8; 102];
    let wanted = Wanted {
        name: "a",
        dtype: DType::Quantized {
            block_elems: 32,
            block_bytes: 34,
        },
        format: Some(Format::Q8_0),
        ne: [32, 3, 1, 1],
        source: &source,
        layout: entry("a", 0, 0).layout,
    };
    for (bytes, scales) in [(200, 2), (199, 2), (201, 2), (200, 1), (200, 3)] {
        let path = folder.join(format!("{bytes}_{scales}.npu"));
        let mut writer = PackWriter::create(&path, "", "", ["a"]).unwrap();
        writer.bytes(&vec![9; bytes]).unwrap();
        let mut entry = entry("a", bytes, scales);
        entry.source.sampled = sampled(&source);
        writer.end(entry, &vec![1.5; scales]).unwrap();
        writer.finish().unwrap();
        let (packs, failed) = Packs::open(&path, false);
        assert!(failed.is_empty());
        let (mut out, mut factors) = ([0; 200], [0.0; 2]);
        let fits = (bytes, scales) == (200, 2);
        assert_eq!(
            packs.take(&wanted, &mut out, &mut factors),
            fits,
            "{bytes} {scales}"
        );
        assert_eq!(out == [9; 200] && factors == [1.5; 2], fits);
        let mut pieces = Vec::new();
        let taken = packs.take_pieces(&wanted, 200, |at, piece| pieces.push((at, piece.len())));
        assert!(!taken && pieces.is_empty(), "it has scales");
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
    // Small tensors are hashed as a whole.
    assert_eq!(sampled(&bytes[..131_072]), xxh3_128(&bytes[..131_072]));
}
