//! Proves that a fault of the vendor's library is an error with the call's name, that the device
//! then refuses further work, and that nothing leaks.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{
    F32_IN_BLOCKS, Numbers, Weight, device_with, mul_mat, mul_mat_of_graph, nmse_limit, packed,
};
use ggml_rust_npu::backend::{Buffer, Content, Device};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::error::Error;
use ggml_rust_npu::host_memory::system_memory;
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::ffi::{MatmulType, code};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::{self, LiveObjects, parse_faults};
use std::sync::Arc;

fn options(faults: &str) -> sim::Options {
    let mut options = sim::Options::new(Soc::Rk3588);
    options.faults = parse_faults(faults).unwrap();
    options
}

#[test]
fn a_device_whose_first_call_fails_is_no_device() {
    for call in [
        "rknn_matmul_create",
        "rknn_matmul_set_core_mask",
        "rknn_matmul_set_io_mem",
        "rknn_matmul_run",
        "rknn_create_mem",
        "rknn_create_mem_from_fd",
        "rknn_mem_sync",
        "rknn_query",
    ] {
        let error = device_with(options(&format!("{call}:1=-1")), &caps::RK3588).unwrap_err();
        assert!(error.to_string().contains(call), "{call}: {error}");
    }
}

#[test]
fn a_call_that_fails_later_is_reported_and_the_device_refuses_to_go_on() {
    let mut numbers = Numbers::new(21);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 4);
    for call in [
        "rknn_matmul_create",
        "rknn_matmul_set_io_mem",
        "rknn_matmul_run",
        "rknn_mem_sync",
    ] {
        // The start itself makes some calls; the fault comes soon after them.
        let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
        let calls = rknn.stand_in().unwrap().calls(call);
        drop((device, rknn));
        let (device, rknn) =
            device_with(options(&format!("{call}:{}=-2", calls + 2)), &caps::RK3588).unwrap();
        let buffer = packed(&device, &w, 0);
        let mut failed = None;
        // M grows, so that new contexts and memory are needed, too.
        for m in [1, 2, 4, 1, 2, 4] {
            let act = &act[..64 * m];
            match mul_mat(&device, &w, Some((&buffer, 0)), act, [64, m, 1, 1]) {
                Ok(_) => assert!(failed.is_none(), "{call}: went on after {failed:?}"),
                Err(error) => {
                    let text = error.to_string();
                    match failed {
                        None => assert!(text.contains(call) && text.contains("-2"), "{text}"),
                        Some(_) => assert!(matches!(error, Error::DeviceLost { .. }), "{text}"),
                    }
                    failed = Some(text);
                }
            }
        }
        assert!(failed.is_some(), "{call} never failed");
        drop((buffer, device));
        assert_eq!(
            rknn.stand_in().unwrap().live(),
            LiveObjects::default(),
            "{call} leaks"
        );
    }
}

/// The first shortage is solved by freeing caches. If it stays, the call fails, but the device is
/// not lost.
#[test]
fn a_lack_of_memory_is_tried_again_and_fails_the_call_if_it_stays() {
    let mut numbers = Numbers::new(22);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 512);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let before = |call| rknn.stand_in().unwrap().calls(call);
    // The first memory is that of the weights. The second is needed because these activations are
    // larger than the self-test's.
    let calls = [
        ("rknn_create_mem", 2),
        ("rknn_matmul_create", 1),
        ("rknn_matmul_set_io_mem", 1),
    ];
    let firsts = calls.map(|(call, nth)| (call, before(call) + nth));
    let expected = mul_mat(&device, &w, None, &act, [64, 512, 1, 1]).unwrap();
    drop((device, rknn));
    for (call, first) in firsts {
        for stays in [false, true] {
            let plus = if stays { "+" } else { "" };
            let faults = format!("{call}:{first}{plus}=-4");
            let (device, rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
            let multiply = || mul_mat(&device, &w, None, &act, [64, 512, 1, 1]);
            let contexts = || rknn.stand_in().unwrap().live().contexts;
            let started = contexts();
            let result = multiply();
            // The self-test's contexts are freed for room.
            assert!(contexts() < started, "{call}: {} of {started}", contexts());
            if stays {
                for result in [result, multiply()] {
                    let error = result.unwrap_err();
                    let text = error.to_string();
                    assert!(error.is_shortage() && text.contains(call), "{text}");
                }
            } else {
                assert_eq!(result.unwrap(), expected, "{call}");
            }
            drop(device);
            let left = rknn.stand_in().unwrap().live();
            assert_eq!(left, LiveObjects::default(), "{call}");
        }
    }
}

/// For a shortage alone the call would be repeated, and a device that failed to compute would be
/// used further.
#[test]
fn an_error_of_one_core_is_not_forgotten_for_the_shortage_of_another() {
    let mut numbers = Numbers::new(22);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 3 * 4096, 1, 1]);
    let act = numbers.floats(64);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let buffer = packed(&device, &w, 0);
    let calls = |call| rknn.stand_in().unwrap().calls(call);
    let [contexts, runs] = ["rknn_matmul_create", "rknn_matmul_run"].map(calls);
    mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1]).unwrap();
    assert_eq!(calls("rknn_matmul_run"), runs + 3, "one for each core");
    drop((buffer, device));
    // One core gets no context, and another core fails to run.
    for nth in 1..=3 {
        let faults = format!(
            "rknn_matmul_create:{}=-4,rknn_matmul_run:{}=-1",
            contexts + nth,
            runs + 1
        );
        let (device, _rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
        let buffer = packed(&device, &w, 0);
        let product = || mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1]);
        let text = product().unwrap_err().to_string();
        assert!(text.contains("rknn_matmul_run"), "{nth}: {text}");
        assert!(matches!(product().unwrap_err(), Error::DeviceLost { .. }));
    }
}

/// Makes a device that has no memory for the `nth` allocation after its self-test; with "+" after
/// it, for all from then on.
fn device_without_memory_at(nth: u64, plus: &str) -> (Arc<RkDevice>, Arc<Rknn>) {
    let call = "rknn_create_mem";
    let (_device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let before = rknn.stand_in().unwrap().calls(call);
    device_with(
        options(&format!("{call}:{}{plus}=-4", before + nth)),
        &caps::RK3588,
    )
    .unwrap()
}

#[test]
fn weights_go_to_the_next_address_space_if_one_has_less_room_than_reckoned() {
    let (device, rknn) = device_without_memory_at(2, "");
    let contexts = || rknn.stand_in().unwrap().live().contexts;
    let started = contexts();
    let _first = RkBuffer::new(Arc::clone(&device), 4096).unwrap();
    let _second = RkBuffer::new(Arc::clone(&device), 4096).unwrap();
    // One additional context, for the second address space; no context was freed.
    assert_eq!(contexts(), started + 1);
}

#[test]
fn weights_without_memory_are_allocated_after_calls_let_theirs_go() {
    let mut numbers = Numbers::new(25);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let expected = mul_mat(&device, &w, None, &act, [64, 1, 1, 1]).unwrap();
    drop((device, rknn));
    let (device, rknn) = device_without_memory_at(1, "");
    let contexts = || rknn.stand_in().unwrap().live().contexts;
    let started = contexts();
    let buffer = packed(&device, &w, 0);
    assert!(contexts() < started, "{} of {started}", contexts());
    let result = mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1]);
    assert_eq!(result.unwrap(), expected);
}

/// Regression: they were used without being packed once, so each product packed them again.
#[test]
fn weights_without_views_are_packed_after_calls_let_theirs_go() {
    let mut numbers = Numbers::new(28);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64);
    let (view, memory) = ("rknn_create_mem_from_fd", "rknn_create_mem");
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let first = rknn.stand_in().unwrap().calls(view) + 1;
    let expected = mul_mat(&device, &w, None, &act, [64, 1, 1, 1]).unwrap();
    drop((device, rknn));
    let start = || device_with(options(&format!("{view}:{first}=-4")), &caps::RK3588).unwrap();
    let (device, rknn) = start();
    let buffer = packed(&device, &w, 0);
    let multiply = || mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1]);
    assert_eq!(multiply().unwrap(), expected);
    let before = rknn.stand_in().unwrap().calls(memory);
    assert_eq!(multiply().unwrap(), expected);
    assert_eq!(rknn.stand_in().unwrap().calls(memory), before);
    // The same for weights that are packed on use.
    let (device, _rknn) = start();
    let result = mul_mat(&device, &w, None, &act, [64, 1, 1, 1]);
    assert_eq!(result.unwrap(), expected);
}

/// The fault comes without a lack of memory before it: the first address space is full by the sum
/// of its allocations.
#[test]
fn an_address_space_that_cannot_begin_is_tried_again_after_calls_let_theirs_go() {
    let call = "rknn_matmul_create";
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let next = rknn.stand_in().unwrap().calls(call) + 1;
    drop((device, rknn));
    let faults = format!("{call}:{next}={}", code::FAIL);
    let (device, _rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
    let _first = RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES).unwrap();
    RkBuffer::new(device, 4096).unwrap();
}

/// Makes a device that, after its self-test, has memory for one allocation but not for the next,
/// and that cannot begin the second address space; with "+" as `plus`, from then on.
fn device_with_one_address_space(code: i32, plus: &str) -> (Arc<RkDevice>, Arc<Rknn>) {
    let (_device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let before = |call| rknn.stand_in().unwrap().calls(call);
    let (memory, context) = ("rknn_create_mem", "rknn_matmul_create");
    let faults = format!(
        "{memory}:{}{plus}=-4,{context}:{}{plus}={code}",
        before(memory) + 2,
        before(context) + 1
    );
    device_with(options(&faults), &caps::RK3588).unwrap()
}

#[test]
fn weights_are_allocated_after_calls_let_theirs_go_if_no_next_address_space_can_begin() {
    for code in [code::MALLOC_FAIL, code::FAIL] {
        let (device, rknn) = device_with_one_address_space(code, "");
        let live = || rknn.stand_in().unwrap().live();
        let first = RkBuffer::new(Arc::clone(&device), 4096).unwrap();
        let started = live();
        let second = RkBuffer::new(Arc::clone(&device), 4096);
        assert!(second.is_ok(), "{code}: {}", second.unwrap_err());
        assert!(live().contexts < started.contexts);
        drop((first, second));
        // The self-test's activations are freed, too, so no memory is left allocated.
        assert_eq!(live().mems, 0);
    }
}

#[test]
fn an_error_names_the_memory_that_is_short_if_no_next_address_space_can_begin() {
    for code in [code::MALLOC_FAIL, code::FAIL] {
        let (device, _) = device_with_one_address_space(code, "+");
        let _first = RkBuffer::new(Arc::clone(&device), 4096).unwrap();
        let error = RkBuffer::new(device, 4096).unwrap_err();
        let text = error.to_string();
        assert!(
            error.is_shortage() && text.contains("rknn_create_mem"),
            "{code}: {text}"
        );
    }
}

#[test]
fn activations_that_were_let_go_are_packed_again_in_the_same_graph() {
    let mut numbers = Numbers::new(27);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64);
    let twice = |faults: &str| {
        let (device, rknn) = device_with(options(faults), &caps::RK3588).unwrap();
        let buffer = packed(&device, &w, 0);
        let multiply =
            || mul_mat_of_graph(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1], 1).unwrap();
        let first = multiply();
        let stand_in = rknn.stand_in().unwrap();
        let (calls, before) = (stand_in.calls("rknn_create_mem"), stand_in.live().mems);
        let _more = RkBuffer::new(Arc::clone(&device), 4096).unwrap();
        let kept = stand_in.live().mems > before;
        assert_eq!(multiply(), first);
        (calls, kept)
    };
    let (calls, kept) = twice("");
    assert!(kept);
    // Neither the first nor the second address space has memory for more weights, so calls free
    // their cached memory.
    let call = "rknn_create_mem";
    // An address space that was just created is asked twice.
    let faults = [1, 2, 3].map(|nth| format!("{call}:{}=-4", calls + nth));
    let (_, kept) = twice(&faults.join(","));
    assert!(!kept);
}

#[test]
fn results_that_are_kept_make_room_for_weights() {
    let (device, rknn) = device_without_memory_at(1, "+");
    let live = || rknn.stand_in().unwrap().live();
    let started = live();
    assert!(RkBuffer::new(device.clone(), 4096).is_err());
    assert!(live().mems < started.mems, "{:?} of {started:?}", live());
}

#[test]
fn everything_is_released_when_device_and_buffers_are_dropped() {
    let mut numbers = Numbers::new(23);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 2, 1]);
    let act = numbers.floats(64 * 40 * 2);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let buffer = packed(&device, &w, 0);
    mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 40, 2, 1]).unwrap();
    mul_mat(&device, &w, None, &act, [64, 40, 2, 1]).unwrap();
    drop(buffer);
    drop(device);
    assert_eq!(rknn.stand_in().unwrap().live(), LiveObjects::default());
}

#[test]
fn a_library_that_is_too_old_is_refused() {
    let mut options = options("");
    options.api_version = "2.2.0 (c195366594@2024-09-14T12:18:56)".into();
    let error = device_with(options, &caps::RK3588).unwrap_err().to_string();
    assert!(
        error.contains("2.2.0") && error.contains("2.3.0"),
        "{error}"
    );
}

/// The fault is that of librknnrt 1.5.2 with M = 2, in FP16 and INT8.
#[test]
fn an_m_that_the_library_computes_wrong_is_served_by_others() {
    let mut numbers = Numbers::new(25);
    for wrong in [1, 2, 4, 16, 64, 128, 512] {
        let faults = options(&format!("rknn_matmul_run:M{wrong}=0"));
        let (device, _) = device_with(faults, &caps::RK3588).unwrap();
        let (k, n) = (160, 96);
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
            let buffer = packed(&device, &w, 0);
            for m in [1, 2, 3, 4, 6, 18, 60, 130, 146, 500] {
                let act = numbers.floats(m * k);
                let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, m, 1, 1]).unwrap();
                let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, k));
                // As in tests/device.rs, the limit is wider for few products.
                let limit = nmse_limit(dtype) * (1.0 + 12.0 / ((m * n) as f64).sqrt());
                assert!(
                    error <= limit,
                    "{dtype:?} M={m} without {wrong}: {error:.1e}"
                );
            }
        }
    }
}

/// The self-test's own K is right. Regression: a wrong K of a model gave wrong text without a log
/// line.
#[test]
fn the_first_use_of_a_shape_that_is_computed_wrong_fails() {
    let mut numbers = Numbers::new(29);
    for (wrong, m, dtype) in [
        (64, 60, F32_IN_BLOCKS),
        (512, 500, F32_IN_BLOCKS),
        (64, 64, DType::F16),
        (1, 1, DType::F16),
    ] {
        let faults = options(&format!("rknn_matmul_run:M{wrong}K576=0"));
        let (device, _rknn) = device_with(faults, &caps::RK3588).unwrap();
        let mut product = |k: usize| {
            let w = Weight::random(&mut numbers, dtype, [k, 96, 1, 1]);
            let act = numbers.floats(k * m);
            mul_mat(&device, &w, None, &act, [k, m, 1, 1])
        };
        product(160).unwrap();
        let text = product(576).unwrap_err().to_string();
        let shape = format!("M={wrong} K=576");
        assert!(
            text.contains("first use") && text.contains(&shape),
            "{text}"
        );
        assert!(matches!(
            product(160).unwrap_err(),
            Error::DeviceLost { .. }
        ));
    }
}

/// Products of zeros are right in every layout, so they prove nothing about a shape.
#[test]
fn zeros_prove_no_shape() {
    let mut numbers = Numbers::new(30);
    let (device, _rknn) = device_with(options("rknn_matmul_run:M4K64=0"), &caps::RK3588).unwrap();
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let buffer = packed(&device, &w, 0);
    let product = |act: &[f32]| mul_mat(&device, &w, Some((&buffer, 0)), act, [64, 4, 1, 1]);
    assert!(product(&[0.0; 64 * 4]).unwrap().iter().all(|x| *x == 0.0));
    let text = product(&numbers.floats(64 * 4)).unwrap_err().to_string();
    assert!(text.contains("first use"), "{text}");
}

/// Nothing ran on the context that failed, and a general failure may be a lack of memory.
#[test]
fn a_failure_before_anything_ran_is_tried_again_and_fails_the_call_alone() {
    let mut numbers = Numbers::new(31);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 3);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let before = |call| rknn.stand_in().unwrap().calls(call) + 1;
    let firsts = ["rknn_matmul_create", "rknn_matmul_set_io_mem"].map(|call| (call, before(call)));
    let expected = mul_mat(&device, &w, None, &act, [64, 3, 1, 1]).unwrap();
    drop((device, rknn));
    for (call, first) in firsts {
        for stays in [false, true] {
            let plus = if stays { "+" } else { "" };
            let faults = format!("{call}:{first}{plus}=-1");
            let (device, _rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
            let multiply = || mul_mat(&device, &w, None, &act, [64, 3, 1, 1]);
            if stays {
                for _ in 0..2 {
                    let error = multiply().unwrap_err();
                    assert!(
                        error.is_shortage() && error.to_string().contains(call),
                        "{error}"
                    );
                }
                assert!(!device.npu().is_lost());
            } else {
                assert_eq!(multiply().unwrap(), expected, "{call}");
            }
        }
    }
}

#[test]
fn a_failure_of_a_context_that_has_run_ends_the_device() {
    let mut numbers = Numbers::new(32);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64);
    let call = "rknn_matmul_set_io_mem";
    let products = |faults: &str| {
        let (device, rknn) = device_with(options(faults), &caps::RK3588).unwrap();
        let buffers = [0, 4096].map(|at| (packed(&device, &w, at), at));
        let [first, second] = [0, 1].map(|i| {
            let (buffer, at) = &buffers[i];
            let before = rknn.stand_in().unwrap().calls(call);
            let result = mul_mat(&device, &w, Some((buffer, *at)), &act, [64, 1, 1, 1]);
            (before, result)
        });
        (first, second, device.npu().is_lost())
    };
    let (first, second, lost) = products("");
    assert_eq!(first.1.unwrap(), second.1.unwrap());
    assert!(!lost);
    let (first, second, lost) = products(&format!("{call}:{}=-1", second.0 + 1));
    assert!(first.1.is_ok() && lost);
    let text = second.1.unwrap_err().to_string();
    assert!(text.contains(call) && !text.contains("lack"), "{text}");
}

#[test]
fn an_arithmetic_with_two_wrong_m_is_no_device() {
    let faults = options("rknn_matmul_run:M2=0,rknn_matmul_run:M16=0");
    let error = device_with(faults, &caps::RK3588).unwrap_err().to_string();
    assert!(
        error.contains("self-test") && error.contains("M=2 K=1056"),
        "{error}"
    );
}

#[test]
fn other_tiles_of_the_library_are_followed_where_they_are_known() {
    let mut numbers = Numbers::new(26);
    // The header's tile for INT4 on RK3576, where the guide says 32 x 32; then two tiles that no
    // chip has.
    for (caps, matmul_type, rules, tile) in [
        (
            &caps::RK3576,
            MatmulType::I8_I4_I32,
            "weight=int4",
            (64, 32),
        ),
        (&caps::RK3588, MatmulType::I8_I8_I32, "", (16, 32)),
        (
            &caps::RK3588,
            MatmulType::I8_I8_I32,
            "weight=int8-plain",
            (16, 32),
        ),
        (&caps::RK3588, MatmulType::F16_F16_F32, "", (8, 16)),
        (&caps::RK3588, MatmulType::F16_F16_F32, "", (32, 32)),
    ] {
        let start = |tile| {
            let mut options = sim::Options::new(caps.soc);
            options.tiles = vec![(matmul_type, tile)];
            let rknn = Rknn::simulate(options).unwrap();
            let target = Target {
                rules: Rules::parse(rules).unwrap(),
                ..Target::from(caps)
            };
            RkDevice::start(rknn, target).map(Arc::new)
        };
        let device = start(tile).unwrap();
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            let w = Weight::random(&mut numbers, dtype, [96, 200, 1, 1]);
            let buffer = packed(&device, &w, 0);
            let act = numbers.floats(3 * 96);
            let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [96, 3, 1, 1]).unwrap();
            let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, 96));
            // INT4 has an error of 0.012; a wrong tile gives 1 or more.
            let limit = if rules == "weight=int4" { 4e-2 } else { 1e-3 };
            assert!(
                error <= limit,
                "{matmul_type:?} {tile:?} {dtype:?}: {error:.1e}"
            );
        }
        for unknown in [(32, 64), (48, 32)] {
            let text = start(unknown).unwrap_err().to_string();
            let words = [
                "rknn_matmul_create",
                "B of M=4 K=128 N=128",
                "bytes, not as [",
            ];
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
            assert!(
                text.contains(&format!("{}, {}]", unknown.0, unknown.1)),
                "{text}"
            );
        }
    }
}

/// Runs multiplications that make and use contexts, memory and views of many shapes: enough for 100
/// calls of every function that can fail after the start. Returns the number of results as in
/// `want` before the first error, and that error.
fn workload(device: &Arc<RkDevice>, want: &[Vec<f32>]) -> (usize, Option<Error>) {
    let mut done = 0;
    for round in 0..ROUNDS {
        for (w, act, ne) in multiplications(round) {
            let tensor = w.tensor(Some(0));
            let bytes = device.packed_bytes(&tensor);
            let result = RkBuffer::new(Arc::clone(device), bytes).and_then(|buffer| {
                let copy = Content::Bytes(&w.bytes);
                buffer.write(&tensor, 0, w.bytes.len(), copy)?;
                mul_mat(device, &w, Some((&buffer, 0)), &act, ne)
            });
            match result {
                Ok(have) => assert!(want.is_empty() || have == want[done], "wrong number {done}"),
                Err(error) => return (done, Some(error)),
            }
            done += 1;
        }
    }
    (done, None)
}

const ROUNDS: usize = 24;

fn multiplications(round: usize) -> impl Iterator<Item = (Weight, Vec<f32>, [usize; 4])> {
    let mut numbers = Numbers::fixed(100 + round as u64);
    let (k, n) = (32 * (1 + round % 12), 96);
    [1, 2, 4, 8].into_iter().map(move |m| {
        let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
        (w, numbers.floats(m * k), [k, m, 1, 1])
    })
}

fn expected() -> Vec<Vec<f32>> {
    let (device, _) = device_with(options(""), &caps::RK3588).unwrap();
    let all = (0..ROUNDS).flat_map(multiplications);
    all.map(|(w, act, ne)| mul_mat(&device, &w, None, &act, ne).unwrap())
        .collect()
}

/// Functions that are called repeatedly; the other functions are called only at the start.
const REPEATED: [&str; 7] = [
    "rknn_matmul_create",
    "rknn_matmul_set_core_mask",
    "rknn_matmul_set_io_mem",
    "rknn_matmul_run",
    "rknn_create_mem",
    "rknn_create_mem_from_fd",
    "rknn_mem_sync",
];

#[test]
fn every_call_that_fails_the_1st_2nd_or_100th_time_is_a_clear_error_or_tried_again() {
    let want = expected();
    for call in REPEATED {
        for nth in [1, 2, 100] {
            let fault = format!("{call}:{nth}=-1");
            let error = match device_with(options(&fault), &caps::RK3588) {
                Err(error) => Some(error),
                Ok((device, rknn)) => {
                    let (_, error) = workload(&device, &want);
                    drop(device);
                    let stand_in = rknn.stand_in().unwrap();
                    assert_eq!(stand_in.live(), LiveObjects::default(), "{fault} leaks");
                    assert!(stand_in.calls(call) >= nth, "{fault} was never reached");
                    error
                }
            };
            match error {
                Some(error) => assert!(error.to_string().contains(call), "{fault}: {error}"),
                // If the error may be a lack of memory, the call is repeated.
                None => assert!(
                    [
                        "rknn_create_mem",
                        "rknn_create_mem_from_fd",
                        "rknn_matmul_create",
                        "rknn_matmul_set_io_mem"
                    ]
                    .contains(&call),
                    "{fault} was no error"
                ),
            }
        }
    }
}

/// Functions whose failure is only worth a warning, because they release resources that are lost
/// anyway.
#[test]
fn a_failing_release_changes_no_result() {
    let want = expected();
    for call in ["rknn_matmul_destroy", "rknn_destroy_mem"] {
        for nth in [1, 2, 100] {
            let faults = options(&format!("{call}:{nth}=-1"));
            let (device, _) = device_with(faults, &caps::RK3588).unwrap();
            let (done, error) = workload(&device, &want);
            assert!(
                error.is_none() && done == want.len(),
                "{call}:{nth}: {error:?}"
            );
        }
    }
}

#[test]
fn two_thousand_graphs_with_random_faults_are_right_or_failed_and_leak_nothing() {
    let mut numbers = Numbers::new(24);
    let want = expected();
    let (mut graphs, mut met, mut failures) = (0, 0, 0);
    while graphs < 2000 {
        let call = REPEATED[numbers.below(REPEATED.len())];
        let nth = 1 + numbers.below(300);
        let fault = format!("{call}:{nth}=-{}", 1 + numbers.below(13));
        match device_with(options(&fault), &caps::RK3588) {
            Err(error) => assert!(error.to_string().contains(call), "{fault}: {error}"),
            Ok((device, rknn)) => {
                let (done, error) = workload(&device, &want);
                drop(device);
                let stand_in = rknn.stand_in().unwrap();
                assert_eq!(stand_in.live(), LiveObjects::default(), "{fault} leaks");
                met += usize::from(stand_in.calls(call) >= nth as u64);
                if let Some(error) = &error {
                    assert!(error.to_string().contains(call), "{fault}: {error}");
                    failures += 1;
                }
                graphs += done;
            }
        }
        graphs += 1;
    }
    // Calls that are repeated make nothing fail.
    assert!(
        met >= 20 && failures >= 5,
        "{met} faults were met, {failures} failed"
    );
}

/// librknnrt has no kernels for some shapes. Regression: the device was out of use for every model
/// after the first such shape.
#[test]
fn a_shape_that_the_library_refuses_fails_its_graph_alone() {
    let mut numbers = Numbers::new(23);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 512);
    let multiply =
        |device: &Arc<RkDevice>, m: usize| mul_mat(device, &w, None, &act[..64 * m], [64, m, 1, 1]);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let calls = rknn.stand_in().unwrap().calls("rknn_matmul_create");
    let expected = multiply(&device, 4).unwrap();
    drop((device, rknn));
    // The first context of a shape that the self-test does not use.
    let faults = format!("rknn_matmul_create:{}=-5", calls + 1);
    let (device, _rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
    let error = multiply(&device, 512).unwrap_err();
    assert!(error.to_string().contains("rknn_matmul_create"), "{error}");
    assert!(!device.npu().is_lost());
    assert_eq!(multiply(&device, 4).unwrap(), expected);
    multiply(&device, 512).unwrap();
}

/// Regression: llama-server without a model only starts other servers, but kept the NPU until its
/// end, so these found no NPU. The same happened with a server whose model was freed.
#[test]
fn a_device_without_weights_has_nothing_of_the_npu_open() {
    let mut numbers = Numbers::new(24);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 4);
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let live = || rknn.stand_in().unwrap().live();
    let memory = device.memory(system_memory());
    assert!(rknn.is_seated());
    device.npu().release_idle();
    let mut first = None;
    for _ in 0..2 {
        assert_eq!((live(), rknn.is_seated()), (LiveObjects::default(), false));
        assert_eq!(device.memory(system_memory()).1, memory.1);
        // No buffer can be this large.
        RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES + 1).unwrap_err();
        assert_eq!((live(), rknn.is_seated()), (LiveObjects::default(), false));
        let [buffer, other] = [0; 2].map(|_| packed(&device, &w, 0));
        assert!(rknn.is_seated());
        let multiply = |buffer: &RkBuffer| {
            mul_mat(&device, &w, Some((buffer, 0)), &act, [64, 4, 1, 1]).unwrap()
        };
        let result = multiply(&buffer);
        assert_eq!(*first.get_or_insert_with(|| result.clone()), result);
        // Contexts that stay bound to freed weights would keep the memory allocated.
        let bound = live().contexts;
        drop(buffer);
        assert!(live().contexts < bound && rknn.is_seated());
        assert_eq!(multiply(&other), result);
    }
}

/// Regression: each of 199 weights reported that it could not be written, and the model was loaded
/// anyway.
#[test]
fn a_weight_without_room_fails_before_it_is_written_and_the_error_counts_and_advises() {
    let call = "rknn_create_mem_from_fd";
    let (_device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let before = rknn.stand_in().unwrap().calls(call);
    let faults = options(&format!("{call}:{}+=-4", before + 4));
    let (device, _) = device_with(faults, &caps::RK3588).unwrap();
    // Each memory has three views, one for each core.
    let w = Weight::random(&mut Numbers::new(33), F32_IN_BLOCKS, [64, 96, 1, 1]);
    let bytes = device.packed_bytes(&w.tensor(Some(0)));
    let buffer = RkBuffer::new(device, 2 * bytes).unwrap();
    buffer.prepare(&w.tensor(Some(0))).unwrap();
    let error = buffer.prepare(&w.tensor(Some(bytes))).unwrap_err();
    let text = error.to_string();
    for words in ["after 1 weights", call, "-ngl", "smaller model"] {
        assert!(text.contains(words), "{text}");
    }
    // A tensor that is already prepared is left unchanged.
    buffer.prepare(&w.tensor(Some(0))).unwrap();
}
