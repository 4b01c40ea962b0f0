//! Proves that packing is a bijection between ggml's bytes and the documented places, and that
//! padding stays zero.
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "test data wraps around on purpose; a panic is a failure"
)]

mod super_block;

use hexagon_ops::error::Error;
use hexagon_ops::layout::{MatrixLayout, PanelLayout, TILE_DIM, WeightType, group_elem};
use proptest::prelude::*;

/// Packs `rows` (one ggml row after the other) into a zeroed matrix.
fn pack(layout: MatrixLayout, rows: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; layout.matrix_bytes()];
    for (n, row) in rows.chunks_exact(layout.ggml_row_bytes()).enumerate() {
        layout.pack_row(&mut packed, n, row).unwrap();
    }
    packed
}

// SOURCE: Knuth's MMIX generator.
fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Returns the place of element (k, column n) in ggml's block `b` of the row: the block's byte and
/// the shift to its bits.
fn ggml_elem(weight: WeightType, k: usize) -> (usize, u32) {
    match weight {
        WeightType::F16 => (2 * k, 0),
        WeightType::Q8_0 => (2 + k, 0),
        WeightType::Q4_0 | WeightType::Iq4Nl => (2 + k % 16, if k < 16 { 0 } else { 4 }),
        WeightType::Q4_1 => (4 + k % 16, if k < 16 { 0 } else { 4 }),
        WeightType::Mxfp4 => (1 + k % 16, if k < 16 { 0 } else { 4 }),
        WeightType::Q4Tile | WeightType::Q8Tile => unreachable!("no type of ggml's"),
        _ => unreachable!("its elements have no such place"),
    }
}

/// Types whose blocks are columns of a tile: ggml's own.
fn of_ggml() -> impl Iterator<Item = WeightType> {
    let all = WeightType::ALL.into_iter();
    all.filter(|weight| !weight.is_grouped())
}

#[test]
fn each_ggml_bit_lands_in_its_own_place() {
    // In packing p each bit is bit p of the number of this bit, counted from 1. So together the
    // packings number every bit.
    for weight in of_ggml() {
        let k = 96_usize.next_multiple_of(weight.block_elems());
        let layout = MatrixLayout::new(weight, 33, k).unwrap();
        let rows_bits = 33 * layout.ggml_row_bytes() * 8;
        let zeros = pack(layout, &vec![0; rows_bits / 8]);
        let mut index = vec![0_usize; layout.matrix_bytes() * 8];
        for plane in 0..usize::BITS - rows_bits.leading_zeros() {
            let mut ones = vec![0; rows_bits / 8];
            for i in (0..rows_bits).filter(|i| (i + 1) >> plane & 1 == 1) {
                ones[i / 8] |= 1 << (i % 8);
            }
            for (at, (have, zero)) in pack(layout, &ones).iter().zip(&zeros).enumerate() {
                for bit in 0..8 {
                    index[8 * at + bit] |= usize::from((have ^ zero) >> bit & 1) << plane;
                }
            }
        }
        let mut seen: Vec<usize> = index.iter().copied().filter(|i| *i != 0).collect();
        seen.sort_unstable();
        assert!(
            seen.into_iter().eq(1..=rows_bits),
            "{weight:?}: not a bijection"
        );
    }
}

#[test]
fn elem_scale_and_min_offsets_agree_with_packing() {
    let in_one_byte = |weight: &WeightType| {
        weight.block_elems() == TILE_DIM && !matches!(weight, WeightType::Q5_0 | WeightType::Q5_1)
    };
    for weight in of_ggml().filter(in_one_byte) {
        let (n_rows, k) = (40, 160);
        let layout = MatrixLayout::new(weight, n_rows, k).unwrap();
        let row_bytes = layout.ggml_row_bytes();
        let rows: Vec<u8> = (0..n_rows * row_bytes)
            .map(|i| (i * 7 + i / 251) as u8)
            .collect();
        let packed = pack(layout, &rows);
        let panel = layout.panel();
        for n in 0..n_rows {
            let base = layout.panel_offset(n / TILE_DIM);
            for kt in 0..panel.k_tiles() {
                let block =
                    &rows[n * row_bytes + kt * weight.block_bytes()..][..weight.block_bytes()];
                for k in 0..TILE_DIM {
                    let (from, from_shift) = ggml_elem(weight, k);
                    let (to, to_shift) = panel.elem(kt, k, n % TILE_DIM);
                    let flip = if weight == WeightType::Q8_0 { 0x80 } else { 0 };
                    assert_eq!(
                        (packed[base + to] ^ flip) >> to_shift & 15,
                        block[from] >> from_shift & 15,
                        "{weight:?} kt {kt} k {k} n {n}"
                    );
                }
                if weight != WeightType::F16 {
                    assert_eq!(
                        packed[base + panel.scale_offset(kt, n % TILE_DIM)],
                        block[0],
                        "{weight:?} scale"
                    );
                }
                if weight == WeightType::Q4_1 {
                    assert_eq!(
                        packed[base + panel.min_offset(kt, n % TILE_DIM) + 1],
                        block[3],
                        "minimum"
                    );
                }
            }
        }
    }
}

#[test]
fn each_weight_of_a_group_lands_beside_its_group() {
    // Both strips are padded to 32 columns, though the second one has a single column.
    let layout = MatrixLayout::new(WeightType::Q4Tile, 33, 96).unwrap();
    assert_eq!((layout.block_rows(), layout.n_strips()), (64, 2));
    let (row_bytes, panel) = (layout.ggml_row_bytes(), layout.panel());
    let rows = random_bytes(7, 64 * row_bytes);
    let packed = pack(layout, &rows);
    let mut seen = vec![0_u8; layout.matrix_bytes()];
    for row in 0..64 {
        let (base, g) = (layout.panel_offset(row / 32), row % 32);
        for kt in 0..3 {
            let block = &rows[row * row_bytes + kt * 18..][..18];
            // The scale's address: two tiles share a line, with a word for each group.
            let scale = base + 3 * 512 + kt / 2 * 128 + 4 * g + kt % 2 * 2;
            assert_eq!(packed[scale..scale + 2], block[..2], "scale of {row} {kt}");
            seen[scale..scale + 2].fill(0xff);
            for i in 0..32 {
                // As in the picture: the group is half g % 2 of FP16 line g / 2. Its halfwords,
                // from 32·(g%2), come from the even or odd bytes of quants line g / 8; lines 4v and
                // 4v + 1 have the low nibbles.
                let (line, half) = (g / 2, g % 2);
                let (odd_k, column) = (i / 16, i % 16);
                let halfword = 32 * half + 2 * column + odd_k;
                let at = base + kt * 512 + line / 4 * 128 + 2 * halfword + line % 2;
                let shift = if line % 4 < 2 { 0 } else { 4 };
                let (k, n) = group_elem(g, i);
                assert_eq!((k, n), (2 * line + odd_k, 16 * half + column));
                assert_eq!(panel.elem(kt, k, n), (at - base, shift));
                let code = block[2 + column] >> (4 * odd_k) & 15;
                assert_eq!(packed[at] >> shift & 15, code, "{row} {kt} {i}");
                assert_eq!(seen[at] >> shift & 15, 0, "{row} {kt} {i}: taken");
                seen[at] |= 15 << shift;
            }
        }
    }
    // Each nibble is used once. The unused half of the last line of scales stays zero in both
    // panels.
    let free: Vec<u8> = (packed.iter().zip(&seen).filter(|(_, seen)| **seen == 0))
        .map(|(byte, _)| *byte)
        .collect();
    assert_eq!(free, [0; 2 * 64]);
    assert!(seen.iter().all(|seen| matches!(seen, 0 | 0xff)));
}

#[test]
fn each_byte_of_a_group_lands_beside_its_group() {
    let layout = MatrixLayout::new(WeightType::Q8Tile, 33, 96).unwrap();
    assert_eq!((layout.block_rows(), layout.n_strips()), (64, 2));
    let (row_bytes, panel) = (layout.ggml_row_bytes(), layout.panel());
    let rows = random_bytes(8, 64 * row_bytes);
    let packed = pack(layout, &rows);
    let mut seen = vec![false; layout.matrix_bytes()];
    let mut see = |at: usize| assert!(!std::mem::replace(&mut seen[at], true), "{at}: taken");
    for row in 0..64 {
        let (base, g) = (layout.panel_offset(row / 32), row % 32);
        for kt in 0..3 {
            let block = &rows[row * row_bytes + kt * 34..][..34];
            let scale = base + 3 * 1024 + kt / 2 * 128 + 4 * g + kt % 2 * 2;
            assert_eq!(packed[scale..scale + 2], block[..2], "scale of {row} {kt}");
            see(scale);
            see(scale + 1);
            for i in 0..32 {
                // As in the picture: FP16 line g / 2 comes from the even or odd bytes of quants
                // line g / 4.
                let (line, half) = (g / 2, g % 2);
                let (odd_k, column) = (i / 16, i % 16);
                let halfword = 32 * half + 2 * column + odd_k;
                let at = base + kt * 1024 + line / 2 * 128 + 2 * halfword + line % 2;
                let (k, n) = group_elem(g, i);
                assert_eq!(panel.elem(kt, k, n), (at - base, 0));
                assert_eq!(packed[at], block[2 + i] ^ 0x80, "{row} {kt} {i}");
                see(at);
            }
        }
    }
    // The unused half of the last line of scales stays zero in both panels.
    let free: Vec<u8> = (packed.iter().zip(&seen).filter(|(_, seen)| !**seen))
        .map(|(byte, _)| *byte)
        .collect();
    assert_eq!(free, [0; 2 * 64]);
}

#[test]
fn tile_bytes_are_ggmls_bytes() {
    for weight in WeightType::ALL {
        // Two whole super-blocks leave no padding at all.
        let layout = PanelLayout::new(weight, 16 * TILE_DIM).unwrap();
        assert_eq!(layout.panel_bytes(), 16 * weight.tile_bytes(), "{weight:?}");
    }
    assert_eq!(WeightType::Q4K.tile_bytes(), 144 * 32 / 8);
    assert_eq!(WeightType::Q5_0.tile_bytes(), 704);
    assert_eq!(WeightType::Q6K.tile_bytes(), 840);
    assert_eq!(WeightType::Iq4Xs.tile_bytes(), 136 * 32 / 8);
    assert_eq!(WeightType::Q3K.tile_bytes(), 440);
    assert_eq!(WeightType::Q2K.tile_bytes(), 336);
    assert_eq!(WeightType::Q4_0.tile_bytes(), 576);
    assert_eq!(WeightType::Q8_0.tile_bytes(), 1088);
    assert_eq!(WeightType::Mxfp4.tile_bytes(), 544);
}

#[test]
fn layout_ids_differ() {
    let mut ids: Vec<u32> = WeightType::ALL.iter().map(|w| w.layout_id().0).collect();
    ids.dedup();
    assert_eq!(ids.len(), WeightType::ALL.len());
}

#[test]
fn wrong_shapes_and_lengths_are_refused() {
    assert_eq!(
        MatrixLayout::new(WeightType::Q4_0, 4, 48),
        Err(Error::BadShape {
            weight: WeightType::Q4_0,
            k: 48
        })
    );
    let layout = MatrixLayout::new(WeightType::F16, 4, 48).unwrap();
    let mut packed = vec![0; layout.matrix_bytes()];
    assert_eq!(
        layout.pack_row(&mut packed, 4, &[0; 96]),
        Err(Error::Index {
            what: "row",
            index: 4,
            limit: 4
        })
    );
    assert_eq!(
        layout.pack_row(&mut packed, 3, &[0; 95]),
        Err(Error::Length {
            what: "ggml row",
            have: 95,
            want: 96
        })
    );
    assert_eq!(
        layout.unpack_row(&packed[1..], 3, &mut [0; 96]),
        Err(Error::Length {
            what: "packed matrix",
            have: packed.len() - 1,
            want: packed.len()
        })
    );
}

#[test]
fn a_panel_of_too_many_rows_or_of_another_size_is_refused() {
    let panel = MatrixLayout::new(WeightType::Q8_0, 32, 64).unwrap().panel();
    let mut out = vec![0; panel.panel_bytes()];
    for bytes in [0, 67, 33 * 68] {
        let refused = panel.pack_panel(&mut out, &vec![0; bytes]);
        assert!(
            matches!(refused, Err(Error::Length { what: "ggml rows of a panel", have, .. }) if have == bytes)
        );
    }
    let groups = MatrixLayout::new(WeightType::Q4Tile, 32, 64)
        .unwrap()
        .panel();
    let refused = groups.pack_panel(&mut [0; 1152], &[0; 31 * 36]);
    assert!(
        refused.is_err(),
        "a strip without its last groups: {refused:?}"
    );
    let refused = panel.pack_panel(&mut out[1..], &[0; 68]);
    assert!(matches!(refused, Err(Error::Length { what: "panel", .. })));
}

proptest! {
    #[test]
    fn a_panel_packed_at_once_is_its_rows_packed_one_by_one(
        weight in prop::sample::select(WeightType::ALL.to_vec()),
        n in 1_usize..=32,
        tiles in 1_usize..8,
        cut in 0_usize..32,
        seed in any::<u64>(),
    ) {
        let k = if weight == WeightType::F16 { tiles * TILE_DIM - cut } else { tiles * weight.block_elems() };
        let layout = MatrixLayout::new(weight, n, k).unwrap();
        let rows = random_bytes(seed, layout.block_rows() * layout.ggml_row_bytes());
        // The panel's previous content must not matter.
        let mut panel = vec![0xa5; layout.panel().panel_bytes()];
        layout.panel().pack_panel(&mut panel, &rows).unwrap();
        prop_assert_eq!(panel, pack(layout, &rows));
    }

    #[test]
    fn unpack_restores_what_pack_was_given(
        weight in prop::sample::select(WeightType::ALL.to_vec()),
        n in 1_usize..70,
        tiles in 1_usize..6,
        cut in 0_usize..32,
        seed in any::<u64>(),
    ) {
        let k = if weight == WeightType::F16 { tiles * TILE_DIM - cut } else { tiles * weight.block_elems() };
        let layout = MatrixLayout::new(weight, n, k).unwrap();
        let rows = random_bytes(seed, layout.block_rows() * layout.ggml_row_bytes());
        let packed = pack(layout, &rows);
        let mut row = vec![0; layout.ggml_row_bytes()];
        for (i, want) in rows.chunks_exact(layout.ggml_row_bytes()).enumerate() {
            layout.unpack_row(&packed, i, &mut row).unwrap();
            prop_assert_eq!(&row[..], want);
        }
    }
}
