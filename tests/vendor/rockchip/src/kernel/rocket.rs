//! Linux's driver `rocket`: a file is an address space, objects are synced whole, and a job that
//! did not run looks like one that did.
//!
//! SOURCE: include/uapi/drm/rocket_accel.h of Linux 6.18; behaviour, drivers/accel/rocket there:
//! the result of handing a job to the scheduler is dropped, each task is started by itself, and a
//! job that meets the time-out ends as others do.
#![expect(
    unsafe_code,
    reason = "the structs of a job lie in the caller's memory"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};

use super::ioctl::{GemClose, Version, drm};
use super::memory::{Addresses, Caches, Object, flag};
use super::{Argument, CORES, Errno, MAP_OFFSET_BITS, Reply, Request, Text};
use crate::device::{self, Computes, Program, TAIL_WORDS};

/// The driver's name, date and description.
const TEXTS: [&str; 3] = ["rocket", "20250818", "emulated rocket driver"];

/// Functions: DRM's numbers for drivers begin at 0x40.
mod function {
    pub const CREATE_BO: u8 = 0x40;
    pub const SUBMIT: u8 = 0x41;
    pub const PREP_BO: u8 = 0x42;
    pub const FINI_BO: u8 = 0x43;
}

/// Time after which a job is stopped, and the core reset.
const TIME_OUT: Duration = Duration::from_millis(500);

/// `drm_rocket_create_bo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct CreateBo {
    size: u32,
    handle: u32,
    dma_address: u64,
    offset: u64,
}

/// `drm_rocket_prep_bo`; without its time, `drm_rocket_fini_bo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct PrepBo {
    handle: u32,
    reserved: u32,
    timeout_ns: i64,
}

/// `drm_rocket_submit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Submit {
    jobs: u64,
    job_count: u32,
    job_struct_size: u32,
    reserved: u64,
}

/// `drm_rocket_job`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Job {
    tasks: u64,
    in_bo_handles: u64,
    out_bo_handles: u64,
    task_count: u32,
    task_struct_size: u32,
    in_bo_handle_count: u32,
    out_bo_handle_count: u32,
}

/// `drm_rocket_task`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Task {
    regcmd: u32,
    regcmd_count: u32,
}

/// Mishaps of a job.
#[cfg_attr(not(test), expect(dead_code, reason = "only tests have mishaps"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// The job's memory is not attached, so it ends at once.
    NotAttached,
    /// The task with this number does not end: the time-out stops the job.
    Hangs(usize),
    /// The job never ends, and no time-out stops it.
    NeverEnds,
}

/// The driver.
#[derive(Debug, Default)]
pub struct Rocket {
    computes: Computes,
    files: Mutex<BTreeMap<u32, Arc<File>>>,
    cores: [Mutex<()>; CORES],
    /// The number of a job, from 0, and its mishap.
    mishap: Option<(usize, Mishap)>,
    jobs: Mutex<usize>,
}

/// An open file.
#[derive(Debug, Default)]
struct File {
    state: Mutex<State>,
    /// A job of the file runs.
    queue: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    addresses: Addresses,
    handles: BTreeMap<u32, Arc<Object>>,
    last_handle: u32,
    /// When jobs that write an object end; `None` for never.
    busy: BTreeMap<u32, Option<Instant>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads `count` structs of the caller's memory.
///
/// # Safety
/// - `address` is 0 or has as many structs, each followed by the next one after `step` bytes.
unsafe fn structs<T: Pod>(address: u64, count: u32, step: usize) -> Result<Vec<T>, Errno> {
    if step < size_of::<T>() {
        return Err(libc::EINVAL);
    }
    if address == 0 && count > 0 {
        return Err(libc::EFAULT);
    }
    let start = usize::try_from(address).map_err(|_| libc::EFAULT)?;
    let read = |index: usize| {
        let place = std::ptr::with_exposed_provenance::<T>(start + index * step);
        // SAFETY: guaranteed by the caller.
        unsafe { place.read_unaligned() }
    };
    // CAST: usize has at least 32 bits.
    Ok((0..count as usize).map(read).collect())
}

impl Rocket {
    /// A driver of a device that computes as much.
    pub fn new(computes: Computes) -> Self {
        Self {
            computes,
            ..Self::default()
        }
    }

    /// A driver with which something happens to one job.
    #[cfg(test)]
    pub fn with_mishap(job: usize, mishap: Mishap) -> Self {
        Self {
            mishap: Some((job, mishap)),
            ..Self::new(Computes::Proven)
        }
    }

    /// Opens a file, and returns its number.
    pub fn open(&self) -> u32 {
        let mut files = lock(&self.files);
        let number = files.last_key_value().map_or(0, |(last, _)| last + 1);
        files.insert(number, Arc::default());
        number
    }

    /// Closes a file, with all that it has.
    pub fn close(&self, number: u32) {
        lock(&self.files).remove(&number);
    }

    /// Returns the number of objects that live, and of files that are open.
    #[cfg(test)]
    pub fn objects(&self) -> (usize, usize) {
        let files = lock(&self.files);
        let objects = files.values().map(|file| lock(&file.state).handles.len());
        (objects.sum(), files.len())
    }

    fn file(&self, number: u32) -> Result<Arc<File>, Errno> {
        lock(&self.files).get(&number).cloned().ok_or(libc::EBADF)
    }

    /// Answers one ioctl on a file. `argument` is the caller's struct, padded with zeros.
    ///
    /// # Errors
    /// The error that the driver returns; `ENOTTY` for a function that is not emulated.
    ///
    /// # Safety
    /// - The addresses in the struct, and in those that they lead to, are 0, or point to as much
    ///   memory as the structs specify.
    pub unsafe fn ioctl(
        &self,
        number: u32,
        request: Request,
        argument: &mut Argument,
    ) -> Result<Reply, Errno> {
        let file = self.file(number)?;
        match request.function {
            drm::VERSION => {
                let mut version: Version = argument.get();
                let [name, date, description] = TEXTS;
                let texts = [
                    Text(name, version.name, version.name_len),
                    Text(date, version.date, version.date_len),
                    Text(description, version.desc, version.desc_len),
                ];
                [version.name_len, version.date_len, version.desc_len] =
                    texts.map(|text| text.0.len() as u64);
                argument.set(version);
                return Ok(Reply::Texts(texts));
            }
            drm::GEM_CLOSE => {
                let handle = argument.get::<GemClose>().handle;
                let mut state = lock(&file.state);
                state.busy.remove(&handle);
                let removed = state.handles.remove(&handle);
                drop(state);
                removed.ok_or(libc::EINVAL)?;
            }
            function::CREATE_BO => {
                let mut create: CreateBo = argument.get();
                file.create(&mut create)?;
                argument.set(create);
            }
            function::PREP_BO => file.prepare(&argument.get())?,
            function::FINI_BO => {
                let handle = argument.get::<PrepBo>().handle;
                let object = file.object(handle)?;
                let synced = object.sync(0, object.bytes(), true, false);
                synced.map_err(|_| libc::EINVAL)?;
            }
            function::SUBMIT => {
                let submit: Submit = argument.get();
                if submit.reserved != 0 {
                    return Err(libc::EINVAL);
                }
                // SAFETY: guaranteed by the caller.
                let jobs = unsafe {
                    structs::<Job>(
                        submit.jobs,
                        submit.job_count,
                        submit.job_struct_size as usize,
                    )
                }?;
                for job in jobs {
                    // SAFETY: guaranteed by the caller.
                    let [reads, writes] = [
                        unsafe { structs::<u32>(job.in_bo_handles, job.in_bo_handle_count, 4) }?,
                        unsafe { structs::<u32>(job.out_bo_handles, job.out_bo_handle_count, 4) }?,
                    ];
                    let step = job.task_struct_size as usize;
                    // SAFETY: guaranteed by the caller.
                    let tasks = unsafe { structs::<Task>(job.tasks, job.task_count, step) }?;
                    self.run(&file, &tasks, &reads, &writes);
                }
            }
            _ => return Err(libc::ENOTTY),
        }
        Ok(Reply::Done)
    }

    /// Returns a descriptor for `mmap` of the object whose offset the caller passes, to be closed
    /// by the caller.
    ///
    /// # Errors
    /// `EINVAL` for an offset that no object has.
    pub fn map(&self, number: u32, offset: u64) -> Result<i32, Errno> {
        let handle = u32::try_from(offset >> MAP_OFFSET_BITS).map_err(|_| libc::EINVAL)?;
        self.file(number)?.object(handle)?.descriptor()
    }

    /// Runs a job, or does not run it; the caller cannot tell which.
    fn run(&self, file: &File, tasks: &[Task], reads: &[u32], writes: &[u32]) {
        let mut named: Vec<u32> = [reads, writes].concat();
        named.sort_unstable();
        let count = named.len();
        named.dedup();
        let are_known = named.iter().all(|handle| file.object(*handle).is_ok());
        if named.len() < count || !are_known {
            return;
        }
        let addresses = lock(&file.state).addresses.clone();
        let _queue = lock(&file.queue);
        let _core = self.core();
        let number = {
            let mut jobs = lock(&self.jobs);
            *jobs += 1;
            *jobs - 1
        };
        let mishap = (self.mishap).and_then(|(job, mishap)| (job == number).then_some(mishap));
        let end = |at| {
            let mut state = lock(&file.state);
            state.busy.extend(writes.iter().map(|handle| (*handle, at)));
        };
        match mishap {
            Some(Mishap::NotAttached) => return,
            Some(Mishap::NeverEnds) => return end(None),
            Some(Mishap::Hangs(_)) | None => {}
        }
        for (index, task) in tasks.iter().enumerate() {
            let program = Program {
                address: task.regcmd.into(),
                words: task.regcmd_count.saturating_sub(TAIL_WORDS),
            };
            let ran = if mishap == Some(Mishap::Hangs(index)) {
                Err(device::Error::Unproven("a mishap".into()))
            } else {
                // A stream that it names is not started.
                device::run(&addresses, program, self.computes).map(drop)
            };
            if let Err(error) = ran {
                eprintln!("rknn-loop: task {index} of job {number} does not end: {error}");
                return end(Some(Instant::now() + TIME_OUT));
            }
        }
    }

    /// Takes a core that is free, or waits for the first.
    fn core(&self) -> MutexGuard<'_, ()> {
        for core in &self.cores {
            match core.try_lock() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(error)) => return error.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        lock(&self.cores[0])
    }
}

impl File {
    fn object(&self, handle: u32) -> Result<Arc<Object>, Errno> {
        let state = lock(&self.state);
        state.handles.get(&handle).cloned().ok_or(libc::EINVAL)
    }

    fn create(&self, create: &mut CreateBo) -> Result<(), Errno> {
        let mut state = lock(&self.state);
        // Mapping the object cleans the caches.
        let object =
            (state.addresses).create_from(0, create.size.into(), flag::CACHEABLE, Caches::Apart)?;
        create.dma_address = object.address();
        state.last_handle += 1;
        create.handle = state.last_handle;
        create.offset = u64::from(create.handle) << MAP_OFFSET_BITS;
        state.handles.insert(create.handle, object);
        Ok(())
    }

    /// Waits for the jobs that write an object.
    fn prepare(&self, prepare: &PrepBo) -> Result<(), Errno> {
        if prepare.reserved != 0 {
            return Err(libc::EINVAL);
        }
        let object = self.object(prepare.handle)?;
        let busy = lock(&self.state).busy.get(&prepare.handle).copied();
        let now = Instant::now();
        let patience = Duration::from_nanos(prepare.timeout_ns.try_into().unwrap_or(0))
            .saturating_sub(monotonic());
        let wait = match busy {
            None => Duration::ZERO,
            Some(end) => end.map_or(Duration::MAX, |end| end - now),
        };
        std::thread::sleep(wait.min(patience));
        if wait > patience {
            return Err(if patience.is_zero() {
                libc::EBUSY
            } else {
                libc::ETIMEDOUT
            });
        }
        lock(&self.state).busy.remove(&prepare.handle);
        let synced = object.sync(0, object.bytes(), false, true);
        synced.map_err(|_| libc::EINVAL)
    }
}

/// Returns the time of the clock that is used for deadlines.
fn monotonic() -> Duration {
    // SAFETY: a time consists of numbers, for which zero is a value.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: `time` is a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = Duration::from_secs(time.tv_sec.try_into().unwrap_or(0));
    seconds + Duration::from_nanos(time.tv_nsec.try_into().unwrap_or(0))
}
