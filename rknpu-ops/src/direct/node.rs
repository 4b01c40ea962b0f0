//! The node of a kernel driver: its calls, without their meaning.
#![expect(unsafe_code, reason = "system calls with pointers")]

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};
use os::memory::Descriptor;

/// A kernel's driver for the NPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Rockchip's own.
    Rknpu,
    /// Linux's.
    Rocket,
}

impl Kernel {
    /// All drivers, in the order in which they are looked for.
    pub const ALL: [Self; 2] = [Self::Rknpu, Self::Rocket];

    /// Returns its name in DRM.
    // SOURCE: drivers/rknpu/rknpu_drv.c of Rockchip's kernel; drivers/accel/rocket/rocket_drv.c of
    // Linux 6.18.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rknpu => "rknpu",
            Self::Rocket => "rocket",
        }
    }
}

/// A field of 64 bits that gets the address of a byte of the same buffer.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The field's first byte.
    pub field: usize,
    /// The byte whose address it gets.
    pub target: usize,
}

impl Link {
    /// Writes the address.
    ///
    /// # Panics
    /// If the field or its target is not inside of `bytes`.
    pub fn write(self, bytes: &mut [u8]) {
        let address = bytes[self.target..].as_mut_ptr().expose_provenance() as u64;
        bytes[self.field..][..8].copy_from_slice(&address.to_ne_bytes());
    }
}

/// An open node.
pub trait Node: Debug + Send + Sync {
    /// Returns the driver after it.
    fn kernel(&self) -> Kernel;

    /// Opens the node once more.
    ///
    /// # Errors
    /// The system's error.
    fn reopen(&self) -> io::Result<Box<dyn Node>>;

    /// Calls the function `number` with its struct, which has the size that the number contains,
    /// and holds no addresses of this process.
    ///
    /// # Errors
    /// The driver's error.
    fn ioctl(&self, number: u32, argument: &mut [u8]) -> io::Result<()>;

    /// As [`Self::ioctl`], for a struct that holds addresses of other structs. The struct is at the
    /// start of `bytes`, and `links` are the places of all addresses in it and in the structs that
    /// it leads to. All of these, with the lengths that the structs give, are inside `bytes`.
    ///
    /// # Errors
    /// The driver's error.
    fn ioctl_linked(&self, number: u32, bytes: &mut [u8], links: &[Link]) -> io::Result<()>;

    /// Maps an object of the driver, by the offset that the driver gave for it.
    ///
    /// # Errors
    /// The system's error.
    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw>;

    /// Allocates a dma-buf from the system's heap.
    ///
    /// # Errors
    /// The system's error; `NotFound` without such a heap.
    fn heap(&self, bytes: usize) -> io::Result<Descriptor> {
        dma_buf::allocate(bytes)
    }

    /// Begins or ends an access of the CPU to a dma-buf: [`dma_buf`] has the flags.
    ///
    /// # Errors
    /// The system's error.
    fn sync_buffer(&self, buffer: &Descriptor, flags: u64) -> io::Result<()> {
        dma_buf::sync(buffer, flags)
    }
}

/// The number of DRM's function that gives the driver's name.
// SOURCE: DRM_IOCTL_VERSION, include/uapi/drm/drm.h of Linux, on machines of 64 bits.
const DRM_VERSION: u32 = 0xc040_6400;

/// DRM's names for nodes without a display, for nodes, and for those of accelerators, the number of
/// the first, and how many of each are looked for.
const KINDS: [(&str, usize); 3] = [("dri/renderD", 128), ("dri/card", 0), ("accel/accel", 0)];
const NODES_OF_A_KIND: usize = 16;

/// A node of this machine.
#[derive(Debug)]
pub struct DeviceNode {
    file: File,
    path: PathBuf,
    kernel: Kernel,
}

impl DeviceNode {
    /// Opens the first node of a driver, whatever the node's number is.
    ///
    /// # Errors
    /// `NotFound` if no node has one, or the first error of a node that could not be opened.
    pub fn find() -> io::Result<Self> {
        let mut refused = None;
        for (kind, first) in KINDS {
            for number in first..first + NODES_OF_A_KIND {
                let path = PathBuf::from(format!("/dev/{kind}{number}"));
                let named = |file| Ok((driver(&file)?, file));
                match open(&path).and_then(named) {
                    Ok((name, file)) => {
                        if let Some(kernel) = Kernel::ALL.into_iter().find(|it| it.name() == name) {
                            return Ok(Self { file, path, kernel });
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => {
                        let text = format!("{}: {error}", path.display());
                        refused = refused.or(Some(io::Error::new(error.kind(), text)));
                    }
                }
            }
        }
        Err(refused.unwrap_or_else(|| {
            let [first, second] = Kernel::ALL.map(Kernel::name);
            let text =
                format!("no node in /dev/dri or /dev/accel has the driver {first} or {second}");
            io::Error::new(ErrorKind::NotFound, text)
        }))
    }

    /// Returns the node's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the bytes of the struct of a function.
// SOURCE: _IOC of asm-generic/ioctl.h: the size has 14 bits, starting at bit 16.
fn struct_bytes(number: u32) -> usize {
    // CAST: usize has at least 32 bits.
    (number >> 16 & 0x3fff) as usize
}

impl Node for DeviceNode {
    fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn reopen(&self) -> io::Result<Box<dyn Node>> {
        Ok(Box::new(Self {
            file: open(&self.path)?,
            path: self.path.clone(),
            kernel: self.kernel,
        }))
    }

    fn ioctl(&self, number: u32, argument: &mut [u8]) -> io::Result<()> {
        let bytes = struct_bytes(number);
        assert_eq!(argument.len(), bytes, "the struct of ioctl {number:#x}");
        // SAFETY: the function accesses as many bytes as its number says, which `argument` has, and
        // they hold no addresses by the trait's contract.
        unsafe { os::node::call(&self.file, number, argument.as_mut_ptr()) }
    }

    fn ioctl_linked(&self, number: u32, bytes: &mut [u8], links: &[Link]) -> io::Result<()> {
        let least = struct_bytes(number);
        assert!(bytes.len() >= least, "the struct of ioctl {number:#x}");
        for link in links {
            link.write(bytes);
        }
        // SAFETY: the function accesses as many bytes as its number says, which `bytes` has, and
        // the memory at their addresses, which is inside of `bytes` by the trait's contract.
        unsafe { os::node::call(&self.file, number, bytes.as_mut_ptr()) }
    }

    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw> {
        MmapOptions::new()
            .offset(offset)
            .len(bytes)
            .map_raw(&self.file)
    }
}

fn open(path: &Path) -> io::Result<File> {
    os::files::at_once(File::options().read(true).write(true)).open(path)
}

/// Returns the driver's name; an empty one if the file is not a DRM node.
fn driver(file: &File) -> io::Result<String> {
    let mut name = [0u8; 32];
    // Three numbers of 32 bits and padding; then length and address of name, date and description.
    let mut version = [0u64; 8];
    version[2] = name.len() as u64;
    version[3] = name.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the struct of this function, which is alive, as is the place for the name that it
    // gives with its length.
    match unsafe { os::node::call(file, DRM_VERSION, version.as_mut_ptr().cast()) } {
        Ok(()) => {}
        Err(error) if os::node::is_unknown_call(&error) => return Ok(String::new()),
        Err(error) => return Err(error),
    }
    // The driver returns the full length, and fills the buffer as far as it goes.
    let bytes = usize::try_from(version[2]).unwrap_or(0).min(name.len());
    Ok(String::from_utf8_lossy(&name[..bytes]).into_owned())
}

/// Memory that drivers share by descriptors.
pub mod dma_buf {
    use super::*;

    /// The access reads.
    pub const READ: u64 = 1;
    /// The access writes.
    pub const WRITE: u64 = 2;
    /// The access ends; without this it begins.
    pub const END: u64 = 4;

    /// Numbers of functions, and the heap's node.
    // SOURCE: DMA_BUF_IOCTL_SYNC, include/uapi/linux/dma-buf.h; DMA_HEAP_IOCTL_ALLOC,
    // include/uapi/linux/dma-heap.h of Linux.
    const SYNC: u32 = 0x4008_6200;
    const ALLOC: u32 = 0xc018_4800;
    const HEAP: &str = "/dev/dma_heap/system";

    pub(super) fn sync(buffer: &Descriptor, flags: u64) -> io::Result<()> {
        let mut argument = flags.to_ne_bytes();
        // SAFETY: the function's struct is these eight bytes.
        unsafe { os::node::call_buffer(buffer, SYNC, argument.as_mut_ptr()) }
    }

    pub(super) fn allocate(bytes: usize) -> io::Result<Descriptor> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{HEAP}: {error}"));
        let heap = open(Path::new(HEAP)).map_err(named)?;
        // Length; descriptor and its flags; flags of the heap.
        let mut argument = [bytes as u64, u64::from(os::node::READ_WRITE) << 32, 0];
        // SAFETY: the function's struct is these 24 bytes.
        unsafe { os::node::call(&heap, ALLOC, argument.as_mut_ptr().cast()) }.map_err(named)?;
        let [b0, b1, b2, b3, ..] = argument[1].to_ne_bytes();
        let descriptor = i32::from_ne_bytes([b0, b1, b2, b3]);
        // SAFETY: the heap made this descriptor for the caller, who owns it alone.
        Ok(unsafe { Descriptor::adopt(descriptor) })
    }
}
