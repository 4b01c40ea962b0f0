//! Safe wrappers of the C functions, operands in every layout, and the reference.

use std::ffi::c_int;
use std::sync::RwLock;

use half::f16;
use rknpu_ops::ffi::{
    Api, IoAttr, Layout, MatmulCtx, MatmulInfo, MatmulShape, MatmulType, MemSync, TensorAttr,
    TensorMem,
};
use rknpu_ops::layout::{Elem, MatmulLayout, Soc};
use rknpu_ops::sim::{self, Machine, Options};
use test_kit::Numbers;

/// A machine and its functions.
pub struct Npu {
    pub machine: Machine,
    pub api: Api,
    pub soc: Soc,
    /// Locked by threads that share the machine: shared for runs, exclusively for all other calls.
    calls: RwLock<()>,
}

/// Tensor memory; the tests destroy it themselves.
#[derive(Clone, Copy)]
pub struct Mem(pub *mut TensorMem);

impl Npu {
    pub fn new(soc: Soc) -> Self {
        Self::with(Options::new(soc))
    }

    pub fn with(options: Options) -> Self {
        let soc = options.soc;
        let machine = start(options);
        let api = machine.api();
        Self {
            machine,
            api,
            soc,
            calls: RwLock::default(),
        }
    }

    pub fn create(&self, mut info: MatmulInfo) -> Result<(MatmulCtx, IoAttr), c_int> {
        let (mut ctx, mut attr) = (0, IoAttr::ZERO);
        // SAFETY: all three point at objects of their types.
        let code = unsafe { (self.api.matmul_create)(&mut ctx, &mut info, &mut attr) };
        if code == 0 {
            Ok((ctx, attr))
        } else {
            Err(code)
        }
    }

    pub fn create_dynamic(
        &self,
        mut info: MatmulInfo,
        shapes: &mut [MatmulShape],
    ) -> Result<(MatmulCtx, Vec<IoAttr>), c_int> {
        let mut ctx = 0;
        let mut attrs = vec![IoAttr::ZERO; shapes.len()];
        let n = c_int::try_from(shapes.len()).unwrap();
        let create = self.api.matmul_create_dynamic_shape;
        // SAFETY: the arrays have `n` elements.
        let code = unsafe {
            create(
                &mut ctx,
                &mut info,
                n,
                shapes.as_mut_ptr(),
                attrs.as_mut_ptr(),
            )
        };
        if code == 0 {
            Ok((ctx, attrs))
        } else {
            Err(code)
        }
    }

    pub fn set_dynamic_shape(&self, ctx: MatmulCtx, mut shape: MatmulShape) -> c_int {
        // SAFETY: the pointer is to one shape, which is all that the function reads.
        unsafe { (self.api.matmul_set_dynamic_shape)(ctx, &mut shape) }
    }

    pub fn mem(&self, ctx: MatmulCtx, size: u32) -> Option<Mem> {
        // SAFETY: no argument is a pointer to memory.
        let mem = unsafe { (self.api.create_mem)(ctx, size) };
        (!mem.is_null()).then_some(Mem(mem))
    }

    pub fn view(&self, ctx: MatmulCtx, parent: Mem, size: u32, offset: i32) -> Option<Mem> {
        // SAFETY: the memory has not been destroyed.
        let TensorMem { fd, virt_addr, .. } = unsafe { parent.0.read() };
        // SAFETY: descriptor and address are those of the memory.
        let mem = unsafe { (self.api.create_mem_from_fd)(ctx, fd, virt_addr, size, offset) };
        (!mem.is_null()).then_some(Mem(mem))
    }

    pub fn sync(&self, ctx: MatmulCtx, mem: Mem, mode: MemSync) -> c_int {
        // SAFETY: the memory has not been destroyed, and nothing uses it at the same time.
        unsafe { (self.api.mem_sync)(ctx, mem.0, mode) }
    }

    /// Cleans memory for results, so that no line of it is in the CPU's cache.
    pub fn clean(&self, ctx: MatmulCtx, mem: Mem) {
        assert_eq!(self.sync(ctx, mem, MemSync::TO_DEVICE), 0);
    }

    pub fn set(&self, ctx: MatmulCtx, mem: Mem, mut attr: TensorAttr) -> c_int {
        // SAFETY: both point at objects of their types.
        unsafe { (self.api.matmul_set_io_mem)(ctx, mem.0, &mut attr) }
    }

    pub fn run(&self, ctx: MatmulCtx) -> c_int {
        // SAFETY: the tests do not use bound memory at the same time.
        unsafe { (self.api.matmul_run)(ctx) }
    }

    pub fn destroy(&self, ctx: MatmulCtx) -> c_int {
        // SAFETY: no argument is a pointer to memory.
        unsafe { (self.api.matmul_destroy)(ctx) }
    }

    pub fn destroy_mem(&self, ctx: MatmulCtx, mem: Mem) -> c_int {
        // SAFETY: the library returned this pointer.
        unsafe { (self.api.destroy_mem)(ctx, mem.0) }
    }

    /// Does everything from creation to destruction, and returns the bytes of C.
    pub fn multiply(&self, info: MatmulInfo, a: &[u8], b: &[u8]) -> Result<Vec<u8>, c_int> {
        let alone = self.calls.write().unwrap();
        let (ctx, attr) = self.create(info)?;
        let mems = [attr.a, attr.b, attr.c].map(|attr| self.mem(ctx, attr.size).unwrap());
        for (mem, bytes) in mems.iter().zip([a, b, &[]]) {
            mem.write(bytes);
            assert_eq!(self.sync(ctx, *mem, MemSync::TO_DEVICE), 0);
        }
        let codes = [
            self.set(ctx, mems[0], attr.a),
            self.set(ctx, mems[1], attr.b),
            self.set(ctx, mems[2], attr.c),
        ];
        drop(alone);
        let together = self.calls.read().unwrap();
        let codes = codes.into_iter().chain([self.run(ctx)]);
        drop(together);
        let _alone = self.calls.write().unwrap();
        let failed = codes.into_iter().find(|code| *code != 0);
        let result = failed.map_or(Ok(()), Err);
        assert_eq!(self.sync(ctx, mems[2], MemSync::FROM_DEVICE), 0);
        let c = mems[2].read();
        for mem in mems {
            assert_eq!(self.destroy_mem(ctx, mem), 0);
        }
        assert_eq!(self.destroy(ctx), 0);
        result.map(|()| c)
    }
}

/// Starts a machine; waits while the test that occupies every slot runs.
pub fn start(options: Options) -> Machine {
    for _ in 0..10_000 {
        if let Ok(machine) = sim::start(options.clone()) {
            return machine;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("no slot for ten seconds");
}

impl Mem {
    /// The memory's struct.
    pub fn raw(self) -> TensorMem {
        // SAFETY: the memory has not been destroyed.
        unsafe { self.0.read() }
    }

    fn bytes(self) -> (*mut u8, usize) {
        let raw = self.raw();
        let offset = usize::try_from(raw.offset).unwrap();
        (
            raw.virt_addr.cast::<u8>().wrapping_add(offset),
            usize::try_from(raw.size).unwrap(),
        )
    }

    pub fn write(self, bytes: &[u8]) {
        let (start, size) = self.bytes();
        assert!(bytes.len() <= size);
        // SAFETY: the mapping has `size` bytes after this address, and no run is under way.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub fn read(self) -> Vec<u8> {
        let (start, size) = self.bytes();
        // SAFETY: the mapping has `size` bytes after this address, and no run is under way.
        unsafe { std::slice::from_raw_parts(start, size) }.to_vec()
    }
}

/// An integer in `[low, high]`.
fn int(numbers: &mut Numbers, low: i64, high: i64) -> i64 {
    let span = u64::try_from(high - low + 1).unwrap();
    low + i64::try_from(numbers.bits() % span).unwrap()
}

/// A value of an element type; halves have `2 * exponents + 1` binades.
pub fn value(numbers: &mut Numbers, elem: Elem, exponents: i64) -> f64 {
    match elem {
        Elem::I4 => int(numbers, -8, 7) as f64,
        Elem::I8 => int(numbers, -128, 127) as f64,
        _ => {
            let exponent = i32::try_from(int(numbers, -exponents, exponents)).unwrap();
            int(numbers, -2047, 2047) as f64 / 1024.0 * 2f64.powi(exponent)
        }
    }
}

pub fn matrix(numbers: &mut Numbers, elem: Elem, rows: usize, columns: usize) -> Matrix {
    let data = (0..rows * columns)
        .map(|_| value(numbers, elem, 5))
        .collect();
    Matrix { columns, data }
}

/// A row-major matrix of values that its element type can hold.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub columns: usize,
    pub data: Vec<f64>,
}

impl Matrix {
    pub fn at(&self, row: usize, column: usize) -> f64 {
        self.data[row * self.columns + column]
    }

    /// The bytes with each element at the index that `index(row, column)` gives.
    pub fn encode(&self, elem: Elem, len: usize, index: impl Fn(usize, usize) -> usize) -> Vec<u8> {
        let mut bytes = vec![0; elem.bytes(len)];
        for (i, value) in self.data.iter().enumerate() {
            let at = index(i / self.columns, i % self.columns);
            match elem {
                Elem::I4 => {
                    let nibble = (*value as i8).cast_unsigned() & 0xf;
                    bytes[at / 2] |= nibble << (at % 2 * 4);
                }
                Elem::I8 => bytes[at] = (*value as i8).cast_unsigned(),
                _ => bytes[2 * at..][..2].copy_from_slice(&f16::from_f64(*value).to_le_bytes()),
            }
        }
        bytes
    }
}

/// A, B and the expected C.
pub struct Problem {
    pub layout: MatmulLayout,
    pub info: MatmulInfo,
    pub shape: [usize; 3],
    pub a: Matrix,
    pub b: Matrix,
}

impl Problem {
    pub fn random(soc: Soc, matmul_type: MatmulType, shape: [usize; 3], seed: u64) -> Self {
        let layout = MatmulLayout::of(soc, matmul_type).unwrap();
        let [m, k, n] = shape;
        let mut numbers = Numbers::fixed(seed);
        let a = matrix(&mut numbers, layout.a.elem, m, k);
        let b = matrix(&mut numbers, layout.b.elem, k, n);
        Self {
            layout,
            info: info(matmul_type, shape),
            shape,
            a,
            b,
        }
    }

    /// A in the layout of `info`.
    pub fn a_bytes(&self) -> Vec<u8> {
        let ([m, k, _], a) = (self.shape, self.layout.a);
        if self.info.ac_layout == Layout::NATIVE {
            self.a
                .encode(a.elem, a.len(m, k), |mi, ki| a.index(mi, ki, m))
        } else {
            self.a.encode(a.elem, m * k, |mi, ki| mi * k + ki)
        }
    }

    /// B in the layout of `info`.
    pub fn b_bytes(&self) -> Vec<u8> {
        let ([_, k, n], b) = (self.shape, self.layout.b);
        match self.info.b_layout {
            Layout::NATIVE => self
                .b
                .encode(b.elem, b.len(k, n), |ki, ni| b.index(ki, ni, k, n)),
            Layout::TP_NORM => self.b.encode(b.elem, k * n, |ki, ni| ni * k + ki),
            _ => self.b.encode(b.elem, k * n, |ki, ni| ki * n + ni),
        }
    }

    /// Returns the value of C at (m, n), as bits.
    pub fn want(&self, m: usize, n: usize) -> u32 {
        let products = |k: usize| self.a.at(m, k) * self.b.at(k, n);
        let k = self.shape[1];
        let float = || {
            let sum = |start: usize| (start..start + 32).map(products).sum::<f64>() as f32;
            (0..k)
                .step_by(32)
                .map(sum)
                .fold(0f32, |total, group| total + group)
        };
        let integer = || (0..k).map(products).sum::<f64>() as i64;
        match self.layout.c.elem {
            Elem::F32 => float().to_bits(),
            Elem::F16 => f16::from_f32(float()).to_bits().into(),
            Elem::I16 => (integer().clamp(-32768, 32767) as i16)
                .cast_unsigned()
                .into(),
            Elem::I8 => (integer().clamp(-128, 127) as i8).cast_unsigned().into(),
            _ => (integer() as i32).cast_unsigned(),
        }
    }

    /// Returns the value of C at (m, n) from its bytes in the layout of `info`, as bits.
    pub fn have(&self, c: &[u8], m: usize, n: usize) -> u32 {
        let [rows, _, columns] = self.shape;
        let layout = self.layout.c;
        let index = if self.info.ac_layout == Layout::NATIVE {
            layout.index(m, n, rows)
        } else {
            m * columns + n
        };
        let size = layout.elem.bytes(1);
        let mut word = [0; 4];
        word[..size].copy_from_slice(&c[index * size..][..size]);
        u32::from_le_bytes(word)
    }

    pub fn check(&self, c: &[u8], context: &str) {
        let [rows, k, columns] = self.shape;
        for m in 0..rows {
            for n in 0..columns {
                let (have, want) = (self.have(c, m, n), self.want(m, n));
                let kind = self.info.matmul_type;
                assert_eq!(
                    have, want,
                    "{context} {kind:?} {rows}x{k}x{columns} at ({m}, {n})"
                );
            }
        }
    }
}

/// A native request.
pub fn info(matmul_type: MatmulType, shape: [usize; 3]) -> MatmulInfo {
    let [m, k, n] = shape.map(|x| c_int::try_from(x).unwrap());
    MatmulInfo::native(matmul_type, m, k, n)
}

/// Every type that gives results, for each chip.
pub fn types(soc: Soc) -> Vec<MatmulType> {
    (1..16)
        .map(MatmulType)
        .filter(|t| *t != MatmulType::I8_I8_F32 && MatmulLayout::of(soc, *t).is_some())
        .collect()
}
