//! Packed copies of weights that are in memory which programs read and write in place: code that
//! both families need for such copies.

use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Part of the machine's memory that packed copies leave free.
const FREE_PART: usize = 8;
/// Bytes that one thread hashes.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns `true` if packed forms may use this many more bytes, given the machine's free and total
/// memory.
#[must_use]
pub fn leaves_enough(bytes: usize, (free, total): (usize, usize)) -> bool {
    free.saturating_sub(bytes) >= total / FREE_PART
}

/// Returns a hash of a piece of a weight. The exclusive or of the hashes of all pieces shows
/// whether the weight has changed since it was packed. Allocates nothing.
///
/// - `first`: where the piece starts in the weight, a multiple of 1 MiB
#[must_use]
pub fn hash_piece(first: usize, bytes: &[u8]) -> u64 {
    let hash = |(index, chunk): (usize, &[u8])| {
        xxh3_64_with_seed(chunk, (first + index * CHUNK_BYTES) as u64)
    };
    if bytes.len() <= CHUNK_BYTES {
        return hash((0, bytes));
    }
    let chunks = bytes.par_chunks(CHUNK_BYTES).enumerate();
    chunks.map(hash).reduce(|| 0, |a, b| a ^ b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_of_the_memory_stays_free() {
        for (free, bytes, is_enough) in [(200, 100, true), (200, 101, false), (50, 100, false)] {
            assert_eq!(
                leaves_enough(bytes, (free, 800)),
                is_enough,
                "{free} {bytes}"
            );
        }
    }

    #[test]
    fn a_hash_is_that_of_its_pieces_and_knows_their_order() {
        let numbers = (0..=250).cycle();
        let mut bytes: Vec<u8> = numbers.take(5 * CHUNK_BYTES / 2).collect();
        let whole = hash_piece(0, &bytes);
        let (first, rest) = bytes.split_at(CHUNK_BYTES);
        assert_eq!(whole, hash_piece(0, first) ^ hash_piece(CHUNK_BYTES, rest));
        let (first, rest) = bytes.split_at_mut(CHUNK_BYTES);
        first.swap_with_slice(&mut rest[..CHUNK_BYTES]);
        assert_ne!(whole, hash_piece(0, &bytes));
    }
}
