//! Proves that a warm decode step allocates nothing: the second run and all later ones, in every
//! arithmetic, with segments of K, on three cores, and with experts.
//!
//! The stand-in returns from its runs at once: allocations of a library inside a run are not
//! counted.
#![expect(unsafe_code, reason = "an allocator is an unsafe trait")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{F32_IN_BLOCKS, Numbers, Weight, contiguous, packed, tensor};
use ggml_rust_npu::backend::{Buffer, Node};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::rockchip::caps::{self, RkCaps};
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::DType;
use rknpu_ops::sim;

/// The system's allocator, which counts the allocations of all threads together.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(memory, layout) };
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn null_device(caps: &'static RkCaps, rules: &str) -> Arc<RkDevice> {
    let mut options = sim::Options::new(caps.soc);
    options.compute = false;
    let rknn = Rknn::simulate(options).unwrap();
    let target = Target {
        rules: Rules::parse(rules).unwrap(),
        ..Target::from(caps)
    };
    Arc::new(RkDevice::untested(rknn, target).unwrap())
}

/// One node. Everything that it needs is made before the first run.
struct Step {
    op: Op,
    w: Weight,
    buffer: RkBuffer,
    act: Vec<u8>,
    act_dtype: DType,
    act_ne: [usize; 4],
    ids: Vec<i32>,
    ids_ne: [usize; 4],
    dst_ne: [usize; 4],
    result: Vec<f32>,
}

impl Step {
    fn run(&mut self, device: &RkDevice, graph: u64) {
        let src1 = Tensor {
            memory: Some(Region::from(&self.act[..])),
            ..tensor(
                "act",
                self.act_dtype,
                contiguous(self.act_dtype, self.act_ne),
            )
        };
        let src2 = Tensor {
            memory: Some(Region::from(bytemuck::cast_slice(&self.ids))),
            ..tensor("ids", DType::I32, contiguous(DType::I32, self.ids_ne))
        };
        let mut node = Node {
            operation: Operation {
                op: self.op,
                params: [0; PARAMS],
                dst: tensor("dst", DType::F32, contiguous(DType::F32, self.dst_ne)),
                src: sources(&[self.w.tensor(Some(0)), src1, src2]),
            },
            out: RegionMut::from(&mut self.result[..]),
            feeds_next: false,
            dst: None,
            src: std::array::from_fn(|i| (i == 0).then_some(&self.buffer as &dyn Buffer)),
        };
        device.compute(&mut node, graph).unwrap();
    }
}

fn mul_mat(device: &Arc<RkDevice>, dtype: DType, act_dtype: DType, [m, k, n]: [usize; 3]) -> Step {
    let w = Weight::random(&mut Numbers::fixed(1), dtype, [k, n, 1, 1]);
    let act_ne = [k, m, 1, 1];
    Step {
        op: Op::MulMat,
        buffer: packed(device, &w, 0),
        w,
        act: vec![0; act_dtype.row_bytes(k).unwrap() * m],
        act_dtype,
        act_ne,
        ids: Vec::new(),
        ids_ne: [0; 4],
        dst_ne: [n, m, 1, 1],
        result: vec![0.0; m * n],
    }
}

fn mul_mat_id(device: &Arc<RkDevice>, [tokens, used, experts]: [usize; 3]) -> Step {
    let (k, n) = (128, 96);
    let mut numbers = Numbers::fixed(2);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, experts, 1]);
    let ids = numbers.choices(tokens, used, experts);
    Step {
        op: Op::MulMatId,
        buffer: packed(device, &w, 0),
        w,
        act: vec![0; k * tokens * 4],
        act_dtype: DType::F32,
        act_ne: [k, 1, tokens, 1],
        ids,
        ids_ne: [used, tokens, 1, 1],
        dst_ne: [n, used, tokens, 1],
        result: vec![0.0; n * used * tokens],
    }
}

/// Runs the steps as graphs, the first time to warm up; returns the allocations of each later run.
fn allocations(device: &RkDevice, steps: &mut [Step]) -> Vec<usize> {
    let mut counts = Vec::with_capacity(16);
    for graph in 0..8 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for step in &mut *steps {
            step.run(device, graph);
        }
        counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    assert!(
        counts[0] > 0,
        "the first run makes contexts: is the allocator counted?"
    );
    counts.split_off(1)
}

// A single test, because another test on another thread would be counted, too.
#[test]
fn nothing_is_allocated_from_the_second_run_on() {
    let (f32, f16) = (DType::F32, DType::F16);
    for caps in caps::ALL {
        let device = null_device(caps, "");
        // One token and a ubatch; rows that are converted first; three segments of K in each
        // precision.
        let mut steps = vec![
            mul_mat(&device, F32_IN_BLOCKS, f32, [1, 576, 1536]),
            mul_mat(&device, F32_IN_BLOCKS, f16, [1, 1536, 576]),
            mul_mat(&device, f16, f32, [1, 576, 1536]),
            mul_mat(&device, F32_IN_BLOCKS, f32, [72, 576, 200]),
            mul_mat(&device, F32_IN_BLOCKS, f32, [1, 3 * 8192, 96]),
            mul_mat(&device, f16, f32, [4, 3 * 4096, 96]),
            mul_mat_id(&device, [1, 4, 8]),
            mul_mat_id(&device, [20, 2, 8]),
        ];
        let counts = allocations(&device, &mut steps);
        assert_eq!(counts, [0; 7], "{}", caps.soc.name());
    }
    for caps in [&caps::RK3588, &caps::RK3576] {
        let device = null_device(caps, "weight=int4");
        let mut steps = vec![
            mul_mat(&device, F32_IN_BLOCKS, f32, [1, 1536, 576]),
            mul_mat(&device, F32_IN_BLOCKS, f32, [40, 576, 1536]),
            mul_mat_id(&device, [1, 2, 4]),
        ];
        let counts = allocations(&device, &mut steps);
        assert_eq!(counts, [0; 7], "INT4 on {}", caps.soc.name());
    }
}
