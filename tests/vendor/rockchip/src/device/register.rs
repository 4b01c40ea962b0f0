//! Registers by unit and offset: their names, and the values that a matrix product allows.

use std::collections::BTreeMap;

use super::{Error, Program, TAIL_WORDS};

/// Units that words write to.
// SOURCE: enum "target" of registers.xml; words carry it plus one (emit of rkt_regcmd.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
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

/// Starts the units, with a bit for each.
// SOURCE: rkt_regcmd.c, the last words of a stream.
const ENABLE: u16 = 0x0081;
/// OPERATION_ENABLE of the PC, the CNA (with the CORE) and the DPU; with that of the DPU's reader.
const WITHOUT_READER: u32 = 0xd;
const WITH_READER: u32 = 0x1d;
/// Orders the words around it.
const SYNC: u16 = 0x0041;

/// Values of a register that the device computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// [`super::product`] reads it.
    Read,
    /// The register changes the time but not the results: burst lengths, buffers, ping-pong.
    Timing,
    /// The register belongs to a step that another register switches off; the latter is checked.
    Off,
    /// Bits of this mask must have this value; the others change time only.
    Bits(u32, u32, &'static str),
}

/// A register.
#[derive(Clone, Copy, Debug)]
pub struct Register {
    pub target: Target,
    pub offset: u16,
    pub name: &'static str,
    pub rule: Rule,
}

/// Declares [`KNOWN`], and a constant for each register that is read.
macro_rules! registers {
    ($($target:ident $offset:literal $name:ident = $rule:expr;)*) => {
        /// All registers that a stream may write.
        pub const KNOWN: &[Register] = &[$(Register {
            target: Target::$target,
            offset: $offset,
            name: stringify!($name),
            rule: $rule,
        }),*];
    };
}

use Rule::{Bits, Off, Read, Timing};

registers! {
    Pc 0x0010 PC_BASE_ADDRESS = Read;
    Pc 0x0014 PC_REGISTER_AMOUNTS = Read;

    Cna 0x1004 CNA_S_POINTER = Timing;
    Cna 0x100c CNA_CONV_CON1 = Read;
    Cna 0x1010 CNA_CONV_CON2 = Bits(0x00ff_0007, 0, "no kernel group, no CSC output");
    Cna 0x1014 CNA_CONV_CON3 = Bits(0x73ff_3f3f, 9, "a stride of 1 in both directions");
    Cna 0x1020 CNA_DATA_SIZE0 = Read;
    Cna 0x1024 CNA_DATA_SIZE1 = Read;
    Cna 0x1028 CNA_DATA_SIZE2 = Read;
    Cna 0x102c CNA_DATA_SIZE3 = Read;
    Cna 0x1030 CNA_WEIGHT_SIZE0 = Read;
    Cna 0x1034 CNA_WEIGHT_SIZE1 = Read;
    Cna 0x1038 CNA_WEIGHT_SIZE2 = Read;
    Cna 0x1040 CNA_CBUF_CON0 = Bits(0x3000, 0, "no reuse of what an earlier task left in the buffer");
    Cna 0x1044 CNA_CBUF_CON1 = Timing;
    Cna 0x104c CNA_CVT_CON0 = Bits(1, 1, "a bypassed converter of features");
    Cna 0x1050 CNA_CVT_CON1 = Off;
    Cna 0x1054 CNA_CVT_CON2 = Off;
    Cna 0x1058 CNA_CVT_CON3 = Off;
    Cna 0x105c CNA_CVT_CON4 = Off;
    Cna 0x1060 CNA_FC_CON0 = Bits(!0, 0, "no skipping of zeros");
    Cna 0x1064 CNA_FC_CON1 = Bits(!0, 0, "no offset of features");
    Cna 0x1068 CNA_PAD_CON0 = Bits(!0, 0, "no padding");
    Cna 0x1070 CNA_FEATURE_DATA_ADDR = Read;
    Cna 0x1074 CNA_FC_CON2 = Bits(!0, 0, "no offset of weights");
    Cna 0x1078 CNA_DMA_CON0 = Timing;
    Cna 0x107c CNA_DMA_CON1 = Read;
    Cna 0x1080 CNA_DMA_CON2 = Read;
    Cna 0x1084 CNA_FC_DATA_SIZE0 = Read;
    Cna 0x1088 CNA_FC_DATA_SIZE1 = Read;
    Cna 0x1090 CNA_CLK_GATE = Timing;
    Cna 0x1100 CNA_DCOMP_CTRL = Bits(!0, 0, "weights that are not compressed");
    Cna 0x1104 CNA_DCOMP_REGNUM = Off;
    Cna 0x1110 CNA_DCOMP_ADDR0 = Read;
    Cna 0x1140 CNA_DCOMP_AMOUNT0 = Off;
    Cna 0x1144 CNA_DCOMP_AMOUNT1 = Off;
    Cna 0x1148 CNA_DCOMP_AMOUNT2 = Off;
    Cna 0x114c CNA_DCOMP_AMOUNT3 = Off;
    Cna 0x1150 CNA_DCOMP_AMOUNT4 = Off;
    Cna 0x1154 CNA_DCOMP_AMOUNT5 = Off;
    Cna 0x1158 CNA_DCOMP_AMOUNT6 = Off;
    Cna 0x115c CNA_DCOMP_AMOUNT7 = Off;
    Cna 0x1160 CNA_DCOMP_AMOUNT8 = Off;
    Cna 0x1164 CNA_DCOMP_AMOUNT9 = Off;
    Cna 0x1168 CNA_DCOMP_AMOUNT10 = Off;
    Cna 0x116c CNA_DCOMP_AMOUNT11 = Off;
    Cna 0x1170 CNA_DCOMP_AMOUNT12 = Off;
    Cna 0x1174 CNA_DCOMP_AMOUNT13 = Off;
    Cna 0x1178 CNA_DCOMP_AMOUNT14 = Off;
    Cna 0x117c CNA_DCOMP_AMOUNT15 = Off;
    Cna 0x1180 CNA_CVT_CON5 = Off;
    Cna 0x1184 CNA_PAD_CON1 = Off;

    Core 0x3004 CORE_S_POINTER = Timing;
    Core 0x3010 CORE_MISC_CFG = Read;
    Core 0x3014 CORE_DATAOUT_SIZE_0 = Read;
    Core 0x3018 CORE_DATAOUT_SIZE_1 = Read;
    Core 0x301c CORE_CLIP_TRUNCATE = Bits(!0, 0, "sums that are not cut");
    // rkt_regcmd.c writes this register as a plain number, which is always 0.
    Core 0x3030 CORE_0X3030 = Bits(!0, 0, "0");

    Dpu 0x4004 DPU_S_POINTER = Timing;
    Dpu 0x400c DPU_FEATURE_MODE_CFG = Bits(!0x1e0, 4, "the results of a direct convolution, to memory");
    Dpu 0x4010 DPU_DATA_FORMAT = Read;
    Dpu 0x4014 DPU_OFFSET_PEND = Bits(!0, 0, "0");
    Dpu 0x4020 DPU_DST_BASE_ADDR = Read;
    Dpu 0x4024 DPU_DST_SURF_STRIDE = Read;
    Dpu 0x4030 DPU_DATA_CUBE_WIDTH = Read;
    Dpu 0x4034 DPU_DATA_CUBE_HEIGHT = Read;
    Dpu 0x4038 DPU_DATA_CUBE_NOTCH_ADDR = Read;
    Dpu 0x403c DPU_DATA_CUBE_CHANNEL = Read;
    Dpu 0x4040 DPU_BS_CFG = Bits(1, 1, "a bypassed step of bias and scale");
    Dpu 0x4044 DPU_BS_ALU_CFG = Off;
    Dpu 0x4048 DPU_BS_MUL_CFG = Off;
    Dpu 0x404c DPU_BS_RELUX_CMP_VALUE = Off;
    Dpu 0x4050 DPU_BS_OW_CFG = Read;
    Dpu 0x4054 DPU_BS_OW_OP = Bits(!0, 0, "no offset of weights");
    Dpu 0x4058 DPU_WDMA_SIZE_0 = Read;
    Dpu 0x405c DPU_WDMA_SIZE_1 = Read;
    Dpu 0x4060 DPU_BN_CFG = Bits(1, 1, "a bypassed step of normalization");
    Dpu 0x4064 DPU_BN_ALU_CFG = Off;
    Dpu 0x4068 DPU_BN_MUL_CFG = Off;
    Dpu 0x406c DPU_BN_RELUX_CMP_VALUE = Off;
    Dpu 0x4070 DPU_EW_CFG = Bits(1, 1, "a bypassed step of elements");
    Dpu 0x4074 DPU_EW_CVT_OFFSET_VALUE = Off;
    Dpu 0x4078 DPU_EW_CVT_SCALE_VALUE = Off;
    Dpu 0x407c DPU_EW_RELUX_CMP_VALUE = Off;
    Dpu 0x4080 DPU_OUT_CVT_OFFSET = Bits(!0, 0, "results without an offset");
    Dpu 0x4084 DPU_OUT_CVT_SCALE = Read;
    Dpu 0x4088 DPU_OUT_CVT_SHIFT = Bits(!0, 0, "results that are not shifted");
    Dpu 0x4090 DPU_EW_OP_VALUE_0 = Off;
    Dpu 0x4094 DPU_EW_OP_VALUE_1 = Off;
    Dpu 0x4098 DPU_EW_OP_VALUE_2 = Off;
    Dpu 0x409c DPU_EW_OP_VALUE_3 = Off;
    Dpu 0x40a0 DPU_EW_OP_VALUE_4 = Off;
    Dpu 0x40a4 DPU_EW_OP_VALUE_5 = Off;
    Dpu 0x40a8 DPU_EW_OP_VALUE_6 = Off;
    Dpu 0x40ac DPU_EW_OP_VALUE_7 = Off;
    Dpu 0x40c0 DPU_SURFACE_ADD = Read;
    // Written as 0x3030 of the CORE is.
    Dpu 0x40c4 DPU_0X40C4 = Bits(!0, 0, "0");
    Dpu 0x4100 DPU_LUT_ACCESS_CFG = Off;
    Dpu 0x4104 DPU_LUT_ACCESS_DATA = Off;
    Dpu 0x4108 DPU_LUT_CFG = Off;
    Dpu 0x410c DPU_LUT_INFO = Off;
    Dpu 0x4110 DPU_LUT_LE_START = Off;
    Dpu 0x4114 DPU_LUT_LE_END = Off;
    Dpu 0x4118 DPU_LUT_LO_START = Off;
    Dpu 0x411c DPU_LUT_LO_END = Off;
    Dpu 0x4120 DPU_LUT_LE_SLOPE_SCALE = Off;
    Dpu 0x4124 DPU_LUT_LE_SLOPE_SHIFT = Off;
    Dpu 0x4128 DPU_LUT_LO_SLOPE_SCALE = Off;
    Dpu 0x412c DPU_LUT_LO_SLOPE_SHIFT = Off;

    // All readers of further operands are off. If the unit is not started, only their ping-pong bit
    // matters.
    DpuRdma 0x5004 RDMA_S_POINTER = Timing;
    DpuRdma 0x500c RDMA_DATA_CUBE_WIDTH = Read;
    DpuRdma 0x5010 RDMA_DATA_CUBE_HEIGHT = Read;
    DpuRdma 0x5014 RDMA_DATA_CUBE_CHANNEL = Read;
    DpuRdma 0x5018 RDMA_SRC_BASE_ADDR = Off;
    DpuRdma 0x501c RDMA_BRDMA_CFG = Bits(!0, 0, "no operands of bias");
    DpuRdma 0x5020 RDMA_BS_BASE_ADDR = Off;
    DpuRdma 0x5028 RDMA_NRDMA_CFG = Bits(!0, 0, "no operands of normalization");
    DpuRdma 0x502c RDMA_BN_BASE_ADDR = Off;
    DpuRdma 0x5034 RDMA_ERDMA_CFG = Bits(1, 1, "no operands of elements");
    DpuRdma 0x5038 RDMA_EW_BASE_ADDR = Off;
    DpuRdma 0x5040 RDMA_EW_SURF_STRIDE = Off;
    DpuRdma 0x5044 RDMA_FEATURE_MODE_CFG = Bits(0x17, 0x10, "a reader that is disabled, else the job never ends");
    DpuRdma 0x5048 RDMA_SRC_DMA_CFG = Off;
    DpuRdma 0x504c RDMA_SURF_NOTCH = Off;
    DpuRdma 0x5064 RDMA_PAD_CFG = Off;
    DpuRdma 0x5068 RDMA_WEIGHT = Timing;
    DpuRdma 0x506c RDMA_EW_SURF_NOTCH = Off;
}

/// Returns the register at an offset.
fn known(target: Target, offset: u16) -> Option<&'static Register> {
    KNOWN
        .iter()
        .find(|register| register.target == target && register.offset == offset)
}

/// The registers that the words of one stream wrote.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    values: BTreeMap<&'static str, u32>,
    /// The value of the PC's OPERATION_ENABLE.
    started: Option<u32>,
}

impl Registers {
    /// Executes one word.
    ///
    /// # Errors
    /// `Target`, `Register` or `Value` if one is unknown.
    pub fn write(&mut self, word: u64) -> Result<(), Error> {
        let [o0, o1, v0, v1, v2, v3, t0, t1] = word.to_le_bytes();
        let (offset, value) = (
            u16::from_le_bytes([o0, o1]),
            u32::from_le_bytes([v0, v1, v2, v3]),
        );
        let target = match u16::from_le_bytes([t0, t1]) {
            0 if word == 0 => return Ok(()),
            SYNC if offset == 0 && value == 0 => return Ok(()),
            ENABLE if offset == 8 && matches!(value, WITHOUT_READER | WITH_READER) => {
                self.started = Some(value);
                return Ok(());
            }
            0x0101 => Target::Pc,
            0x0201 => Target::Cna,
            0x0801 => Target::Core,
            0x1001 => Target::Dpu,
            0x2001 => Target::DpuRdma,
            target => return Err(Error::Target { word, target }),
        };
        let register = known(target, offset).ok_or(Error::Register {
            target,
            offset,
            value,
        })?;
        if let Bits(mask, want, expected) = register.rule
            && value & mask != want
        {
            return Err(Error::Value {
                name: register.name,
                value,
                expected,
            });
        }
        self.values.insert(register.name, value);
        Ok(())
    }

    /// Returns the value of a register.
    ///
    /// # Errors
    /// `Unwritten`: hardware would compute with an earlier stream's value.
    pub fn get(&self, name: &'static str) -> Result<u32, Error> {
        self.values
            .get(name)
            .copied()
            .ok_or(Error::Unwritten { name })
    }

    /// Checks that the stream started the units, and wrote all that must have a certain value.
    ///
    /// # Errors
    /// `Unwritten`.
    pub fn check(&self) -> Result<(), Error> {
        if self.started.is_none() {
            return Err(Error::Unwritten {
                name: "PC_OPERATION_ENABLE",
            });
        }
        let required = KNOWN.iter().filter(|register| {
            let is_started = register.target != Target::DpuRdma || self.reads_operands();
            is_started && matches!(register.rule, Bits(..))
        });
        required
            .into_iter()
            .try_for_each(|register| self.get(register.name).map(drop))
    }

    /// Returns `true` if the stream starts the DPU's reader.
    pub fn reads_operands(&self) -> bool {
        self.started == Some(WITH_READER)
    }

    /// Returns the stream that this one names as the next.
    pub fn next(&self) -> Option<Program> {
        let amount = self
            .values
            .get("PC_REGISTER_AMOUNTS")
            .copied()
            .filter(|amount| *amount != 0)?;
        let address = self.values.get("PC_BASE_ADDRESS").copied()?;
        // The inverse of the driver's formula: pairs of words, minus one.
        let words = ((amount + 1) * 2).saturating_sub(TAIL_WORDS);
        Some(Program {
            address: u64::from(address & !0xf),
            words,
        })
    }
}
