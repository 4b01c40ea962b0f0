//! Packets of a step on the calling thread, apart from its tasks.

use core::fmt::Write;
use core::hint::black_box;

use hexagon_ops::ops::tensor::{Shape, Type, ViewMut};
use hexagon_ops::rt::Engine;

use crate::bench::packets;
use crate::scratch::Scratch;

/// Rows of a result.
const ROWS: usize = 64;
/// Elements of a row. All rows together are also used as a single row.
const ROW: usize = 128;
/// Number of steps; the shortest one is reported. In it no thread is late, because the calling
/// thread runs the tasks itself.
const TURNS: usize = 2000;

static RESULT: Scratch<[f32; ROWS * ROW]> = Scratch::new([0.0; ROWS * ROW]);

/// Writes the packets of a step of as many tasks as there are threads, with tasks of a few packets:
/// for parts of rows, and for parts of a single row.
pub fn run(text: &mut dyn Write, threads: usize) {
    let engine = Engine::new(threads);
    if engine.threads() != threads {
        let _ = writeln!(text, "no engine of {threads} threads");
        return;
    }
    // SAFETY: the only reference to RESULT.
    let memory = unsafe { RESULT.get() };
    for ne in [[ROW, ROWS, 1, 1], [ROW * ROWS, 1, 1, 1]] {
        let shape = Shape {
            dtype: Type::F32,
            ne,
            nb: [4, 4 * ne[0], 0, 0],
        };
        let mut least = u32::MAX;
        for _ in 0..TURNS {
            let bytes = bytemuck::cast_slice_mut(&mut memory[..]);
            let Ok(dst) = ViewMut::new(bytes, shape) else {
                return;
            };
            let start = packets();
            dst.for_column_parts(&engine, || usize::MAX, |part| {
                black_box(part.len());
            });
            least = least.min(packets().wrapping_sub(start));
        }
        let _ = writeln!(text, "{least}");
    }
}
