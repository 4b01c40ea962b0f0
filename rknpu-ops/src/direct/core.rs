//! One core: the streams of a run, and the cubes that it copies.
#![expect(
    unsafe_code,
    reason = "bound memory is shared with the caller by the rules of the C API"
)]

use std::io;
use std::sync::Arc;

use super::memory::Region;
use super::rknpu::{self, Direction, Object, Purpose, Rknpu, TASK_BYTES, TASKS_OF_A_JOB};
use crate::stream::{BODY_WORDS, Plan, STREAM_WORDS};

/// Bytes of a stream.
const STREAM_BYTES: usize = STREAM_WORDS * 8;

/// The length of a stream in the driver's words.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a body has some hundred words"
)]
const BODY: u32 = BODY_WORDS as u32;

/// Cubes of C begin with a page: a cache line that the CPU writes has no results in it.
const CUBE_ALIGN: usize = 4096;

/// Objects that runs of any shape use, each as large as the largest shape so far needs.
#[derive(Debug)]
pub(super) struct Core {
    number: usize,
    streams: Option<Object>,
    tasks: Option<Object>,
    cubes: Option<Object>,
}

/// Replaces an object that is too small.
fn grow(
    place: &mut Option<Object>,
    rknpu: &Arc<Rknpu>,
    bytes: usize,
    purpose: Purpose,
) -> io::Result<()> {
    if place.as_ref().is_none_or(|object| object.size() < bytes) {
        // The old one first: both may not fit.
        *place = None;
        *place = Some(rknpu.create(bytes, purpose)?);
    }
    Ok(())
}

/// Returns an object that [`Core::reserve`] has made.
fn reserved(place: &mut Option<Object>) -> &mut Object {
    // PANIC: operands are bound before a run, which reserves.
    place.as_mut().expect("a reserved object")
}

/// Returns the place of the cubes of C behind those of A.
fn start_of_c(plan: &Plan) -> usize {
    plan.cube_bytes()[0].next_multiple_of(CUBE_ALIGN)
}

impl Core {
    pub(super) fn new(number: usize) -> Self {
        Self {
            number,
            streams: None,
            tasks: None,
            cubes: None,
        }
    }

    /// Allocates what runs of `plan` need.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn reserve(&mut self, rknpu: &Arc<Rknpu>, plan: &Plan) -> io::Result<()> {
        let count = plan.task_count();
        grow(
            &mut self.streams,
            rknpu,
            count * STREAM_BYTES,
            Purpose::Data,
        )?;
        grow(&mut self.tasks, rknpu, count * TASK_BYTES, Purpose::Tasks)?;
        if plan.is_in_place() {
            return Ok(());
        }
        let bytes = start_of_c(plan) + plan.cube_bytes()[1];
        grow(&mut self.cubes, rknpu, bytes, Purpose::Data)
    }

    /// Computes C from A and B, for which [`Self::reserve`] was called.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// - Nothing uses C, or writes A and B, during the call.
    pub(super) unsafe fn run(
        &mut self,
        rknpu: &Rknpu,
        plan: &Plan,
        [a, b, c]: [&Region; 3],
    ) -> io::Result<()> {
        if plan.is_in_place() {
            self.write(plan, [a.address(), b.address(), c.address()])?;
            return self.submit(rknpu, plan);
        }
        let [a_bytes, _, c_bytes] = plan.native_bytes();
        let [a_cubes, c_cubes] = plan.cube_bytes();
        let c_start = start_of_c(plan);
        let cubes = reserved(&mut self.cubes);
        let address = cubes.address();
        // SAFETY: nothing writes A by the caller's promise.
        let native = unsafe { a.read(a_bytes) };
        plan.fill_cubes(native, &mut cubes.bytes_mut()[..a_cubes]);
        cubes.sync(0..a_cubes, Direction::ToDevice)?;
        // PANIC: an object's addresses have 32 bits.
        let c_address = address + u32::try_from(c_start).expect("a place inside");
        self.write(plan, [address, b.address(), c_address])?;
        self.submit(rknpu, plan)?;
        let cubes = reserved(&mut self.cubes);
        cubes.sync(c_start..c_start + c_cubes, Direction::FromDevice)?;
        // SAFETY: nothing else uses C by the caller's promise.
        let native = unsafe { c.write(c_bytes) };
        plan.empty_cubes(&cubes.bytes_mut()[c_start..][..c_cubes], native);
        // The caller syncs C from the device, which must have what the CPU has written.
        c.sync(c_bytes, Direction::ToDevice)
    }

    /// Writes the streams, each with the address of the next one, and the list of tasks.
    fn write(&mut self, plan: &Plan, addresses: [u32; 3]) -> io::Result<()> {
        let streams = reserved(&mut self.streams);
        let first = streams.address();
        // PANIC: an object's addresses have 32 bits.
        let address =
            |index: usize| first + u32::try_from(index * STREAM_BYTES).expect("a place inside");
        let count = plan.task_count();
        let places = streams.bytes_mut().chunks_exact_mut(STREAM_BYTES);
        let list = reserved(&mut self.tasks).bytes_mut();
        let entries = list.chunks_exact_mut(TASK_BYTES);
        let mut words = Vec::with_capacity(STREAM_WORDS);
        for (index, ((task, place), entry)) in
            plan.tasks(addresses).zip(places).zip(entries).enumerate()
        {
            let is_last = (index + 1) % TASKS_OF_A_JOB == 0 || index + 1 == count;
            words.clear();
            task.stream((!is_last).then(|| address(index + 1)), &mut words)
                .map_err(io::Error::other)?;
            for (place, word) in place.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
                *place = word.to_le_bytes();
            }
            entry.copy_from_slice(&rknpu::task(address(index), BODY));
        }
        // The kernel reads the list itself, so only the streams are synced.
        reserved(&mut self.streams).sync(0..count * STREAM_BYTES, Direction::ToDevice)
    }

    fn submit(&self, rknpu: &Rknpu, plan: &Plan) -> io::Result<()> {
        // PANIC: as in `reserved`.
        let tasks = self.tasks.as_ref().expect("a reserved object");
        let count = plan.task_count();
        (0..count).step_by(TASKS_OF_A_JOB).try_for_each(|first| {
            let number = TASKS_OF_A_JOB.min(count - first);
            rknpu.submit(self.number, tasks, first, number)
        })
    }
}
