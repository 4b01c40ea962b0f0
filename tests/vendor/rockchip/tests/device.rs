//! Proves that our device multiplies correctly above the vendor's own library.
//! `scripts/vendor_rknn.py` builds these tests for aarch64 and runs them under qemu, with the
//! library and the emulated parts below it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../../../common/mod.rs"]
mod common;
#[path = "../src/operands.rs"]
mod operands;

use std::path::PathBuf;
use std::sync::Arc;

use common::{F32_IN_BLOCKS, Numbers, Weight, mul_mat, packed};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::RkDevice;
use ggml_rust_npu::rockchip::caps::{self, Precision};
use ggml_rust_npu::rockchip::device::RkNpu;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::driver::lock::Nodes;
use ggml_rust_npu::rockchip::selftest;
use ggml_rust_npu::tensor::DType;
use operands::Operands;
use rknpu_ops::direct::node::DeviceNode;
use rknpu_ops::ffi::MatmulType;

/// Reason why none of these tests runs by default.
const NEEDS: &str = "GGML_RUST_NPU_RKNN_LIB, which scripts/vendor_rknn.py sets";

fn library() -> Arc<Rknn> {
    let path = PathBuf::from(std::env::var("GGML_RUST_NPU_RKNN_LIB").expect(NEEDS));
    Rknn::load(Some(&path)).unwrap()
}

/// Returns a device that passed its self-test.
fn device() -> Arc<RkDevice> {
    Arc::new(RkDevice::start(library(), &caps::RK3588).unwrap())
}

/// Multiplies and fails over `limit`, a normalized mean square error.
fn check(device: &Arc<RkDevice>, dtype: DType, [m, k, n]: [usize; 3], numbers: &mut Numbers) {
    let w = Weight::random(numbers, dtype, [k, n, 1, 1]);
    let act = numbers.floats(m * k);
    let limit = if dtype == DType::F16 { 1e-6 } else { 1e-3 };
    let buffer = packed(device, &w, 4096);
    let have = mul_mat(device, &w, Some((&buffer, 4096)), &act, [k, m, 1, 1]).unwrap();
    let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, k));
    println!("{dtype:?} M={m} K={k} N={n}: {error:.1e}");
    assert!(
        error <= limit,
        "{dtype:?} M={m} K={k} N={n}: {error:.2e} > {limit:.0e}"
    );
}

#[test]
#[ignore = "needs librknnrt 1.5.2 under qemu: VENDOR=rknn make vendor"]
fn the_self_test_sees_that_m_of_2_is_wrong_and_nothing_else() {
    let precisions = [Precision::Fp16, Precision::Int8];
    let npu = RkNpu::open(library(), &caps::RK3588, &precisions, &[]).unwrap();
    let passed = selftest::run(&npu, &Rules::default()).unwrap();
    for precision in precisions {
        let buckets = passed.buckets(precision);
        for m in [1, 4, 8, 16, 32, 64, 128, 256, 512] {
            assert!(buckets.contain(m), "{precision:?} M={m}");
        }
        assert!(!buckets.contain(2), "{precision:?}");
    }
}

#[test]
#[ignore = "needs librknnrt 1.5.2 under qemu: VENDOR=rknn make vendor"]
fn products_agree_with_the_reference_whatever_their_shape() {
    let (device, mut numbers) = (device(), Numbers::new(1));
    // M of every bucket and values in between; N from one tile to several calls; K from one tile to
    // the library's limits: 2048 (FP16) and 4096 (INT8).
    for m in [1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 61, 64, 128, 256, 512] {
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            check(&device, dtype, [m, 576, 96], &mut numbers);
        }
    }
    for [m, k, n] in [
        [1, 32, 32],
        [2, 64, 33],
        [5, 96, 200],
        [1, 2048, 64],
        [72, 2048, 31],
        [1, 64, 13000],
    ] {
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            check(&device, dtype, [m, k, n], &mut numbers);
        }
    }
    for [m, k, n] in [
        [1, 4096, 64],
        [2, 4096, 96],
        [130, 4096, 64],
        [16, 2080, 40],
    ] {
        check(&device, F32_IN_BLOCKS, [m, k, n], &mut numbers);
    }
}

#[test]
#[ignore = "needs librknnrt 1.5.2 under qemu: VENDOR=rknn make vendor"]
fn a_shape_that_the_library_refuses_is_an_error_and_no_result() {
    // Version 1.5.2 accepts no FP16 product with K above 2048; version 2.3 accepts 4096.
    let (device, mut numbers) = (device(), Numbers::new(2));
    let w = Weight::random(&mut numbers, DType::F16, [4096, 32, 1, 1]);
    let act = numbers.floats(4096);
    let buffer = packed(&device, &w, 0);
    let error = mul_mat(&device, &w, Some((&buffer, 0)), &act, [4096, 1, 1, 1]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("rknn_matmul_create") && text.contains("-5"),
        "{text}"
    );
}

#[test]
#[ignore = "needs librknnrt 1.5.2 under qemu: VENDOR=rknn make vendor"]
fn values_are_those_of_our_own_streams_on_the_same_device() {
    // Of the same driver: the loop answers for its node.
    let node = DeviceNode::find().unwrap();
    let (ours, theirs) = (
        Rknn::direct(Box::new(node), Nodes::Private).unwrap(),
        library(),
    );
    let mut numbers = Numbers::new(3);
    let mut compared = 0;
    for (matmul_type, k_max) in [
        (MatmulType::F16_F16_F32, 2048),
        (MatmulType::I8_I8_I32, 4096),
    ] {
        // M as the backend has them; 1.5.2 gives other values for M = 2 and 3.
        for [m, k, n] in [
            [1, 64, 64],
            [4, 576, 96],
            [8, 1024, 320],
            [16, 2048, 64],
            [32, 320, 3200],
            [64, k_max, 128],
            [128, 576, 192],
            [256, 96, 64],
            [512, 96, 64],
        ] {
            let operands = Operands::random(matmul_type, [m, k, n], &mut numbers);
            let (have, want) = (operands.of_library(&ours), operands.of_library(&theirs));
            assert!(
                have == want,
                "matmul type {}, M={m} K={k} N={n}",
                matmul_type.0
            );
            compared += have.len() / 4;
        }
    }
    println!("values equal those of librknnrt: {compared}");
}
