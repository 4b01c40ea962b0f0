//! Copies between the caller's A and C and the cubes that tasks read and write.

use super::{ATOM_BYTES, Plan};
use crate::layout::Elem;

impl Plan {
    /// Copies the rows of A into its cubes. Rows that only fill a cube up are not written.
    ///
    /// # Panics
    /// If a length is not that of the layout or of [`Self::cube_bytes`].
    pub fn fill_cubes(&self, a: &[u8], cubes: &mut [u8]) {
        let bytes = self.native_bytes()[0];
        assert_eq!(a.len(), bytes, "A");
        assert_eq!(cubes.len(), self.cube_bytes()[0], "cubes of A");
        let row_bytes = bytes / self.m;
        for tile in self.row_tiles() {
            for surface in 0..row_bytes / ATOM_BYTES {
                let to = tile.a + ATOM_BYTES * surface * tile.all_rows;
                let cube = &mut cubes[to..][..ATOM_BYTES * tile.rows];
                if !self.is_row_major {
                    let from = ATOM_BYTES * (surface * self.m + tile.first);
                    cube.copy_from_slice(&a[from..][..ATOM_BYTES * tile.rows]);
                    continue;
                }
                let (atoms, _) = cube.as_chunks_mut::<ATOM_BYTES>();
                for (row, atom) in (tile.first..).zip(atoms) {
                    let from = row * row_bytes + ATOM_BYTES * surface;
                    atom.copy_from_slice(&a[from..][..ATOM_BYTES]);
                }
            }
        }
    }

    /// Copies the rows of the cubes of C into C, the sums of all passes.
    ///
    /// # Panics
    /// If a length is not that of the layout or of [`Self::cube_bytes`].
    pub fn empty_cubes(&self, cubes: &[u8], c: &mut [u8]) {
        let bytes = self.native_bytes()[2];
        assert_eq!(c.len(), bytes, "C");
        assert_eq!(cubes.len(), self.cube_bytes()[1], "cubes of C");
        let row_bytes = bytes / self.m;
        let elem = self.arithmetic.layout.c.elem;
        let has_passes = self.pass_count() > 1;
        for tile in self.row_tiles() {
            for surface in 0..row_bytes / ATOM_BYTES {
                let from = tile.c + ATOM_BYTES * surface * tile.all_rows;
                let cube = from..from + ATOM_BYTES * tile.rows;
                if !self.is_row_major && !has_passes {
                    let to = ATOM_BYTES * (surface * self.m + tile.first);
                    c[to..][..cube.len()].copy_from_slice(&cubes[cube]);
                    continue;
                }
                for (row, from) in (tile.first..).zip(cube.step_by(ATOM_BYTES)) {
                    let to = if self.is_row_major {
                        row * row_bytes + ATOM_BYTES * surface
                    } else {
                        ATOM_BYTES * (surface * self.m + row)
                    };
                    let passes = cubes.chunks_exact(self.c_bytes_of_pass());
                    let atoms = passes.map(|pass| &pass[from..][..ATOM_BYTES]);
                    c[to..][..ATOM_BYTES].copy_from_slice(&sum(elem, atoms));
                }
            }
        }
    }
}

/// Adds atoms of results, in their order. Sums of INT16 saturate, as one pass's do.
fn sum<'a>(elem: Elem, atoms: impl Iterator<Item = &'a [u8]>) -> [u8; ATOM_BYTES] {
    let mut out = [0; ATOM_BYTES];
    match elem {
        Elem::F32 => {
            let mut sums = [0f32; ATOM_BYTES / 4];
            for (index, atom) in atoms.enumerate() {
                for (sum, bytes) in sums.iter_mut().zip(atom.as_chunks::<4>().0) {
                    let value = f32::from_le_bytes(*bytes);
                    // The first one as it is: 0 + -0 is 0.
                    *sum = if index == 0 { value } else { *sum + value };
                }
            }
            put(&mut out, sums.map(f32::to_le_bytes));
        }
        Elem::I32 => {
            let mut sums = [0i32; ATOM_BYTES / 4];
            for atom in atoms {
                for (sum, bytes) in sums.iter_mut().zip(atom.as_chunks::<4>().0) {
                    *sum = sum.wrapping_add(i32::from_le_bytes(*bytes));
                }
            }
            put(&mut out, sums.map(i32::to_le_bytes));
        }
        Elem::I16 => {
            let mut sums = [0i32; ATOM_BYTES / 2];
            for atom in atoms {
                for (sum, bytes) in sums.iter_mut().zip(atom.as_chunks::<2>().0) {
                    *sum += i32::from(i16::from_le_bytes(*bytes));
                }
            }
            let saturated = |sum: i32| sum.clamp(i16::MIN.into(), i16::MAX.into());
            // CAST: clamped to the range.
            let narrow = |sum| i16::try_from(saturated(sum)).unwrap_or(i16::MAX);
            put(&mut out, sums.map(|sum| narrow(sum).to_le_bytes()));
        }
        // `Plan::new` gives products with other results one pass.
        Elem::F16 | Elem::I8 | Elem::I4 => {
            atoms.take(1).for_each(|atom| out.copy_from_slice(atom));
        }
    }
    out
}

fn put<const BYTES: usize, const COUNT: usize>(out: &mut [u8], values: [[u8; BYTES]; COUNT]) {
    out.copy_from_slice(values.as_flattened());
}
