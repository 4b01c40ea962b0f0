//! Proves that the pack files of small weights, one of each layout, are byte for byte those in
//! `tests/golden/`: a change of any layout, of rounding or of the format fails here, and requires a
//! new version number for the changed part.
//!
//! The files are written again by `cargo test --test golden -- --ignored`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};

use ggml_rust_npu::backend::offline::{Form, Weight};
use ggml_rust_npu::config::rules::Choice;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Place, Tensor};
use ggml_rust_npu::hexagon;
use ggml_rust_npu::packfile::{Pack, PackWriter};
use ggml_rust_npu::rockchip::caps::{self, RkCaps};
use ggml_rust_npu::rockchip::layout::WeightLayout;
use ggml_rust_npu::tensor::Shape;
use half::f16;
use hexagon_ops::layout::{MatrixLayout, TILE_DIM, WeightType};
use rknpu_ops::calibrate::Method;

/// Shape of weights in blocks of 32: two strips of N and two blocks of K, the second strip with
/// padding.
const NE: [usize; 4] = [64, 40, 1, 1];

/// Shape of weights of a type: whole blocks of K.
fn shape(dtype: GgmlType) -> [usize; 4] {
    [dtype.block_elems().max(NE[0]), NE[1], NE[2], NE[3]]
}

/// Bytes of a weight: any, but numbers in half precision are between 2^-7 and 2^-6.
fn bytes(dtype: GgmlType) -> Vec<u8> {
    let row = dtype.row_bytes(shape(dtype)[0]).unwrap();
    let mut state = u32::from(dtype.name().as_bytes()[1]);
    // SOURCE: Numerical Recipes' generator.
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    let mut bytes: Vec<u8> = (0..row * NE[1]).map(|_| next()).collect();
    let small = |byte: u8| f16::from_bits(0x2000 | u16::from(byte) << 2);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let halves: &[usize] = match dtype.name() {
            "F16" | "Q4_0" | "Q8_0" | "IQ4_NL" | "IQ4_XS" | "Q5_0" => &[0],
            "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K" => &[0, 2],
            "Q6_K" => &[208],
            "Q3_K" => &[108],
            "Q2_K" => &[80, 82],
            _ => &[],
        };
        for at in halves {
            let half = small(block[*at]).to_le_bytes();
            block[*at..at + 2].copy_from_slice(&half);
        }
        if dtype == GgmlType::MXFP4 {
            block[0] = 120 + block[0] % 4;
        }
    }
    bytes
}

fn weight(dtype: GgmlType) -> Tensor<'static> {
    let (plain, format) = dtype.tensor_type();
    let row = plain.row_bytes(shape(dtype)[0]).unwrap();
    Tensor {
        name: "",
        dtype: plain,
        format,
        shape: Shape {
            ne: shape(dtype),
            nb: [plain.step_bytes().unwrap(), row, row * NE[1], row * NE[1]],
        },
        place: Place::Packed,
        memory: None,
        packed_offset: 0,
        role: ggml_rust_npu::graph::Role::Weights,
        dequantize: dequantize::of(dtype),
    }
}

/// Name, type and form of each weight of a file.
type Plan = Vec<(String, GgmlType, Form)>;

fn hexagon() -> Plan {
    let types = [
        GgmlType::F16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q8_0,
        GgmlType::IQ4_NL,
        GgmlType::MXFP4,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
        GgmlType::IQ4_XS,
        GgmlType::Q3_K,
        GgmlType::Q2_K,
    ];
    let form = |weight: &Tensor| Form::Hexagon(hexagon::layout::WeightLayout::new(weight).unwrap());
    let mut plan: Plan = types
        .map(|dtype| (dtype.name().to_owned(), dtype, form(&weight(dtype))))
        .into();
    // A weight of a type without tiles becomes Q8_0.
    let without = Tensor {
        format: None,
        ..weight(GgmlType::IQ4_XS)
    };
    plan.push((
        "quantized again".to_owned(),
        GgmlType::IQ4_XS,
        form(&without),
    ));
    plan
}

fn rockchip(caps: &RkCaps) -> Plan {
    let choices = [
        ("fp16", GgmlType::F16, Choice::Fp16),
        ("int8", GgmlType::Q8_0, Choice::Int8),
        ("int4", GgmlType::Q4_0, Choice::Int4),
        ("int4-fp16", GgmlType::Q4_0, Choice::Int4Fp16),
    ];
    let plan = choices.into_iter().filter_map(|(name, dtype, choice)| {
        let layout = WeightLayout::new(caps, Some(choice), dtype.tensor_type().0, NE)?;
        Some((name.to_owned(), dtype, Form::Rockchip(layout, Method::Mse)))
    });
    plan.collect()
}

fn plans() -> [(&'static str, Plan); 5] {
    [
        ("hexagon", hexagon()),
        ("rk3588", rockchip(&caps::RK3588)),
        ("rk3576", rockchip(&caps::RK3576)),
        ("rk3562", rockchip(&caps::RK3562)),
        ("rk3566", rockchip(&caps::RK3566)),
    ]
}

fn write(path: &Path, chip: &str, plan: &Plan) {
    let names = plan.iter().map(|(name, ..)| name.as_str());
    let mut writer = PackWriter::create(path, chip, "", names).unwrap();
    for (name, dtype, form) in plan {
        let data = bytes(*dtype);
        let weight = Weight {
            name,
            dtype: *dtype,
            ne: shape(*dtype),
            data: &data,
            feedback: &[],
        };
        assert!(form.write(&weight, &mut writer, |_| true).unwrap());
    }
    writer.finish().unwrap();
}

fn golden(chip: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    folder.join(format!("{chip}.npu"))
}

#[test]
fn packs_are_those_that_were_made_before() {
    for (chip, plan) in plans() {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("golden_{chip}.npu"));
        write(&path, chip, &plan);
        let (have, want) = (
            Pack::open(&path).unwrap(),
            Pack::open(&golden(chip)).unwrap(),
        );
        assert_eq!(have.table().entries.len(), plan.len(), "{chip}");
        for (have_entry, want_entry) in have.table().entries.iter().zip(&want.table().entries) {
            let name = &have_entry.source.name;
            let (have, want) = (
                have.payload(have_entry).unwrap(),
                want.payload(want_entry).unwrap(),
            );
            assert!(
                have == want,
                "{chip} {name}: other bytes, but the same version"
            );
            // Squares may be added in any order, so the sum is only nearly equal.
            let near = (have_entry.error - want_entry.error).abs() <= 1e-9 * want_entry.error;
            assert!(near, "{chip} {name}");
            let mut same = want_entry.clone();
            same.error = have_entry.error;
            assert_eq!(have_entry, &same, "{chip}");
        }
    }
}

/// Groups of 2 × 16 of each type, the name of their golden file, and the type whose blocks have the
/// same bytes.
const GROUPS: [(&str, WeightType, GgmlType); 2] = [
    ("groups", WeightType::Q4Tile, GgmlType::Q4_0),
    ("groups_8", WeightType::Q8Tile, GgmlType::Q8_0),
];

/// Packs panels of groups of 2 × 16, the content of a pack of `ggml-npu quantize --tile-group`.
fn groups(weight: WeightType, blocks: GgmlType) -> Vec<u8> {
    let layout = MatrixLayout::new(weight, NE[1], NE[0]).unwrap();
    let panel_rows = TILE_DIM * layout.ggml_row_bytes();
    let blocks = [bytes(blocks), bytes(blocks)].concat();
    let mut packed = vec![0; layout.matrix_bytes()];
    let panels = packed.chunks_exact_mut(layout.panel().panel_bytes());
    for (panel, rows) in panels.zip(blocks.chunks_exact(panel_rows)) {
        layout.panel().pack_panel(panel, rows).unwrap();
    }
    packed
}

#[test]
fn groups_are_those_that_were_made_before() {
    for (name, weight, blocks) in GROUPS {
        let want = std::fs::read(golden(name).with_extension("bin")).unwrap();
        let have = groups(weight, blocks);
        assert!(have == want, "{name}: other bytes, but the same version");
    }
}

#[test]
#[ignore = "writes the golden files"]
fn write_the_golden_files() {
    for (name, weight, blocks) in GROUPS {
        std::fs::write(golden(name).with_extension("bin"), groups(weight, blocks)).unwrap();
    }
    for (chip, plan) in plans() {
        write(&golden(chip), chip, &plan);
    }
}
