//! Division of M rows into calls. Contexts exist for powers of two only: rows are padded, or split
//! over several calls. A power of two that the device computes wrong is not used.

use crate::rockchip::caps::{
    ACTIVATION_BYTES, CALL_RESULT_BYTES, CallCost, MAX_RESULTS, Precision,
};
use crate::rockchip::layout::WeightLayout;

/// Largest M of one call.
pub const M_BUCKET_MAX: usize = 512;

/// One call's share of the M rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MPiece {
    /// First row.
    pub first: usize,
    /// Rows with content.
    pub rows: usize,
    /// M of the context that computes them: a power of two; the rest is zeros.
    pub bucket: usize,
}

/// The M that calls may have: powers of two up to [`M_BUCKET_MAX`], except those that the device
/// computes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Bit i stands for 2^i.
    bits: u16,
}

impl Buckets {
    /// Every power of two.
    pub const ALL: Self = Self {
        bits: (1 << (M_BUCKET_MAX.ilog2() + 1)) - 1,
    };

    /// Returns these sizes without `bucket`.
    #[must_use]
    pub fn without(self, bucket: usize) -> Self {
        Self {
            bits: self.bits & !bit(bucket),
        }
    }

    /// Returns `true` if calls may have this M.
    #[must_use]
    pub fn contain(self, bucket: usize) -> bool {
        bucket.is_power_of_two() && self.bits & bit(bucket) != 0
    }

    /// Returns the buckets whose double is also a bucket: the values of M for activations that need
    /// two rows of a call each.
    fn halves(self) -> Self {
        Self {
            bits: self.bits >> 1,
        }
    }

    /// Returns the sizes that are at most `most`.
    fn up_to(self, most: usize) -> Self {
        let largest = most.clamp(1, M_BUCKET_MAX).ilog2();
        Self {
            bits: self.bits & ((2 << largest) - 1),
        }
    }

    /// Returns the largest M.
    #[must_use]
    pub fn largest(self) -> usize {
        self.at_most(M_BUCKET_MAX).unwrap_or(M_BUCKET_MAX)
    }

    /// Returns the smallest M for `rows`.
    #[must_use]
    pub fn at_least(self, rows: usize) -> Option<usize> {
        (0..=M_BUCKET_MAX.ilog2())
            .map(|log| 1 << log)
            .find(|bucket| *bucket >= rows && self.contain(*bucket))
    }

    /// Returns the largest M of at most `rows`.
    fn at_most(self, rows: usize) -> Option<usize> {
        (0..=M_BUCKET_MAX.ilog2())
            .rev()
            .map(|log| 1 << log)
            .find(|bucket| *bucket <= rows && self.contain(*bucket))
    }
}

fn bit(bucket: usize) -> u16 {
    1u16.checked_shl(bucket.ilog2()).unwrap_or(0)
}

/// Returns the most rows of a call for which there is memory: for the results of all cores and
/// segments and of one block, and for the activations.
fn most_rows(layout: &WeightLayout) -> usize {
    let rows = M_BUCKET_MAX * layout.precision.rows();
    let cores = layout.chunks.div_ceil(layout.chunks_per_core);
    let results = layout.native.c.bytes(rows, layout.chunk_n) * layout.segments * cores;
    let activations = layout.native.a.bytes(rows, layout.segment_k) * layout.segments;
    let fit = |bytes: usize, most: usize| most * M_BUCKET_MAX / bytes.max(1);
    (most_sums(layout) / layout.chunk_n)
        .min(fit(results, CALL_RESULT_BYTES))
        .min(fit(activations, ACTIVATION_BYTES))
}

/// Returns the product of the most rows of one call and the columns.
fn most_sums(layout: &WeightLayout) -> usize {
    if layout.precision == Precision::Int8Wide {
        MAX_RESULTS / layout.precision.rows()
    } else {
        MAX_RESULTS
    }
}

/// Cost of the calls for one block of weights, for the choice between padding and splitting.
#[derive(Clone, Copy, Debug)]
pub struct Bucketing {
    buckets: Buckets,
    /// The call as such.
    call_ns: f32,
    /// Reading the weights.
    weights_ns: f32,
    /// Computing a row.
    row_ns: f32,
}

impl Bucketing {
    /// Returns the bucketing for the blocks of a weight. All blocks have the same size.
    #[must_use]
    pub fn new(cost: &CallCost, layout: &WeightLayout, buckets: Buckets) -> Self {
        // CAST: rounding changes no choice that matters.
        let elements = (layout.segment_k * layout.chunk_n) as f32;
        let rows = layout.precision.rows() as f32;
        // `Int8Wide` sends two rows for each row of activations, so its buckets are half as large
        // as the tested ones of INT8.
        let buckets = if layout.precision == Precision::Int8Wide {
            buckets.halves()
        } else {
            buckets
        };
        Self {
            buckets: buckets.up_to(most_rows(layout)),
            call_ns: cost.call_ns,
            weights_ns: layout.block_bytes() as f32 / cost.bytes_per_ns,
            row_ns: 2.0 * elements * rows / cost.ops_per_ns(layout.precision),
        }
    }

    /// Returns the nanoseconds of one call with M = `bucket`.
    #[must_use]
    pub fn cost(&self, bucket: usize) -> f32 {
        let [call, weights, rows] = self.parts(bucket);
        call + weights.max(rows)
    }

    /// Returns three times of a call with M = `bucket`, in nanoseconds: its fixed cost, reading the
    /// weights, and computing the rows. The last two overlap.
    #[must_use]
    pub fn parts(&self, bucket: usize) -> [f32; 3] {
        [self.call_ns, self.weights_ns, bucket as f32 * self.row_ns]
    }

    /// Returns the nanoseconds of the cheapest division of `rows`, at most as many as the largest
    /// bucket, and its first call.
    fn best(&self, rows: usize) -> (f32, MPiece) {
        let piece = |rows, bucket| MPiece {
            first: 0,
            rows,
            bucket,
        };
        let up = self.buckets.at_least(rows).unwrap_or(M_BUCKET_MAX);
        let (padded, whole) = (self.cost(up), piece(rows, up));
        if up == rows {
            return (padded, whole);
        }
        let Some(down) = self.buckets.at_most(rows) else {
            return (padded, whole);
        };
        // Each step subtracts the largest bucket that fits, so the depth is about the number of
        // binary digits of M.
        let (rest, _) = self.best(rows - down);
        let split = self.cost(down) + rest;
        if padded <= split {
            return (padded, whole);
        }
        (split, piece(down, down))
    }

    /// Divides `m` rows into calls: as many of the largest M as possible. The rest becomes one
    /// padded call, or a call of the largest power of two and further calls for the remainder (72 =
    /// 64 + 8), whichever is cheaper.
    pub fn pieces(self, m: usize) -> impl Iterator<Item = MPiece> {
        let mut first = 0;
        let largest = self.buckets.largest();
        std::iter::from_fn(move || {
            let left = m - first;
            if left == 0 {
                return None;
            }
            let (_, piece) = self.best(left.min(largest));
            let piece = MPiece { first, ..piece };
            first += piece.rows;
            Some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rules::Choice;
    use crate::rockchip::caps::{ALL, RkCaps};
    use crate::tensor::DType;

    fn buckets(costs: Bucketing, m: usize) -> Vec<usize> {
        costs.pieces(m).map(|piece| piece.bucket).collect()
    }

    fn total(costs: Bucketing, buckets: &[usize]) -> f32 {
        buckets.iter().map(|bucket| costs.cost(*bucket)).sum()
    }

    /// Returns the costs of some weights on every chip and in every arithmetic. Also returns
    /// made-up costs: those without overhead, those that are nothing but overhead, and some
    /// between.
    fn tables() -> Vec<Bucketing> {
        let of = |caps: &RkCaps, choice, ne| {
            let layout = WeightLayout::new(caps, Some(choice), DType::F16, ne)?;
            Some(Bucketing::new(&caps.cost, &layout, Buckets::ALL))
        };
        let mut all = Vec::new();
        for caps in ALL {
            for choice in [Choice::Fp16, Choice::Int8, Choice::Int8Wide, Choice::Int4] {
                for ne in [[32, 32, 1, 1], [576, 1536, 1, 1], [4096, 14336, 1, 1]] {
                    all.extend(of(caps, choice, ne));
                }
            }
        }
        for (call_ns, weights_ns, row_ns) in [
            (0.0, 0.0, 1.0),
            (1.0, 0.0, 0.0),
            (5.0, 9.0, 1.0),
            (40.0, 100.0, 1.0),
        ] {
            all.push(Bucketing {
                buckets: Buckets::ALL,
                call_ns,
                weights_ns,
                row_ns,
            });
        }
        all
    }

    #[test]
    fn pieces_cover_all_rows_once_and_stay_in_their_bucket() {
        for costs in tables() {
            for m in 0..1100 {
                let mut next = 0;
                for piece in costs.pieces(m) {
                    assert_eq!(piece.first, next);
                    assert!(piece.rows >= 1 && piece.rows <= piece.bucket);
                    assert!(piece.bucket.is_power_of_two() && piece.bucket <= M_BUCKET_MAX);
                    next += piece.rows;
                }
                assert_eq!(next, m);
            }
        }
    }

    #[test]
    fn no_piece_has_a_bucket_that_is_left_out() {
        for left_out in (0..10).map(|log| 1 << log) {
            for costs in tables() {
                let costs = Bucketing {
                    buckets: Buckets::ALL.without(left_out),
                    ..costs
                };
                for m in 0..1100 {
                    let mut next = 0;
                    for piece in costs.pieces(m) {
                        assert!(costs.buckets.contain(piece.bucket) && piece.bucket != left_out);
                        assert!(piece.first == next && (1..=piece.bucket).contains(&piece.rows));
                        next += piece.rows;
                    }
                    assert_eq!(next, m);
                }
            }
        }
    }

    #[test]
    fn calls_of_wide_chunks_have_few_rows() {
        let caps = &crate::rockchip::caps::RK3588;
        for (n, chunk_n, most) in [
            (12_288, 4096, 512),
            (14_336, 4800, 256),
            (151_936, 12_672, 128),
        ] {
            let layout = WeightLayout::new(caps, Some(Choice::Int8), DType::F16, [4096, n, 1, 1]);
            let layout = layout.unwrap();
            assert_eq!(layout.chunk_n, chunk_n, "{n}");
            let costs = Bucketing::new(&caps.cost, &layout, Buckets::ALL);
            for m in 1..1100 {
                let pieces: Vec<_> = costs.pieces(m).collect();
                assert!(pieces.iter().all(|piece| piece.bucket <= most), "{n} {m}");
                assert_eq!(pieces.iter().map(|piece| piece.rows).sum::<usize>(), m);
            }
            assert_eq!(buckets(costs, 512)[0], most);
        }
    }

    #[test]
    fn calls_with_two_digits_have_half_of_the_rows_and_no_size_that_was_wrong_for_int8() {
        let caps = &crate::rockchip::caps::RK3588;
        for (n, most) in [(576, 256), (12_288, 256), (14_336, 128), (151_936, 64)] {
            let of = |choice| {
                let layout = WeightLayout::new(caps, Some(choice), DType::F16, [4096, n, 1, 1]);
                layout.unwrap()
            };
            let layout = of(Choice::Int8Wide);
            assert_eq!(
                layout.tag(),
                of(Choice::Int8).tag(),
                "the weights are the same"
            );
            for left_out in [2, 64, 512] {
                let costs = Bucketing::new(&caps.cost, &layout, Buckets::ALL.without(left_out));
                for m in 1..700 {
                    let pieces: Vec<_> = costs.pieces(m).collect();
                    assert!(pieces.iter().all(|piece| piece.bucket <= most), "{n} {m}");
                    assert!(pieces.iter().all(|piece| 2 * piece.bucket != left_out));
                    assert_eq!(pieces.iter().map(|piece| piece.rows).sum::<usize>(), m);
                }
            }
        }
    }

    #[test]
    fn calls_of_long_rows_have_few_rows() {
        let caps = &crate::rockchip::caps::RK3588;
        // 256 rows of these activations have 64 MiB.
        let layout = WeightLayout::new(caps, Some(Choice::Fp16), DType::F16, [131_072, 256, 1, 1]);
        let costs = Bucketing::new(&caps.cost, &layout.unwrap(), Buckets::ALL);
        assert_eq!(buckets(costs, 512), [256, 256]);
    }

    #[test]
    fn operands_of_a_call_fit_beside_the_weights_of_an_address_space() {
        for caps in ALL {
            for choice in [Choice::Fp16, Choice::Int8, Choice::Int8Wide, Choice::Int4] {
                // The shapes of Llama 8B and Qwen2.5 7B, and the longest rows.
                for ne in [
                    [14336, 4096],
                    [4096, 14336],
                    [18944, 3584],
                    [3584, 18944],
                    [36864, 256],
                ] {
                    let ne = [ne[0], ne[1], 1, 1];
                    let Some(layout) = WeightLayout::new(caps, Some(choice), DType::F16, ne) else {
                        continue;
                    };
                    let costs = Bucketing::new(&caps.cost, &layout, Buckets::ALL);
                    let m = buckets(costs, M_BUCKET_MAX)[0] * layout.precision.rows();
                    let cores = caps.cores.count();
                    let c = layout.native.c.bytes(m, layout.chunk_n) * layout.segments * cores;
                    let a = layout.native.a.bytes(m, layout.segment_k) * layout.segments;
                    assert!(c <= 128 << 20, "{:?} {choice:?} {ne:?}: {c}", caps.soc);
                    assert!(a <= 64 << 20, "{:?} {choice:?} {ne:?}: {a}", caps.soc);
                    assert!(m >= 64, "{:?} {choice:?} {ne:?}: {m} rows", caps.soc);
                }
            }
        }
    }

    #[test]
    fn never_worse_by_the_table_than_all_padded_or_all_split() {
        // Wide chunks have no bucket of 512 rows, so they are skipped.
        let all = |costs: &Bucketing| costs.buckets == Buckets::ALL;
        for costs in tables().into_iter().filter(all) {
            for m in 1..1100 {
                let mut padded = vec![M_BUCKET_MAX; m / M_BUCKET_MAX];
                let mut split = padded.clone();
                let rest = m % M_BUCKET_MAX;
                if rest > 0 {
                    padded.push(rest.next_power_of_two());
                }
                split.extend(
                    (0..9)
                        .rev()
                        .map(|bit| rest & 1 << bit)
                        .filter(|bit| *bit > 0),
                );
                assert_eq!(split.iter().sum::<usize>(), m);
                let have = total(costs, &buckets(costs, m));
                // Adding in another order may change the last digit.
                let limit = total(costs, &padded).min(total(costs, &split)) * 1.000_01;
                assert!(have <= limit, "M={m} {costs:?}: {have} > {limit}");
            }
        }
    }

    #[test]
    fn cheap_calls_split_and_dear_ones_pad() {
        let costs = |call_ns, weights_ns| Bucketing {
            buckets: Buckets::ALL,
            call_ns,
            weights_ns,
            row_ns: 1.0,
        };
        assert_eq!(buckets(costs(5.0, 9.0), 72), [64, 8]);
        assert_eq!(buckets(costs(5.0, 9.0), 600), [512, 64, 16, 8]);
        assert_eq!(buckets(costs(40.0, 100.0), 72), [128]);
        assert_eq!(buckets(costs(40.0, 100.0), 600), [512, 128]);
        // Rows are computed at the same time as weights are read.
        assert!((costs(5.0, 9.0).cost(8) - 14.0).abs() < 1e-6);
        assert!((costs(5.0, 9.0).cost(64) - 69.0).abs() < 1e-6);
    }

    #[test]
    fn a_large_int8_weight_on_rk3588_is_padded_up_to_the_rows_that_its_reading_hides() {
        let ne = [4096, 12288, 1, 1];
        let caps = &crate::rockchip::caps::RK3588;
        let layout = WeightLayout::new(caps, Some(Choice::Int8), DType::F16, ne).unwrap();
        let costs = Bucketing::new(&caps.cost, &layout, Buckets::ALL);
        // 1800 ops/ns and 8.87 bytes/ns: reading the weights takes as long as computing 101 rows.
        assert_eq!(buckets(costs, 33), [64]);
        assert_eq!(buckets(costs, 72), [128]);
        assert_eq!(buckets(costs, 130), [128, 2]);
        assert_eq!(buckets(costs, 300), [256, 64]);
        assert_eq!(buckets(costs, 400), [256, 128, 16]);
        assert_eq!(buckets(costs, 450), [512]);
    }
}
