//! Proves that rules select the arithmetic of weights, and that INT4 products have the accuracy
//! that its levels allow.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::sync::Arc;

use common::{F32_IN_BLOCKS, Numbers, Weight, contiguous, functions, mul_mat, packed, tensor};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::RkDevice;
use ggml_rust_npu::rockchip::caps::{self, Precision, RkCaps};
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::layout::FEW_ROWS;
use ggml_rust_npu::rockchip::plan::{self, Target};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::calibrate::Method;
use rknpu_ops::sim;

fn target(caps: &'static RkCaps, rules: &str, calibration: Method) -> Target {
    Target {
        rules: Rules::parse(rules).unwrap(),
        calibration,
        ..Target::from(caps)
    }
}

fn device(caps: &'static RkCaps, word: &str, calibration: Method) -> Arc<RkDevice> {
    let mut options = sim::Options::new(caps.soc);
    options.coherence = sim::Coherence::Strict;
    let rknn = functions(options);
    let rule = format!("weight={word}");
    Arc::new(RkDevice::start(rknn, target(caps, &rule, calibration)).unwrap())
}

/// Every chip that has INT4 weights, and the words of its rules for them.
const ARITHMETICS: [(&RkCaps, &str); 3] = [
    (&caps::RK3588, "int4"),
    (&caps::RK3576, "int4"),
    (&caps::RK3576, "int4-fp16"),
];

#[test]
fn rules_decide_the_arithmetic_by_name() {
    let target = target(
        &caps::RK3588,
        "up=int4,down=int8,head=fp16,embd=cpu",
        Method::Mse,
    );
    let precision = |name, dtype| {
        let tensor = tensor(name, dtype, contiguous(dtype, [64, 96, 1, 1]));
        plan::weight_layout(&target, &tensor).map(|layout| layout.precision)
    };
    assert_eq!(precision("ffn_up", F32_IN_BLOCKS), Some(Precision::Int4));
    assert_eq!(precision("ffn_up", DType::F16), Some(Precision::Int4));
    assert_eq!(precision("ffn_down", DType::F16), Some(Precision::Int8));
    assert_eq!(precision("head", F32_IN_BLOCKS), Some(Precision::Fp16));
    assert_eq!(precision("embd", F32_IN_BLOCKS), None);
    assert_eq!(precision("attn_q", F32_IN_BLOCKS), Some(Precision::Int8));
    let few = tensor(
        "router",
        F32_IN_BLOCKS,
        contiguous(F32_IN_BLOCKS, [64, FEW_ROWS, 1, 1]),
    );
    let few = plan::weight_layout(&target, &few).map(|layout| layout.precision);
    assert_eq!(few, Some(Precision::Fp16));
    assert_eq!(precision("attn_q", DType::F16), Some(Precision::Fp16));
}

#[test]
fn weights_that_results_depend_on_most_are_more_exact_than_others_unless_a_rule_says_otherwise() {
    let precision = |rules, name, ne: [usize; 2], slices| {
        let target = target(&caps::RK3588, rules, Method::Mse);
        let shape = contiguous(F32_IN_BLOCKS, [ne[0], ne[1], slices, 1]);
        plan::weight_layout(&target, &tensor(name, F32_IN_BLOCKS, shape))
            .map(|layout| layout.precision)
    };
    for (name, ne, want) in [
        ("output.weight", [64, 96], Precision::Int8Wide),
        ("token_embd.weight", [64, 96], Precision::Int8Wide),
        ("output.weight", [64, FEW_ROWS], Precision::Fp16),
        ("blk.3.attn_output.weight", [192, 64], Precision::Int8),
        ("blk.3.attn_k.weight", [192, 64], Precision::Fp16),
        ("blk.3.attn_v.weight", [192, 64], Precision::Fp16),
        ("blk.3.attn_v.weight", [160, 64], Precision::Int8),
        ("blk.3.attn_q.weight", [192, 64], Precision::Int8),
        ("blk.0.attn_q.weight", [192, 64], Precision::Fp16),
        ("blk.1.ffn_down.weight", [192, 64], Precision::Fp16),
        ("blk.2.ffn_down.weight", [192, 64], Precision::Int8Wide),
        ("blk.3.ffn_down.weight", [192, 64], Precision::Int8),
        ("blk.14.ffn_down.weight", [192, 64], Precision::Int8Wide),
        ("blk.14.ffn_up.weight", [192, 64], Precision::Int8),
        ("blk.x.ffn_down.weight", [192, 64], Precision::Int8),
        ("v.blk.0.ffn_down.weight", [192, 64], Precision::Int8),
    ] {
        assert_eq!(precision("", name, ne, 1), Some(want), "{name}");
        let by_rule = precision(".*=int8", name, ne, 1);
        assert_eq!(by_rule, Some(Precision::Int8), "{name}");
    }
    // Experts stay INT8 by default, because they hold most of a model's memory.
    for name in ["blk.0.ffn_up_exps.weight", "blk.2.ffn_down.weight"] {
        let experts = precision("", name, [192, 64], 4);
        assert_eq!(experts, Some(Precision::Int8), "{name}");
    }
}

#[test]
fn every_choice_of_a_rule_multiplies() {
    let mut numbers = Numbers::new(31);
    for (rule, dtype, limit) in [
        ("fp16", F32_IN_BLOCKS, 2e-7),
        ("int8", DType::F16, 2.6e-4),
        ("int8-wide", DType::F16, 1.3e-4),
        ("int4", DType::F16, 2e-2),
    ] {
        let rknn = Rknn::simulate(sim::Options::new(caps::RK3588.soc)).unwrap();
        let target = target(&caps::RK3588, &format!("weight={rule}"), Method::Mse);
        let device = Arc::new(RkDevice::start(rknn, target).unwrap());
        let (k, n, m) = (576, 100, 9);
        let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
        let buffer = packed(&device, &w, 0);
        let act = numbers.floats(m * k);
        let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, m, 1, 1]).unwrap();
        let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, k));
        // FP16 also rounds weights that were not exact in FP16 before.
        let limit = if rule == "fp16" { 2.0 * limit } else { limit };
        assert!(error <= limit, "{rule}: {error:.2e} > {limit:.1e}");
    }
}

/// Weight error of 16 levels, measured for normal rows in rknpu-ops/tests/int4: 0.0165 by absmax,
/// 0.0112 by squared error. FP16, INT8 or two-digit activations add less than a hundredth of that.
/// The error over the power of `MN` results, both means of squares, has a standard deviation of `2
/// / sqrt(MN)` of its value; four of them are allowed.
#[test]
fn int4_is_as_exact_as_its_calibration() {
    let mut numbers = Numbers::new(32);
    for (caps, word) in ARITHMETICS {
        for (method, mean) in [(Method::AbsMax, 0.0165), (Method::Mse, 0.0112)] {
            let device = device(caps, word, method);
            for [m, k, n] in [[1, 576, 200], [5, 1536, 72], [40, 8960, 33], [600, 64, 40]] {
                let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 2, 1]);
                let act = numbers.floats(m * k * 2);
                let buffer = packed(&device, &w, 4096);
                let limit = mean * (1.01 + 8.0 / ((m * n) as f64).sqrt());
                for packed in [None, Some((&buffer, 4096))] {
                    let have = mul_mat(&device, &w, packed, &act, [k, m, 2, 1]).unwrap();
                    for plane in 0..2 {
                        let act = &act[plane * m * k..][..m * k];
                        let values = &w.values[plane * n * k..][..n * k];
                        let want = reference::mul_mat(act, values, k);
                        let error = reference::nmse(&have[plane * m * n..][..m * n], &want);
                        assert!(
                            error <= limit,
                            "{} {word} {method:?} M={m} K={k} N={n}: {error:.4} > {limit}",
                            caps.soc.name()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn an_int4_row_does_not_depend_on_the_batch_it_is_computed_in() {
    let mut numbers = Numbers::new(33);
    for (caps, word) in ARITHMETICS {
        let device = device(caps, word, Method::Mse);
        let (k, n) = (1536, 100);
        let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
        let buffer = packed(&device, &w, 0);
        let packed = Some((&buffer, 0));
        let act = numbers.floats(70 * k);
        let alone: Vec<f32> = act
            .chunks_exact(k)
            .flat_map(|row| mul_mat(&device, &w, packed, row, [k, 1, 1, 1]).unwrap())
            .collect();
        for m in [2, 7, 33, 70] {
            let batch = mul_mat(&device, &w, packed, &act[..m * k], [k, m, 1, 1]).unwrap();
            assert!(batch == alone[..m * n], "{} {word} M={m}", caps.soc.name());
        }
    }
}
