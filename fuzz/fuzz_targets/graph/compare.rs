//! Computes a graph and compares each result with the reference, which is computed in f64 from the
//! operands that the device had, as far as they are still there. Nodes that a device leaves to the
//! CPU are computed here, as ggml's scheduler would do it, so graphs are cut into submissions at
//! any place.

use ggml_rust_npu::abi::*;
use ggml_rust_npu::reference;
use ggml_rust_npu_fuzz::border::*;

use crate::build::{BASE, EPS, Graph, Op, Step};

/// The result of a step, and the error that each value may have.
struct Want {
    values: Vec<f64>,
    errors: Vec<f64>,
}

/// Five standard deviations of a rounding to a grid, for a grid of 1.
const ROUNDING: f64 = 5.0 * 0.289;
/// Distance of neighbours in FP16, for numbers of 1 to 2; and the smallest normal number.
const HALF_STEP: f64 = 1.0 / 1024.0;
const HALF_SMALLEST: f64 = 1.0 / 16384.0;
/// Largest relative error of a rounding to F32.
const ROUNDED: f64 = 1.0 / 16_777_216.0;

impl Graph {
    fn operand(&self, value: usize, wanted: &[Option<Want>]) -> (Vec<f32>, f64) {
        match &wanted[value] {
            // The value was not stored, or may not have been.
            Some(want) => {
                let error = want.errors.iter().copied().fold(0.0, f64::max);
                (want.values.iter().map(|x| *x as f32).collect(), error)
            }
            None => {
                let value = &self.values[value];
                (self.memory.read(&value.tensor, value.count()), 0.0)
            }
        }
    }

    /// Returns the result of a step.
    fn reference(&self, step: &Step, wanted: &[Option<Want>]) -> Want {
        let (x, x_error) = self.operand(step.from[0], wanted);
        let (y, y_error) = match step.from.len() {
            3.. => self.operand(step.from[1], wanted),
            _ => (Vec::new(), 0.0),
        };
        let error = x_error + y_error;
        let ne = self.values[step.from[0]].ne;
        let [k, m, planes, _] = ne;
        let double = |x: &f32| f64::from(*x);
        let largest = |values: &[f32]| {
            let finite = values.iter().filter(|x| x.is_finite());
            finite.fold(0.0, |most: f64, x| most.max(double(x).abs()))
        };
        // Where a function compares, devices treat NaN differently.
        let map = |f: &dyn Fn(f64) -> f64| -> Vec<f64> {
            let f = |x: &f32| if x.is_nan() { f64::NAN } else { f(double(x)) };
            x.iter().map(f).collect()
        };
        let pairs = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
            let any = |x: f64, y: f64| {
                if x.is_nan() || y.is_nan() {
                    f64::NAN
                } else {
                    f(x, y)
                }
            };
            (x.iter().enumerate())
                .map(|(i, x)| any(double(x), double(&y[i % y.len()])))
                .collect()
        };
        let most = largest(&x).max(largest(&y));
        // Functions may differ in their last bits, and sums in their order.
        let plain = |values: Vec<f64>, error: f64| Want {
            errors: values
                .iter()
                .map(|v| error + 5e-4 * v.abs() + 1e-5 * most + 1e-9)
                .collect(),
            values,
        };
        let exact = |values: Vec<f64>| Want {
            errors: vec![error; values.len()],
            values,
        };
        match step.op {
            Op::MulMat | Op::MulMatId { .. } => self.product(step, &x, error, ne),
            Op::Add => plain(pairs(&|x, y| x + y), error),
            Op::Sub => plain(pairs(&|x, y| x - y), error),
            Op::Mul => plain(
                pairs(&|x, y| x * y),
                x_error * largest(&y) + y_error * largest(&x),
            ),
            Op::Unary(f, slope) => plain(map(&f), error * slope),
            Op::Scale(scale, bias) => {
                let [scale, bias] = [scale, bias].map(f64::from);
                plain(map(&|x| x * scale + bias), error * scale.abs())
            }
            Op::Clamp(low, high) => exact(map(&|x| x.clamp(double(&low), double(&high)))),
            Op::Norm { centered } => {
                // The mean, and the sum for it, are rounded to F32. In a row of equal numbers only
                // this error is left, and it is divided by the root of EPS.
                let of_mean = if centered { 4.0 * ROUNDED * most } else { 0.0 };
                let values = reference::norm(&x, k, double(&EPS), centered);
                plain(values, (error + of_mean) * 1e3)
            }
            Op::L2Norm => plain(reference::l2_norm(&x, k, double(&EPS)), error * 2e5),
            Op::SoftMax(scale) => {
                let mask = vec![0.0; x.len()];
                plain(reference::soft_max(&x, &mask, k, double(&scale)), error)
            }
            // After many turns, an F32 angle is inexact.
            Op::Rope { halves } => plain(
                reference::rope(&x, k, m, &step.ints, double(&BASE), halves),
                2.0 * error + 1e-4 * most,
            ),
            Op::Glu(gate) => plain(
                pairs(&|x, y| gate(x) * y),
                1.2 * (x_error * largest(&y) + y_error * largest(&x)),
            ),
            Op::SumRows => {
                let sums = x
                    .chunks_exact(k)
                    .map(|row| row.iter().map(double).sum())
                    .collect();
                plain(sums, (error + 1e-6 * most) * k as f64)
            }
            Op::Cont => exact(map(&|x| x)),
            Op::Concat(dim) => {
                let inner: usize = ne[..=dim].iter().product();
                let parts = x.chunks_exact(inner).zip(y.chunks_exact(inner));
                exact(
                    parts
                        .flat_map(|(x, y)| x.iter().chain(y).map(double))
                        .collect(),
                )
            }
            Op::GetRows => {
                let rows = step.ints.len() / planes;
                let pick = |(at, row): (usize, &i32)| {
                    let row = at / rows * m + usize::try_from(*row).expect("a row");
                    x[row * k..][..k].iter().map(double).collect::<Vec<_>>()
                };
                exact(step.ints.iter().enumerate().flat_map(pick).collect())
            }
        }
    }

    /// Returns the result of a product with activations of `ne`.
    fn product(&self, step: &Step, x: &[f32], error: f64, [k, m, planes, _]: [usize; 4]) -> Want {
        let n = self.values[*step.from.last().expect("its result")].ne[0];
        let is_f16 = step.node.src[0].dtype == NPU_DTYPE_F16;
        let is_id = matches!(step.op, Op::MulMatId { .. });
        let square = |x: &f32| f64::from(*x).powi(2);
        let length = |row: &[f32]| row.iter().map(square).sum::<f64>().sqrt();
        let largest = |row: &[f32]| {
            row.iter()
                .fold(0.0, |most: f64, x| most.max(f64::from(*x).abs()))
        };
        // The largest error of a sum of products, for one row.
        let of_row = |x: &[f32], w: &[f32], value: f64| {
            let terms = x
                .iter()
                .zip(w)
                .map(|(x, w)| square(x) * square(w))
                .sum::<f64>()
                .sqrt();
            let half = ROUNDING * HALF_STEP * 1.5 * terms
                + HALF_SMALLEST * (length(w) + length(x))
                + HALF_STEP * value.abs()
                + HALF_SMALLEST;
            let bytes = match self.device {
                RK if is_f16 => 0.0,
                // Both operands are rotated, which keeps their lengths, and then rounded. No
                // element is larger than its row's length.
                RK => ROUNDING * 2.0 / 127.0 * length(x) * length(w),
                // With one or two rows, activations are rounded to bytes.
                _ if m <= 2 || is_id => ROUNDING / 127.0 * largest(x) * length(w),
                _ => 0.0,
            };
            half + bytes + error * w.iter().map(|w| f64::from(*w).abs()).sum::<f64>()
        };
        let mut want = Want {
            values: Vec::new(),
            errors: Vec::new(),
        };
        let mut multiply = |act: &[f32], w: &[f32]| {
            for row in act.chunks_exact(k) {
                let values = reference::mul_mat(row, w, k);
                let rows = w.chunks_exact(k).zip(&values);
                want.errors
                    .extend(rows.map(|(w, value)| of_row(row, w, *value)));
                want.values.extend(values);
            }
        };
        for plane in 0..planes {
            let act = &x[plane * m * k..][..m * k];
            if let Op::MulMatId { used } = step.op {
                for slot in 0..used {
                    let expert = step.ints[plane * used + slot];
                    let expert = usize::try_from(expert).expect("an expert");
                    multiply(
                        &act[slot % m * k..][..k],
                        &step.weights[expert * n * k..][..n * k],
                    );
                }
            } else {
                let slices = step.weights.len() / (n * k);
                multiply(act, &step.weights[plane % slices * n * k..][..n * k]);
            }
        }
        want
    }

    /// Compares the results of steps with the reference.
    pub fn check(&self, round: usize) {
        let mut wanted: Vec<Option<Want>> = self.values.iter().map(|_| None).collect();
        for (index, step) in self.steps.iter().enumerate() {
            let dst = *step.from.last().expect("its result");
            let want = self.reference(step, &wanted);
            let value = &self.values[dst];
            if step.node.feeds_next || value.is_gone {
                wanted[dst] = Some(want);
                continue;
            }
            let have = self.memory.read(&value.tensor, value.count());
            assert_eq!(have.len(), want.values.len());
            // Results beyond FP16 are infinite on the matrix unit.
            let is_wrong = |(x, want): (&f32, (&f64, &f64))| {
                let (want, error) = want;
                // Written so that NaN counts as wrong.
                let is_near = (f64::from(*x) - want).abs() <= *error;
                want.abs() < 3e4 && error.is_finite() && !is_near
            };
            let wants = want.values.iter().zip(&want.errors);
            let Some(at) = have.iter().zip(wants).position(is_wrong) else {
                continue;
            };
            for step in &self.steps {
                let ne: Vec<_> = step.from.iter().map(|at| self.values[*at].ne).collect();
                let (from, feeds) = (&step.from, step.node.feeds_next);
                eprintln!(
                    "{:?} of {from:?}, shapes {ne:?}, feeds next: {feeds}",
                    step.name
                );
            }
            panic!(
                "device {}, round {round}, node {index} {:?}: element {at} is {} instead of {} ± {:.3e}",
                self.device, step.name, have[at], want.values[at], want.errors[at]
            );
        }
    }

    /// Computes all steps: on the device if it supports them, otherwise here.
    pub fn compute(&mut self, stream: &Stream, supported: &[bool], uid: u64) {
        let mut begin = 0;
        while begin < self.steps.len() {
            let end = (begin..self.steps.len()).find(|at| supported[*at] != supported[begin]);
            let end = end.unwrap_or(self.steps.len());
            if supported[begin] {
                let nodes: Vec<Node> = self.steps[begin..end]
                    .iter()
                    .map(|step| step.node)
                    .collect();
                let uid = if nodes.len() == self.steps.len() {
                    uid
                } else {
                    0
                };
                assert_eq!(
                    stream.compute(uid, &nodes),
                    NPU_STATUS_OK,
                    "FUZZ_LOG=1 says why"
                );
            } else {
                for at in begin..end {
                    let nothing: Vec<Option<Want>> = self.values.iter().map(|_| None).collect();
                    let want = self.reference(&self.steps[at], &nothing);
                    let values: Vec<f32> = want.values.iter().map(|x| *x as f32).collect();
                    let dst = *self.steps[at].from.last().expect("its result");
                    let tensor = self.values[dst].tensor;
                    self.memory.write(&tensor, bytemuck::cast_slice(&values));
                }
            }
            begin = end;
        }
    }
}
