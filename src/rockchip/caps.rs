//! The capabilities of each Rockchip NPU, as data: one constant per chip, each number with its
//! source. No decisions.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use rknpu_ops::ffi::MatmulType;
use rknpu_ops::int4::Digits;
use rknpu_ops::layout::{MatmulLayout, Soc};

/// The arithmetic of a multiplication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// INT8 weights with a scale for each row, INT8 activations with a scale for each token, exact
    /// INT32 sums.
    Int8,
    /// As [`Self::Int8`], but neither operand is rotated, and rows of weights that are integers of
    /// 8 bits times a scale keep their values exactly.
    Int8Unrotated,
    /// As [`Self::Int8`], with activations as two INT8 digits, whose error is far below that of the
    /// weights.
    Int8Wide,
    /// FP16 weights unchanged, FP16 activations, FP32 sums.
    Fp16,
    /// INT4 weights with a scale for each row and segment, activations as two INT4 digits, INT16
    /// sums.
    Int4,
    /// INT4 weights with a scale for each row and segment, INT8 activations with a scale for each
    /// token, INT32 sums.
    Int4Int8,
    /// INT4 weights with a scale for each row and segment, FP16 activations, FP32 sums.
    Int4Fp16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Precision {
    /// Returns its name in messages: the word of `GGML_RUST_NPU_RULES` in capitals.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "INT8",
            Self::Int8Unrotated => "INT8-PLAIN",
            Self::Int8Wide => "INT8-WIDE",
            Self::Fp16 => "FP16",
            Self::Int4 => "INT4",
            Self::Int4Int8 => "INT4-INT8",
            Self::Int4Fp16 => "INT4-FP16",
        }
    }

    /// Returns the vendor's number for the arithmetic.
    #[must_use]
    pub const fn matmul_type(self) -> MatmulType {
        match self {
            Self::Int8 | Self::Int8Unrotated | Self::Int8Wide => MatmulType::I8_I8_I32,
            Self::Fp16 => MatmulType::F16_F16_F32,
            Self::Int4 => MatmulType::I4_I4_I16,
            Self::Int4Int8 => MatmulType::I8_I4_I32,
            Self::Int4Fp16 => MatmulType::F16_I4_F32,
        }
    }

    /// Returns the number of rows of A and C for each row of activations.
    #[must_use]
    pub const fn rows(self) -> usize {
        match self {
            Self::Int4 => DIGITS.rows(),
            Self::Int8Wide => Digits::TwoBytes.rows(),
            Self::Int8 | Self::Int8Unrotated | Self::Fp16 | Self::Int4Int8 | Self::Int4Fp16 => 1,
        }
    }

    /// Returns `true` if the weights have a scale for each segment of K.
    #[must_use]
    pub const fn is_int4(self) -> bool {
        matches!(self, Self::Int4 | Self::Int4Int8 | Self::Int4Fp16)
    }
}

/// INT4 activations are two digits. One digit has 15 levels, so its error would be as large as that
/// of the weights.
pub const DIGITS: Digits = Digits::Two;

/// Cost of one call of one core while the other cores work as well.
///
/// In a call the weights are read from DRAM once, whatever the number of rows, and the core
/// computes at the same time, so a call lasts its fixed time plus the longer of the two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallCost {
    /// Nanoseconds of a call that does nothing.
    pub call_ns: f32,
    /// Bytes of weights read in a nanosecond.
    pub bytes_per_ns: f32,
    /// Operations in a nanosecond, a multiplication and an addition being two.
    pub int8_ops_per_ns: f32,
    /// As above.
    pub fp16_ops_per_ns: f32,
    /// As above.
    pub int4_ops_per_ns: f32,
}

impl CallCost {
    /// Returns the operations in a nanosecond.
    #[must_use]
    pub fn ops_per_ns(&self, precision: Precision) -> f32 {
        match precision {
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => {
                self.int8_ops_per_ns
            }
            Precision::Fp16 => self.fp16_ops_per_ns,
            Precision::Int4 => self.int4_ops_per_ns,
            // No rates of mixed types are published; they are assumed to be those of the
            // activations' type.
            Precision::Int4Int8 => self.int8_ops_per_ns,
            Precision::Int4Fp16 => self.fp16_ops_per_ns,
        }
    }
}

/// Cost of FLASH_ATTN_EXT in addition to its calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionCost {
    /// Operations of ggml's CPU backend in a nanosecond, on all big CPUs.
    pub cpu_ops_per_ns: f32,
    /// Time of the CPU's stages between the NPU's products, as a multiple of that of the products.
    pub stages: f32,
}

/// The lowest and the highest operations of the CPU's attention in a nanosecond. The planner uses
/// the highest, so that the NPU computes only where it is faster by either.
// SOURCE: RK3588. Llama-3.2-3B F16 falls from 61.8 tokens/s for 512 tokens to 45.5 for 2,048
// (gregordinary), which is attention at 45 to 60 GFLOPS. Other chips have no published figures.
pub const CPU_OPS_PER_NS: [f32; 2] = [45.0, 60.0];

// SOURCE: RK3588. The stages on the cores take 135 ms of 167 to 203 ms, next to 54 ms of waiting
// for products (unimatrix099, 512 tokens of Gemma-4 E4B). Other chips have no published figures.
const ATTENTION: AttentionCost = AttentionCost {
    cpu_ops_per_ns: CPU_OPS_PER_NS[1],
    stages: 1.5,
};

/// Cells of attention that are one dimension of a product come in multiples of this.
// SOURCE: the granularity of K in `rknpu_ops::layout` (32) and of N (32; 16 on chips with one
// core).
pub const CELLS_ALIGN: usize = 32;

// SOURCE: RK3588, unimatrix099's fork of rk-llama.cpp: rknn_matmul_run 32.9 us, each rknn_mem_sync
// around it 46-75 us; one core with native layouts 1.8 TOPS INT8, 0.9 TFLOPS FP16, 3.6-3.9 TOPS
// INT4 (128 x 1024 x 8192); 11.1 GB/s for one core, 26.6 GB/s for three. Other chips have no
// published figures: they get those of RK3588's cores, and its bandwidth for as many cores.
// Decisions depend on the ratio alone: a call of the largest weights costs as much as about 100
// rows.
const ONE_CORE: CallCost = CallCost {
    call_ns: 32_900.0 + 2.0 * 60_000.0,
    bytes_per_ns: 11.1,
    int8_ops_per_ns: 1800.0,
    fp16_ops_per_ns: 900.0,
    int4_ops_per_ns: 3600.0,
};
const TWO_CORES: CallCost = CallCost {
    // An assumed value between 11.1 (one core) and 26.6 / 3 (a third of three cores).
    bytes_per_ns: 10.0,
    ..ONE_CORE
};
const THREE_CORES: CallCost = CallCost {
    bytes_per_ns: 26.6 / 3.0,
    ..ONE_CORE
};

/// The cores of an NPU that are used, by bit.
///
/// ```
/// use ggml_rust_npu::rockchip::caps::Cores;
///
/// let cores = Cores::parse("0,2").expect("a list of cores");
/// assert_eq!(cores.iter().collect::<Vec<_>>(), [0, 2]);
/// assert_eq!(Cores::parse("all"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores(u8);

impl Cores {
    /// Returns the first `count` cores.
    #[must_use]
    pub const fn first(count: usize) -> Self {
        Self((1 << count) - 1)
    }

    /// Returns these cores and `core`.
    #[must_use]
    pub const fn with(self, core: usize) -> Self {
        Self(self.0 | 1 << core)
    }

    /// Returns the number of cores.
    #[must_use]
    pub const fn count(self) -> usize {
        // CAST: u32 to usize loses nothing.
        self.0.count_ones() as usize
    }

    /// Reads numbers between commas: the cores to use.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut cores = Self(0);
        for number in text.split(',') {
            let core = number.trim().parse().ok().filter(|core| *core < 8)?;
            cores = cores.with(core);
        }
        Some(cores)
    }

    /// Iterates over the numbers of the cores.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..8).filter(move |core| self.0 & 1 << core != 0)
    }
}

impl std::fmt::Display for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let numbers: Vec<_> = self.iter().map(|core| core.to_string()).collect();
        f.write_str(&numbers.join(","))
    }
}

/// The tiles of weights of an arithmetic: columns, and elements of K.
pub type Tiles = (Precision, (usize, usize));

/// A Rockchip NPU as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RkCaps {
    /// The chip; `rknpu_ops::layout` has its native layouts, alignments, cores and name.
    pub soc: Soc,
    /// Cores that are used.
    pub cores: Cores,
    /// Tiles of weights where the library's are not those of `rknpu_ops::layout`.
    pub tiles: &'static [Tiles],
    /// Largest K of one INT8 call; longer rows are split.
    pub k_max_int8: usize,
    /// Largest K of one FP16 call.
    pub k_max_fp16: usize,
    /// Largest N of one call according to the documentation.
    pub n_max: usize,
    /// Largest N of one INT8 or FP16 call with libraries that accept more than [`Self::n_max`]. The
    /// library is tested when the device opens.
    pub n_wide: usize,
    /// The arithmetic for INT4 weights, if there is one.
    pub int4: Option<Precision>,
    /// The arithmetic for INT4 weights with FP16 activations, if there is one.
    pub int4_fp16: Option<Precision>,
    /// Cost of a call.
    pub cost: CallCost,
    /// Cost of attention.
    pub attention: AttentionCost,
    /// The faster CPUs, by the kernel's numbers; none if all are the same.
    pub big_cpus: &'static [usize],
}

/// Descriptions of chips that differ from the constants, and lists of their tiles. They live until
/// the process ends, as devices do; equal ones are kept once.
static KEPT: Mutex<Vec<&'static RkCaps>> = Mutex::new(Vec::new());
static KEPT_TILES: Mutex<Vec<&'static Vec<Tiles>>> = Mutex::new(Vec::new());

/// Returns the value in `kept` that equals `value`, which is added if there is none.
fn keep<T: PartialEq>(kept: &Mutex<Vec<&'static T>>, value: T) -> &'static T {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    let known = kept.iter().find(|known| ***known == value).copied();
    known.unwrap_or_else(|| {
        let value = Box::leak(Box::new(value));
        kept.push(value);
        value
    })
}

impl RkCaps {
    /// Returns this description for as long as the program runs.
    #[must_use]
    pub fn keep(self) -> &'static Self {
        keep(&KEPT, self)
    }

    /// Returns the chip with other tiles, for as long as the program runs.
    #[must_use]
    pub fn with_tiles(self, tiles: Vec<Tiles>) -> Self {
        Self {
            tiles: keep(&KEPT_TILES, tiles).as_slice(),
            ..self
        }
    }

    /// Returns the native layouts of an arithmetic, if the chip has it.
    #[must_use]
    pub fn native(&self, precision: Precision) -> Option<MatmulLayout> {
        let matmul_type = precision.matmul_type();
        let mut native = MatmulLayout::of(self.soc, matmul_type)?;
        let mut tiles = self.tiles.iter();
        if let Some((_, (gn, gk))) = tiles.find(|(other, _)| other.matmul_type() == matmul_type) {
            (native.b.gn, native.b.gk) = (*gn, *gk);
            native.n_align = native.n_align.max(*gn);
        }
        Some(native)
    }
}

// SOURCE: cpu-map in Rockchip's BSP device trees: RK3588 has Cortex-A55 as CPUs 0-3 and Cortex-A76
// as CPUs 4-7, RK3576 Cortex-A53 and Cortex-A72 likewise; the four CPUs of RK3562 and RK3566/68 are
// alike. Decode is 19-66 % faster on the A76: `taskset -c 4-7`, -t 4, docs/backend/RKNPU2-*.md of
// unimatrix099's fork of rk-llama.cpp, October 2026, on an RK3588.
const UPPER_FOUR: &[usize] = &[4, 5, 6, 7];

// SOURCE: RKNN SDK User Guide 2.3.0 §3.5 for N <= 4096. K: INT8 weights longer than 8192 (RK3576:
// 4096) are stored in pieces, so longer rows are split here; FP16 beyond 4096 collapses on RK3588
// (unimatrix099's measurements) and is split everywhere; RK356x takes at most 10240 of either.
/// Largest N of one call of RK3588 and RK3576 with librknnrt 2.3.2. A core's share of 151,936
/// columns then needs 4 calls instead of the 13 with N = 4096. It leaves M at 128
/// ([`MAX_RESULTS`]): with fewer rows, reading the weights would be slower than computing.
// SOURCE: unimatrix099's fork of rk-llama.cpp ran N = 87392 in INT8 and 32768 in FP16.
const N_WIDE: usize = 16384;

/// Oldest librknnrt for which calls of 16,384 columns are tried: the one that ran them.
pub const MIN_RKNNRT_WIDE: (u32, u32, u32) = (2, 3, 2);

/// Most results of one call: those of the documented largest N with 512 rows.
pub const MAX_RESULTS: usize = 512 * 4096;

/// RK3588 and RK3588S.
pub const RK3588: RkCaps = RkCaps {
    soc: Soc::Rk3588,
    cores: Cores::first(Soc::Rk3588.cores()),
    tiles: &[],
    k_max_int8: 8192,
    k_max_fp16: 4096,
    n_max: 4096,
    n_wide: N_WIDE,
    int4: Some(Precision::Int4),
    int4_fp16: None,
    cost: THREE_CORES,
    attention: ATTENTION,
    big_cpus: UPPER_FOUR,
};
/// RK3583: an RK3588 with two NPU cores.
// SOURCE: vendor driver 0.9.8, rknpu_drv.c: the entry of rockchip,rk3583-rknpu has two cores.
pub const RK3583: RkCaps = RkCaps {
    cores: Cores::first(2),
    cost: TWO_CORES,
    ..RK3588
};
/// RK3576.
pub const RK3576: RkCaps = RkCaps {
    soc: Soc::Rk3576,
    cores: Cores::first(Soc::Rk3576.cores()),
    tiles: &[],
    k_max_int8: 4096,
    k_max_fp16: 4096,
    n_max: 4096,
    n_wide: N_WIDE,
    int4: Some(Precision::Int4Int8),
    int4_fp16: Some(Precision::Int4Fp16),
    cost: TWO_CORES,
    attention: ATTENTION,
    big_cpus: UPPER_FOUR,
};
/// RK3562.
pub const RK3562: RkCaps = RkCaps {
    soc: Soc::Rk3562,
    cores: Cores::first(Soc::Rk3562.cores()),
    tiles: &[],
    k_max_int8: 8192,
    k_max_fp16: 4096,
    n_max: 4096,
    n_wide: 4096,
    int4: None,
    int4_fp16: None,
    cost: ONE_CORE,
    attention: ATTENTION,
    big_cpus: &[],
};
/// RK3566 and RK3568.
pub const RK3566: RkCaps = RkCaps {
    soc: Soc::Rk3566,
    cores: Cores::first(Soc::Rk3566.cores()),
    tiles: &[],
    k_max_int8: 8192,
    k_max_fp16: 4096,
    n_max: 4096,
    n_wide: 4096,
    int4: None,
    int4_fp16: None,
    cost: ONE_CORE,
    attention: ATTENTION,
    big_cpus: &[],
};

/// Every Rockchip chip that is known.
pub const ALL: [&RkCaps; 4] = [&RK3588, &RK3576, &RK3562, &RK3566];

/// Names of the chips in the kernel's device tree, and their capabilities.
// SOURCE: the `compatible` strings of Rockchip's BSP device trees.
const COMPATIBLE: [(&str, &RkCaps); 7] = [
    ("rockchip,rk3583", &RK3583),
    ("rockchip,rk3588s", &RK3588),
    ("rockchip,rk3588", &RK3588),
    ("rockchip,rk3576", &RK3576),
    ("rockchip,rk3562", &RK3562),
    ("rockchip,rk3566", &RK3566),
    ("rockchip,rk3568", &RK3566),
];

/// Bytes of one I/O address space that librknnrt can use.
// SOURCE: rk-llama.cpp caps each IOMMU domain at INT32_MAX - 65536; the hardware's addresses are
// 32-bit.
const DOMAIN_BYTES: usize = (i32::MAX as usize) - 65536;

/// I/O address spaces that the NPU can be given.
// SOURCE: vendor driver 0.9.8, rknpu_iommu.h: RKNPU_MAX_IOMMU_DOMAIN_NUM 16.
pub const IO_DOMAINS: usize = 16;

/// Oldest kernel driver with more than one I/O address space.
// SOURCE: vendor driver history: the domain id appears in 0.9.6.
pub const MIN_DRIVER_FOR_DOMAINS: (u32, u32, u32) = (0, 9, 6);

/// Bytes of an I/O address space for activations and results.
const CALL_BYTES: usize = 256 << 20;

/// Activations that are kept in one I/O address space, and the most that one call may have there.
pub const ACTIVATION_BYTES: usize = CALL_BYTES / 4;

/// Results of all cores that are kept in one I/O address space.
pub const RESULT_BYTES: usize = CALL_BYTES - ACTIVATION_BYTES;

/// Results of all cores and segments of K that one call may have. The memory kept for calls has
/// room for them and for those of other calls.
pub const CALL_RESULT_BYTES: usize = CALL_BYTES / 2;

/// Bytes of weights in one I/O address space; the rest that librknnrt can use is for activations
/// and results.
pub const DOMAIN_WEIGHT_BYTES: usize = DOMAIN_BYTES - CALL_BYTES;

/// Bytes of weights in an I/O address space without librknnrt, whose cap does not apply to the
/// driver. Streams and copies of rows get as much as calls do.
// SOURCE: addresses have 32 bits (vendor driver 0.9.8, rknpu_drv.c and rknpu_gem.c).
pub const DIRECT_WEIGHT_BYTES: usize = u32::MAX as usize - 2 * CALL_BYTES;

/// File descriptors that the process should be allowed: each allocation needs one.
// SOURCE: rk-llama.cpp's README asks for `ulimit -n 65536`; beyond the limit librknnrt fails with
// errno 24.
pub const FILE_DESCRIPTORS: u64 = 65536;

/// Oldest librknnrt whose structures are the ones in `rknpu_ops::ffi`.
// SOURCE: rknn_matmul_api.h 2.3.x (facts taken from 2.3.2); `group_size` and the quantization types
// moved before it.
pub const MIN_RKNNRT: (u32, u32, u32) = (2, 3, 0);

/// Smallest M that the NPU computes, unless the user sets another: every M.
///
/// The published figures for decode (M = 1) contradict each other, so no other value follows from
/// them: on RK3588 the CPU reaches 19.5 tokens/s of Gemma3 1B Q8_0 and the NPU 16.5, but 6.1 and
/// 6.9 of Ministral3 3B, 2.5 and 3.2 of Qwen3.5 9B, and the NPU uses less than half of the power.
/// Other chips have no such figures.
// SOURCE: rk-llama.cpp's README, table for RK3588 with four A76 threads.
pub const MIN_M: usize = 1;

/// Smallest M for weights whose packed form has more bytes than [`NARROW`] allows, such as 4-bit
/// ones that are multiplied in INT8: a few rows cost as much as reading the weights, and the CPU
/// reads fewer bytes.
// SOURCE: RK3588, four A76 threads: E4B Q4_0 4.9-6.9 tokens/s on the CPU, 3.3-4.55 as INT8 on the
// NPU (unimatrix099's fork of rk-llama.cpp); Gemma3 1B Q4_0 28.3 against 16.7 (rk-llama.cpp's
// README).
pub const MIN_M_NARROW: usize = 32;

/// Ratio of packed to stored bytes of a weight above which [`MIN_M_NARROW`] applies, as a fraction.
pub const NARROW: (usize, usize) = (6, 5);

/// Returns the chip of a name such as `rk3588`.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static RkCaps> {
    ALL.into_iter().find(|caps| caps.soc.name() == name)
}

/// Returns the chip in the contents of `/proc/device-tree/compatible`: strings that end in NUL.
#[must_use]
pub fn by_compatible(compatible: &str) -> Option<&'static RkCaps> {
    compatible.split('\0').find_map(of_compatible)
}

/// Returns the chip in the `uevent` of the NPU's device, which a container sees even where the
/// device tree is hidden from it: a line such as `OF_COMPATIBLE_0=rockchip,rk3588-rknpu`.
#[must_use]
pub fn by_uevent(uevent: &str) -> Option<&'static RkCaps> {
    uevent.lines().find_map(|line| {
        let (key, name) = line.split_once('=')?;
        let name = name.strip_suffix("-rknpu")?;
        (key.starts_with("OF_COMPATIBLE_")).then(|| of_compatible(name))?
    })
}

fn of_compatible(name: &str) -> Option<&'static RkCaps> {
    let found = COMPATIBLE.iter().find(|(known, _)| *known == name);
    found.map(|(_, caps)| *caps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn board_names_before_the_chip_are_passed_over() {
        let orange_pi = "rockchip,rk3588s-orangepi-5\0rockchip,rk3588s\0";
        assert_eq!(by_compatible(orange_pi).unwrap().soc.name(), "rk3588");
        let rk3583 = by_compatible("board\0rockchip,rk3583\0").unwrap();
        assert_eq!((rk3583.soc.name(), rk3583.cores.count()), ("rk3588", 2));
        assert!(by_compatible("raspberrypi,5-model-b\0brcm,bcm2712\0").is_none());
        assert_eq!(
            by_compatible("radxa,zero3\0rockchip,rk3566\0")
                .unwrap()
                .soc
                .name(),
            "rk3566"
        );
    }

    #[test]
    fn the_npu_s_own_device_names_the_chip_where_the_device_tree_is_hidden() {
        let uevent =
            "DRIVER=RKNPU\nOF_NAME=npu\nOF_COMPATIBLE_0=rockchip,rk3588-rknpu\nOF_COMPATIBLE_N=1\n";
        assert_eq!(by_uevent(uevent).unwrap().soc.name(), "rk3588");
        let small = "OF_COMPATIBLE_0=rockchip,rk3568-rknpu\n";
        assert_eq!(by_uevent(small).unwrap().soc.name(), "rk3566");
        for other in [
            "OF_COMPATIBLE_0=rockchip,rv1126-rknpu",
            "OF_COMPATIBLE_0=rockchip,rk3588-vop",
            "",
        ] {
            assert!(by_uevent(other).is_none());
        }
    }
}
