//! Proves that a device multiplies right: every chip and arithmetic against the reference, in
//! shapes around every edge (tiles, chunks, segments, buckets), whatever the batch, and under
//! strict coherence.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(
    unsafe_code,
    reason = "a node that writes what it reads has two ways to one memory"
)]

mod common;

use common::{
    F32_IN_BLOCKS, Numbers, Q8_0, Weight, contiguous, device, device_with, mul_mat, mul_mat_id,
    mul_mat_of_graph, nmse_limit, packed, tensor,
};
use ggml_rust_npu::backend::{Buffer, Content, Device, Node};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::caps::{self, Cores, RkCaps};
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice, selftest};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::sim::{self, Coherence};
use std::sync::Arc;
use std::time::Duration;

/// N below, at and above a tile, a core's share and a chunk; K below, at and above a tile and a
/// segment.
const SHAPES: [[usize; 3]; 12] = [
    [1, 32, 1],
    [1, 32, 31],
    [4, 64, 32],
    [7, 96, 33],
    [33, 576, 96],
    [1, 576, 200],
    [72, 160, 64],
    [600, 32, 17],
    [1, 4096, 40],
    [2, 4128, 40],
    [3, 8224, 24],
    [1, 64, 13000],
];

fn check(
    device: &Arc<RkDevice>,
    caps: &'static RkCaps,
    dtype: DType,
    [m, k, n]: [usize; 3],
    numbers: &mut Numbers,
) {
    let w = Weight::random(numbers, dtype, [k, n, 1, 1]);
    let act = numbers.floats(m * k);
    let want = reference::mul_mat(&act, &w.values, k);
    let buffer = packed(device, &w, 4096);
    for packed in [None, Some((&buffer, 4096))] {
        let have = mul_mat(device, &w, packed, &act, [k, m, 1, 1]).unwrap();
        // The error is relative to the power that uncorrelated rows would have, because a single
        // product may cancel to almost nothing.
        let norms = |rows: &[f32]| -> f64 { rows.iter().map(|x| f64::from(x * x)).sum() };
        let power = norms(&act) * norms(&w.values) / k as f64;
        let error: f64 = have
            .iter()
            .zip(&want)
            .map(|(x, y)| (f64::from(*x) - y).powi(2))
            .sum();
        let error = error / power;
        // With few products, the mean square error varies more: 12 / sqrt(1) covers 3.6 standard
        // deviations of a single product.
        let limit = nmse_limit(dtype) * (1.0 + 12.0 / ((m * n) as f64).sqrt());
        assert!(
            error <= limit,
            "{} {dtype:?} M={m} K={k} N={n} packed={}: {error:.2e} > {limit:.1e}",
            caps.soc.name(),
            packed.is_some()
        );
    }
}

#[test]
fn every_chip_and_arithmetic_agrees_with_the_reference() {
    let mut numbers = Numbers::new(1);
    for caps in caps::ALL {
        let device = device(caps);
        for dtype in [DType::F16, DType::Bf16, F32_IN_BLOCKS] {
            for shape in SHAPES {
                check(&device, caps, dtype, shape, &mut numbers);
            }
        }
    }
}

#[test]
fn k_that_is_no_multiple_of_a_tile_is_padded() {
    let mut numbers = Numbers::new(2);
    let caps = &caps::RK3588;
    let device = device(caps);
    for k in [2, 31, 33, 129] {
        check(&device, caps, DType::F16, [3, k, 40], &mut numbers);
    }
}

#[test]
fn planes_are_batched_and_broadcast() {
    let mut numbers = Numbers::new(3);
    let device = device(&caps::RK3588);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let (k, m, n) = (64, 5, 48);
        // Each dimension has a different factor, so that an exchange of dimensions would be
        // noticed.
        let w = Weight::random(&mut numbers, dtype, [k, n, 2, 3]);
        let act = numbers.floats(k * m * 4 * 9);
        let have = mul_mat(&device, &w, None, &act, [k, m, 4, 9]).unwrap();
        for i3 in 0..9 {
            for i2 in 0..4 {
                let plane = i3 * 4 + i2;
                let slice = (i3 / 3) * 2 + i2 / 2;
                let act = &act[plane * m * k..][..m * k];
                let want = reference::mul_mat(act, &w.values[slice * n * k..][..n * k], k);
                let error = reference::nmse(&have[plane * m * n..][..m * n], &want);
                assert!(error <= nmse_limit(dtype), "plane {i2},{i3}: {error:.2e}");
            }
        }
    }
}

/// Q, K and V read the same activations, which are packed once; a node in between may write its
/// result there.
#[test]
fn activations_that_a_node_of_the_graph_overwrites_are_packed_again() {
    let mut numbers = Numbers::new(5);
    let device = device(&caps::RK3588);
    let (k, m) = (64, 3);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let w = Weight::random(&mut numbers, dtype, [k, k, 1, 1]);
        let mut x = numbers.floats(k * m);
        let graph = u64::MAX;
        let ne = [k, m, 1, 1];
        let shape = contiguous(DType::F32, ne);
        // All nodes read x, and this one also writes it.
        let at = x.as_mut_ptr().cast::<u8>();
        // SAFETY: these are the bytes of x, which is alive.
        let act = unsafe { Region::new(at, k * m * 4) };
        // SAFETY: as above; the device has packed its input before it writes.
        let out = unsafe { RegionMut::new(at, k * m * 4) };
        let act = Tensor {
            memory: Some(act),
            ..tensor("x", DType::F32, shape)
        };
        let mut node = Node {
            operation: Operation {
                op: Op::MulMat,
                params: [0; PARAMS],
                dst: tensor("result", DType::F32, shape),
                src: sources(&[w.tensor(None), act]),
            },
            out,
            feeds_next: false,
            dst: None,
            src: [None; ggml_rust_npu::graph::MAX_SOURCES],
        };
        device.compute(&mut node, graph).unwrap();
        let want = reference::mul_mat(&x, &w.values, k);
        let have = mul_mat_of_graph(&device, &w, None, &x, ne, graph).unwrap();
        let error = reference::nmse(&have, &want);
        assert!(error <= nmse_limit(dtype), "{dtype:?}: {error:.2e}");
    }
}

/// Memory is reused for rows of any length, so old elements after K must have no effect.
#[test]
fn what_lay_behind_k_is_cleared() {
    use rknpu_ops::layout::{Elem, NativeA, NativeB};
    use rknpu_ops::pack::{Rows, interleave_a, pack_group};
    let (k, rows) = (21usize, 3);
    let source: Vec<i8> = (0..rows * k)
        .map(|i| i8::try_from(i % 100 + 1).unwrap())
        .collect();
    for s in [4, 8, 16, 32, 12] {
        let slices = k.div_ceil(s);
        let mut dst = vec![0x55i8; slices * 4 * s];
        let elem = Elem::I8;
        let layout = NativeA { s, elem };
        interleave_a(Rows::new(&source, rows, k, k), layout, 4, &mut dst);
        let (gk, gn, split_k) = (s, 4, 8192);
        let layout = NativeB {
            gn,
            gk,
            split_k,
            elem,
        };
        let mut group = vec![0x55i8; slices * 4 * s];
        pack_group(Rows::new(&source, rows, k, k), layout, &mut group);
        for (at, (a, b)) in dst.iter().zip(&group).enumerate() {
            let (row, column) = (at / s % 4, at / (4 * s) * s + at % s);
            let is_real = row < rows && column < k;
            let want = if is_real { source[row * k + column] } else { 0 };
            assert_eq!(
                (*a, *b),
                (want, want),
                "slices of {s}: row {row}, column {column}"
            );
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_batch_it_is_computed_in() {
    let mut numbers = Numbers::new(4);
    for caps in caps::ALL {
        let device = device(caps);
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            let (k, n) = (576, 200);
            let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
            let buffer = packed(&device, &w, 0);
            let packed = Some((&buffer, 0));
            let act = numbers.floats(130 * k);
            let alone: Vec<f32> = act
                .chunks_exact(k)
                .flat_map(|row| mul_mat(&device, &w, packed, row, [k, 1, 1, 1]).unwrap())
                .collect();
            for m in [2, 3, 8, 17, 64, 100, 130] {
                let rows = &act[..m * k];
                let batch = mul_mat(&device, &w, packed, rows, [k, m, 1, 1]).unwrap();
                let same = batch
                    .iter()
                    .zip(&alone)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{} {dtype:?} M={m}", caps.soc.name());
            }
        }
    }
}

#[test]
fn no_cache_operation_is_forgotten() {
    let mut numbers = Numbers::new(5);
    for caps in caps::ALL {
        let mut options = sim::Options::new(caps.soc);
        options.coherence = Coherence::Strict;
        let (strict, _) = device_with(options, caps).unwrap();
        let relaxed = device(caps);
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            // Two segments of K. At the second multiplication, every buffer still has the results
            // of the first.
            let (k, n) = (8224, 72);
            let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
            let (in_strict, in_relaxed) = (packed(&strict, &w, 0), packed(&relaxed, &w, 0));
            for m in [1, 5, 40, 1] {
                let act = numbers.floats(m * k);
                let ne = [k, m, 1, 1];
                let have = mul_mat(&strict, &w, Some((&in_strict, 0)), &act, ne).unwrap();
                let want = mul_mat(&relaxed, &w, Some((&in_relaxed, 0)), &act, ne).unwrap();
                assert_eq!(have, want, "{} {dtype:?} M={m}", caps.soc.name());
            }
        }
    }
}

#[test]
fn rows_with_huge_tiny_or_missing_numbers_keep_to_themselves() {
    let mut numbers = Numbers::new(6);
    let device = device(&caps::RK3588);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let (k, n) = (128, 40);
        let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
        let plain = numbers.floats(k);
        let mut act = Vec::new();
        for factor in [1.0, 1e6, 1e-30, 0.0] {
            act.extend(plain.iter().map(|x| x * factor));
        }
        act.extend(&plain);
        act[4 * k + 3] = f32::INFINITY;
        let have = mul_mat(&device, &w, None, &act, [k, 5, 1, 1]).unwrap();
        let want = reference::mul_mat(&act[..3 * k], &w.values, k);
        for row in 0..3 {
            let error = reference::nmse(&have[row * n..][..n], &want[row * n..][..n]);
            assert!(
                error <= nmse_limit(dtype),
                "{dtype:?} row {row}: {error:.2e}"
            );
        }
        assert!(have[3 * n..4 * n].iter().all(|x| *x == 0.0));
        assert!(have[4 * n..].iter().all(|x| !x.is_finite()));
    }
}

#[test]
fn threads_take_turns() {
    let mut numbers = Numbers::new(7);
    let device = device(&caps::RK3588);
    let (k, n) = (192, 96);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
    let buffer = packed(&device, &w, 0);
    let acts: Vec<_> = [1, 9, 30].map(|m| (m, numbers.floats(m * k))).into();
    let compute = |m: usize, act: &[f32]| {
        mul_mat(&device, &w, Some((&buffer, 0)), act, [k, m, 1, 1]).unwrap()
    };
    let want: Vec<_> = acts.iter().map(|(m, act)| compute(*m, act)).collect();
    std::thread::scope(|scope| {
        for ((m, act), want) in acts.iter().zip(&want) {
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(&compute(*m, act), want);
                }
            });
        }
    });
}

#[test]
fn experts_multiply_the_rows_that_chose_them() {
    let mut numbers = Numbers::new(8);
    let device = device(&caps::RK3588);
    let (k, n, experts, used, tokens) = (96, 40, 5, 3, 7);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let w = Weight::random(&mut numbers, dtype, [k, n, experts, 1]);
        let buffer = packed(&device, &w, 0);
        let ids = numbers.choices(tokens, used, experts);
        // One row for all slots of a token, and then one row for each slot.
        for rows in [1, used] {
            let act = numbers.floats(k * rows * tokens);
            for packed in [None, Some((&buffer, 0))] {
                let ne = [k, rows, tokens, 1];
                let have = mul_mat_id(&device, &w, packed, &act, ne, &ids, used).unwrap();
                for (row, have) in have.chunks_exact(n).enumerate() {
                    let (token, slot) = (row / used, row % used);
                    let expert = usize::try_from(ids[row]).unwrap();
                    let act = &act[(token * rows + slot % rows) * k..][..k];
                    let want = reference::mul_mat(act, &w.values[expert * n * k..][..n * k], k);
                    let error = reference::nmse(have, &want);
                    assert!(error <= 2.0 * nmse_limit(dtype), "row {row}: {error:.2e}");
                }
            }
        }
        for wrong in [-1, 5] {
            let mut ids = ids.clone();
            ids[4] = wrong;
            let act = numbers.floats(k * tokens);
            let error = mul_mat_id(&device, &w, None, &act, [k, 1, tokens, 1], &ids, used);
            let text = error.unwrap_err().to_string();
            assert!(text.contains("expert"), "{text}");
        }
    }
}

#[test]
fn weights_fill_one_address_space_after_another_and_give_it_back() {
    let mut numbers = Numbers::new(9);
    // librknnrt's address spaces, which have other sizes than those of the direct drivers.
    let options = sim::Options::new(caps::RK3588.soc);
    let (device, _) = device_with(options, &caps::RK3588).unwrap();
    let (free, total) = device.address_space();
    assert_eq!(
        (free, total),
        (
            16 * caps::DOMAIN_WEIGHT_BYTES,
            16 * caps::DOMAIN_WEIGHT_BYTES
        )
    );
    let (k, n) = (64, 96);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
    let act = numbers.floats(k * 3);
    // Each weight needs most of an address space, so the last one is in the third. Memory is only
    // reserved, not touched.
    let large = caps::DOMAIN_WEIGHT_BYTES * 3 / 4;
    let offsets = [0, 0, 4096];
    let buffers = offsets.map(|_| RkBuffer::new(Arc::clone(&device), large).unwrap());
    assert_eq!(device.address_space().0, free - 3 * large);
    let results = [0, 1, 2].map(|i| {
        let (tensor, bytes) = (w.tensor(Some(offsets[i])), w.bytes.len());
        let write = Content::Bytes(&w.bytes);
        buffers[i].write(&tensor, 0, bytes, write).unwrap();
        mul_mat(
            &device,
            &w,
            Some((&buffers[i], offsets[i])),
            &act,
            [k, 3, 1, 1],
        )
        .unwrap()
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
    drop(buffers);
    assert_eq!(device.address_space().0, free);
    assert!(RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES + 1).is_err());
    RkBuffer::new(device, caps::DOMAIN_WEIGHT_BYTES).unwrap();
}

/// In such a kernel the switch of spaces succeeds and does nothing; the third buffer of 1.75 GiB
/// does not fit into 4 GiB.
#[test]
fn spaces_that_share_their_addresses_are_found_out_when_an_empty_one_is_full() {
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.one_address_space = true;
    let (device, rknn) = device_with(options, &caps::RK3588).unwrap();
    let allocate = || RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES);
    assert_eq!(device.address_space().1, 16 * caps::DOMAIN_WEIGHT_BYTES);
    let held = [allocate().unwrap(), allocate().unwrap()];
    let contexts = || rknn.stand_in().unwrap().live().contexts;
    assert!(allocate().unwrap_err().is_shortage());
    let both = 2 * caps::DOMAIN_WEIGHT_BYTES;
    assert_eq!(device.address_space(), (0, both));
    // Nothing of the third space is left, and it is not tried again.
    let left = contexts();
    assert!(allocate().is_err());
    assert_eq!(contexts(), left);
    drop(held);
    assert_eq!(device.address_space(), (both, both));
    allocate().unwrap();
}

/// Two threads of such a driver disturb each other; one core alone is right.
#[test]
fn one_core_is_used_if_several_disturb_each_other() {
    let mut numbers = Numbers::new(35);
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.mixed_views = true;
    options.run_time = Duration::from_millis(2);
    let rknn = Rknn::simulate(options).unwrap();
    let device = RkDevice::untested(Arc::clone(&rknn), &caps::RK3588).unwrap();
    assert!(selftest::cores(device.npu()).unwrap().is_some());
    drop(device);
    let device = Arc::new(RkDevice::start(rknn, &caps::RK3588).unwrap());
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 200, 1, 1]);
    let act = numbers.floats(64 * 5);
    let buffer = packed(&device, &w, 4096);
    let have = mul_mat(&device, &w, Some((&buffer, 4096)), &act, [64, 5, 1, 1]).unwrap();
    let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, 64));
    assert!(error <= nmse_limit(F32_IN_BLOCKS), "{error:.1e}");
}

/// Each product has new shapes, so contexts and memory are made, bound and dropped all the time, by
/// two threads that multiply and by one that loads weights; runs are long enough for every other
/// call to meet one.
#[test]
fn nothing_but_runs_happens_during_a_run() {
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.run_time = Duration::from_millis(1);
    let (device, rknn) = device_with(options, &caps::RK3588).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let device = &device;
            scope.spawn(move || {
                let mut numbers = Numbers::new(36 + thread);
                for (round, dtype) in [F32_IN_BLOCKS, DType::F16]
                    .into_iter()
                    .cycle()
                    .take(8)
                    .enumerate()
                {
                    let (k, n) = (64 + 32 * round, 13_000);
                    let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
                    let buffer = packed(device, &w, 0);
                    for m in [1, 3] {
                        let act = numbers.floats(k * m);
                        let have =
                            mul_mat(device, &w, Some((&buffer, 0)), &act, [k, m, 1, 1]).unwrap();
                        let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, k));
                        assert!(error <= nmse_limit(dtype), "M={m} K={k}: {error:.1e}");
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..200 {
                drop(RkBuffer::new(Arc::clone(&device), 4096).unwrap());
            }
        });
    });
    assert_eq!(rknn.stand_in().unwrap().locked_up(), None);
}

#[test]
fn a_driver_without_address_spaces_has_one() {
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.driver_version = "0.9.5".into();
    let (device, _) = device_with(options, &caps::RK3588).unwrap();
    assert_eq!(device.address_space().1, caps::DOMAIN_WEIGHT_BYTES);
    let _first = RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES).unwrap();
    let error = RkBuffer::new(device, 4096).unwrap_err();
    assert!(error.is_shortage(), "{error}");
}

#[test]
fn activations_are_shared_in_a_graph_and_only_there() {
    let mut numbers = Numbers::new(10);
    let device = device(&caps::RK3588);
    let (k, n, m) = (576, 96, 5);
    let weights = [0, 1].map(|_| Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]));
    let buffers = [0, 1].map(|i| packed(&device, &weights[i], 0));
    let mut act = numbers.floats(m * k);
    let ne = [k, m, 1, 1];
    let multiply = |i: usize, act: &[f32], graph| {
        mul_mat_of_graph(&device, &weights[i], Some((&buffers[i], 0)), act, ne, graph).unwrap()
    };
    let alone = [multiply(0, &act, 1), multiply(1, &act, 2)];
    assert_eq!([multiply(0, &act, 3), multiply(1, &act, 3)], alone);
    // In the next graph the same memory has other contents.
    act.iter_mut().for_each(|x| *x *= 2.0);
    let doubled = multiply(0, &act, 4);
    assert!(doubled.iter().zip(&alone[0]).all(|(x, y)| *x == 2.0 * y));
}

#[test]
fn few_rows_with_values_beyond_fp16_are_as_exact_as_the_others() {
    let mut numbers = Numbers::new(31);
    let (k, n, m) = (192, 20, 3);
    let mut w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
    // Factors from just inside FP16's range (65504) to far outside; the other rows are unchanged.
    for (row, factor) in [(1, 65504.0), (4, 65530.0), (5, 1e6), (9, 1e30)] {
        w.values[row * k..][..k]
            .iter_mut()
            .for_each(|x| *x *= factor);
    }
    w.bytes = w.values.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let act = numbers.floats(m * k);
    let want = reference::mul_mat(&act, &w.values, k);
    for caps in caps::ALL {
        let device = device(caps);
        let buffer = packed(&device, &w, 0);
        let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, m, 1, 1]).unwrap();
        for row in 0..n {
            let column = |m: usize| m * n + row;
            let have: Vec<_> = (0..m).map(|m| have[column(m)]).collect();
            let want: Vec<_> = (0..m).map(|m| want[column(m)]).collect();
            let error = reference::nmse(&have, &want);
            // Both operands are rounded here, each with an error of 2e-8, so the sum of three
            // products stays below this.
            assert!(error <= 1e-6, "{} row {row}: {error:.1e}", caps.soc.name());
        }
    }
}

#[test]
fn rows_with_nan_or_infinity_are_nan_and_all_goes_on() {
    let mut numbers = Numbers::new(32);
    for (caps, rules) in [
        (&caps::RK3588, ""),
        (&caps::RK3588, "weight=int4"),
        (&caps::RK3576, "weight=int4"),
        (&caps::RK3576, "weight=int4-fp16"),
        (&caps::RK3566, ""),
    ] {
        let rknn = Rknn::simulate(sim::Options::new(caps.soc)).unwrap();
        let target = Target {
            rules: Rules::parse(rules).unwrap(),
            ..Target::from(caps)
        };
        let device = Arc::new(RkDevice::start(rknn, target).unwrap());
        for dtype in [DType::F16, F32_IN_BLOCKS] {
            let (k, n) = (576, 40);
            let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
            let buffer = packed(&device, &w, 0);
            for m in [1, 2, 3, 5, 17, 64] {
                let act = numbers.floats(m * k);
                let ne = [k, m, 1, 1];
                let compute =
                    |act: &[f32]| mul_mat(&device, &w, Some((&buffer, 0)), act, ne).unwrap();
                let want = compute(&act);
                for (odd, at) in [
                    (f32::NAN, 0),
                    (f32::INFINITY, k - 1),
                    (f32::NEG_INFINITY, 7),
                ] {
                    for bad in [0, m / 2, m - 1] {
                        let mut act = act.clone();
                        act[bad * k + at] = odd;
                        let have = compute(&act);
                        for row in 0..m {
                            let (have, want) = (&have[row * n..][..n], &want[row * n..][..n]);
                            let right = if row == bad {
                                have.iter().all(|x| x.is_nan())
                            } else {
                                have == want
                            };
                            let name = caps.soc.name();
                            assert!(
                                right,
                                "{name} {rules} {dtype:?} M={m} {odd} in row {bad}: row {row} {have:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_cores_that_are_left_compute_all_columns() {
    let mut numbers = Numbers::new(33);
    let all = device(&caps::RK3588);
    for cores in ["0", "1", "0,2", "1,2"] {
        let cores = Cores::parse(cores).unwrap();
        let caps = RkCaps {
            cores,
            ..caps::RK3588
        };
        let some = device(caps.keep());
        for [m, k, n] in [[1, 64, 1], [3, 96, 40], [2, 64, 13000], [5, 8224, 200]] {
            let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
            let act = numbers.floats(m * k);
            let ne = [k, m, 1, 1];
            let have = mul_mat(&some, &w, None, &act, ne).unwrap();
            assert!(
                have == mul_mat(&all, &w, None, &act, ne).unwrap(),
                "{cores} N={n}"
            );
        }
    }
}

/// llama.cpp's loader asks about ggml's default buffers first, then for packed ones. A weight of
/// any operation but a product must stay on the CPU, where its operation runs.
#[test]
fn weights_land_packed_if_the_npu_multiplies_with_them_and_else_on_the_cpu() {
    let device = device(&caps::RK3588);
    let of = |dtype, ne, place| Tensor {
        place,
        ..tensor("weight", dtype, contiguous(dtype, ne))
    };
    for (op, dtype, ne, is_packed) in [
        (Op::MulMat, Q8_0, [64, 96, 1, 1], true),
        (Op::MulMat, DType::F16, [64, 96, 1, 1], true),
        (Op::MulMat, DType::Bf16, [64, 96, 1, 1], true),
        (Op::MulMat, DType::F32, [64, 96, 1, 1], false),
        (Op::GetRows, Q8_0, [64, 512, 1, 1], false),
        (Op::Add, DType::F32, [64, 1, 1, 1], false),
        (Op::Mul, DType::F32, [64, 1, 1, 1], false),
        (Op::Rope, DType::F32, [64, 1, 1, 1], false),
        (Op::SsmConv, DType::F32, [4, 64, 1, 1], false),
        // An empty operation needs no computing, but the nodes around it are the CPU's.
        (Op::Add, DType::F32, [64, 0, 1, 1], false),
    ] {
        for (place, lands) in [(Place::Host, false), (Place::Packed, is_packed)] {
            let operation = Operation {
                op,
                params: [0; PARAMS],
                dst: of(DType::F32, [ne[1], 512, 1, 1], Place::Host),
                src: sources(&[
                    of(dtype, ne, place),
                    of(DType::F32, [ne[0], 512, 1, 1], Place::Unknown),
                ]),
            };
            let name = op.name();
            assert_eq!(
                device.supports(&operation),
                lands,
                "{name} {dtype:?} {place:?}"
            );
        }
    }
}

/// Before wide calls, a head of 151,936 columns needed 13 calls of each core.
#[test]
fn a_library_that_takes_wide_calls_and_computes_them_wrong_gets_narrow_ones() {
    let caps = &caps::RK3588;
    let cores = caps.cores.count();
    let (k, n) = (64, 16_384 * cores);
    let w = Weight::random(&mut Numbers::new(36), F32_IN_BLOCKS, [k, n, 1, 1]);
    let act = Numbers::new(37).floats(k);
    // The wide call of the start-up test has four rows.
    for (faults, per_core) in [("", 1), ("rknn_matmul_run:M4=0", 4)] {
        let options = sim::Options {
            faults: sim::parse_faults(faults).unwrap(),
            ..sim::Options::new(caps.soc)
        };
        let (device, rknn) = device_with(options, caps).unwrap();
        let buffer = packed(&device, &w, 0);
        let runs = || rknn.stand_in().unwrap().calls("rknn_matmul_run");
        let before = runs();
        let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, 1, 1, 1]).unwrap();
        assert_eq!(runs() - before, (per_core * cores) as u64, "{faults:?}");
        let want = reference::mul_mat(&act, &w.values, k);
        assert!(reference::nmse(&have, &want) <= nmse_limit(F32_IN_BLOCKS));
    }
}

#[test]
fn wide_weights_take_few_calls_where_the_library_takes_them_and_are_right_where_it_does_not() {
    for (caps, dtype) in [
        (&caps::RK3588, F32_IN_BLOCKS),
        (&caps::RK3576, F32_IN_BLOCKS),
        (&caps::RK3588, DType::F16),
    ] {
        let cores = caps.cores.count();
        // Each core makes two calls, or eight.
        let (k, n) = (64, 2 * 16_384 * cores);
        let mut numbers = Numbers::new(35);
        let w = Weight::random(&mut numbers, dtype, [k, n, 1, 1]);
        let act = numbers.floats(3 * k);
        let mut results = Vec::new();
        let old = "2.3.0 (c949ad889d@2024-11-07T11:35:33)";
        for (documented_limits, version, per_core) in
            [(false, None, 2), (true, None, 8), (false, Some(old), 8)]
        {
            let usual = sim::Options::new(caps.soc).api_version;
            let options = sim::Options {
                documented_limits,
                api_version: version.map_or(usual, str::to_owned),
                ..sim::Options::new(caps.soc)
            };
            let (device, rknn) = device_with(options, caps).unwrap();
            let buffer = packed(&device, &w, 0);
            let runs = || rknn.stand_in().unwrap().calls("rknn_matmul_run");
            let before = runs();
            results.push(mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, 3, 1, 1]).unwrap());
            // Three rows need one call for each block.
            assert_eq!(
                runs() - before,
                (per_core * cores) as u64,
                "{}",
                caps.soc.name()
            );
        }
        let want = reference::mul_mat(&act, &w.values, k);
        assert!(reference::nmse(&results[0], &want) <= nmse_limit(dtype));
        assert!(results[0] == results[1] && results[0] == results[2]);
    }
}

/// A view whose experts are one and the same.
#[test]
fn experts_of_a_view_are_packed_as_they_are_chosen() {
    let mut numbers = Numbers::new(23);
    let device = device(&caps::RK3588);
    let (k, n) = (64, 40);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]);
    let act = numbers.floats(k);
    let ids = [0_i32, 999];
    let mut experts = w.tensor(None);
    experts.shape.ne[2] = 1000;
    experts.shape.nb[2] = 0;
    let mut result = [f32::NAN; 80];
    let operand = |name, dtype, ne, bytes| Tensor {
        memory: Some(Region::from(bytes)),
        ..tensor(name, dtype, contiguous(dtype, ne))
    };
    let src = [
        experts,
        operand(
            "activations",
            DType::F32,
            [k, 1, 1, 1],
            bytemuck::cast_slice(&act),
        ),
        operand("ids", DType::I32, [2, 1, 1, 1], bytemuck::cast_slice(&ids)),
    ];
    let mut node = Node {
        operation: Operation {
            op: Op::MulMatId,
            params: [0; PARAMS],
            dst: tensor("result", DType::F32, contiguous(DType::F32, [n, 2, 1, 1])),
            src: sources(&src),
        },
        out: RegionMut::from(&mut result[..]),
        feeds_next: false,
        dst: None,
        src: [None; 7],
    };
    device.compute(&mut node, 0).unwrap();
    let want = reference::mul_mat(&act, &w.values, k);
    for have in result.chunks_exact(n) {
        assert!(reference::nmse(have, &want) <= 2.0 * nmse_limit(F32_IN_BLOCKS));
    }
}

/// A plane of no rows is after the region of an operand without elements.
#[test]
fn products_of_no_rows_compute_nothing() {
    let device = device(&caps::RK3588);
    let w = Weight::random(&mut Numbers::new(24), F32_IN_BLOCKS, [64, 40, 1, 1]);
    let mut act = tensor(
        "activations",
        DType::F32,
        contiguous(DType::F32, [64, 0, 2, 1]),
    );
    act.shape.nb[2] = 256;
    act.memory = Some(Region::from(&[][..]));
    let mut node = Node {
        operation: Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: tensor("result", DType::F32, contiguous(DType::F32, [40, 0, 2, 1])),
            src: sources(&[w.tensor(None), act]),
        },
        out: RegionMut::from(&mut [][..]),
        feeds_next: false,
        dst: None,
        src: [None; 7],
    };
    device.compute(&mut node, 0).unwrap();
}
