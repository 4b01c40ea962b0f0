//! One core: the streams of a run, and the cubes that it copies.
#![expect(
    unsafe_code,
    reason = "bound memory is shared with the caller by the rules of the C API"
)]

use std::io;
use std::sync::Arc;

use super::driver::{Direction, Driver, Job, Object, Purpose};
use super::memory::Region;
use crate::stream::{BODY_WORDS, Plan, STREAM_WORDS};

/// Bytes of a stream.
const STREAM_BYTES: usize = STREAM_WORDS * 8;

/// The length of a stream, and of a stream without its tail.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a stream has some hundred words"
)]
pub(super) const WORDS: u32 = STREAM_WORDS as u32;
#[expect(
    clippy::cast_possible_truncation,
    reason = "a body has some hundred words"
)]
pub(super) const BODY: u32 = BODY_WORDS as u32;

/// Returns the device's address of a stream, by its number.
pub(super) fn stream_address(streams: &Object, index: usize) -> u32 {
    // PANIC: an object's addresses fit into 32 bits.
    streams.address() + u32::try_from(index * STREAM_BYTES).expect("a place inside")
}

/// Objects of one purpose, one for each power of two. A driver may sync whole objects, so a small
/// run does not use a large object.
#[derive(Debug, Default)]
struct Objects(Vec<Option<Object>>);

impl Objects {
    fn class(bytes: usize) -> usize {
        bytes.next_power_of_two().trailing_zeros() as usize
    }

    /// Makes an object for `bytes`, if there is none.
    fn reserve(
        &mut self,
        driver: &Arc<dyn Driver>,
        bytes: usize,
        purpose: Purpose,
    ) -> io::Result<()> {
        let class = Self::class(bytes);
        if self.0.len() <= class {
            self.0.resize_with(class + 1, || None);
        }
        if self.0[class].is_none() {
            self.0[class] = Some(Arc::clone(driver).create(1 << class, purpose)?);
        }
        Ok(())
    }

    /// Returns the object that [`Self::reserve`] made for `bytes`.
    fn get(&mut self, bytes: usize) -> &mut Object {
        let place = self.0.get_mut(Self::class(bytes)).and_then(Option::as_mut);
        // PANIC: operands are bound before a run, and binding reserves the object.
        place.expect("a reserved object")
    }
}

/// Objects that runs of any shape use.
#[derive(Debug)]
pub(super) struct Core {
    number: usize,
    streams: Objects,
    /// The driver's own.
    own: Objects,
    cubes_of_a: Objects,
    cubes_of_c: Objects,
}

impl Core {
    pub(super) fn new(number: usize) -> Self {
        Self {
            number,
            streams: Objects::default(),
            own: Objects::default(),
            cubes_of_a: Objects::default(),
            cubes_of_c: Objects::default(),
        }
    }

    /// Allocates the objects that runs of `plan` need.
    ///
    /// # Errors
    /// An error of the driver.
    pub(super) fn reserve(&mut self, driver: &Arc<dyn Driver>, plan: &Plan) -> io::Result<()> {
        let count = plan.task_count();
        (self.streams).reserve(driver, count * STREAM_BYTES, Purpose::Data)?;
        (self.own).reserve(driver, driver.own_bytes(count), Purpose::Jobs)?;
        if plan.is_in_place() {
            return Ok(());
        }
        let [a_bytes, c_bytes] = plan.cube_bytes();
        (self.cubes_of_a).reserve(driver, a_bytes, Purpose::Data)?;
        (self.cubes_of_c).reserve(driver, c_bytes, Purpose::Data)
    }

    /// Computes C from A and B, for which [`Self::reserve`] was called.
    ///
    /// # Errors
    /// An error of the driver.
    ///
    /// # Safety
    /// - Nothing uses C, or writes A and B, during the call.
    pub(super) unsafe fn run(
        &mut self,
        driver: &dyn Driver,
        plan: &Plan,
        [a, b, c]: [&Region; 3],
    ) -> io::Result<()> {
        let count = plan.task_count();
        let streams = self.streams.get(count * STREAM_BYTES);
        let own = self.own.get(driver.own_bytes(count));
        if plan.is_in_place() {
            let addresses = [a.address(), b.address(), c.address()];
            write(streams, plan, addresses, driver.chain())?;
            let job = Job {
                core: self.number,
                streams,
                count,
                inputs: [a.object(), b.object()],
                result: c.object(),
            };
            return driver.run(own, &job);
        }
        let [a_bytes, _, c_bytes] = plan.native_bytes();
        let [a_cube_bytes, c_cube_bytes] = plan.cube_bytes();
        let cubes_of_a = self.cubes_of_a.get(a_cube_bytes);
        let cubes_of_c = self.cubes_of_c.get(c_cube_bytes);
        // SAFETY: the caller guarantees that nothing writes A.
        let native = unsafe { a.read(a_bytes) };
        plan.fill_cubes(native, &mut cubes_of_a.bytes_mut()[..a_cube_bytes]);
        cubes_of_a.sync(0..a_cube_bytes, Direction::ToDevice)?;
        let addresses = [cubes_of_a.address(), b.address(), cubes_of_c.address()];
        write(streams, plan, addresses, driver.chain())?;
        let job = Job {
            core: self.number,
            streams,
            count,
            inputs: [cubes_of_a, b.object()],
            result: cubes_of_c,
        };
        driver.run(own, &job)?;
        cubes_of_c.sync(0..c_cube_bytes, Direction::FromDevice)?;
        // SAFETY: the caller guarantees that nothing else uses C.
        let native = unsafe { c.write(c_bytes) };
        plan.empty_cubes(&cubes_of_c.bytes_mut()[..c_cube_bytes], native);
        // Without this, the device may hold older bytes than the CPU wrote, which the caller's sync
        // from the device would bring back.
        c.sync(c_bytes, Direction::ToDevice)
    }
}

/// Writes the streams of a run. Each names the next one, but for the last of `chain`.
fn write(streams: &mut Object, plan: &Plan, addresses: [u32; 3], chain: usize) -> io::Result<()> {
    let count = plan.task_count();
    let mut words = Vec::with_capacity(STREAM_WORDS);
    for (index, task) in plan.tasks(addresses).enumerate() {
        let is_last = (index + 1) % chain == 0 || index + 1 == count;
        let next = (!is_last).then(|| stream_address(streams, index + 1));
        words.clear();
        task.stream(next, &mut words).map_err(io::Error::other)?;
        let place = &mut streams.bytes_mut()[index * STREAM_BYTES..][..STREAM_BYTES];
        for (place, word) in place.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
            *place = word.to_le_bytes();
        }
    }
    streams.sync(0..count * STREAM_BYTES, Direction::ToDevice)
}
