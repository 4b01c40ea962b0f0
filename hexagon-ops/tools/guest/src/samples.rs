//! Weights for the kernels of `conventional.rs`, for the guest and for the host test that compares
//! their results.

/// Rows of weights: columns of a tile.
pub const ROWS: usize = 32;
/// Tiles along K: an even number.
pub const K_TILES: usize = 6;
/// Bytes of a block of Q4_0: an f16 scale and 32 quants.
pub const BLOCK_BYTES: usize = 18;
/// Bytes of a row.
pub const ROW_BYTES: usize = K_TILES * BLOCK_BYTES;

/// Returns rows of random blocks in ggml's order. Products of scales and quants are within FP16's
/// range; some scales are subnormal.
pub fn rows(seed: u32) -> [[u8; ROW_BYTES]; ROWS] {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as u16
    };
    let mut rows = [[0; ROW_BYTES]; ROWS];
    for block in rows.as_flattened_mut().as_chunks_mut::<BLOCK_BYTES>().0 {
        for two in block.as_chunks_mut::<2>().0 {
            *two = next().to_le_bytes();
        }
        let bits = u16::from_le_bytes([block[0], block[1]]);
        let exponent = (bits >> 10 & 31) % 27;
        let scale = bits & 0x83ff | exponent << 10;
        block[..2].copy_from_slice(&scale.to_le_bytes());
    }
    rows
}

/// Elements along K of a panel of any type: two super-blocks.
pub const TILE_K: usize = 512;

/// The largest score of a row: f16 3.
pub const LARGEST: u16 = 0x4200;

/// Returns score `k` of a row: f16 between -3 and 3.
pub fn score(k: u16) -> u16 {
    let bits = k.wrapping_mul(40_503);
    // Magnitudes below 3, with both signs.
    ((bits & 0x7fff) % (LARGEST + 1)) | (bits & 0x8000)
}
