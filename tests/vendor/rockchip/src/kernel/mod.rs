//! The kernel driver: answers ioctls, owns memory objects, and hands submitted jobs to the device.
//!
//! It keeps these rules of the real one: device addresses have 32 bits, a job names its tasks
//! through a memory object, and a core runs one job at a time. It does not keep: I/O address spaces
//! beyond the first, timeouts, and objects that outlive their handle because a descriptor is open.
//!
//! [`Rocket`] is Linux's driver for the same NPU.
//!
//! [`Kernel::strict`] also has caches, and a device that computes only jobs that boards are known
//! to compute.

mod ioctl;
mod memory;
mod rocket;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, bytes_of, pod_read_unaligned};

use self::ioctl::{
    Action, GemClose, GemFlink, MemCreate, MemDestroy, MemMap, MemSync, Prime, Submit, Task,
    Unique, Version, action, drm, job, rknpu, sync,
};
pub use self::ioctl::{DMA_BUF_TYPE, DRM_TYPE, Request};
use self::memory::{Addresses, Caches, Object, flag};
#[cfg(test)]
pub use self::rocket::Mishap;
pub use self::rocket::Rocket;
use crate::device::{self, Computes, Program};

/// Number of an error, as in errno.h.
pub type Errno = i32;

/// The version that the driver reports: 0.9.8.
// SOURCE: RKNPU_GET_DRV_VERSION_CODE, drivers/rknpu/include/rknpu_ioctl.h.
const DRIVER_VERSION: u32 = 9 * 100 + 8;

/// The name of the driver, its date and its description. libdrm copies all three, so none may be
/// empty.
const NAME: &str = "rknpu";
const DATE: &str = "20240828";
const DESCRIPTION: &str = "emulated RKNPU driver";

/// The clock that the driver reports, in Hz.
const CLOCK_HZ: u32 = 1_000_000_000;

/// Cores of the RK3588's NPU.
const CORES: usize = 3;

/// Start of an object's offset for `mmap`, in units of its handle.
const MAP_OFFSET_BITS: u32 = 32;

/// The driver and the memory that it owns.
#[derive(Debug, Default)]
pub struct Kernel {
    computes: Computes,
    caches: Caches,
    state: Mutex<State>,
    cores: [Mutex<()>; CORES],
}

#[derive(Debug, Default)]
struct State {
    addresses: Addresses,
    handles: BTreeMap<u32, Arc<Object>>,
    last_handle: u32,
}

impl State {
    fn add(&mut self, object: Arc<Object>) -> u32 {
        self.last_handle += 1;
        self.handles.insert(self.last_handle, object);
        self.last_handle
    }

    fn object(&self, handle: u32) -> Result<&Arc<Object>, Errno> {
        self.handles.get(&handle).ok_or(libc::EINVAL)
    }
}

/// The bytes of an ioctl's struct, with zeros after the caller's bytes: the longest is [`Submit`].
#[derive(Clone, Copy, Debug)]
pub struct Argument(pub [u8; 128]);

impl Argument {
    fn get<T: Pod>(&self) -> T {
        pod_read_unaligned(&self.0[..size_of::<T>()])
    }

    fn set<T: Pod>(&mut self, value: T) {
        self.0[..size_of::<T>()].copy_from_slice(bytes_of(&value));
    }
}

/// The values that an ioctl returns in addition to its struct.
#[derive(Debug)]
pub enum Reply {
    /// Nothing.
    Done,
    /// Texts to copy.
    Texts([Text; 3]),
}

/// A text, the address for it, and the bytes there.
#[derive(Clone, Copy, Debug)]
pub struct Text(pub &'static str, pub u64, pub u64);

impl Kernel {
    /// As on real boards: a missing sync shows, and products that no board is known to compute are
    /// refused.
    pub fn strict() -> Self {
        Self {
            computes: Computes::Proven,
            caches: Caches::Apart,
            ..Self::default()
        }
    }

    /// Returns the number of objects that live.
    #[cfg(test)]
    pub fn objects(&self) -> usize {
        self.state().handles.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers one ioctl on the driver's node. `argument` is the caller's struct, padded with
    /// zeros.
    ///
    /// # Errors
    /// The error that the driver returns; `ENOTTY` for a function that is not emulated.
    pub fn ioctl(&self, request: Request, argument: &mut Argument) -> Result<Reply, Errno> {
        match request.function {
            drm::VERSION => {
                let mut version: Version = argument.get();
                let texts = [
                    Text(NAME, version.name, version.name_len),
                    Text(DATE, version.date, version.date_len),
                    Text(DESCRIPTION, version.desc, version.desc_len),
                ];
                (version.major, version.minor, version.patch) = (0, 9, 8);
                let lengths = texts.map(|text| text.0.len() as u64);
                [version.name_len, version.date_len, version.desc_len] = lengths;
                argument.set(version);
                return Ok(Reply::Texts(texts));
            }
            // An empty name: a program that looks for the driver by its name then accepts any
            // device.
            drm::GET_UNIQUE => {
                let mut unique: Unique = argument.get();
                unique.len = 0;
                argument.set(unique);
            }
            drm::SET_VERSION => {}
            drm::GEM_CLOSE => self.close(argument.get::<GemClose>().handle)?,
            drm::GEM_FLINK => {
                let mut flink: GemFlink = argument.get();
                self.state().object(flink.handle)?;
                flink.name = flink.handle;
                argument.set(flink);
            }
            drm::PRIME_HANDLE_TO_FD => {
                let mut prime: Prime = argument.get();
                prime.fd = self.state().object(prime.handle)?.descriptor()?;
                argument.set(prime);
            }
            drm::PRIME_FD_TO_HANDLE => {
                let mut prime: Prime = argument.get();
                prime.handle = self.import(prime.fd)?;
                argument.set(prime);
            }
            rknpu::ACTION => {
                let mut action: Action = argument.get();
                act(&mut action)?;
                argument.set(action);
            }
            rknpu::MEM_CREATE => {
                let mut create: MemCreate = argument.get();
                self.create(&mut create)?;
                argument.set(create);
            }
            rknpu::MEM_MAP => {
                let mut map: MemMap = argument.get();
                self.state().object(map.handle)?;
                map.offset = u64::from(map.handle) << MAP_OFFSET_BITS;
                argument.set(map);
            }
            rknpu::MEM_DESTROY => self.close(argument.get::<MemDestroy>().handle)?,
            rknpu::MEM_SYNC => {
                let sync: MemSync = argument.get();
                let object = self
                    .state()
                    .addresses
                    .by_identity(sync.obj_addr)
                    .ok_or(libc::EINVAL)?;
                if sync
                    .offset
                    .checked_add(sync.size)
                    .is_none_or(|end| end > object.bytes())
                {
                    return Err(libc::EINVAL);
                }
                self.sync(&object, &sync)?;
            }
            rknpu::SUBMIT => {
                let mut submit: Submit = argument.get();
                self.submit(&mut submit)?;
                argument.set(submit);
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
    pub fn map(&self, offset: u64) -> Result<i32, Errno> {
        let handle = u32::try_from(offset >> MAP_OFFSET_BITS).map_err(|_| libc::EINVAL)?;
        self.state().object(handle)?.descriptor()
    }

    /// Begins or ends an access of the CPU to a dma-buf, which may be of another driver.
    pub fn sync_buffer(&self, descriptor: i32, flags: u64) -> Result<(), Errno> {
        let object = match self.state().addresses.by_descriptor(descriptor) {
            Err(libc::EINVAL) => return Ok(()),
            known => known?,
        };
        // SOURCE: include/uapi/linux/dma-buf.h.
        let [reads, writes, ends] = [1, 2, 4].map(|bit| flags & bit != 0);
        let synced = object.sync(0, object.bytes(), ends && writes, !ends && reads);
        synced.map_err(|_| libc::EINVAL)
    }

    fn sync(&self, object: &Object, sync: &MemSync) -> Result<(), Errno> {
        // SOURCE: rknpu_gem_sync_ioctl of Rockchip's kernel.
        if self.caches == Caches::Apart && object.flags() & flag::CACHEABLE == 0 {
            return Err(libc::EINVAL);
        }
        let [to, from] = [sync::TO_DEVICE, sync::FROM_DEVICE].map(|bit| sync.flags & bit != 0);
        (object.sync(sync.offset, sync.size, to, from)).map_err(|_| libc::EINVAL)
    }

    fn create(&self, create: &mut MemCreate) -> Result<(), Errno> {
        if create.handle != 0 {
            // The object is imported: the caller wants to know its address.
            let state = self.state();
            let object = state.object(create.handle)?;
            create.obj_addr = object.identity();
            create.dma_addr = object.address();
            return Ok(());
        }
        let mut state = self.state();
        let object = (state.addresses).create(create.size, create.flags, self.caches)?;
        create.obj_addr = object.identity();
        create.dma_addr = object.address();
        create.sram_size = 0;
        create.handle = state.add(object);
        Ok(())
    }

    fn import(&self, descriptor: i32) -> Result<u32, Errno> {
        let mut state = self.state();
        let object = match state.addresses.by_descriptor(descriptor) {
            Err(libc::EINVAL) => state.addresses.import(descriptor, self.caches)?,
            known => known?,
        };
        let same = state
            .handles
            .iter()
            .find(|(_, other)| Arc::ptr_eq(other, &object));
        if let Some((handle, _)) = same {
            return Ok(*handle);
        }
        Ok(state.add(object))
    }

    fn close(&self, handle: u32) -> Result<(), Errno> {
        let removed = self.state().handles.remove(&handle);
        removed.map(drop).ok_or(libc::EINVAL)
    }

    /// Runs a job and waits for its end.
    fn submit(&self, submit: &mut Submit) -> Result<(), Errno> {
        if submit.flags & job::PC == 0 || submit.flags & job::NONBLOCK != 0 {
            return refuse(
                "only jobs of the program counter that the caller waits for are emulated",
            );
        }
        // The job uses the memory as it is now. Freeing an object while a job uses it is the
        // caller's mistake; here it stays alive.
        let addresses = self.state().addresses.clone();
        let tasks = addresses
            .by_identity(submit.task_obj_addr)
            .ok_or(libc::EINVAL)?;
        // SOURCE: rknpu_job.c reads tasks through a mapping that exists only with this flag;
        // without it, it follows a null pointer.
        if self.caches == Caches::Apart && tasks.flags() & flag::KERNEL_MAPPING == 0 {
            eprintln!("rknn-loop: a real kernel ends here: it has no mapping of the list of tasks");
            return Err(libc::EFAULT);
        }
        for (core, start, number) in shares(submit)? {
            let _turn = self.cores[core]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            run(&addresses, &tasks, start, number, self.computes)
                .or_else(|error| refuse(&error.to_string()))?;
            submit.task_counter = number;
        }
        Ok(())
    }
}

/// Prints the reason for the end of a job, as a kernel does in its log.
fn refuse(reason: &str) -> Result<(), Errno> {
    eprintln!("rknn-loop: job refused: {reason}");
    Err(libc::EINVAL)
}

/// Returns the tasks of each core: (core, first, number).
///
/// SOURCE: rknpu_job_schedule and rknpu_job_subcore_commit_pc, drivers/rknpu/rknpu_job.c: with one
/// or two cores, each core uses the entry with its number; with three, the cores use the entries 2,
/// 3 and 4.
fn shares(submit: &Submit) -> Result<Vec<(usize, u64, u32)>, Errno> {
    // For an empty mask, the driver picks a core and continues as if the caller had named it.
    let mask = submit.core_mask.max(1);
    let first = match mask {
        1..=6 => 0,
        7 => 2,
        _ => return Err(libc::EINVAL),
    };
    let used = (0..CORES).filter(|core| mask & 1 << core != 0);
    Ok(used
        .map(|core| {
            let task = submit.subcore_task[first + core];
            (core, task.start.into(), task.number)
        })
        .collect())
}

/// Runs `number` tasks of the list in `tasks`, from `start`.
fn run(
    addresses: &Addresses,
    tasks: &Object,
    start: u64,
    number: u32,
    computes: Computes,
) -> Result<(), device::Error> {
    let mut next = None;
    for index in start..start + u64::from(number) {
        let mut bytes = [0; 40];
        tasks.read(index * ioctl::TASK_BYTES, &mut bytes)?;
        let task = Task::new(&bytes);
        if computes == Computes::Proven && (task.int_mask != 0x300 || task.enable_mask & 0xd != 0xd)
        {
            return Err(device::Error::Unproven(format!("{task:x?} does not end")));
        }
        let listed = Program {
            address: task.regcmd_addr,
            words: task.regcfg_amount,
        };
        // The driver passes the first stream to the hardware, and each stream names the one after
        // it.
        let program = next.unwrap_or(listed);
        if program != listed {
            return Err(device::Error::Chain {
                stream: program,
                listed,
            });
        }
        next = device::run(addresses, program, computes)?;
        if next.is_none() && index + 1 < start + u64::from(number) {
            return Err(device::Error::Stopped {
                done: index + 1 - start,
                tasks: number,
            });
        }
    }
    Ok(())
}

fn act(action: &mut Action) -> Result<(), Errno> {
    action.value = match action.flags {
        action::GET_DRV_VERSION => DRIVER_VERSION,
        action::GET_HW_VERSION => device::HARDWARE_VERSION,
        action::GET_FREQ => CLOCK_HZ,
        action::GET_IOMMU_EN => 1,
        action::GET_TOTAL_SRAM_SIZE | action::GET_FREE_SRAM_SIZE => 0,
        action::ACT_RESET | action::SET_PROC_NICE | action::POWER_ON | action::POWER_OFF => {
            action.value
        }
        _ => return Err(libc::EINVAL),
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::ioctl::SubcoreTask;
    use super::*;

    fn call<T: Pod>(kernel: &Kernel, function: u8, value: T) -> Result<T, Errno> {
        let mut argument = Argument([0; 128]);
        argument.set(value);
        let request = Request {
            kind: DRM_TYPE,
            function,
            bytes: size_of::<T>(),
        };
        kernel.ioctl(request, &mut argument).map(|_| argument.get())
    }

    fn create(kernel: &Kernel, size: u64) -> MemCreate {
        let create = MemCreate {
            size,
            ..MemCreate::default()
        };
        call(kernel, rknpu::MEM_CREATE, create).unwrap()
    }

    #[test]
    fn three_cores_take_the_entries_after_the_first_two() {
        let subcore_task = [0, 1, 2, 3, 4].map(|start| SubcoreTask {
            start,
            number: 10 + start,
        });
        let of = |core_mask| {
            shares(&Submit {
                core_mask,
                subcore_task,
                ..Submit::default()
            })
        };
        assert_eq!(of(0).unwrap(), [(0, 0, 10)]);
        assert_eq!(of(4).unwrap(), [(2, 2, 12)]);
        assert_eq!(of(3).unwrap(), [(0, 0, 10), (1, 1, 11)]);
        assert_eq!(of(7).unwrap(), [(0, 2, 12), (1, 3, 13), (2, 4, 14)]);
        assert_eq!(of(8).unwrap_err(), libc::EINVAL);
    }

    #[test]
    fn memory_lives_until_its_handle_is_closed() {
        let kernel = Kernel::default();
        let memory = create(&kernel, 100);
        let sync = MemSync {
            obj_addr: memory.obj_addr,
            size: 4096,
            ..MemSync::default()
        };
        assert!(call(&kernel, rknpu::MEM_SYNC, sync).is_ok());
        let beyond = MemSync { offset: 1, ..sync };
        assert_eq!(
            call(&kernel, rknpu::MEM_SYNC, beyond).unwrap_err(),
            libc::EINVAL
        );
        let destroy = MemDestroy {
            handle: memory.handle,
            ..MemDestroy::default()
        };
        assert!(call(&kernel, rknpu::MEM_DESTROY, destroy).is_ok());
        assert_eq!(
            call(&kernel, rknpu::MEM_SYNC, sync).unwrap_err(),
            libc::EINVAL
        );
        assert_eq!(
            kernel
                .map(u64::from(memory.handle) << MAP_OFFSET_BITS)
                .unwrap_err(),
            libc::EINVAL
        );
    }

    #[test]
    fn a_job_with_a_stream_that_is_unknown_fails() {
        let kernel = Kernel::default();
        // A stream of zeros: no word starts a unit, and no register has a value.
        let (tasks, stream) = (create(&kernel, 40), create(&kernel, 4096));
        let addresses = kernel.state().addresses.clone();
        let address = stream.dma_addr.to_le_bytes();
        device::Memory::write(&addresses, tasks.dma_addr + 32, &address).unwrap();
        let submit = Submit {
            flags: job::PC,
            core_mask: 1,
            task_obj_addr: tasks.obj_addr,
            subcore_task: [SubcoreTask {
                start: 0,
                number: 1,
            }; 5],
            ..Submit::default()
        };
        assert_eq!(
            call(&kernel, rknpu::SUBMIT, submit).unwrap_err(),
            libc::EINVAL
        );
        let unwritten = run(
            &addresses,
            &addresses.by_identity(tasks.obj_addr).unwrap(),
            0,
            1,
            Computes::All,
        );
        assert!(matches!(unwritten, Err(device::Error::Unwritten { .. })));
    }

    #[test]
    fn a_function_that_is_not_emulated_is_refused() {
        let unknown = call(&Kernel::default(), 0x7f, Action::default());
        assert_eq!(unknown.unwrap_err(), libc::ENOTTY);
    }
}
