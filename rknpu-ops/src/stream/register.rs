//! The registers that a stream writes, and its words.
//!
//! SOURCE: names and offsets, src/gallium/drivers/rocket/registers.xml of Mesa 25.3 (MIT).

/// A unit of a core, by the target that words carry for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Program counter.
    Pc,
    /// Reads features and weights.
    Cna,
    /// Multiplies and adds.
    Core,
    /// Converts and writes results.
    Dpu,
    /// Reads further operands for the DPU.
    DpuRdma,
}

impl Unit {
    // SOURCE: enum "target" of registers.xml; words carry it plus one (emit of rkt_regcmd.c, Mesa
    // 25.3).
    const fn target(self) -> u64 {
        match self {
            Self::Pc => 0x0101,
            Self::Cna => 0x0201,
            Self::Core => 0x0801,
            Self::Dpu => 0x1001,
            Self::DpuRdma => 0x2001,
        }
    }
}

/// A register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register {
    unit: Unit,
    offset: u16,
}

impl Register {
    /// Returns the word that writes `value`.
    pub(super) const fn word(self, value: u32) -> u64 {
        self.unit.target() << 48 | (value as u64) << 16 | self.offset as u64
    }
}

/// Separates the words before it from those after it.
pub(super) const ORDER: u64 = 0x0041 << 48;

/// Starts the PC, the CNA with the CORE, the DPU, and its reader: a bit for each.
///
/// The reader has nothing to read, but without it a board may never end the job.
// SOURCE: gregordinary's notes: with the reader's block, OPERATION_ENABLE is 0x1d.
pub(super) const START: u64 = 0x0081 << 48 | 0x1d << 16 | 0x0008;

/// Declares a constant for each register.
macro_rules! registers {
    ($($unit:ident $offset:literal $name:ident;)*) => {
        $(pub(super) const $name: Register = Register { unit: Unit::$unit, offset: $offset };)*
    };
}

registers! {
    // The next stream: its address, and its number of word pairs.
    Pc 0x0010 PC_BASE_ADDRESS;
    Pc 0x0014 PC_REGISTER_AMOUNTS;

    // Precisions, and GROUP_LINE_OFF.
    Cna 0x100c CNA_CONV_CON1;
    // Lines of features to fetch before the first product.
    Cna 0x1010 CNA_CONV_CON2;
    // Strides of the kernel.
    Cna 0x1014 CNA_CONV_CON3;
    // Width and height of the features; their channels; width and positions of the results.
    Cna 0x1020 CNA_DATA_SIZE0;
    Cna 0x1024 CNA_DATA_SIZE1;
    Cna 0x1028 CNA_DATA_SIZE2;
    Cna 0x102c CNA_DATA_SIZE3;
    // Bytes of all kernels; bytes of one; their width, height and number.
    Cna 0x1030 CNA_WEIGHT_SIZE0;
    Cna 0x1034 CNA_WEIGHT_SIZE1;
    Cna 0x1038 CNA_WEIGHT_SIZE2;
    // Banks of the buffer for features and for weights; entries of a line of features.
    Cna 0x1040 CNA_CBUF_CON0;
    Cna 0x1044 CNA_CBUF_CON1;
    // The converter of features, which is off, and its scales.
    Cna 0x104c CNA_CVT_CON0;
    Cna 0x1050 CNA_CVT_CON1;
    Cna 0x1054 CNA_CVT_CON2;
    Cna 0x1058 CNA_CVT_CON3;
    Cna 0x105c CNA_CVT_CON4;
    Cna 0x1070 CNA_FEATURE_DATA_ADDR;
    // Lengths of bursts.
    Cna 0x1078 CNA_DMA_CON0;
    // Atoms from line to line; atoms from the end of a surface's first group of lines to the next
    // surface.
    Cna 0x107c CNA_DMA_CON1;
    Cna 0x1080 CNA_DMA_CON2;
    // Width, height and channels of the fetched features.
    Cna 0x1084 CNA_FC_DATA_SIZE0;
    Cna 0x1088 CNA_FC_DATA_SIZE1;
    // The address of the weights.
    Cna 0x1110 CNA_DCOMP_ADDR0;

    // Precision.
    Core 0x3010 CORE_MISC_CFG;
    // Height and width of the results, less one; their channels, less one.
    Core 0x3014 CORE_DATAOUT_SIZE_0;
    Core 0x3018 CORE_DATAOUT_SIZE_1;

    // The set of registers, of two, that is written and used.
    Dpu 0x4004 DPU_S_POINTER;
    // Results of the CORE, to memory.
    Dpu 0x400c DPU_FEATURE_MODE_CFG;
    Dpu 0x4010 DPU_DATA_FORMAT;
    Dpu 0x4020 DPU_DST_BASE_ADDR;
    // Bytes between surfaces of the results.
    Dpu 0x4024 DPU_DST_SURF_STRIDE;
    Dpu 0x4030 DPU_DATA_CUBE_WIDTH;
    Dpu 0x4034 DPU_DATA_CUBE_HEIGHT;
    // Atoms to skip at the end of a line of results.
    Dpu 0x4038 DPU_DATA_CUBE_NOTCH_ADDR;
    Dpu 0x403c DPU_DATA_CUBE_CHANNEL;
    // The steps for bias, normalization and single elements: all off.
    Dpu 0x4040 DPU_BS_CFG;
    Dpu 0x4060 DPU_BN_CFG;
    Dpu 0x4070 DPU_EW_CFG;
    Dpu 0x4078 DPU_EW_CVT_SCALE_VALUE;
    // SIZE_E: surfaces of a group of kernels, less one.
    Dpu 0x4050 DPU_BS_OW_CFG;
    Dpu 0x4058 DPU_WDMA_SIZE_0;
    Dpu 0x405c DPU_WDMA_SIZE_1;
    // Scale of the results, and their rounding to FP16.
    Dpu 0x4084 DPU_OUT_CVT_SCALE;
    // Bytes between groups of kernels in the results.
    Dpu 0x40c0 DPU_SURFACE_ADD;

    DpuRdma 0x5004 RDMA_S_POINTER;
    DpuRdma 0x500c RDMA_DATA_CUBE_WIDTH;
    DpuRdma 0x5010 RDMA_DATA_CUBE_HEIGHT;
    DpuRdma 0x5014 RDMA_DATA_CUBE_CHANNEL;
    // No operands for single elements.
    DpuRdma 0x5034 RDMA_ERDMA_CFG;
    // No operands at all.
    DpuRdma 0x5044 RDMA_FEATURE_MODE_CFG;
    // How its four readers share the bus.
    DpuRdma 0x5068 RDMA_WEIGHT;
}

/// Registers that are 0 in each task, as first and last offset. They belong to steps and units that
/// a product does not use.
const ZERO_RANGES: [(Unit, u16, u16); 23] = [
    // FC_CON0, FC_CON1, PAD_CON0: no skipped zeros, no offset, no padding.
    (Unit::Cna, 0x1060, 0x1068),
    // FC_CON2.
    (Unit::Cna, 0x1074, 0x1074),
    // DCOMP_CTRL, DCOMP_REGNUM: the weights are not compressed.
    (Unit::Cna, 0x1100, 0x1104),
    // DCOMP_AMOUNT0 to 15, CVT_CON5, PAD_CON1.
    (Unit::Cna, 0x1140, 0x1184),
    // CLIP_TRUNCATE: sums are not cut.
    (Unit::Core, 0x301c, 0x301c),
    // No name; Mesa writes 0.
    (Unit::Core, 0x3030, 0x3030),
    // OFFSET_PEND.
    (Unit::Dpu, 0x4014, 0x4014),
    // BS_ALU_CFG, BS_MUL_CFG, BS_RELUX_CMP_VALUE.
    (Unit::Dpu, 0x4044, 0x404c),
    // BS_OW_OP.
    (Unit::Dpu, 0x4054, 0x4054),
    // BN_ALU_CFG, BN_MUL_CFG, BN_RELUX_CMP_VALUE.
    (Unit::Dpu, 0x4064, 0x406c),
    // EW_CVT_OFFSET_VALUE.
    (Unit::Dpu, 0x4074, 0x4074),
    // EW_RELUX_CMP_VALUE, OUT_CVT_OFFSET.
    (Unit::Dpu, 0x407c, 0x4080),
    // OUT_CVT_SHIFT.
    (Unit::Dpu, 0x4088, 0x4088),
    // EW_OP_VALUE_0 to 7.
    (Unit::Dpu, 0x4090, 0x40ac),
    // No name; Mesa writes 0.
    (Unit::Dpu, 0x40c4, 0x40c4),
    // The table of a function.
    (Unit::Dpu, 0x4100, 0x412c),
    // SRC_BASE_ADDR, BRDMA_CFG, BS_BASE_ADDR.
    (Unit::DpuRdma, 0x5018, 0x5020),
    // NRDMA_CFG, BN_BASE_ADDR.
    (Unit::DpuRdma, 0x5028, 0x502c),
    // EW_BASE_ADDR.
    (Unit::DpuRdma, 0x5038, 0x5038),
    // EW_SURF_STRIDE.
    (Unit::DpuRdma, 0x5040, 0x5040),
    // SRC_DMA_CFG, SURF_NOTCH.
    (Unit::DpuRdma, 0x5048, 0x504c),
    // PAD_CFG.
    (Unit::DpuRdma, 0x5064, 0x5064),
    // EW_SURF_NOTCH.
    (Unit::DpuRdma, 0x506c, 0x506c),
];

/// Returns the registers that are 0 in each task.
pub(super) fn zeros() -> impl Iterator<Item = Register> {
    ZERO_RANGES.into_iter().flat_map(|(unit, first, last)| {
        (first..=last)
            .step_by(4)
            .map(move |offset| Register { unit, offset })
    })
}

/// The number of [`zeros`].
pub(super) const ZEROS: usize = {
    let (mut count, mut row) = (0, 0);
    while row < ZERO_RANGES.len() {
        count += (ZERO_RANGES[row].2 - ZERO_RANGES[row].1) as usize / 4 + 1;
        row += 1;
    }
    count
};
