//! Fields of super-blocks are where the pictures of `hexagon_ops::layout` have them.

use hexagon_ops::layout::{MatrixLayout, WeightType};

use crate::{pack, random_bytes};

#[test]
fn fields_of_a_super_block_are_where_the_picture_has_them() {
    let layout = MatrixLayout::new(WeightType::Q4K, 33, 512).unwrap();
    let (row_bytes, panel) = (layout.ggml_row_bytes(), layout.panel());
    let rows = random_bytes(9, 33 * row_bytes);
    let packed = pack(layout, &rows);
    for (n, row) in rows.chunks(row_bytes).enumerate() {
        let strip = &packed[layout.panel_offset(n / 32)..];
        for (b, block) in row.chunks(144).enumerate() {
            // As in the picture: 16 tiles of 512 bytes, then 4 lines for each super-block.
            let half = |line: usize, odd: usize| {
                let at = 16 * 512 + 128 * (4 * b + line) + 4 * (n % 32) + 2 * odd;
                u16::from_le_bytes([strip[at], strip[at + 1]])
            };
            let f16_at = |i: usize| u16::from_le_bytes([block[i], block[i + 1]]);
            assert_eq!([half(0, 0), half(0, 1)], [f16_at(0), f16_at(2) ^ 0x8000]);
            for sub in 0..8 {
                // SOURCE: get_scale_min_k4, ggml-quants.c.
                let scales = &block[4..16];
                let (s, m) = if sub < 4 {
                    (scales[sub] & 63, scales[sub + 4] & 63)
                } else {
                    (
                        scales[sub + 4] & 15 | scales[sub - 4] >> 6 << 4,
                        scales[sub + 4] >> 4 | scales[sub] >> 6 << 4,
                    )
                };
                let bits =
                    |line, from: u32, count: u32| half(line, sub % 2) >> from & ((1 << count) - 1);
                let have = match sub / 2 {
                    0 => [bits(1, 0, 6), bits(2, 0, 6)],
                    1 => [bits(1, 10, 6), bits(2, 10, 6)],
                    2 => [bits(3, 0, 6), bits(3, 10, 6)],
                    _ => [
                        bits(1, 6, 4) | bits(3, 6, 2) << 4,
                        bits(2, 6, 4) | bits(3, 8, 2) << 4,
                    ],
                };
                assert_eq!(have, [s, m].map(u16::from), "{n} {b} {sub}");
                for k in 0..32 {
                    let byte = block[16 + 32 * (sub / 2) + k];
                    let (at, shift) = panel.elem(8 * b + sub, k, n % 32);
                    let q = byte >> (4 * (sub % 2)) & 15;
                    assert_eq!(strip[at] >> shift & 15, q, "{n} {b} {sub} {k}");
                }
            }
        }
    }
}

#[test]
fn fields_of_few_bits_are_where_the_picture_has_them() {
    for weight in [WeightType::Iq4Xs, WeightType::Q3K, WeightType::Q2K] {
        let layout = MatrixLayout::new(weight, 33, 512).unwrap();
        let (row_bytes, block_bytes) = (layout.ggml_row_bytes(), weight.block_bytes());
        let rows = random_bytes(10, 33 * row_bytes);
        let packed = pack(layout, &rows);
        let (tile_lines, scale_lines) = match weight {
            WeightType::Iq4Xs => (4, 2),
            WeightType::Q3K => (3, 3),
            _ => (2, 5),
        };
        for (n, row) in rows.chunks(row_bytes).enumerate() {
            let strip = &packed[layout.panel_offset(n / 32)..];
            for (b, block) in row.chunks(block_bytes).enumerate() {
                let word = |line: usize| {
                    let at = 128 * line + 4 * (n % 32);
                    u32::from_le_bytes(strip[at..at + 4].try_into().unwrap())
                };
                // As in the picture: the lines of 16 tiles, then those of two super-blocks, then d.
                let quants = |tile: usize, line: usize| word((8 * b + tile) * tile_lines + line);
                let scales = |line: usize| word(16 * tile_lines + b * scale_lines + line);
                let bits = |word: u32, from: usize, count: u32| word >> from & ((1 << count) - 1);
                let what = format!("{weight:?} row {n} super-block {b}");
                match weight {
                    WeightType::Iq4Xs => iq4_xs_fields(block, quants, scales, bits, &what),
                    WeightType::Q3K => {
                        let d = bits(word(16 * 3 + 2 * 3), 16 * b, 16);
                        q3_k_fields(block, quants, scales, d, &what);
                    }
                    _ => q2_k_fields(block, quants, scales, &what),
                }
            }
        }
    }
}

/// The byte of a word that has element k, in a line of four elements a word.
fn byte_of(word: u32, k: usize) -> u32 {
    word >> (8 * [0, 2, 1, 3][k % 4]) & 0xff
}

fn iq4_xs_fields(
    block: &[u8],
    quants: impl Fn(usize, usize) -> u32,
    scales: impl Fn(usize) -> u32,
    bits: impl Fn(u32, usize, u32) -> u32,
    what: &str,
) {
    // SOURCE: dequantize_row_iq4_xs, ggml-quants.c.
    let high = u16::from_le_bytes([block[2], block[3]]);
    let d = bits(scales(0), 0, 8) | bits(scales(0), 16, 8) << 8;
    assert_eq!(
        d,
        u32::from(u16::from_le_bytes([block[0], block[1]])),
        "{what}"
    );
    for tile in 0..8 {
        let low = block[4 + tile / 2] >> (4 * (tile % 2)) & 15;
        let s = u32::from(low) | u32::from(high >> (2 * tile) & 3) << 4;
        let half = 16 * (tile % 2);
        let c = match tile / 2 {
            0 => bits(scales(1), half + 10, 6),
            1 => bits(scales(1), half + 4, 6),
            2 => bits(scales(1), half, 4) | bits(scales(0), half + 8, 2) << 4,
            _ => bits(scales(0), half + 10, 6),
        };
        assert_eq!(c, s ^ 32, "{what} tile {tile}");
        for k in 0..32 {
            let byte = block[8 + 16 * tile + k % 16];
            let have = byte_of(quants(tile, k % 16 / 4), k) >> (k / 16 * 4) & 15;
            let want = if k < 16 { byte & 15 } else { byte >> 4 };
            assert_eq!(have, u32::from(want), "{what} tile {tile} {k}");
        }
    }
}

fn q3_k_fields(
    block: &[u8],
    quants: impl Fn(usize, usize) -> u32,
    scales: impl Fn(usize) -> u32,
    d: u32,
    what: &str,
) {
    // SOURCE: dequantize_row_q3_K, ggml-quants.c.
    assert_eq!(
        d,
        u32::from(u16::from_le_bytes([block[108], block[109]])),
        "{what}"
    );
    for (tile, half) in (0..16).map(|i| (i / 2, i % 2)) {
        let j = 2 * tile + half;
        let low = block[96 + j % 8] >> (4 * (j / 8)) & 15;
        let s = low | (block[104 + j % 4] >> (2 * (j / 4)) & 3) << 4;
        let line = |line: usize, from: usize| scales(line) >> (16 * half + from);
        let c = match tile {
            0..3 => line(tile, 10) & 63,
            3..6 => line(tile - 3, 4) & 63,
            6 => line(0, 0) & 15 | (line(2, 0) & 3) << 4,
            _ => line(1, 0) & 15 | (line(2, 2) & 3) << 4,
        };
        assert_eq!(c, u32::from(s) ^ 32, "{what} tile {tile} half {half}");
    }
    for (tile, k) in (0..256).map(|i| (i / 32, i % 32)) {
        let low = block[32 + 32 * (tile / 4) + k] >> (2 * (tile % 4)) & 3;
        let q = low | (block[k] >> tile & 1) << 2;
        let at = |line: usize, from: u32| byte_of(quants(tile, line), k) >> from;
        let have = match k / 4 {
            0 => at(0, 0) & 7,
            1 => at(0, 3) & 7,
            2 => at(1, 0) & 7,
            3 => at(1, 3) & 7,
            4 => at(2, 0) & 7,
            5 => at(2, 5),
            6 => at(0, 6) << 1 | at(2, 3) & 1,
            _ => at(1, 6) << 1 | at(2, 4) & 1,
        };
        assert_eq!(have, u32::from(q), "{what} tile {tile} {k}");
    }
}

fn q2_k_fields(
    block: &[u8],
    quants: impl Fn(usize, usize) -> u32,
    scales: impl Fn(usize) -> u32,
    what: &str,
) {
    // SOURCE: dequantize_row_q2_K, ggml-quants.c.
    let header = u32::from_le_bytes(block[80..84].try_into().unwrap());
    assert_eq!(scales(0), header ^ 0x8000_0000, "{what}");
    for (tile, half) in (0..16).map(|i| (i / 2, i % 2)) {
        let both = block[2 * tile + half];
        let have = scales(1 + tile / 2) >> (16 * half + 8 * (tile % 2)) & 0xff;
        let want = if half == 0 { both.rotate_left(4) } else { both };
        assert_eq!(have, u32::from(want), "{what} tile {tile} half {half}");
    }
    for (tile, k) in (0..256).map(|i| (i / 32, i % 32)) {
        let q = block[16 + 32 * (tile / 4) + k] >> (2 * (tile % 4)) & 3;
        let (line, from) = [
            (0, 0),
            (0, 2),
            (1, 0),
            (1, 2),
            (0, 4),
            (0, 6),
            (1, 4),
            (1, 6),
        ][k / 4];
        let have = byte_of(quants(tile, line), k) >> from & 3;
        assert_eq!(have, u32::from(q), "{what} tile {tile} {k}");
    }
}
