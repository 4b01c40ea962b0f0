//! The node of a kernel driver: its calls, without their meaning.
#![expect(unsafe_code, reason = "ioctl is a system call with a pointer")]

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};

/// An open node.
pub trait Node: Debug + Send + Sync {
    /// Calls the function `number` with its struct, which has as many bytes as the number says and holds no addresses
    /// of this process.
    ///
    /// # Errors
    /// The driver's error.
    fn ioctl(&self, number: u32, argument: &mut [u8]) -> io::Result<()>;

    /// Maps an object of the driver, by the offset that the driver gave for it.
    ///
    /// # Errors
    /// The system's error.
    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw>;
}

/// The number of DRM's function that gives the driver's name.
// SOURCE: DRM_IOCTL_VERSION, include/uapi/drm/drm.h of Linux, on machines of 64 bits.
const DRM_VERSION: u32 = 0xc040_6400;

/// The first of DRM's names for nodes and for nodes without a display, and how many of each are looked for.
const KINDS: [(&str, usize); 2] = [("renderD", 128), ("card", 0)];
const NODES_OF_A_KIND: usize = 16;

/// A node of this machine.
#[derive(Debug)]
pub struct DeviceNode {
    file: File,
    path: PathBuf,
}

impl DeviceNode {
    /// Opens the first node of a DRM driver with this name, whatever the node's number is.
    ///
    /// # Errors
    /// `NotFound` if no node has it, or the first error of a node that could not be opened.
    pub fn find(driver: &str) -> io::Result<Self> {
        let mut refused = None;
        for (kind, first) in KINDS {
            for number in first..first + NODES_OF_A_KIND {
                let path = PathBuf::from(format!("/dev/dri/{kind}{number}"));
                let named = |node: Self| Ok((node.driver()?, node));
                match Self::open(&path).and_then(named) {
                    Ok((name, node)) if name == driver => return Ok(node),
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => {
                        let text = format!("{}: {error}", path.display());
                        refused = refused.or(Some(io::Error::new(error.kind(), text)));
                    }
                }
            }
        }
        Err(refused.unwrap_or_else(|| {
            let text = format!("no node in /dev/dri has the driver {driver}");
            io::Error::new(ErrorKind::NotFound, text)
        }))
    }

    fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(path)?;
        Ok(Self {
            file,
            path: path.into(),
        })
    }

    /// Returns the node's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the driver's name; an empty one for a file that is no DRM node.
    fn driver(&self) -> io::Result<String> {
        let mut name = [0u8; 32];
        // Three numbers and a pad of 32 bits; then length and address of name, date and description.
        let mut version = [0u64; 8];
        version[2] = name.len() as u64;
        version[3] = name.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the struct of this function, which is alive, as is the place for the name that it gives with its length.
        match unsafe { call(&self.file, DRM_VERSION, version.as_mut_ptr().cast()) } {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return Ok(String::new()),
            Err(error) => return Err(error),
        }
        // The driver gives the whole length, and fills what there is room for.
        let bytes = usize::try_from(version[2]).unwrap_or(0).min(name.len());
        Ok(String::from_utf8_lossy(&name[..bytes]).into_owned())
    }
}

impl Node for DeviceNode {
    fn ioctl(&self, number: u32, argument: &mut [u8]) -> io::Result<()> {
        // SOURCE: _IOC of asm-generic/ioctl.h: 14 bits of size from bit 16 on.
        let bytes = (number >> 16 & 0x3fff) as usize;
        assert_eq!(argument.len(), bytes, "the struct of ioctl {number:#x}");
        // SAFETY: the function accesses as many bytes as its number says, which `argument` has, and they hold no
        // addresses by the trait's contract.
        unsafe { call(&self.file, number, argument.as_mut_ptr()) }
    }

    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw> {
        MmapOptions::new()
            .offset(offset)
            .len(bytes)
            .map_raw(&self.file)
    }
}

/// Calls a function, again if a signal interrupted it.
///
/// # Safety
/// - `argument` is the function's struct, and addresses in it are valid.
unsafe fn call(file: &File, number: u32, argument: *mut u8) -> io::Result<()> {
    loop {
        // The C libraries disagree about the type of the number.
        let request = number as _;
        // SAFETY: passed on to the caller; the descriptor is open.
        if unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
