//! Proves that the backend never uses a shape that the vendor's library refuses, or on which it
//! ends the process: real models' weights, and every length of a row.

use ggml_rust_npu::config::rules::Choice;
use ggml_rust_npu::rockchip::caps::{self, Precision, RkCaps};
use ggml_rust_npu::rockchip::driver::{Context, Rknn};
use ggml_rust_npu::rockchip::layout::WeightLayout;
use ggml_rust_npu::rockchip::plan::{Bucketing, Buckets};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::ffi::MatmulInfo;
use rknpu_ops::sim;

/// Hidden size, columns of Q, of K and V, feed-forward size and vocabulary.
// SOURCE: config.json of the models on their makers' pages.
const MODELS: [(&str, [usize; 5]); 14] = [
    ("SmolLM2-135M", [576, 576, 192, 1536, 49_152]),
    ("Qwen2.5-0.5B", [896, 896, 128, 4864, 151_936]),
    ("Qwen3-0.6B", [1024, 2048, 1024, 3072, 151_936]),
    ("Llama-3.2-1B", [2048, 2048, 512, 8192, 128_256]),
    ("Gemma-3-270M", [640, 1024, 256, 2048, 262_144]),
    ("Gemma-3-1B", [1152, 1024, 256, 6912, 262_144]),
    ("Qwen2.5-1.5B", [1536, 1536, 256, 8960, 151_936]),
    ("Qwen3-4B", [2560, 4096, 1024, 9728, 151_936]),
    ("Phi-4-mini", [3072, 3072, 1024, 8192, 200_064]),
    ("Mistral-7B", [4096, 4096, 1024, 14_336, 32_768]),
    ("Qwen2.5-7B", [3584, 3584, 512, 18_944, 152_064]),
    ("Gemma-2-9B", [3584, 4096, 2048, 14_336, 256_000]),
    ("Qwen2.5-14B", [5120, 5120, 1024, 13_824, 152_064]),
    ("Llama-2-13B", [5120, 5120, 5120, 13_824, 32_000]),
];

const CHOICES: [Choice; 6] = [
    Choice::Fp16,
    Choice::Int8,
    Choice::Int8Unrotated,
    Choice::Int8Wide,
    Choice::Int4,
    Choice::Int4Fp16,
];

/// Fails if a call of the layout is one of those that real libraries do not survive.
// SOURCE: one open backend found that FP16 with K of 16640, 16896 and 17408 ends the process on
// RK3588 with librknnrt 2.3.2, and that FP16 with K over 4096 collapses. INT8 over 8192 is stored
// in pieces (User Guide 2.3.0, section 3.5).
fn check(caps: &RkCaps, layout: &WeightLayout, name: &str) {
    let k = layout.segment_k;
    let most = match layout.precision {
        Precision::Fp16 => 4096,
        Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => 8192,
        Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => 576,
    };
    assert!(
        k <= most,
        "{name} {:?} {:?}: K={k}",
        caps.soc,
        layout.precision
    );
    assert!(k.is_multiple_of(layout.native.k_align), "{name}: K={k}");
    assert!(
        layout.chunk_n.is_multiple_of(layout.native.n_align),
        "{name}: N={}",
        layout.chunk_n
    );
    assert!(
        layout.segments * k >= layout.k,
        "{name}: K={k} x {}",
        layout.segments
    );
}

#[test]
fn every_length_is_cut_into_ones_that_the_library_survives() {
    for caps in caps::ALL {
        for choice in CHOICES {
            for k in (2..=40_960).step_by(2) {
                let Some(layout) = WeightLayout::new(caps, Some(choice), DType::F16, [k, 64, 1, 1])
                else {
                    continue;
                };
                check(caps, &layout, "any");
            }
        }
    }
}

#[test]
fn contexts_of_real_models_are_all_accepted() {
    for caps in caps::ALL {
        let rknn = Rknn::simulate(sim::Options::new(caps.soc)).unwrap();
        let mut made = 0;
        for (name, [hidden, q, kv, ffn, vocabulary]) in MODELS {
            for [k, n] in [
                [hidden, q],
                [hidden, kv],
                [q, hidden],
                [hidden, ffn],
                [ffn, hidden],
                [hidden, vocabulary],
            ] {
                for choice in CHOICES {
                    let Some(layout) =
                        WeightLayout::new(caps, Some(choice), DType::F16, [k, n, 1, 1])
                    else {
                        continue;
                    };
                    check(caps, &layout, name);
                    let costs = Bucketing::new(&caps.cost, &layout, Buckets::ALL);
                    for m in (0..=9).map(|log| 1 << log) {
                        for piece in costs.pieces(m) {
                            let rows = piece.bucket * layout.precision.rows();
                            let [m, k, n] = [rows, layout.segment_k, layout.chunk_n]
                                .map(|size| i32::try_from(size).unwrap());
                            let info = MatmulInfo::native(layout.precision.matmul_type(), m, k, n);
                            let context = Context::new(&rknn, info, None).unwrap();
                            context.expect(&layout.native).unwrap();
                            made += 1;
                        }
                    }
                }
            }
        }
        assert!(made > 1000, "{made}");
        assert_eq!(rknn.stand_in().unwrap().locked_up(), None);
    }
}
