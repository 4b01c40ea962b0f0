//! Weights in host memory of a Rockchip device's buffer type get a packed copy once.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::sync::Arc;

use common::{
    F32_IN_BLOCKS, Numbers, Weight, contiguous, device, device_with, mul_mat, mul_mat_id, packed,
    tensor,
};
use ggml_rust_npu::backend::{Device, Node};
use ggml_rust_npu::error::Result;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::sim::{self, parse_faults};

const K: usize = 256;
const N: usize = 96;
const M: usize = 7;

fn weight(seed: u64, dtype: DType) -> Weight {
    Weight::random(&mut Numbers::new(seed), dtype, [K, N, 1, 1])
}

fn activations() -> Vec<f32> {
    Numbers::new(9).floats(K * M)
}

fn operation<'a>(w: &'a Weight, act: &'a [f32], place: Place) -> Operation<'a> {
    let floats = |name, ne| tensor(name, DType::F32, contiguous(DType::F32, ne));
    let weights = Tensor {
        place,
        role: Role::Weights,
        ..w.tensor(None)
    };
    let act = Tensor {
        memory: Some(Region::from(bytemuck::cast_slice(act))),
        ..floats("activations", [K, M, 1, 1])
    };
    Operation {
        op: Op::MulMat,
        params: [0; PARAMS],
        dst: floats("result", [N, M, 1, 1]),
        src: sources(&[weights, act]),
    }
}

/// The product with a weight in host memory, in a graph with this number.
fn product(device: &RkDevice, w: &Weight, graph: u64) -> Vec<f32> {
    try_product(device, w, graph).unwrap()
}

fn try_product(device: &RkDevice, w: &Weight, graph: u64) -> Result<Vec<f32>> {
    let act = activations();
    let mut result = vec![f32::NAN; N * M];
    let mut node = Node {
        operation: operation(w, &act, Place::Device),
        out: RegionMut::from(&mut result[..]),
        feeds_next: false,
        dst: None,
        src: [None; 7],
    };
    device.compute(&mut node, graph).map(|_| result)
}

/// The product with a weight that was packed when it was written.
fn packed_product(device: &Arc<RkDevice>, w: &Weight) -> Vec<f32> {
    let buffer = packed(device, w, 0);
    mul_mat(device, w, Some((&buffer, 0)), &activations(), [K, M, 1, 1]).unwrap()
}

fn invalidate(device: &RkDevice, w: &Weight) {
    let start = w.bytes.as_ptr().addr();
    device.invalidate(start..start + w.bytes.len());
}

#[test]
fn the_npu_multiplies_with_weights_in_host_memory_of_its_own_type() {
    let device = device(&caps::RK3588);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let w = weight(1, dtype);
        let act = activations();
        let is_for_cpu = |place| device.prefers_cpu(&operation(&w, &act, place));
        assert!(!is_for_cpu(Place::Device), "{dtype:?}");
        assert!(is_for_cpu(Place::Host), "{dtype:?}");
        let want = packed_product(&device, &w);
        assert_eq!(product(&device, &w, 1), want, "{dtype:?}");
        let bytes = device.bytes_beside();
        assert!(bytes > 0, "{dtype:?}");
        assert_eq!(
            product(&device, &w, 1),
            want,
            "{dtype:?}, in the same graph"
        );
        assert_eq!(
            product(&device, &w, 2),
            want,
            "{dtype:?}, in the next graph"
        );
        assert_eq!(device.bytes_beside(), bytes, "{dtype:?}");
        invalidate(&device, &w);
        assert_eq!(device.bytes_beside(), 0, "{dtype:?}");
    }
}

#[test]
fn a_weight_that_the_program_writes_in_place_is_packed_again() {
    let device = device(&caps::RK3588);
    let (mut w, new) = (weight(1, DType::F16), weight(2, DType::F16));
    let [old_product, new_product] = [&w, &new].map(|w| packed_product(&device, w));
    assert_ne!(old_product, new_product);
    assert_eq!(product(&device, &w, 1), old_product);
    let bytes = device.bytes_beside();
    // Only the last byte changes, in a graph that follows the one with all others.
    let last = w.bytes.len() - 1;
    w.bytes[..last].copy_from_slice(&new.bytes[..last]);
    product(&device, &w, 2);
    w.bytes[last] = new.bytes[last];
    assert_eq!(product(&device, &w, 3), new_product);
    assert_eq!(device.bytes_beside(), bytes);
}

#[test]
fn many_loads_and_frees_leave_no_memory_of_the_npu_behind() {
    let device = device(&caps::RK3588);
    let before = device.address_space();
    for round in 0..100 {
        let weights = [round, round + 1000].map(|seed| weight(seed, DType::F16));
        for (graph, w) in (0..).zip(&weights) {
            product(&device, w, 2 * round + graph);
        }
        assert!(device.address_space().0 < before.0);
        // A range that ends where another weight begins touches neither.
        device.invalidate(
            0..weights[0]
                .bytes
                .as_ptr()
                .addr()
                .min(weights[1].bytes.as_ptr().addr()),
        );
        let bytes = device.bytes_beside();
        invalidate(&device, &weights[0]);
        assert_eq!(device.bytes_beside() * 2, bytes);
        invalidate(&device, &weights[1]);
        assert_eq!(device.bytes_beside(), 0);
        assert_eq!(device.address_space(), before);
    }
}

#[test]
fn weights_without_room_are_the_cpu_s_until_memory_is_freed() {
    let (first, second) = (weight(1, DType::F16), weight(2, DType::F16));
    let with_faults = |faults: &str| {
        let mut options = sim::Options::new(caps::RK3588.soc);
        options.faults = parse_faults(faults).unwrap();
        let (device, rknn) = device_with(options, &caps::RK3588).unwrap();
        product(&device, &first, 1);
        (device, rknn)
    };
    let call = "rknn_create_mem";
    let calls = with_faults("").1.stand_in().unwrap().calls(call);
    let (device, _rknn) = with_faults(&format!("{call}:{}+=-4", calls + 1));
    let act = activations();
    let is_for_cpu = || device.prefers_cpu(&operation(&second, &act, Place::Device));
    assert!(!is_for_cpu());
    assert!(device.bytes_beside() > 0);
    // There is not even room for one product.
    assert!(try_product(&device, &second, 2).unwrap_err().is_shortage());
    assert_eq!(device.bytes_beside(), 0);
    assert!(is_for_cpu());
    invalidate(&device, &first);
    assert!(!is_for_cpu());
}

/// If there is no room for the packed copy, the CPU must compute; otherwise the graph would fail.
#[test]
fn weights_that_no_address_space_takes_are_the_cpu_s() {
    let w = weight(1, DType::F16);
    let mut options = sim::Options::new(caps::RK3588.soc);
    // This driver version has a single address space.
    options.driver_version = "0.9.5".into();
    let (device, _rknn) = device_with(options, &caps::RK3588).unwrap();
    let act = activations();
    let is_for_cpu = || device.prefers_cpu(&operation(&w, &act, Place::Device));
    assert!(!is_for_cpu());
    let others = RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES).unwrap();
    assert!(is_for_cpu());
    drop(others);
    assert!(!is_for_cpu());
}

#[test]
fn experts_are_packed_beside_their_own_bytes() {
    let device = device(&caps::RK3588);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let w = Weight::random(&mut Numbers::new(3), dtype, [K, N, 4, 1]);
        let act = Numbers::new(5).floats(K * 3);
        // Each of three tokens has two slots.
        let (ids, used) = ([0, 3, 1, 2, 3, 0], 2);
        let buffer = packed(&device, &w, 0);
        let place = Some((&buffer, 0));
        let want = mul_mat_id(&device, &w, place, &act, [K, 1, 3, 1], &ids, used).unwrap();
        let numbers = |name, dtype, ne, memory| Tensor {
            memory: Some(memory),
            ..tensor(name, dtype, contiguous(dtype, ne))
        };
        let weights = Tensor {
            place: Place::Device,
            role: Role::Weights,
            ..w.tensor(None)
        };
        let act = Region::from(bytemuck::cast_slice(&act));
        let ids = Region::from(bytemuck::cast_slice(&ids));
        let mut result = vec![f32::NAN; want.len()];
        let mut node = Node {
            operation: Operation {
                op: Op::MulMatId,
                params: [0; PARAMS],
                dst: tensor(
                    "result",
                    DType::F32,
                    contiguous(DType::F32, [N, used, 3, 1]),
                ),
                src: sources(&[
                    weights,
                    numbers("activations", DType::F32, [K, 1, 3, 1], act),
                    numbers("ids", DType::I32, [used, 3, 1, 1], ids),
                ]),
            },
            out: RegionMut::from(&mut result[..]),
            feeds_next: false,
            dst: None,
            src: [None; 7],
        };
        assert!(!device.prefers_cpu(&node.operation), "{dtype:?}");
        for graph in [1, 2] {
            device.compute(&mut node, graph).unwrap();
        }
        assert_eq!(result, want, "{dtype:?}");
        assert!(device.bytes_beside() > 0, "{dtype:?}");
        invalidate(&device, &w);
        assert_eq!(device.bytes_beside(), 0, "{dtype:?}");
    }
}

/// A convolution multiplies rows that IM2COL made with its kernel, which the CPU computed.
#[test]
fn a_kernel_that_is_the_second_factor_is_multiplied_by_the_npu() {
    let device = device(&caps::RK3588);
    for [k, n, m] in [[256, 300, 48], [96, 45, 64]] {
        let halves =
            |seed, rows| Weight::random(&mut Numbers::new(seed), DType::F16, [k, rows, 1, 1]);
        let (kernel, rows) = (halves(7, m), halves(8, n));
        let buffer = packed(&device, &kernel, 0);
        let want = mul_mat(
            &device,
            &kernel,
            Some((&buffer, 0)),
            &rows.values,
            [k, n, 1, 1],
        );
        let want = want.unwrap();
        let mut result = vec![f32::NAN; n * m];
        let factors = [(&rows, Role::Result), (&kernel, Role::Weights)];
        let factors = factors.map(|(w, role)| Tensor {
            place: Place::Device,
            role,
            ..w.tensor(None)
        });
        let mut node = Node {
            operation: Operation {
                op: Op::MulMat,
                params: [0; PARAMS],
                dst: tensor("result", DType::F32, contiguous(DType::F32, [n, m, 1, 1])),
                src: sources(&factors),
            },
            out: RegionMut::from(&mut result[..]),
            feeds_next: false,
            dst: None,
            src: [None; 7],
        };
        assert!(!device.prefers_cpu(&node.operation));
        device.compute(&mut node, 1).unwrap();
        for (index, value) in result.iter().enumerate() {
            assert_eq!(
                *value,
                want[index % n * m + index / n],
                "{k} {n} {m} {index}"
            );
        }
        assert!(device.bytes_beside() > 0);
        invalidate(&device, &kernel);
    }
}
