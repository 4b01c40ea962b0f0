//! Weights are read from a pack file if it belongs to them, and are packed otherwise. In both cases
//! the bytes are the same.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_rust_npu::backend::offline::{self, Form};
use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Op, Place, Tensor};
use ggml_rust_npu::hexagon::layout::WeightLayout;
use ggml_rust_npu::hexagon::{HexBuffer, HexStream};
use ggml_rust_npu::packfile::{Fingerprint, Pack, PackWriter, Packs, SourceHash, sampled};
use ggml_rust_npu::tensor::Format;
use proptest::prelude::*;

use super::common::*;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Types with tiles, and one that becomes F16.
const TYPES: [(GgmlType, Option<Kind>); 15] = [
    (GgmlType::F16, Some(Kind::F16)),
    (GgmlType::Q4_0, Some(Kind::Blocks(Format::Q4_0))),
    (GgmlType::Q4_1, Some(Kind::Blocks(Format::Q4_1))),
    (GgmlType::Q8_0, Some(Kind::Blocks(Format::Q8_0))),
    (GgmlType::IQ4_NL, Some(Kind::Blocks(Format::Iq4Nl))),
    (GgmlType::MXFP4, Some(Kind::Blocks(Format::Mxfp4))),
    (GgmlType::Q4_K, Some(Kind::Blocks(Format::Q4K))),
    (GgmlType::Q5_0, Some(Kind::Blocks(Format::Q5_0))),
    (GgmlType::Q6_K, Some(Kind::Blocks(Format::Q6K))),
    (GgmlType::Q5_1, Some(Kind::Blocks(Format::Q5_1))),
    (GgmlType::Q5_K, Some(Kind::Blocks(Format::Q5K))),
    (GgmlType::IQ4_XS, Some(Kind::Blocks(Format::Iq4Xs))),
    (GgmlType::Q3_K, Some(Kind::Blocks(Format::Q3K))),
    (GgmlType::Q2_K, Some(Kind::Blocks(Format::Q2K))),
    (GgmlType::BF16, Some(Kind::Bf16)),
];

/// Bytes of a random weight.
fn bytes(dtype: GgmlType, kind: Option<Kind>, ne: [usize; 4], seed: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    match kind {
        Some(kind) => Weight::random(&mut numbers, kind, ne).bytes,
        None => {
            let blocks = ne.iter().product::<usize>() / dtype.block_elems();
            // A block has a scale and a minimum; F16 has only numbers.
            let block = |_| {
                let halves = [(); 2].map(|()| half::f16::from_f32(numbers.float()).to_le_bytes());
                let rest = (4..dtype.block_bytes()).map(|_| numbers.bits() as u8);
                let mut block = [halves.as_flattened(), &rest.collect::<Vec<_>>()].concat();
                block.truncate(dtype.block_bytes());
                block
            };
            (0..blocks).flat_map(block).collect()
        }
    }
}

fn weight(dtype: GgmlType, ne: [usize; 4]) -> Tensor<'static> {
    let (plain, format) = dtype.tensor_type();
    Tensor {
        format,
        place: Place::Packed,
        dequantize: dequantize::of(dtype),
        ..tensor("weight", plain, ne, 0)
    }
}

/// Writes a pack with one weight: the packed form of `packed` under the fingerprint of `source`.
fn write(path: &Path, dtype: GgmlType, ne: [usize; 4], packed: &[u8], source: &[u8]) {
    let form = Form::Hexagon(WeightLayout::new(&weight(dtype, ne)).unwrap());
    let side = path.with_extension("side");
    let mut writer = PackWriter::create(&side, "hexagon-v75", "", ["weight"]).unwrap();
    let as_file = offline::Weight {
        name: "weight",
        dtype,
        ne,
        data: packed,
        feedback: &[],
    };
    assert!(form.write(&as_file, &mut writer, |_| true).unwrap());
    writer.finish().unwrap();
    let pack = Pack::open(&side).unwrap();
    let mut entry = pack.entry("weight").unwrap().clone();
    entry.source = Fingerprint {
        sampled: sampled(source),
        full: SourceHash::of(source),
        ..entry.source
    };
    let mut writer = PackWriter::create(path, "hexagon-v75", "", ["weight"]).unwrap();
    writer.bytes(&pack.payload(&entry).unwrap().0).unwrap();
    writer.end(entry, &[]).unwrap();
    writer.finish().unwrap();
}

/// Writes `source` to a device that uses the pack. Returns the bytes that are read back, and the
/// product.
fn load(
    pack: Option<&Path>,
    full: bool,
    dtype: GgmlType,
    ne: [usize; 4],
    source: &[u8],
) -> (Vec<u8>, Vec<f32>) {
    let device = device();
    if let Some(path) = pack {
        device.use_packs(Arc::new(Packs::open(path, full).0));
    }
    let tensor = weight(dtype, ne);
    let buffer = HexBuffer::new(&device, device.packed_bytes(&tensor), false).unwrap();
    // The buffer's previous content must not matter.
    buffer.clear(0xa5);
    buffer
        .write(&tensor, 0, source.len(), Content::Bytes(source))
        .unwrap();
    let mut back = vec![0; source.len()];
    buffer.read(&tensor, 0, &mut back).unwrap();
    let act = Numbers::new(4).floats(ne[0] * 5);
    let work = Work::new(&device, &act, [ne[0], 5, 1, 1], [ne[1], 5, 1, 1], &[]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let used = Tensor {
        place: Place::Device,
        ..tensor
    };
    stream
        .submit(0, &mut [work.node(Op::MulMat, used, &buffer)])
        .unwrap();
    (back, work.result())
}

/// Tests that a weight is loaded from a pack that has it, and equals the result of packing.
fn comes_from_the_pack(dtype: GgmlType, kind: Option<Kind>, ne: [usize; 4]) {
    let name = dtype.name();
    let (source, other) = (bytes(dtype, kind, ne, 1), bytes(dtype, kind, ne, 2));
    let path = path(&format!("hexagon_{name}_{}.npu", ne[1]));
    write(&path, dtype, ne, &source, &source);
    let want = load(None, false, dtype, ne, &source);
    assert_eq!(want.0, source, "{name}");
    assert!(
        load(Some(&path), true, dtype, ne, &source) == want,
        "{name}"
    );
    // The pack has another weight's bytes under this weight's fingerprint, so the result shows that
    // the pack was used.
    write(&path, dtype, ne, &other, &source);
    let (back, product) = load(Some(&path), true, dtype, ne, &source);
    let lossless = kind.is_some_and(|kind| kind != Kind::Bf16);
    let wanted = if lossless { &other } else { &source };
    assert!(back == *wanted, "{name}");
    assert_eq!(product, load(None, false, dtype, ne, &other).1, "{name}");
}

#[test]
fn a_weight_comes_from_the_pack_and_is_the_one_that_packing_gives() {
    for (dtype, kind) in TYPES {
        let ne = [96_usize.next_multiple_of(dtype.block_elems()), 70, 1, 1];
        comes_from_the_pack(dtype, kind, ne);
    }
}

#[test]
fn a_weight_that_is_copied_in_pieces_is_the_one_that_packing_gives() {
    // More than the 4 MiB that are copied at once, and not a multiple of that.
    let kind = Some(Kind::Blocks(Format::Q8_0));
    comes_from_the_pack(GgmlType::Q8_0, kind, [2048, 2400, 1, 1]);
}

#[test]
fn a_pack_that_is_not_of_this_weight_is_not_used() {
    let ne = [64, 40, 1, 1];
    let q8_0 = Some(Kind::Blocks(Format::Q8_0));
    let (source, other) = (
        bytes(GgmlType::Q8_0, q8_0, ne, 1),
        bytes(GgmlType::Q8_0, q8_0, ne, 2),
    );
    let path = path("hexagon_stale.npu");
    let want = load(None, false, GgmlType::Q8_0, ne, &source);
    let same = |what: &str| {
        assert_eq!(
            load(Some(&path), false, GgmlType::Q8_0, ne, &source),
            want,
            "{what}"
        );
    };
    write(&path, GgmlType::Q8_0, ne, &other, &other);
    same("another model");
    // A type with the same number of bytes, and another shape.
    let f16 = [68, 40, 1, 1];
    let halves = bytes(GgmlType::F16, None, [68, 40, 1, 1], 3);
    assert_eq!(halves.len() % 2, 0);
    write(&path, GgmlType::F16, f16, &vec![0; 68 * 40 * 2], &source);
    same("another type");
    write(
        &path,
        GgmlType::Q8_0,
        [64, 41, 1, 1],
        &vec![0; 68 * 41],
        &source,
    );
    same("another shape");
    write(&path, GgmlType::Q8_0, ne, &other, &source);
    let mut file = std::fs::read(&path).unwrap();
    let last = file.len() - 1;
    let payload = 4096;
    file[payload + 100] ^= 1;
    std::fs::write(&path, &file).unwrap();
    same("corrupted payload");
    file[60] ^= 1;
    std::fs::write(&path, &file).unwrap();
    same("corrupted table");
    std::fs::write(&path, &file[..last]).unwrap();
    same("truncated");
    std::fs::write(&path, b"GGUF").unwrap();
    same("foreign");
    std::fs::remove_file(&path).unwrap();
    same("absent");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tiles_of_a_pack_unpack_to_the_source(
        which in 0usize..14,
        blocks in 1usize..5,
        n in 1usize..100,
        slices in 1usize..3,
        seed in any::<u64>(),
    ) {
        let (dtype, kind) = TYPES[which];
        let ne = [dtype.block_elems().max(32) * blocks, n, slices, 1];
        let source = bytes(dtype, kind, ne, seed);
        let path = path("hexagon_round_trip.npu");
        write(&path, dtype, ne, &source, &source);
        let pack = Pack::open(&path).unwrap();
        let entry = pack.entry("weight").unwrap();
        prop_assert_eq!(entry.error.to_bits(), 0);
        let layout = WeightLayout::new(&weight(dtype, ne)).unwrap();
        let (packed, _) = pack.payload(entry).unwrap();
        prop_assert_eq!(packed.len(), layout.bytes());
        let mut row = vec![0; layout.matrix.ggml_row_bytes()];
        for (number, want) in source.chunks_exact(row.len()).enumerate() {
            let matrix = &packed[number / n * layout.matrix.matrix_bytes()..][..layout.matrix.matrix_bytes()];
            layout.matrix.unpack_row(matrix, number % n, &mut row).unwrap();
            prop_assert_eq!(&row[..], want);
        }
    }
}
