//! Packets that an emulator counted: whole operations and kernels, by name.

use std::collections::HashMap;

use ggml_rust_npu::gguf::GgmlType;
use hexagon_ops::ops::matmul::Dots;

/// Every count of every architecture: its name, a kernel or an operation, and packets.
const COUNTED: &str = include_str!("../../../hexagon-ops/tests/packets.txt");

/// Rows of activations of the products that were counted whole, beyond one and two, which are dot
/// products.
const ROWS: [usize; 5] = [4, 8, 32, 128, 512];

/// The counts of one architecture.
pub struct Counts(HashMap<&'static str, f64>);

impl Counts {
    /// Returns the counts of an architecture such as 75.
    pub fn of_arch(arch: u32) -> Self {
        if arch >= 73 {
            return Self::recorded(arch);
        }
        // On V68 only kernels and products without a matrix unit were counted. The code around a
        // kernel takes as many packets on V79, which has qfloat, too.
        let (own, newer) = (Self::recorded(68), Self::recorded(79));
        let mut counts = Self::recorded(79);
        for (name, packets) in &mut counts.0 {
            let Some((weight, rows)) = name
                .strip_prefix("whole_mul_mat_")
                .and_then(|rest| rest.rsplit_once("_m"))
            else {
                continue;
            };
            let kernel = match rows {
                "1" => "gemv_2x1",
                "1_16_bits" | "2" => "gemv_1x2",
                _ => "dequantize",
            };
            let kernel = format!("{kernel}_{weight}");
            if let (Some(own), Some(newer)) = (own.get(&kernel), newer.get(&kernel)) {
                *packets += own - newer;
            }
        }
        counts.0.extend(own.0);
        counts
    }

    fn recorded(arch: u32) -> Self {
        let arch = format!("v{arch} ");
        let lines = COUNTED.lines().filter_map(|line| line.strip_prefix(&arch));
        let counts = lines.filter_map(|line| {
            let (name, packets) = line.split_once(' ')?;
            Some((name, packets.trim().parse().ok()?))
        });
        Self(counts.collect())
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Returns the packets of a whole operation on one thread.
    pub fn whole(&self, name: &str) -> f64 {
        let found = self.get(&format!("whole_{name}"));
        found.unwrap_or_else(|| unreachable!("{name} is counted: a test asks for every name"))
    }

    /// Returns the packets for a tile of weights in a product with `rows` rows of activations,
    /// where `dots` selects dot products.
    ///
    /// Whole products were counted for Q4_0, Q8_0 and F16; other types add the difference between
    /// their kernel and that of Q4_0. F32 has no dequantizing kernel and uses the packets of F16,
    /// the nearest counted type.
    pub fn per_tile(&self, weight: GgmlType, rows: usize, dots: Dots) -> f64 {
        let name = weight.name().to_lowercase();
        let is_counted = self.get(&format!("whole_mul_mat_{name}_m1")).is_some();
        let base = match weight {
            _ if is_counted => name.as_str(),
            GgmlType::F32 => "f16",
            _ => "q4_0",
        };
        let own = |kernel: &str| {
            let packets = |weight: &str| self.get(&format!("{kernel}_{weight}"));
            packets(&name).unwrap_or(0.0) - packets(base).unwrap_or(0.0)
        };
        let on_tiles = || self.between(base, rows.max(ROWS[0])) + own("dequantize");
        match (rows, dots) {
            // F16 always uses dot products for one row, so there is no choice.
            (1, Dots::None) if base != "f16" => on_tiles(),
            (1, Dots::TwoDigits) => {
                self.whole(&format!("mul_mat_{base}_m1_16_bits")) + own("gemv_1x2")
            }
            (1, _) => self.whole(&format!("mul_mat_{base}_m1")) + own("gemv_2x1"),
            (2, Dots::TwoRows) => {
                // For Q8_0 the whole operation was not counted with two rows: only its kernel's
                // part is replaced.
                let grown = || {
                    let of = |kernel| self.get(&format!("{kernel}_{base}")).unwrap_or(0.0);
                    self.whole(&format!("mul_mat_{base}_m1")) + of("gemv_1x2") - of("gemv_2x1")
                };
                let two = self.get(&format!("whole_mul_mat_{base}_m2"));
                two.unwrap_or_else(grown) + own("gemv_1x2")
            }
            _ => on_tiles(),
        }
    }

    /// Returns the packets for a tile of weights in a product of many rows without a matrix unit.
    /// Types that were not counted take those of Q4_0 if they have dot products, of F16 if not.
    pub fn on_vectors(&self, weight: GgmlType, rows: usize) -> f64 {
        let counted = match weight {
            GgmlType::F16 | GgmlType::F32 | GgmlType::BF16 => "f16",
            GgmlType::Q8_0 => "q8_0",
            _ => "q4_0",
        };
        let of = |rows: usize| self.get(&format!("whole_mul_mat_{counted}_m{rows}_on_vectors"));
        let few = of(32).unwrap_or(0.0);
        if rows <= 32 {
            return few * as_f64(rows) / 32.0;
        }
        let each = few / 32.0;
        let points = [(32.0, few), (512.0, of(512).unwrap_or(512.0 * each))];
        line(&points, as_f64(rows))
    }

    /// Returns the packets for a tile with `rows` rows, on the line through the counted ones.
    fn between(&self, weight: &str, rows: usize) -> f64 {
        let point = |rows: usize| {
            let packets = self.get(&format!("whole_mul_mat_{weight}_m{rows}"))?;
            Some((as_f64(rows), packets))
        };
        line(
            &ROWS.into_iter().filter_map(point).collect::<Vec<_>>(),
            as_f64(rows),
        )
    }
}

/// Returns the value at `x` of the line through points, extended beyond the last two points.
pub fn line(points: &[(f64, f64)], x: f64) -> f64 {
    let last = points.len() - 2;
    let pairs = points.windows(2).enumerate();
    let found = pairs
        .into_iter()
        .find(|(i, pair)| x <= pair[1].0 || *i == last);
    let (_, pair) = found.unwrap_or_else(|| unreachable!("the last two points hold for every x"));
    let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
    y0 + (y1 - y0) * (x - x0) / (x1 - x0)
}

/// Returns a count as a floating-point number.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub fn as_f64(count: usize) -> f64 {
    count as f64
}
