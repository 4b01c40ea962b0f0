//! The capabilities of each Hexagon NPU, as data: each number with its source. No decisions.

/// A Hexagon NPU as the planner sees it.
#[derive(Clone, Copy, Debug)]
pub struct HexCaps {
    /// Architecture: 73 for V73.
    pub arch: u32,
    /// `false` for chips without a matrix unit: vector units compute the products of tiles.
    pub has_matrix: bool,
    /// Name in `GGML_RUST_NPU_SIM`.
    pub name: &'static str,
    /// Bytes that a session can have mapped at a time.
    pub address_bytes: u64,
    /// Rates for the cost model: no device is faster.
    pub rates: HexRates,
}

/// Speed of the parts of a Hexagon NPU, as the cost model uses it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HexRates {
    /// Bytes that DMA reads from memory in a nanosecond.
    pub dma_gb_per_s: f64,
    /// FP16 operations of the matrix unit in a nanosecond; a multiply-add is two.
    pub hmx_gflops: f64,
    /// Packets of one HVX thread in a microsecond.
    pub packets_per_us: f64,
}

// SOURCE: EuroSys'26, V75: DMA reads 60 GB/s, FP16 GEMM of 1024^3 in TCM at 12032.54 GFLOPS. The
// paper has no other chips, so these numbers are used for all. The clock is an assumption: no
// sustained clock has been published.
const HEX_RATES: HexRates = HexRates {
    dma_gb_per_s: 60.0,
    hmx_gflops: 12032.54,
    packets_per_us: 1100.0,
};

/// Rates for choices between kernels where no device has been measured.
// SOURCE: published tokens/s of ggml-hexagon on V73 and V81, divided by its packets and bytes of a
// token: 315 to 580 packets/us of a thread, 31 to 60 GB/s. These are the middles of both ranges.
pub const FITTED: HexRates = HexRates {
    dma_gb_per_s: 45.0,
    packets_per_us: 450.0,
    ..HEX_RATES
};

/// Number of vector units if there is no chip to ask.
// SOURCE: upstream starts one thread for each vector unit (typically 4), shared by all chips.
pub const VECTOR_UNITS: u32 = 4;

// SOURCE: ggml-hexagon of ggml 0.25.3 keeps V73 sessions at 3000 MiB and gives others 3,355,443,200
// bytes of their 32-bit address space.
const ADDRESS_BYTES: u64 = 3_355_443_200;

// SOURCE: hexagon-ops/tests/packets.txt, `whole_mul_mat_q4_0_m32_on_vectors` of v68, on four
// threads of 1100 packets in a microsecond: 2 * 32^3 operations of a tile of weights and 32 rows
// take 458 packets, of Q8_0 as well.
const NO_MATRIX: HexRates = HexRates {
    hmx_gflops: 630.0,
    ..HEX_RATES
};

// SOURCE: "HMX feature validation on Snapdragon 888" ran FP16 tiles on a V68's matrix unit. QNN's
// list of chips has no FP16 unit for QCS6490 (V68), but neither for SM8350, which has one. So both
// variants are simulated, and on a device the unit's lock and the self-test decide. Address space
// and rates are assumed to be V73's, because none are published.
const OLD_ADDRESS_BYTES: u64 = 3000 * 1024 * 1024;

/// Every Hexagon architecture with the instructions that the kernels use; the usual chip of each
/// before its variants.
pub const ALL: [HexCaps; 7] = [
    HexCaps {
        arch: 68,
        has_matrix: true,
        name: "hexagon-v68",
        address_bytes: OLD_ADDRESS_BYTES,
        rates: HEX_RATES,
    },
    HexCaps {
        arch: 68,
        has_matrix: false,
        name: "hexagon-v68-hvx",
        address_bytes: OLD_ADDRESS_BYTES,
        rates: NO_MATRIX,
    },
    HexCaps {
        arch: 69,
        has_matrix: true,
        name: "hexagon-v69",
        address_bytes: OLD_ADDRESS_BYTES,
        rates: HEX_RATES,
    },
    HexCaps {
        arch: 73,
        has_matrix: true,
        name: "hexagon-v73",
        address_bytes: 3000 * 1024 * 1024,
        rates: HEX_RATES,
    },
    HexCaps {
        arch: 75,
        has_matrix: true,
        name: "hexagon-v75",
        address_bytes: ADDRESS_BYTES,
        rates: HEX_RATES,
    },
    HexCaps {
        arch: 79,
        has_matrix: true,
        name: "hexagon-v79",
        address_bytes: ADDRESS_BYTES,
        rates: HEX_RATES,
    },
    HexCaps {
        arch: 81,
        has_matrix: true,
        name: "hexagon-v81",
        address_bytes: ADDRESS_BYTES,
        rates: HEX_RATES,
    },
];

/// Returns the Hexagon NPU of a name such as `hexagon-v75`.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static HexCaps> {
    ALL.iter().find(|caps| caps.name == name)
}

/// Returns the Hexagon NPU of an architecture such as 75.
#[must_use]
pub fn by_arch(arch: u32) -> Option<&'static HexCaps> {
    ALL.iter().find(|caps| caps.arch == arch)
}
