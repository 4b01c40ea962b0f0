//! Weights in groups of 2 × 16 come from a pack in place of Q4_0 or Q8_0 tiles of the same tensor;
//! the tensor's bytes are kept, and a weight that does not fit, or is overwritten, uses its own
//! type again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_rust_npu::backend::offline::{self, Form};
use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Op, Place};
use ggml_rust_npu::hexagon::layout::WeightLayout;
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream};
use ggml_rust_npu::loss::SquaredLoss;
use ggml_rust_npu::packfile::{PackWriter, Packs, SourceHash, sampled};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::Format;
use half::f16;

use super::common::*;

/// Types that have groups.
const FORMATS: [Format; 2] = [Format::Q4_0, Format::Q8_0];

/// Largest normalized mean square error: weights, activations and results are rounded to FP16, for
/// any M.
const LIMIT: f64 = 2e-6;

/// A tensor, and the same tensor in groups with other values, so that results show which of
/// them were used.
struct Both {
    format: Format,
    plain: Weight,
    /// Payload of the pack.
    packed: Vec<u8>,
    /// Values of the groups, as `Weight::values`.
    values: Vec<f32>,
}

impl Both {
    fn random(numbers: &mut Numbers, format: Format, ne: [usize; 4]) -> Self {
        let [k, n, s2, s3] = ne;
        let plain = Weight::random(numbers, Kind::Blocks(format), ne);
        let layout = layout(&plain);
        let (mut packed, mut values) = (vec![0; layout.bytes()], vec![0.0; k * n * s2 * s3]);
        let matrix = layout.matrix;
        for slice in 0..s2 * s3 {
            let packed = &mut packed[slice * matrix.matrix_bytes()..][..matrix.matrix_bytes()];
            for row in 0..n.next_multiple_of(32) {
                let mut bytes = Vec::new();
                for kt in 0..k / 32 {
                    let d = f16::from_f32(numbers.float() / 8.0);
                    bytes.extend(d.to_le_bytes());
                    // In each column the even k comes first, then the odd one.
                    let mut levels = [[0.0; 2]; 16];
                    if format == Format::Q4_0 {
                        for pair in &mut levels {
                            let byte = numbers.bits() as u8;
                            bytes.push(byte);
                            *pair = [byte & 15, byte >> 4].map(|code| f32::from(code) - 8.0);
                        }
                    } else {
                        for i in 0..32 {
                            // No quantizer produces -128, so it is avoided.
                            let level = (numbers.bits() as i8).max(-127);
                            bytes.push(level.cast_unsigned());
                            levels[i % 16][i / 16] = f32::from(level);
                        }
                    }
                    // Group g holds k = 2·(g/2) and the next one, for 16 columns starting at
                    // 16·(g%2).
                    let (g, first) = (row % 32, row / 32 * 32 + row % 2 * 16);
                    for (c, pair) in levels.iter().enumerate().filter(|(c, _)| first + c < n) {
                        let at = (slice * n + first + c) * k + kt * 32 + g / 2 * 2;
                        values[at..at + 2].copy_from_slice(&pair.map(|level| d.to_f32() * level));
                    }
                }
                matrix.pack_row(packed, row, &bytes).unwrap();
            }
        }
        Self {
            format,
            plain,
            packed,
            values,
        }
    }

    /// Writes the pack; `source`: the tensor's bytes according to the pack.
    fn write(&self, path: &Path, source: &[u8]) {
        let mut writer = PackWriter::create(path, "hexagon", "", ["weight"]).unwrap();
        writer.bytes(&self.packed).unwrap();
        let weight = offline::Weight {
            name: "weight",
            dtype: match self.format {
                Format::Q4_0 => GgmlType::Q4_0,
                _ => GgmlType::Q8_0,
            },
            ne: self.plain.ne,
            data: source,
            feedback: &[],
        };
        let hashes = [sampled(source), SourceHash::of(source)];
        let form = Form::Hexagon(layout(&self.plain));
        let entry = form.entry(&weight, hashes, SquaredLoss::default());
        writer.end(entry, &[]).unwrap();
        writer.finish().unwrap();
    }
}

/// The layout of a weight in groups.
fn layout(w: &Weight) -> WeightLayout {
    let own = WeightLayout::new(&w.tensor(0, Place::Packed)).unwrap();
    let groups = own.groups().unwrap();
    // Each can replace the other in memory.
    assert_eq!(groups.bytes(), own.bytes());
    groups
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A device that uses a pack.
fn device_with_pack(path: &Path) -> Arc<HexDevice> {
    let device = device();
    device.use_packs(Arc::new(Packs::open(path, true).0));
    device
}

/// Fails unless the device multiplies with `values`.
fn multiplies(device: &Arc<HexDevice>, w: &Weight, buffer: &HexBuffer, values: &[f32], limit: f64) {
    let mut numbers = Numbers::new(9);
    let [k, ..] = w.ne;
    for m in [1, 2, 5, 40] {
        let act = numbers.floats(m * k);
        let have = mul_mat(device, w, buffer, &act, [k, m, 1, 1]).unwrap();
        let want = reference::mul_mat(&act, values, k);
        // The error is relative to the power that uncorrelated rows would have, because a single
        // product may cancel to almost nothing.
        let norms = |rows: &[f32]| -> f64 { rows.iter().map(|x| f64::from(x * x)).sum() };
        let errors = have
            .iter()
            .zip(&want)
            .map(|(x, y)| (f64::from(*x) - y).powi(2));
        let error = errors.sum::<f64>() / (norms(&act) * norms(values) / k as f64);
        assert!(error <= limit, "{:?} M={m}: {error:.2e}", w.ne);
    }
}

fn bytes_of(w: &Weight, buffer: &HexBuffer) -> Vec<u8> {
    let mut back = vec![0; w.bytes.len()];
    buffer
        .read(&w.tensor(0, Place::Packed), 0, &mut back)
        .unwrap();
    back
}

#[test]
fn groups_are_multiplied_and_the_tensor_keeps_its_bytes() {
    let mut numbers = Numbers::new(1);
    let shapes = [(32, 1), (96, 70), (320, 33)];
    for (format, (k, n)) in FORMATS
        .iter()
        .flat_map(|format| shapes.map(|shape| (*format, shape)))
    {
        let both = Both::random(&mut numbers, format, [k, n, 1, 1]);
        let path = path(&format!("groups_{format:?}_{k}.npu"));
        both.write(&path, &both.plain.bytes);
        let device = device_with_pack(&path);
        let buffer = buffer_with(&device, &both.plain, Place::Packed);
        multiplies(&device, &both.plain, &buffer, &both.values, LIMIT);
        assert_eq!(bytes_of(&both.plain, &buffer), both.plain.bytes);
    }
}

#[test]
fn experts_in_groups_get_their_rows() {
    FORMATS.into_iter().for_each(experts_get_their_rows);
}

fn experts_get_their_rows(format: Format) {
    let mut numbers = Numbers::new(2);
    let (k, n, experts, slots, tokens) = (64, 40, 3, 2, 9);
    let both = Both::random(&mut numbers, format, [k, n, experts, 1]);
    let path = path(&format!("groups_experts_{format:?}.npu"));
    both.write(&path, &both.plain.bytes);
    let device = device_with_pack(&path);
    let buffer = buffer_with(&device, &both.plain, Place::Packed);
    let act = numbers.floats(k * tokens);
    let ids: Vec<i32> = (0..tokens * slots).map(|row| (row % 3) as i32).collect();
    let (act_ne, dst_ne) = ([k, 1, tokens, 1], [n, slots, tokens, 1]);
    let work = Work::new(&device, &act, act_ne, dst_ne, &ids).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let src0 = both.plain.tensor(0, Place::Packed);
    stream
        .submit(0, &mut [work.node(Op::MulMatId, src0, &buffer)])
        .unwrap();
    for (row, have) in work.result().chunks_exact(n).enumerate() {
        let act = &act[row / slots * k..][..k];
        let values = &both.values[ids[row] as usize * k * n..][..k * n];
        let error = reference::nmse(have, &reference::mul_mat(act, values, k));
        // The limit is wider, because this is a mean of 40 numbers and not of many rows.
        assert!(error <= 4.0 * LIMIT, "row {row}: {error:.2e}");
    }
}

#[test]
fn a_write_into_groups_makes_them_blocks_again() {
    FORMATS.into_iter().for_each(a_write_makes_blocks);
}

fn a_write_makes_blocks(format: Format) {
    let mut numbers = Numbers::new(3);
    let both = Both::random(&mut numbers, format, [64, 50, 1, 1]);
    let path = path(&format!("groups_written_{format:?}.npu"));
    both.write(&path, &both.plain.bytes);
    let device = device_with_pack(&path);
    let buffer = buffer_with(&device, &both.plain, Place::Packed);
    let other = Weight::random(&mut numbers, Kind::Blocks(format), both.plain.ne);
    let tensor = both.plain.tensor(0, Place::Packed);
    // From the middle of a block to the middle of a row.
    let part = 41..1000;
    buffer
        .write(
            &tensor,
            part.start,
            part.len(),
            Content::Bytes(&other.bytes[part.clone()]),
        )
        .unwrap();
    let mut want = both.plain.bytes.clone();
    want[part.clone()].copy_from_slice(&other.bytes[part]);
    assert_eq!(bytes_of(&both.plain, &buffer), want);
    let fresh = Weight {
        bytes: want,
        ..Weight::random(&mut numbers, Kind::Blocks(format), both.plain.ne)
    };
    let plain_device = self::device();
    let fresh_buffer = buffer_with(&plain_device, &fresh, Place::Packed);
    let act = numbers.floats(64 * 5);
    let product =
        |device, buffer| mul_mat(device, &both.plain, buffer, &act, [64, 5, 1, 1]).unwrap();
    assert_eq!(
        product(&device, &buffer),
        product(&plain_device, &fresh_buffer)
    );
    // Written as a whole: first other weights, then the ones in the pack.
    buffer
        .write(&tensor, 0, other.bytes.len(), Content::Bytes(&other.bytes))
        .unwrap();
    assert_eq!(bytes_of(&other, &buffer), other.bytes);
    multiplies(&device, &other, &buffer, &other.values, 1e-4);
    buffer
        .write(
            &tensor,
            0,
            other.bytes.len(),
            Content::Bytes(&both.plain.bytes),
        )
        .unwrap();
    multiplies(&device, &both.plain, &buffer, &both.values, LIMIT);
}

#[test]
fn a_pack_of_groups_that_does_not_fit_leaves_the_weights_as_they_are() {
    let mut numbers = Numbers::new(4);
    let both = Both::random(&mut numbers, Format::Q4_0, [64, 40, 1, 1]);
    let path = path("groups_stale.npu");
    let same = |what: &str| {
        let device = device_with_pack(&path);
        let buffer = buffer_with(&device, &both.plain, Place::Packed);
        assert_eq!(bytes_of(&both.plain, &buffer), both.plain.bytes, "{what}");
        multiplies(&device, &both.plain, &buffer, &both.plain.values, 1e-4);
    };
    let other = Weight::random(&mut numbers, Kind::Blocks(Format::Q4_0), both.plain.ne);
    both.write(&path, &other.bytes);
    same("another model");
    both.write(&path, &both.plain.bytes);
    let mut file = std::fs::read(&path).unwrap();
    file[4096 + 100] ^= 1;
    std::fs::write(&path, &file).unwrap();
    same("corrupted payload");
    std::fs::write(&path, &file[..file.len() - 1]).unwrap();
    same("truncated");
    // The name belongs to groups of another shape.
    let wide = Both::random(&mut numbers, Format::Q4_0, [96, 40, 1, 1]);
    wide.write(&path, &both.plain.bytes);
    same("another shape");
    // The name belongs to groups of another type.
    let bytes = Both::random(&mut numbers, Format::Q8_0, [64, 40, 1, 1]);
    bytes.write(&path, &both.plain.bytes);
    same("another type");
}
