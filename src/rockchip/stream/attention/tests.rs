use std::sync::Arc;

use rknpu_ops::sim;
use test_kit::Numbers;

use super::*;
use crate::backend::Device;
use crate::graph::{Op, Operation, PARAMS, Place, Role, sources};
use crate::host_memory::RegionMut;
use crate::reference::{self, Heads};
use crate::rockchip::caps::{self, RkCaps};
use crate::rockchip::driver::Rknn;
use crate::tensor::Shape;

mod beside;
mod faults;

fn simulate(caps: &RkCaps) -> Arc<Rknn> {
    let mut options = sim::Options::new(caps.soc);
    options.coherence = sim::Coherence::Strict;
    Rknn::simulate(options).unwrap()
}

/// A device that compares first results with the CPU's.
fn device(caps: &'static RkCaps) -> RkDevice {
    let device = RkDevice::untested(simulate(caps), caps).unwrap();
    device.npu().prove_shapes();
    device
}

fn tensor(dtype: DType, ne: [usize; 4], bytes: &[u8]) -> Tensor<'_> {
    let row = dtype.row_bytes(ne[0]).unwrap();
    let nb = [
        dtype.step_bytes().unwrap(),
        row,
        row * ne[1],
        row * ne[1] * ne[2],
    ];
    Tensor {
        name: "",
        dtype,
        format: None,
        shape: Shape { ne, nb },
        place: Place::Host,
        role: Role::State,
        memory: Some(Region::from(bytes)),
        packed_offset: 0,
        dequantize: None,
    }
}

/// A case of attention without sinks, with keys and values as long as queries.
struct Case {
    sizes: Heads,
    q: Vec<f32>,
    k: Vec<f16>,
    v: Vec<f16>,
    mask: Vec<f16>,
}

impl Case {
    /// Random numbers, and a mask that lets each query see one cell less than the next.
    fn new(sizes: Heads) -> Self {
        let mut numbers = Numbers::new(47);
        let (queries, cells) = (sizes.queries, sizes.positions);
        let cache = sizes.heads / sizes.shared * cells * sizes.d;
        let mut halves = |count| {
            let floats = numbers.floats(count);
            floats.into_iter().map(f16::from_f32).collect::<Vec<_>>()
        };
        let (k, v) = (halves(cache), halves(cache));
        let mask = (0..queries * cells)
            .map(|at| (at / cells, at % cells))
            .map(|(query, cell)| cell + queries <= cells + query)
            .map(|is_seen| {
                if is_seen {
                    f16::ZERO
                } else {
                    f16::NEG_INFINITY
                }
            });
        Self {
            sizes,
            q: numbers.floats(sizes.heads * queries * sizes.d),
            k,
            v,
            mask: mask.collect(),
        }
    }

    fn compute(&self, device: &RkDevice) -> Vec<f32> {
        let Heads {
            d, heads, queries, ..
        } = self.sizes;
        let mut out = vec![f32::NAN; queries * heads * d];
        device.compute(&mut self.node(&mut out), 0).unwrap();
        out
    }

    fn node<'a>(&'a self, out: &'a mut [f32]) -> Node<'a> {
        let Heads {
            d,
            heads,
            shared,
            queries,
            positions: cells,
        } = self.sizes;
        let cache = [d, cells, heads / shared, 1];
        let mut params = [0; PARAMS];
        params[0] = (1.0 / (d as f32).sqrt()).to_bits().cast_signed();
        let dst = Tensor {
            memory: None,
            ..tensor(DType::F32, [d, heads, queries, 1], &[])
        };
        let src = sources(&[
            tensor(
                DType::F32,
                [d, queries, heads, 1],
                bytemuck::cast_slice(&self.q),
            ),
            tensor(DType::F16, cache, bytemuck::cast_slice(&self.k)),
            tensor(DType::F16, cache, bytemuck::cast_slice(&self.v)),
            tensor(
                DType::F16,
                [cells, queries, 1, 1],
                bytemuck::cast_slice(&self.mask),
            ),
        ]);
        Node {
            operation: Operation {
                op: Op::FlashAttnExt,
                params,
                dst,
                src,
            },
            out: RegionMut::from(out),
            feeds_next: false,
            dst: None,
            src: [None; crate::graph::MAX_SOURCES],
        }
    }

    fn reference(&self) -> Vec<f64> {
        let floats = |halves: &[f16]| halves.iter().map(|half| half.to_f32()).collect::<Vec<_>>();
        let (k, v, mask) = (floats(&self.k), floats(&self.v), floats(&self.mask));
        reference::attention(&self.q, &k, &v, &mask, self.sizes)
    }
}

/// A case that uses all cores, with cells in two shapes of products.
fn two_shapes() -> Case {
    Case::new(Heads {
        d: 64,
        heads: 2,
        shared: 2,
        queries: 64,
        positions: 2100,
    })
}

/// The squared error of scores in FP16 is far below upstream's limit of 5e-4.
const NMSE: f64 = 1e-6;

#[test]
fn attention_is_that_of_the_reference_around_the_largest_product() {
    let device = device(&caps::RK3588);
    for positions in [32, 2047, 2048, 2049, 4096] {
        let case = Case::new(Heads {
            d: 64,
            heads: 3,
            shared: 3,
            queries: 32,
            positions,
        });
        let error = reference::nmse(&case.compute(&device), &case.reference());
        assert!(error < NMSE, "{positions} cells: {error:e}");
    }
}

/// Most of a row is in cells that count less than the smallest normal number of FP16 each.
#[test]
fn many_cells_that_count_little_are_not_lost() {
    let sizes = Heads {
        d: 64,
        heads: 1,
        shared: 1,
        queries: 32,
        positions: 16_384,
    };
    let mut case = Case::new(sizes);
    for query in case.q.chunks_exact_mut(64) {
        query.fill(0.0);
        query[0] = 8.0;
    }
    let rows = case.k.chunks_exact_mut(64).zip(case.v.chunks_exact_mut(64));
    for (cell, (key, value)) in rows.enumerate() {
        let is_peak = cell % 1024 == 7;
        let score = -13.0 - (cell % 9) as f32 / 2.0;
        key[0] = f16::from_f32(if is_peak { 0.0 } else { score });
        for value in value {
            *value = f16::from_f32(if is_peak {
                0.0
            } else {
                1.0 + value.to_f32() / 2.0
            });
        }
    }
    let error = reference::nmse(&case.compute(&device(&caps::RK3588)), &case.reference());
    assert!(error < NMSE, "{error:e}");
}

#[test]
fn whatever_is_in_hidden_cells_changes_nothing() {
    let sizes = Heads {
        d: 64,
        heads: 2,
        shared: 2,
        queries: 32,
        positions: 2304,
    };
    let mut case = Case::new(sizes);
    // One position is hidden from all queries, the other from all but the last.
    let (hidden, last) = (700, 2303);
    for row in case.mask.chunks_exact_mut(sizes.positions) {
        row[hidden] = f16::NEG_INFINITY;
    }
    let device = device(&caps::RK3588);
    let clean = case.compute(&device);
    for garbage in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY, f16::MAX] {
        case.k[hidden * 64..][..64].fill(garbage);
        case.v[hidden * 64..][..64].fill(garbage);
        assert_eq!(case.compute(&device), clean, "{garbage}");
    }
    for of_keys in [true, false] {
        let cache = if of_keys { &mut case.k } else { &mut case.v };
        let kept = std::mem::replace(&mut cache[last * 64 + 5], f16::NAN);
        let have = case.compute(&device);
        let (others, see) = have.split_at(31 * 2 * 64);
        assert_eq!(others, &clean[..31 * 2 * 64]);
        assert!(see.iter().all(|value| value.is_nan()), "{of_keys}");
        let cache = if of_keys { &mut case.k } else { &mut case.v };
        cache[last * 64 + 5] = kept;
    }
}

#[test]
fn two_computations_give_the_same_bits() {
    let case = two_shapes();
    let device = device(&caps::RK3588);
    let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(case.compute(&device)), bits(case.compute(&device)));
}

#[test]
fn every_chip_computes_heads_of_every_size() {
    for caps in caps::ALL {
        let device = device(caps);
        for (d, shared) in [
            (64, 1),
            (80, 4),
            (96, 2),
            (112, 3),
            (128, 7),
            (192, 1),
            (256, 16),
        ] {
            let case = Case::new(Heads {
                d,
                heads: 2 * shared,
                shared,
                queries: 33,
                positions: 100,
            });
            let error = reference::nmse(&case.compute(&device), &case.reference());
            assert!(error < NMSE, "{:?} {d}: {error:e}", caps.soc);
        }
    }
}

#[test]
fn keys_and_values_beyond_fp16_are_computed() {
    let sizes = Heads {
        d: 64,
        heads: 1,
        shared: 1,
        queries: 32,
        positions: 64,
    };
    let mut case = Case::new(sizes);
    for row in case.mask.chunks_exact_mut(64) {
        row[63] = f16::NEG_INFINITY;
    }
    let large =
        |halves: &[f16]| -> Vec<f32> { halves.iter().map(|half| half.to_f32() * 1e5).collect() };
    let (mut k, mut v) = (large(&case.k), large(&case.v));
    let q: Vec<f32> = case.q.iter().map(|q| q * 1e-5).collect();
    let mask: Vec<f32> = case.mask.iter().map(|mask| mask.to_f32()).collect();
    let want = reference::attention(&q, &k, &v, &mask, sizes);
    // Large values at positions that no query sees must not make the other values smaller.
    let hidden = 63 * 64..64 * 64;
    k[hidden.clone()].fill(1e35);
    v[hidden].fill(1e35);
    let device = device(&caps::RK3588);
    let mut params = [0; PARAMS];
    params[0] = 0.125_f32.to_bits().cast_signed();
    let mut out = vec![f32::NAN; 32 * 64];
    let cache = [64, 64, 1, 1];
    let mut node = Node {
        operation: Operation {
            op: Op::FlashAttnExt,
            params,
            dst: tensor(DType::F32, [64, 1, 32, 1], &[]),
            src: sources(&[
                tensor(DType::F32, [64, 32, 1, 1], bytemuck::cast_slice(&q)),
                tensor(DType::F32, cache, bytemuck::cast_slice(&k)),
                tensor(DType::F32, cache, bytemuck::cast_slice(&v)),
                tensor(DType::F16, [64, 32, 1, 1], bytemuck::cast_slice(&case.mask)),
            ]),
        },
        out: RegionMut::from(&mut out[..]),
        feeds_next: false,
        dst: None,
        src: [None; crate::graph::MAX_SOURCES],
    };
    device.compute(&mut node, 0).unwrap();
    let error = reference::nmse(&out, &want);
    assert!(error < NMSE, "{error:e}");
}

#[test]
fn rows_that_see_nothing_are_zeros() {
    let mut case = Case::new(Heads {
        d: 64,
        heads: 2,
        shared: 1,
        queries: 32,
        positions: 64,
    });
    case.mask[..64].fill(f16::NEG_INFINITY);
    let out = case.compute(&device(&caps::RK3588));
    let (first, others) = out.split_at(2 * 64);
    assert!(first.iter().all(|value| *value == 0.0));
    assert!(
        others
            .iter()
            .all(|value| value.is_finite() && *value != 0.0)
    );
}

/// Calls of changing lengths keep a limited number of contexts and bytes.
#[test]
fn nothing_grows_with_lengths() {
    let rknn = simulate(&caps::RK3588);
    let device = RkDevice::untested(Arc::clone(&rknn), &caps::RK3588).unwrap();
    let mut most = 0;
    for positions in [64, 96, 128, 192, 256, 384, 512, 64, 768, 1024] {
        let case = Case::new(Heads {
            d: 64,
            heads: 1,
            shared: 1,
            queries: 32,
            positions,
        });
        case.compute(&device);
        most = most.max(rknn.stand_in().unwrap().live().contexts);
    }
    // Two contexts for each core and shape, in addition to those of the device.
    assert!(most <= 4 * 3 * 2 + 8, "{most} contexts");
}
