//! Contexts and memory for attention of one shape: made and bound before anything runs.

use std::sync::Arc;

use rknpu_ops::ffi::{CoreMask, MatmulInfo};
use rknpu_ops::layout::MatmulLayout;
use task_pool::{Pool, chunks};

use super::super::MAX_CORES;
use crate::error::{Error, Result};
use crate::rockchip::caps::Precision;
use crate::rockchip::driver::{Context, Memory, MemoryView, Rknn, RunOperands, Turn};

/// Shape of a set: M, the padded elements of keys and of values, and the padded cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SetShape {
    pub(super) m: usize,
    pub(super) dk: usize,
    pub(super) dv: usize,
    pub(super) cells: usize,
}

/// The two products.
#[derive(Clone, Copy, Debug)]
pub(super) enum Product {
    Scores,
    Sums,
}

impl SetShape {
    /// Returns M, K and N of a product.
    pub(super) fn product(self, product: Product) -> [usize; 3] {
        let Self { m, dk, dv, cells } = self;
        match product {
            Product::Scores => [m, dk, cells],
            Product::Sums => [m, cells, dv],
        }
    }
}

/// Parameters of making a set.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a> {
    pub(super) rknn: &'a Arc<Rknn>,
    pub(super) anchor: &'a Arc<Context>,
    /// Masks of the cores.
    pub(super) masks: &'a [Option<CoreMask>],
    pub(super) native: MatmulLayout,
}

/// One product of one core, with its own operand and its results.
#[derive(Debug)]
pub(super) struct Half {
    context: Context,
    pub(super) a: Memory,
    pub(super) c: Memory,
}

/// The two products of one core.
#[derive(Debug)]
pub(super) struct CoreSet {
    pub(super) scores: Half,
    pub(super) sums: Half,
}

/// B of a product, shared by all cores.
#[derive(Debug)]
pub(super) struct SharedOperand {
    pub(super) memory: Memory,
    view: MemoryView,
}

/// Contexts and memory for one shape.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) keys: SharedOperand,
    pub(super) values: SharedOperand,
    pub(super) cores: Vec<CoreSet>,
}

impl Maker<'_> {
    /// Makes a set and binds it.
    ///
    /// # Errors
    /// The error of the call that failed.
    pub(super) fn make(&self, shape: SetShape) -> Result<Set> {
        let SetShape { dk, dv, cells, .. } = shape;
        let keys = self.shared(self.native.b.bytes(dk, cells))?;
        let values = self.shared(self.native.b.bytes(cells, dv))?;
        let cores = self.masks.iter().map(|mask| {
            Ok::<_, Error>(CoreSet {
                scores: self.half(*mask, shape.product(Product::Scores), &keys.view)?,
                sums: self.half(*mask, shape.product(Product::Sums), &values.view)?,
            })
        });
        let cores = cores.collect::<Result<_>>()?;
        Ok(Set {
            keys,
            values,
            cores,
        })
    }

    fn shared(&self, bytes: usize) -> Result<SharedOperand> {
        let memory = Memory::new(self.anchor, bytes)?;
        let view = memory.view(0, bytes)?;
        Ok(SharedOperand { memory, view })
    }

    fn half(&self, mask: Option<CoreMask>, [m, k, n]: [usize; 3], b: &MemoryView) -> Result<Half> {
        let MatmulLayout { a, c, .. } = self.native;
        let sizes = [m, k, n].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
        let mut info =
            MatmulInfo::native(Precision::Fp16.matmul_type(), sizes[0], sizes[1], sizes[2]);
        info.iommu_domain_id = self.anchor.domain();
        let context = Context::new(self.rknn, info, mask)?;
        context.expect(&self.native)?;
        let mut half = Half {
            context,
            a: Memory::new(self.anchor, a.bytes(m, k))?,
            c: Memory::for_results(self.anchor, c.bytes(m, n))?,
        };
        half.context.bind(&RunOperands {
            a: &half.a,
            b,
            c: &mut half.c,
        })?;
        Ok(half)
    }
}

impl CoreSet {
    pub(super) fn half(&self, product: Product) -> &Half {
        match product {
            Product::Scores => &self.scores,
            Product::Sums => &self.sums,
        }
    }

    fn half_mut(&mut self, product: Product) -> &mut Half {
        match product {
            Product::Scores => &mut self.scores,
            Product::Sums => &mut self.sums,
        }
    }
}

impl Set {
    pub(super) fn shared(&self, product: Product) -> &SharedOperand {
        match product {
            Product::Scores => &self.keys,
            Product::Sums => &self.values,
        }
    }

    /// Runs a product on the first `used` cores, and makes the results visible.
    ///
    /// # Errors
    /// The error of a call that failed.
    pub(super) fn run(
        &mut self,
        product: Product,
        used: usize,
        threads: &Pool,
        turn: &Turn,
    ) -> Result<()> {
        let Self {
            keys,
            values,
            cores,
        } = self;
        let b = match product {
            Product::Scores => &keys.view,
            Product::Sums => &values.view,
        };
        let mut results: [Result<()>; MAX_CORES] = [const { Ok(()) }; MAX_CORES];
        let parts = (
            chunks(&mut cores[..used], 1),
            chunks(&mut results[..used], 1),
        );
        threads.for_each(parts, |_, (cores, results)| {
            for (core, result) in cores.iter_mut().zip(results) {
                let Half { context, a, c } = core.half_mut(product);
                *result = context.run(turn, &mut RunOperands { a, b, c });
            }
        });
        for result in results {
            result?;
        }
        for core in &mut cores[..used] {
            core.half_mut(product).c.sync_from_device()?;
        }
        Ok(())
    }
}
