//! Linux's own kernel driver for an RK3588's NPU, `rocket`.
//!
//! A file is an address space. Its jobs run one after another, on any core that is free, and each
//! task of a job is started separately. A job that the driver refuses, one that it stops after its
//! time-out, and one whose memory cannot be attached look like one that succeeded. So each job ends
//! with a task that writes a known product ([`status`]).
//!
//! SOURCE: numbers and structs, include/uapi/drm/rocket_accel.h and drm.h of Linux 6.18 (MIT);
//! behaviour, drivers/accel/rocket there.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use os::memory::Descriptor;

use super::argument::Argument;
use super::core::{WORDS, stream_address};
use super::driver::{Direction, Driver, Job, Object, Purpose, page_bytes};
use super::node::{Kernel, Link, Node};

mod status;

/// Numbers of functions: direction, bytes of the struct, the letter of DRM, the function.
mod number {
    pub const CREATE_BO: u32 = 0xc018_6440;
    pub const SUBMIT: u32 = 0x4018_6441;
    pub const PREP_BO: u32 = 0x4010_6442;
    pub const FINI_BO: u32 = 0x4008_6443;
    pub const GEM_CLOSE: u32 = 0x4008_6409;
}

/// Tasks of a job, not counting the one that writes the status: at most a third of the driver's
/// time-out.
// SOURCE: the largest task has 403 million INT8 products (128 x 3072 x 1024), or 268 million in
// FP16. At 200 MHz, the clock of Linux's device tree, boards reach 75 thousand million FP16
// products a second (gregordinary's notes), and twice as many in INT8.
const TASKS_OF_A_JOB: usize = 32;

/// The driver's time-out for a job.
// SOURCE: JOB_TIMEOUT_MS, drivers/accel/rocket/rocket_job.c of Linux 6.18.
const TIME_OUT: Duration = Duration::from_millis(500);

/// The longest wait for a job. Jobs of other files may run before it.
const WAIT: Duration = Duration::from_millis(1800);

/// Bytes of `drm_rocket_submit`, `drm_rocket_job` and `drm_rocket_task`.
const SUBMIT_BYTES: usize = 24;
const JOB_BYTES: usize = 40;
const TASK_BYTES: usize = 8;

/// The driver.
#[derive(Debug)]
pub struct Rocket {
    node: Box<dyn Node>,
    /// A job did not end. It may still write its results.
    is_stuck: AtomicBool,
}

impl Rocket {
    pub fn new(node: Box<dyn Node>) -> Self {
        Self {
            node,
            is_stuck: AtomicBool::new(false),
        }
    }

    /// Waits until no job writes an object, and makes its bytes visible to the CPU.
    fn prepare(&self, object: &Object) -> io::Result<()> {
        let deadline = os::node::monotonic()? + WAIT;
        let deadline = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        Argument::<16>::ZERO
            .u32(0, object.handle)
            .u64(8, deadline)
            .call(&*self.node, number::PREP_BO)
            .map(drop)
    }

    /// Makes the CPU's bytes of an object visible to the device.
    fn finish(&self, object: &Object) -> io::Result<()> {
        Argument::<8>::ZERO
            .u32(0, object.handle)
            .call(&*self.node, number::FINI_BO)
            .map(drop)
    }

    /// Hands one job to the driver.
    fn submit(&self, tasks: &[[u32; 2]], reads: &[u32], writes: &[u32]) -> io::Result<()> {
        let number = |len: usize| {
            u32::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
        };
        // The four parts follow one another: submission, job, tasks, handles.
        let tasks_at = SUBMIT_BYTES + JOB_BYTES;
        let reads_at = tasks_at + TASK_BYTES * tasks.len();
        let writes_at = reads_at + 4 * reads.len();
        let submission = Argument::<SUBMIT_BYTES>::ZERO
            .u32(8, 1)
            .u32(12, number(JOB_BYTES)?);
        let job = Argument::<JOB_BYTES>::ZERO
            .u32(24, number(tasks.len())?)
            .u32(28, number(TASK_BYTES)?)
            .u32(32, number(reads.len())?)
            .u32(36, number(writes.len())?);
        let mut bytes = [&submission.0[..], &job.0].concat();
        let numbers = tasks.as_flattened().iter().chain(reads).chain(writes);
        bytes.extend(numbers.flat_map(|number| number.to_ne_bytes()));
        let links = [
            (0, SUBMIT_BYTES),
            (SUBMIT_BYTES, tasks_at),
            (SUBMIT_BYTES + 8, reads_at),
            (SUBMIT_BYTES + 16, writes_at),
        ];
        let links = links.map(|(field, target)| Link { field, target });
        self.node.ioctl_linked(number::SUBMIT, &mut bytes, &links)
    }

    /// Runs some tasks, and finds out whether they ran.
    fn run_some(&self, own: &mut Object, job: &Job, some: Range<usize>) -> io::Result<()> {
        status::clear(own);
        self.finish(own)?;
        let mut tasks: Vec<[u32; 2]> = some
            .clone()
            .map(|index| [stream_address(job.streams, index), WORDS])
            .collect();
        tasks.push([status::stream(own), WORDS]);
        // The driver refuses a job that names an object twice.
        let writes = [job.result.handle, own.handle];
        let mut reads = vec![job.streams.handle];
        for input in job.inputs {
            if !reads.contains(&input.handle) && !writes.contains(&input.handle) {
                reads.push(input.handle);
            }
        }
        let begun = Instant::now();
        self.submit(&tasks, &reads, &writes)?;
        let name = || {
            let (first, last) = (some.start + 1, some.end);
            format!("tasks {first} to {last} of {}", job.count)
        };
        if let Err(error) = self.prepare(own) {
            self.is_stuck.store(true, Ordering::Relaxed);
            let text = format!(
                "rocket does not end {} within {} ms ({error}); they may write results later, so nothing more runs",
                name(),
                WAIT.as_millis()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        if status::is_written(own) {
            return Ok(());
        }
        if begun.elapsed() >= TIME_OUT {
            let text = format!(
                "rocket stopped {} at its time-out of {} ms, and reset the core",
                name(),
                TIME_OUT.as_millis()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        let text = format!("rocket reports no error, but did not run {}", name());
        Err(io::Error::other(text))
    }
}

impl Driver for Rocket {
    fn kernel(&self) -> Kernel {
        Kernel::Rocket
    }

    fn spaces(&self) -> String {
        "none (each file has its own)".into()
    }

    fn version_text(&self) -> String {
        "rocket".into()
    }

    /// Returns 1: the driver does not start streams that another stream names.
    fn chain(&self) -> usize {
        1
    }

    fn reopen(&self) -> io::Result<Arc<dyn Driver>> {
        Ok(Arc::new(Self::new(self.node.reopen()?)))
    }

    fn create(self: Arc<Self>, bytes: usize, purpose: Purpose) -> io::Result<Object> {
        let bytes = page_bytes(bytes);
        let size = u32::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let created = Argument::<24>::ZERO
            .u32(0, size)
            .call(&*self.node, number::CREATE_BO)?;
        let driver = Arc::clone(&self);
        let object = Object::adopt(driver, created.read_u32(4), 0, bytes);
        let map = self.node.map(created.read_u64(16), bytes)?;
        let mut object = object.place(created.read_u64(8), map, None)?.finish()?;
        if purpose == Purpose::Jobs {
            status::fill(&mut object)?;
        }
        Ok(object)
    }

    fn import(self: Arc<Self>, _buffer: Descriptor) -> io::Result<Object> {
        let text = "rocket imports no dma-bufs";
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Syncs the whole object: the driver knows no ranges.
    fn sync(&self, object: &Object, range: Range<usize>, direction: Direction) -> io::Result<()> {
        if range.end > object.size() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match direction {
            Direction::ToDevice => self.finish(object),
            Direction::FromDevice => self.prepare(object),
        }
    }

    fn destroy(&self, object: &Object) -> io::Result<()> {
        Argument::<8>::ZERO
            .u32(0, object.handle)
            .call(&*self.node, number::GEM_CLOSE)
            .map(drop)
    }

    fn own_bytes(&self, _tasks: usize) -> usize {
        status::BYTES
    }

    fn run(&self, own: &mut Object, job: &Job) -> io::Result<()> {
        if self.is_stuck.load(Ordering::Relaxed) {
            let text = "an earlier job of rocket did not end";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        (0..job.count)
            .step_by(TASKS_OF_A_JOB)
            .try_for_each(|first| {
                self.run_some(own, job, first..job.count.min(first + TASKS_OF_A_JOB))
            })
    }
}
