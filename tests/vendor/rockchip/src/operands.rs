//! Random operands of a product, for tests.

use std::sync::Arc;

use ggml_rust_npu::error::{Error, Result};
use ggml_rust_npu::rockchip::driver::{Context, Memory, Rknn, RunOperands};
use rknpu_ops::ffi::{Layout, MatmulInfo, MatmulType};
use rknpu_ops::layout::Elem;
use rknpu_ops::stream::Arithmetic;
use test_kit::Numbers;

/// Operands of a product. B is native.
pub struct Operands {
    pub matmul_type: MatmulType,
    /// The layout of A and C.
    pub ac_layout: Layout,
    pub arithmetic: Arithmetic,
    pub shape: [usize; 3],
    pub a: Vec<u8>,
    pub b: Vec<u8>,
}

impl Operands {
    pub fn random(matmul_type: MatmulType, shape: [usize; 3], numbers: &mut Numbers) -> Self {
        let arithmetic = Arithmetic::of(matmul_type).unwrap();
        let ([m, k, n], layout) = (shape, arithmetic.layout);
        let mut bytes = |len: usize| -> Vec<u8> {
            let mut random = |_| match layout.a.elem {
                Elem::F16 => half::f16::from_f32(numbers.float()).to_le_bytes(),
                _ => [numbers.bits().to_le_bytes()[0]; 2],
            };
            let step = if layout.a.elem == Elem::F16 { 2 } else { 1 };
            let values = (0..len / step).flat_map(|i| random(i).into_iter().take(step));
            values.collect()
        };
        let (a, b) = (bytes(layout.a.bytes(m, k)), bytes(layout.b.bytes(k, n)));
        Self {
            matmul_type,
            ac_layout: Layout::NATIVE,
            arithmetic,
            shape,
            a,
            b,
        }
    }

    /// Returns C, as a library computes it on its first core.
    pub fn of_library(&self, rknn: &Arc<Rknn>) -> Vec<u8> {
        self.try_of_library(rknn).unwrap()
    }

    /// As [`Self::of_library`].
    ///
    /// # Errors
    /// The error of the first call that fails.
    pub fn try_of_library(&self, rknn: &Arc<Rknn>) -> Result<Vec<u8>> {
        self.try_in_space(rknn, 0)
    }

    /// As [`Self::try_of_library`], in an address space.
    ///
    /// # Errors
    /// As there.
    pub fn try_in_space(&self, rknn: &Arc<Rknn>, space: i32) -> Result<Vec<u8>> {
        let [m, k, n] = self.shape.map(|size| i32::try_from(size).unwrap());
        let mut info = MatmulInfo::native(self.matmul_type, m, k, n);
        info.iommu_domain_id = space;
        info.ac_layout = self.ac_layout;
        let context = || Context::new(rknn, info, None);
        let anchor = Arc::new(context()?);
        let memory = |bytes: &[u8]| {
            let mut memory = Memory::new(&anchor, bytes.len())?;
            memory.bytes_mut().copy_from_slice(bytes);
            memory.sync_to_device()?;
            Ok::<_, Error>(memory)
        };
        let (a, b) = (memory(&self.a)?, memory(&self.b)?);
        let bytes = self.arithmetic.layout.c.bytes(self.shape[0], self.shape[2]);
        let mut c = Memory::for_results(&anchor, bytes)?;
        let operands = RunOperands {
            a: &a,
            b: &b.view(0, self.b.len())?,
            c: &mut c,
        };
        context()?.bind_and_run(operands)?;
        c.sync_from_device()?;
        Ok(c.bytes().to_vec())
    }
}
