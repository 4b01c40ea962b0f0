//! Dot products of super-blocks whose scales become those of a plain type: Q4_K, Q5_K, IQ4_XS.
//!
//! The loop is that of the plain types, over the groups of activations one by one: a group's scales
//! are expanded for it ([`super::super::super_block`]), and it has no tiles without a neighbour.

use super::format::TileFormat;
use super::{LateSum, Registers, add_run, first_of, strip_runs, times_factors};
use crate::hvx::{self, Vector};
use crate::layout::SUPER_TILES;
use crate::ops::matmul::Panel;
use crate::ops::matmul::quantize::{ActGroup, ActRow};
use crate::ops::matmul::super_block::{Expansion, GROUP_BLOCKS, GroupPlanes, PAIR_LINES};

/// Returns `totals` plus the products of the strips of a group of super-blocks with `R` rows,
/// before the rows' factors.
#[inline(always)]
fn add_group<F: TileFormat<L, 2, 1>, const L: usize, const S: usize, const R: usize>(
    format: F,
    panels: [&Panel<'_>; S],
    group: [ActGroup<'_>; R],
    mut totals: [[Vector; R]; S],
) -> [[Vector; R]; S] {
    let registers = Registers {
        has_pairs: true,
        has_odd_mins: F::HAS_ODD_MINS,
        has_no_start: true,
    };
    let mut sums = [[LateSum::new(); R]; S];
    if S * R > 1 {
        // Each sum gets its own zero: a shared one would be copied, which qfloat values must not
        // be.
        sums[S - 1][R - 1] = LateSum::new();
    }
    let strips = strip_runs::<L, 2>(panels[0], F::HAS_MIN);
    let strips = strips.zip(strip_runs::<L, 2>(panels[S - 1], F::HAS_MIN));
    let rows = group[0].runs::<2, 1>().zip(group[R - 1].runs::<2, 1>());
    for ((strip0, strip1), (act0, act1)) in strips.zip(rows) {
        let (strips, acts) = (
            first_of::<_, S>([strip0, strip1]),
            first_of::<_, R>([act0, act1]),
        );
        for s in 0..S {
            add_run(format, strips[s], acts, &mut sums[s], registers);
        }
    }
    for s in 0..S {
        for r in 0..R {
            if F::HAS_MIN && F::HAS_ODD_MINS {
                sums[s][r].join_mins();
            }
            let added = sums[s][r].finish(R == 1 || F::HAS_LATE_ROWS);
            totals[s][r] = hvx::add_f32(totals[s][r], added);
        }
    }
    totals
}

/// Computes the products of super-blocks as those of a plain type, group by group.
///
/// On the device this is not inlined, so that only super-blocks pay for its stack.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
pub(super) fn dot_super_blocks<
    E: Expansion<PAIR_LINES>,
    F: TileFormat<L, 2, 1>,
    const L: usize,
    const S: usize,
    const R: usize,
>(
    _: E,
    format: F,
    panels: [&Panel<'_>; S],
    acts: [ActRow<'_>; R],
) -> [[Vector; R]; S] {
    let mut totals = [[hvx::splat_w(0); R]; S];
    let (mut planes0, mut planes1) = (GroupPlanes::new(), GroupPlanes::new());
    let blocks = panels[0].layout.k_tiles() / SUPER_TILES;
    let groups = acts[0].each_group().zip(acts[R - 1].each_group());
    for (g, (group0, group1)) in groups.enumerate() {
        let part = g * GROUP_BLOCKS..((g + 1) * GROUP_BLOCKS).min(blocks);
        let [plain0, plain1] = if S == 1 {
            [planes0.expand::<E>(panels[0], part, L); 2]
        } else {
            let planes = [&mut planes0, &mut planes1];
            GroupPlanes::expand_two::<E>(planes, [panels[0], panels[S - 1]], part, L)
        };
        let here = first_of::<_, S>([&plain0, &plain1]);
        totals = add_group(format, here, first_of([group0, group1]), totals);
    }
    times_factors(totals, acts)
}
