//! Hashes of sources and payloads.

use std::io;

use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Bytes of a chunk that is hashed on its own: small enough to be in the second-level cache when it
/// has just been copied.
pub const CHUNK_BYTES: usize = 256 * 1024;

/// Samples of a tensor, and bytes of each: pages, because reading a byte of a file costs a page.
const SAMPLES: usize = 32;
const SAMPLE_BYTES: usize = 4096;

/// Returns the hash of samples of a tensor's bytes: of `SAMPLES` pages, spread evenly with the
/// first and the last among them, and of the length; of all bytes if they are not more than the
/// samples.
///
/// Another quantization, another model and a fine-tuned one differ everywhere, and so in the
/// samples. Manual changes of a few rows may not; the full hash finds them.
#[must_use]
pub fn sampled(source: &[u8]) -> u128 {
    if source.len() <= SAMPLES * SAMPLE_BYTES {
        return xxh3_128(source);
    }
    let mut hash = Xxh3Default::new();
    hash.update(&(source.len() as u64).to_le_bytes());
    let last = source.len() - SAMPLE_BYTES;
    for sample in 0..SAMPLES {
        // Samples begin at whole pages of the tensor. The last sample is an exception: it ends
        // where the tensor ends.
        let at = match sample {
            _ if sample == SAMPLES - 1 => last,
            _ => last / (SAMPLES - 1) * sample / SAMPLE_BYTES * SAMPLE_BYTES,
        };
        hash.update(&source[at..at + SAMPLE_BYTES]);
    }
    hash.digest128()
}

/// Hash of all bytes of a source, which come one after another.
#[derive(Default)]
pub struct SourceHash(Xxh3Default);

impl SourceHash {
    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.0.digest128()
    }

    /// Returns the hash of a complete slice.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u128 {
        xxh3_128(bytes)
    }
}

/// Hash of a payload: that of the hashes of its chunks of [`CHUNK_BYTES`], so that threads can
/// share the work.
#[derive(Default)]
pub struct ChunkHash {
    hashes: Xxh3Default,
    /// The last chunk, if it is not whole yet.
    open: Xxh3Default,
    open_bytes: usize,
}

impl ChunkHash {
    /// The next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.open_bytes));
            self.open.update(part);
            self.open_bytes += part.len();
            if self.open_bytes == CHUNK_BYTES {
                self.end_chunk();
            }
            bytes = rest;
        }
    }

    /// Ends an incomplete chunk, because another part of the payload follows.
    pub fn end_chunk(&mut self) {
        if self.open_bytes > 0 {
            self.hashes.update(&self.open.digest128().to_le_bytes());
            self.open.reset();
            self.open_bytes = 0;
        }
    }

    /// Reads the next part of a payload to `out` and hashes it there, so that the hash covers the
    /// bytes that were read, even if the source changes at the same time.
    ///
    /// - `read(at, chunk)`: reads the bytes of the part that begin at `at`
    ///
    /// # Errors
    /// The first one of `read`.
    pub fn read_part(
        &mut self,
        out: &mut [u8],
        read: impl Fn(usize, &mut [u8]) -> io::Result<()> + Sync,
    ) -> io::Result<()> {
        self.end_chunk();
        let chunks = out.par_chunks_mut(CHUNK_BYTES).enumerate();
        let hashes: Vec<[u8; 16]> = chunks
            .map(|(number, chunk)| {
                read(number * CHUNK_BYTES, chunk)?;
                Ok(xxh3_128(chunk).to_le_bytes())
            })
            .collect::<io::Result<_>>()?;
        self.hashes.update(hashes.as_flattened());
        Ok(())
    }

    /// Returns the hash.
    #[must_use]
    pub fn digest(mut self) -> u128 {
        self.end_chunk();
        self.hashes.digest128()
    }
}

impl std::fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("ChunkHash").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count)
            .map(|i| ((i * 31 + (i >> 8)) & 255).to_le_bytes()[0])
            .collect()
    }

    /// Packs that were written before must be found again. SOURCE: the package xxhash 4.1 of PyPI,
    /// over the bytes that the documentation of the functions names.
    #[test]
    fn hashes_are_those_of_the_format() {
        let source = bytes(1000);
        let mut hash = SourceHash::default();
        hash.update(&source[..333]);
        hash.update(&source[333..]);
        let want = 0x5b9a_5362_90e8_5d63_0dc5_4da2_1822_85f1;
        assert_eq!((hash.digest(), SourceHash::of(&source)), (want, want));
        for (count, want) in [
            (131_072, 0x35c8_c729_974e_cc54_9477_a43b_a08a_bac3),
            (131_073, 0x8ded_497c_c1e4_c5c9_041a_c0c9_736d_22e0),
            (300_000, 0xc810_cabb_e4b6_569f_791f_71e1_9afa_b49a),
        ] {
            assert_eq!(sampled(&bytes(count)), want, "{count}");
        }
        let mut chunks = ChunkHash::default();
        chunks.update(&bytes(600_000));
        assert_eq!(chunks.digest(), 0xe03e_178e_bf03_7dec_b188_c885_7f4f_a093);
    }
}
