//! The product that the registers specify, and its computation.
//!
//! Features are a cube of W × H positions with K channels, weights are N kernels of K values,
//! results are a cube of W × H positions with N channels: a product with M = W · H. All is in
//! atoms of 16 bytes: a position has one atom in each surface of features, and one in each surface
//! of results.

use super::arithmetic::{Arithmetic, GROUP_LINE_OFF, LINE};
use super::register::Registers;
use super::{Error, Memory};

/// Bytes of an atom.
// SOURCE: FEATURE_ATOMIC_SIZE, rkt_task.c.
const ATOM: usize = 16;

/// A product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    pub(super) arithmetic: Arithmetic,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    features: u64,
    weights: u64,
    results: u64,
    /// Atoms from line to line and from surface to surface of the features.
    feature_strides: [i64; 2],
    /// Atoms from line to line and from surface to surface of the results.
    result_strides: [i64; 2],
}

/// Returns the bits `low..=high` of a value.
fn bits(value: u32, low: u32, high: u32) -> u32 {
    (value >> low) & (u32::MAX >> (31 - (high - low)))
}

/// Returns the bits as a size.
fn size(value: u32, low: u32, high: u32) -> usize {
    bits(value, low, high) as usize
}

/// Returns a number of `width` bits with a sign.
fn signed(value: u32, width: u32) -> i64 {
    let shift = 32 - width;
    i64::from((value << shift).cast_signed() >> shift)
}

/// Fails unless two registers agree.
fn agree(what: &str, have: usize, want: usize) -> Result<(), Error> {
    if have == want {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{what} is {have}, the other registers ask for {want}"
    )))
}

impl Product {
    /// Decodes the product from the registers.
    ///
    /// # Errors
    /// `Unwritten`, `Value` or `Shape` if the registers do not specify a product.
    pub fn new(registers: &Registers) -> Result<Self, Error> {
        registers.check()?;
        let get = |name| registers.get(name);
        let arithmetic = Arithmetic::new(registers)?;
        let group = arithmetic.group();

        let cube = get("CNA_DATA_SIZE0")?;
        let (width, height) = (size(cube, 16, 26), size(cube, 0, 10));
        let channels = get("CNA_DATA_SIZE1")?;
        let k = size(channels, 0, 15);
        let kernels = get("CNA_WEIGHT_SIZE2")?;
        let n = size(kernels, 0, 13);
        if width == 0
            || height == 0
            || k == 0
            || n == 0
            || !k.is_multiple_of(LINE)
            || !n.is_multiple_of(group)
        {
            let shape = format!("{width} x {height} positions, {k} channels, {n} kernels");
            return Err(Error::Shape(shape));
        }

        agree(
            "CNA_DATA_SIZE1, real channels less one,",
            size(channels, 16, 29),
            k - 1,
        )?;
        agree("CNA_DATA_SIZE2", size(get("CNA_DATA_SIZE2")?, 0, 10), width)?;
        agree(
            "CNA_DATA_SIZE3",
            size(get("CNA_DATA_SIZE3")?, 0, 31),
            width * height,
        )?;
        let kernel_bytes = arithmetic.operand_bytes(k);
        agree(
            "CNA_WEIGHT_SIZE0",
            get("CNA_WEIGHT_SIZE0")? as usize,
            n * kernel_bytes,
        )?;
        agree(
            "CNA_WEIGHT_SIZE1",
            get("CNA_WEIGHT_SIZE1")? as usize,
            kernel_bytes,
        )?;
        agree("CNA_WEIGHT_SIZE2, width", size(kernels, 24, 28), 1)?;
        agree("CNA_WEIGHT_SIZE2, height", size(kernels, 16, 20), 1)?;
        let fetched = get("CNA_FC_DATA_SIZE0")?;
        agree("CNA_FC_DATA_SIZE0, width", size(fetched, 16, 29), width)?;
        agree("CNA_FC_DATA_SIZE0, height", size(fetched, 0, 10), height)?;
        agree(
            "CNA_FC_DATA_SIZE1",
            size(get("CNA_FC_DATA_SIZE1")?, 0, 15),
            k,
        )?;

        let core = get("CORE_DATAOUT_SIZE_0")?;
        agree(
            "CORE_DATAOUT_SIZE_0, width less one,",
            size(core, 0, 15),
            width - 1,
        )?;
        agree(
            "CORE_DATAOUT_SIZE_0, height less one,",
            size(core, 16, 31),
            height - 1,
        )?;
        agree(
            "CORE_DATAOUT_SIZE_1",
            size(get("CORE_DATAOUT_SIZE_1")?, 0, 15),
            n - 1,
        )?;

        agree(
            "DPU_DATA_CUBE_WIDTH",
            get("DPU_DATA_CUBE_WIDTH")? as usize,
            width - 1,
        )?;
        agree(
            "DPU_DATA_CUBE_HEIGHT",
            get("DPU_DATA_CUBE_HEIGHT")? as usize,
            height - 1,
        )?;
        let cube = get("DPU_DATA_CUBE_CHANNEL")?;
        agree("DPU_DATA_CUBE_CHANNEL", size(cube, 0, 12), n - 1)?;
        agree(
            "DPU_DATA_CUBE_CHANNEL, original,",
            size(cube, 16, 28),
            n - 1,
        )?;
        agree("DPU_WDMA_SIZE_0", get("DPU_WDMA_SIZE_0")? as usize, n - 1)?;
        let written = get("DPU_WDMA_SIZE_1")?;
        agree(
            "DPU_WDMA_SIZE_1, width less one,",
            size(written, 0, 12),
            width - 1,
        )?;
        agree(
            "DPU_WDMA_SIZE_1, height less one,",
            size(written, 16, 28),
            height - 1,
        )?;

        let notch = get("DPU_DATA_CUBE_NOTCH_ADDR")?;
        agree(
            "DPU_DATA_CUBE_NOTCH_ADDR, high half,",
            size(notch, 16, 28),
            size(notch, 0, 12),
        )?;
        // A kernel group fills this number of result surfaces.
        let surfaces = group * arithmetic.result_bytes() / ATOM;
        let stride = get("DPU_DST_SURF_STRIDE")?;
        agree(
            "DPU_SURFACE_ADD",
            get("DPU_SURFACE_ADD")? as usize,
            stride as usize * surfaces,
        )?;
        if registers.reads_operands() {
            for (name, have, want) in [
                (
                    "RDMA_DATA_CUBE_WIDTH",
                    size(get("RDMA_DATA_CUBE_WIDTH")?, 0, 12),
                    width - 1,
                ),
                (
                    "RDMA_DATA_CUBE_HEIGHT",
                    size(get("RDMA_DATA_CUBE_HEIGHT")?, 0, 12),
                    height - 1,
                ),
                (
                    "RDMA_DATA_CUBE_CHANNEL",
                    size(get("RDMA_DATA_CUBE_CHANNEL")?, 0, 12),
                    n - 1,
                ),
            ] {
                agree(name, have, want)?;
            }
        }
        let elements = get("DPU_BS_OW_CFG")?;
        for low in [2, 5, 8] {
            agree(
                "DPU_BS_OW_CFG, SIZE_E",
                size(elements, low, low + 2),
                surfaces - 1,
            )?;
        }

        Ok(Self {
            arithmetic,
            width,
            height,
            k,
            n,
            features: get("CNA_FEATURE_DATA_ADDR")?.into(),
            weights: get("CNA_DCOMP_ADDR0")?.into(),
            results: get("DPU_DST_BASE_ADDR")?.into(),
            feature_strides: feature_strides(registers, width)?,
            result_strides: [
                width as i64 + i64::from(bits(notch, 0, 12)),
                i64::from(stride >> 4),
            ],
        })
    }

    /// Computes the product.
    ///
    /// # Errors
    /// `Address`.
    pub fn run(&self, memory: &impl Memory) -> Result<(), Error> {
        let group = self.arithmetic.group();
        let rows = self.arithmetic.widen(&self.read_features(memory)?);
        let mut weights = vec![0; group * self.arithmetic.operand_bytes(self.k)];
        for first in (0..self.n).step_by(group) {
            let offset = weights.len() * (first / group);
            memory.read(self.weights + offset as u64, &mut weights)?;
            let weights = self.arithmetic.widen(&weights);
            let results = self.arithmetic.multiply(&rows, &weights, self.k);
            self.write_results(memory, first, &results)?;
        }
        Ok(())
    }

    /// Returns M.
    pub(super) fn positions(&self) -> usize {
        self.width * self.height
    }

    /// Returns the features, position by position.
    fn read_features(&self, memory: &impl Memory) -> Result<Vec<u8>, Error> {
        let row_bytes = self.arithmetic.operand_bytes(self.k);
        let mut rows = vec![0; self.positions() * row_bytes];
        for surface in 0..row_bytes / ATOM {
            for (line, bytes) in self.lines(self.features, self.feature_strides, surface) {
                let mut atoms = vec![0; bytes];
                memory.read(line.address, &mut atoms)?;
                for (position, atom) in (line.first..).zip(atoms.as_chunks::<ATOM>().0) {
                    rows[position * row_bytes + surface * ATOM..][..ATOM].copy_from_slice(atom);
                }
            }
        }
        Ok(rows)
    }

    /// Writes the results of the kernels that start at `first`, position by position.
    fn write_results(
        &self,
        memory: &impl Memory,
        first: usize,
        results: &[u8],
    ) -> Result<(), Error> {
        let bytes = self.arithmetic.result_bytes();
        let of_position = self.arithmetic.group() * bytes;
        for part in (0..of_position).step_by(ATOM) {
            let surface = (first * bytes + part) / ATOM;
            for (line, bytes) in self.lines(self.results, self.result_strides, surface) {
                let positions = line.first..line.first + bytes / ATOM;
                let atoms: Vec<u8> = positions
                    .flat_map(|position| &results[position * of_position + part..][..ATOM])
                    .copied()
                    .collect();
                memory.write(line.address, &atoms)?;
            }
        }
        Ok(())
    }

    /// The contiguous pieces of a surface, each with its bytes.
    fn lines(
        &self,
        base: u64,
        [line, surface]: [i64; 2],
        index: usize,
    ) -> impl Iterator<Item = (Line, usize)> {
        let packed = line == self.width as i64;
        let (lines, positions) = if packed {
            (1, self.positions())
        } else {
            (self.height, self.width)
        };
        let start = surface * index as i64;
        (0..lines).map(move |h| {
            let atoms = start + line * h as i64;
            let line = Line {
                address: base.wrapping_add_signed(atoms * ATOM as i64),
                first: h * positions,
            };
            (line, positions * ATOM)
        })
    }
}

/// Atoms of neighbouring positions.
struct Line {
    address: u64,
    /// The first position.
    first: usize,
}

/// Atoms from line to line and from surface to surface of the features.
///
/// The reader fetches groups of four packed lines, or with GROUP_LINE_OFF single lines. SURF_STRIDE
/// is the way from the end of a surface's first group to the next surface; it can be negative.
// SOURCE: fill_task of rkt_task.c: for surfaces of W * H packed atoms it sets SURF_STRIDE = 4 W (H
// / 4 - 1) in groups, and with GROUP_LINE_OFF SURF_STRIDE = W (H - 1).
fn feature_strides(registers: &Registers, width: usize) -> Result<[i64; 2], Error> {
    let width = width as i64;
    let line = signed(registers.get("CNA_DMA_CON1")?, 28);
    let from_end = signed(registers.get("CNA_DMA_CON2")?, 28);
    if registers.get("CNA_CONV_CON1")? & GROUP_LINE_OFF != 0 {
        return Ok([line, width + from_end]);
    }
    // A single line has no next line.
    let height = bits(registers.get("CNA_DATA_SIZE0")?, 0, 10);
    if height > 1 && line != 4 * width {
        return Err(Error::Shape(format!(
            "CNA_DMA_CON1 is {line} for groups of four lines of {width} positions"
        )));
    }
    Ok([width, 4 * width + from_end])
}
