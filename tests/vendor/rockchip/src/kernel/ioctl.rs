//! Numbers and structs of the kernel's interface.
//!
//! SOURCE: drivers/rknpu/include/rknpu_ioctl.h of rockchip-linux/kernel; include/uapi/drm/drm.h of
//! Linux. librknnrt 1.5.2 passes shorter versions of the same structs: fields were only ever added
//! at the end.

use bytemuck::{Pod, Zeroable};

/// The type of all ioctls of a DRM node.
pub const DRM_TYPE: u8 = b'd';
/// The type of the ioctls of a dma-buf.
pub const DMA_BUF_TYPE: u8 = b'b';

/// The parts of an ioctl's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The driver's letter.
    pub kind: u8,
    /// The function.
    pub function: u8,
    /// Bytes of the argument.
    pub bytes: usize,
}

impl Request {
    /// Splits a number. The C library passes it as a long; only its lower 32 bits matter.
    pub fn new(number: u64) -> Self {
        let [function, kind, low, high, ..] = number.to_le_bytes();
        Self {
            kind,
            function,
            bytes: usize::from(low) | usize::from(high & 0x3f) << 8,
        }
    }
}

/// Functions of DRM itself.
pub mod drm {
    pub const VERSION: u8 = 0x00;
    pub const GET_UNIQUE: u8 = 0x01;
    pub const SET_VERSION: u8 = 0x07;
    pub const GEM_CLOSE: u8 = 0x09;
    pub const GEM_FLINK: u8 = 0x0a;
    pub const PRIME_HANDLE_TO_FD: u8 = 0x2d;
    pub const PRIME_FD_TO_HANDLE: u8 = 0x2e;
}

/// Functions of the driver: DRM's numbers for drivers begin at 0x40.
pub mod rknpu {
    pub const ACTION: u8 = 0x40;
    pub const SUBMIT: u8 = 0x41;
    pub const MEM_CREATE: u8 = 0x42;
    pub const MEM_MAP: u8 = 0x43;
    pub const MEM_DESTROY: u8 = 0x44;
    pub const MEM_SYNC: u8 = 0x45;
}

/// Values of [`Action::flags`].
pub mod action {
    pub const GET_HW_VERSION: u32 = 0;
    pub const GET_DRV_VERSION: u32 = 1;
    pub const GET_FREQ: u32 = 2;
    pub const ACT_RESET: u32 = 6;
    pub const GET_IOMMU_EN: u32 = 18;
    pub const SET_PROC_NICE: u32 = 19;
    pub const POWER_ON: u32 = 20;
    pub const POWER_OFF: u32 = 21;
    pub const GET_TOTAL_SRAM_SIZE: u32 = 22;
    pub const GET_FREE_SRAM_SIZE: u32 = 23;
}

/// `drm_version`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Version {
    pub major: i32,
    pub minor: i32,
    pub patch: i32,
    pub pad: u32,
    pub name_len: u64,
    pub name: u64,
    pub date_len: u64,
    pub date: u64,
    pub desc_len: u64,
    pub desc: u64,
}

/// `drm_unique`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Unique {
    pub len: u64,
    pub text: u64,
}

/// `drm_gem_close`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GemClose {
    pub handle: u32,
    pub pad: u32,
}

/// `drm_gem_flink`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct GemFlink {
    pub handle: u32,
    pub name: u32,
}

/// `drm_prime_handle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Prime {
    pub handle: u32,
    pub flags: u32,
    pub fd: i32,
}

/// `rknpu_action`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Action {
    pub flags: u32,
    pub value: u32,
}

/// `rknpu_mem_create`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemCreate {
    pub handle: u32,
    pub flags: u32,
    pub size: u64,
    pub obj_addr: u64,
    pub dma_addr: u64,
    pub sram_size: u64,
    pub iommu_domain_id: i32,
    pub core_mask: u32,
}

/// `rknpu_mem_map`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemMap {
    pub handle: u32,
    pub reserved: u32,
    pub offset: u64,
}

/// `rknpu_mem_destroy`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemDestroy {
    pub handle: u32,
    pub reserved: u32,
    pub obj_addr: u64,
}

/// `rknpu_mem_sync`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemSync {
    pub flags: u32,
    pub reserved: u32,
    pub obj_addr: u64,
    pub offset: u64,
    pub size: u64,
}

/// `rknpu_subcore_task`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SubcoreTask {
    pub start: u32,
    pub number: u32,
}

/// `rknpu_submit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Submit {
    pub flags: u32,
    pub timeout: u32,
    pub task_start: u32,
    pub task_number: u32,
    pub task_counter: u32,
    pub priority: i32,
    pub task_obj_addr: u64,
    pub regcfg_obj_addr: u64,
    pub task_base_addr: u64,
    pub user_data: u64,
    pub core_mask: u32,
    pub fence_fd: i32,
    pub subcore_task: [SubcoreTask; 5],
}

/// Bits of [`MemSync::flags`].
pub mod sync {
    pub const TO_DEVICE: u32 = 1;
    pub const FROM_DEVICE: u32 = 2;
}

/// Values of [`Submit::flags`].
pub mod job {
    pub const PC: u32 = 1;
    pub const NONBLOCK: u32 = 2;
}

/// Bytes of `rknpu_task`, which is packed.
pub const TASK_BYTES: u64 = 40;

/// The fields of an `rknpu_task` that the driver reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Units that are started.
    pub enable_mask: u32,
    /// Interrupts that end the job.
    pub int_mask: u32,
    /// Words of the stream, without the four at its end.
    pub regcfg_amount: u32,
    /// The stream's device address.
    pub regcmd_addr: u64,
}

impl Task {
    pub fn new(bytes: &[u8; 40]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self {
            enable_mask: word(8),
            int_mask: word(12),
            regcfg_amount: word(24),
            regcmd_addr: u64::from(word(32)) | u64::from(word(36)) << 32,
        }
    }
}

const _: () = assert!(size_of::<MemCreate>() == 48 && size_of::<Submit>() == 104);
const _: () = assert!(size_of::<MemSync>() == 32 && size_of::<Version>() == 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_split_as_the_kernel_composes_them() {
        let submit = Request {
            kind: b'd',
            function: rknpu::SUBMIT,
            bytes: size_of::<Submit>(),
        };
        assert_eq!(Request::new(0xc068_6441), submit);
        assert_eq!(Request::new(0xffff_ffff_c068_6441), submit);
    }

    #[test]
    fn a_task_has_its_address_behind_eight_words() {
        let mut bytes = [0; 40];
        bytes[24] = 104;
        bytes[33..35].copy_from_slice(&[0x10, 0x20]);
        assert_eq!(
            Task::new(&bytes),
            Task {
                enable_mask: 0,
                int_mask: 0,
                regcfg_amount: 104,
                regcmd_addr: 0x20_1000
            }
        );
    }
}
