//! The rows and columns of each task of a step.

use std::sync::Mutex;

use hexagon_ops::ops::tensor::{Shape, TASK_PACKETS, Type, ViewMut};
use hexagon_ops::rt::Engine;

/// The number of columns of a task is a multiple of this.
const COLUMNS: usize = 768;

type Share<'s> = &'s dyn Fn(ViewMut<'_>, &Engine, &(dyn Fn(&mut ViewMut<'_>) + Sync));

/// Returns the tasks of a result as [first row, rows, first column, columns], in order; each writes
/// its elements once.
fn tasks_of(ne: [usize; 4], threads: usize, share: Share<'_>) -> Vec<[usize; 4]> {
    let plane = 4 * ne[0] * ne[1];
    let shape = Shape {
        dtype: Type::F32,
        ne,
        nb: [4, 4 * ne[0], plane, plane * ne[2]],
    };
    let mut memory = vec![0.0_f32; ne.iter().product()];
    let view = ViewMut::new(bytemuck::cast_slice_mut(&mut memory), shape).unwrap();
    let seen = Mutex::new(Vec::new());
    share(view, &Engine::new(threads), &|part| {
        let [i1, i2, _] = part.place_of(0);
        let task = [i2 * ne[1] + i1, part.len(), part.first(), part.shape.ne[0]];
        seen.lock().unwrap().push(task);
        part.for_each_row(|mut row| {
            let first = row.first;
            for (k, elem) in row.floats().unwrap().iter_mut().enumerate() {
                *elem += (first + k) as f32 + 1.0;
            }
        });
    });
    for row in memory.chunks(ne[0]) {
        for (k, elem) in row.iter().enumerate() {
            assert_eq!(*elem, k as f32 + 1.0, "column {k} of {ne:?}");
        }
    }
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    seen
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes offence at the thread pool")]
fn few_long_rows_are_cut_into_columns_and_others_into_rows() {
    let columns = |ne, threads, packets| {
        tasks_of(ne, threads, &|view, engine, run| {
            view.for_column_parts(engine, || packets, run);
        })
    };
    let n = 4 * COLUMNS + 5;
    // Five units for two threads: three for one; two for the other, of which the last is short.
    let two = [[0, 1, 0, 3 * COLUMNS], [0, 1, 3 * COLUMNS, COLUMNS + 5]];
    assert_eq!(columns([n, 1, 1, 1], 2, 2 * TASK_PACKETS), two);
    assert_eq!(columns([n, 1, 1, 1], 8, 8 * TASK_PACKETS).len(), 5);
    let whole = [[0, 1, 0, n]];
    assert_eq!(columns([n, 1, 1, 1], 8, 2 * TASK_PACKETS - 1), whole);
    assert_eq!(columns([n, 1, 1, 1], 1, usize::MAX), whole);
    let short = [[0, 1, 0, COLUMNS]];
    assert_eq!(columns([COLUMNS, 1, 1, 1], 4, usize::MAX), short);
    let rows = [[0, 1, 0, n], [1, 1, 0, n], [2, 1, 0, n]];
    assert_eq!(columns([n, 3, 1, 1], 4, TASK_PACKETS), rows);
    assert_eq!(columns([n, 1, 3, 1], 8, 8 * TASK_PACKETS).len(), 6);
    let halves = [[0, 3, 0, n], [3, 2, 0, n]];
    assert_eq!(columns([n, 5, 1, 1], 2, TASK_PACKETS), halves);
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes offence at the thread pool")]
fn named_rows_are_shared_out_evenly() {
    let named = |ids: &[usize], packets| {
        let tasks = tasks_of([8, 100, 1, 1], 4, &|view, engine, run| {
            let place = |i: usize| [ids[i], 0, 0];
            view.for_named_parts(engine, || (packets, ids.len()), place, run);
        });
        tasks.iter().map(|task| task[1]).collect::<Vec<_>>()
    };
    let enough = 4 * TASK_PACKETS;
    let eight: Vec<usize> = (50..58).collect();
    assert_eq!(named(&eight, enough), [52, 2, 2, 44]);
    assert_eq!(named(&eight, TASK_PACKETS), [100]);
    // A cache used as a ring, which wraps around.
    assert_eq!(named(&[98, 99, 0, 1], enough), [0, 1, 98, 1]);
    assert_eq!(named(&[7], enough), [100]);
    assert_eq!(named(&[], enough), [100]);
}
