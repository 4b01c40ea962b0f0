//! Attention together with other nodes, and a graph without attention.

use super::*;
use crate::graph::Sources;
use crate::rockchip::RkStream;

/// Weights that a product or the experts of one read, and activations.
struct Product {
    /// `[experts][96 or 64][64]`
    weights: Vec<f16>,
    act: Vec<f32>,
}

impl Product {
    fn multiply(&self, device: &RkDevice, act: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; 32 * 96];
        let src = sources(&[
            tensor(
                DType::F16,
                [64, 96, 1, 1],
                bytemuck::cast_slice(&self.weights[..96 * 64]),
            ),
            tensor(DType::F32, [64, 32, 1, 1], bytemuck::cast_slice(act)),
        ]);
        let dst = tensor(DType::F32, [96, 32, 1, 1], &[]);
        compute(device, Op::MulMat, dst, src, &mut out);
        out
    }

    /// Has two experts write 32 rows of 64 elements.
    fn choose(&self, device: &RkDevice, out: &mut [f32]) {
        let ids: Vec<i32> = (0..32).map(|token| token % 2).collect();
        let src = sources(&[
            tensor(
                DType::F16,
                [64, 64, 2, 1],
                bytemuck::cast_slice(&self.weights),
            ),
            tensor(DType::F32, [64, 1, 32, 1], bytemuck::cast_slice(&self.act)),
            tensor(DType::I32, [1, 32, 1, 1], bytemuck::cast_slice(&ids)),
        ]);
        let dst = tensor(DType::F32, [64, 1, 32, 1], &[]);
        compute(device, Op::MulMatId, dst, src, out);
    }
}

/// Computes a node of graph 3.
fn compute<'a>(device: &RkDevice, op: Op, dst: Tensor<'a>, src: Sources<'a>, out: &'a mut [f32]) {
    let mut node = Node {
        operation: Operation {
            op,
            params: [0; PARAMS],
            dst: Tensor {
                memory: None,
                ..dst
            },
            src,
        },
        out: RegionMut::from(out),
        feeds_next: false,
        dst: None,
        src: [None; crate::graph::MAX_SOURCES],
    };
    device.compute(&mut node, 3).unwrap();
}

/// Results of attention, and of experts, overwrite the activations that a product has just read.
#[test]
fn activations_that_other_nodes_overwrite_are_packed_again() {
    let device = device(&caps::RK3588);
    let case = Case::new(Heads {
        d: 64,
        heads: 1,
        shared: 1,
        queries: 32,
        positions: 64,
    });
    let mut numbers = Numbers::new(5);
    let halves = numbers.floats(64 * 128).into_iter().map(f16::from_f32);
    let product = Product {
        weights: halves.collect(),
        act: numbers.floats(32 * 64),
    };
    let weights: Vec<f32> = (product.weights[..96 * 64].iter())
        .map(|half| half.to_f32())
        .collect();
    let mut act = product.act.clone();
    for overwritten_by in ["nothing", "attention", "experts"] {
        match overwritten_by {
            "attention" => drop(device.compute(&mut case.node(&mut act), 3).unwrap()),
            "experts" => product.choose(&device, &mut act),
            _ => {}
        }
        let have = product.multiply(&device, &act);
        let error = reference::nmse(&have, &reference::mul_mat(&act, &weights, 64));
        assert!(error < 1e-6, "{overwritten_by}: {error:e}");
    }
}

/// A program without weights on the NPU, such as whisper.cpp.
#[test]
fn nothing_of_the_npu_stays_open_after_the_last_graph() {
    let rknn = simulate(&caps::RK3588);
    let device = Arc::new(RkDevice::untested(Arc::clone(&rknn), &caps::RK3588).unwrap());
    let stream = RkStream::new(Arc::clone(&device));
    two_shapes().compute(&device);
    assert!(rknn.stand_in().unwrap().live().contexts > 0);
    drop(stream);
    assert_eq!(rknn.stand_in().unwrap().live().contexts, 0);
}
