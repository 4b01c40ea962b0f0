//! librknnrt, or a replacement with its functions: contexts, memory and runs as Rust values. Every
//! return code is checked here, and nowhere else.
//!
//! Ownership: a [`Context`] or [`Memory`] keeps the library open, a [`Memory`] keeps the context it
//! was made with, a [`MemoryView`] keeps the memory that it shows. A context binds memory in
//! [`Context::bind`], and only operands that changed since the last time; [`Context::run`] gets the
//! same operands again, so it can never run on freed memory.
//!
//! Every call is in a turn ([`Rknn::turn`]): the caller's, or one for the call alone. One thread of
//! one process has it. Only runs may be in several threads: the thread that has the turn lends it
//! to them.
#![expect(unsafe_code, reason = "calls into the vendor's library")]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rknpu_ops::direct::{self, node::Node, question::Answer};
use rknpu_ops::ffi::{self, Api, CoreMask, IoAttr, MatmulCtx, MatmulInfo, SdkVersion, TensorAttr};
use rknpu_ops::layout::MatmulLayout;
use rknpu_ops::sim;

use crate::driver::loader;
use crate::error::{Error, Result};
use crate::rockchip::caps;

use self::lock::Nodes;
use self::memory::TensorMemory;
pub use self::memory::{Memory, MemoryView};
pub use self::turn::Turn;
use self::turn::{Leftover, Turns};

pub mod lock;
mod memory;
pub mod neighbour;
pub mod process;
mod traced;
mod turn;

/// Owner of the functions in the table.
#[derive(Debug)]
enum Provider {
    Library(
        #[expect(dead_code, reason = "held for its Drop: the functions live in it")]
        libloading::Library,
    ),
    StandIn(sim::Machine),
    Direct(direct::Machine),
}

/// The library's functions: loaded, simulated, or our own over the kernel's driver.
#[derive(Debug)]
pub struct Rknn {
    api: Api,
    turns: Turns,
    /// The longest wait for the turn.
    patience: Duration,
    /// Objects of the library that are freed with the next turn, in this order.
    leftovers: Mutex<Vec<Leftover>>,
    provider: Provider,
}

impl Rknn {
    /// Loads the vendor's library: `path`, or `librknnrt.so` wherever the system's loader finds it.
    ///
    /// # Errors
    /// `Library` if it, or one of its functions, is not there.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>> {
        let name = path.map_or_else(|| PathBuf::from("librknnrt.so"), Path::to_path_buf);
        let library = loader::open(&name)?;
        // SAFETY: a symbol of librknnrt has the type that its name has in the vendor's headers
        // (SOURCE: `ffi`), and stays valid because `library` is stored together with the table.
        let api = unsafe { Api::from_symbols(|symbol| loader::address(&library, &name, symbol)) }?;
        Ok(Arc::new(Self {
            api: traced::traced(api),
            turns: Turns::new(Nodes::Machine),
            patience: lock::PATIENCE,
            leftovers: Mutex::default(),
            provider: Provider::Library(library),
        }))
    }

    /// Opens the NPU at a node of the kernel's driver, to drive it by our own command streams.
    ///
    /// - `nodes`: those by which processes share the NPU
    ///
    /// # Errors
    /// `Direct` with the feature that the driver lacks.
    pub fn direct(node: Box<dyn Node>, nodes: Nodes) -> Result<Arc<Self>> {
        let machine = direct::start(node).map_err(|error| Error::Direct {
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self {
            api: traced::traced(machine.api()),
            turns: Turns::new(nodes),
            patience: lock::PATIENCE,
            leftovers: Mutex::default(),
            provider: Provider::Direct(machine),
        }))
    }

    /// Starts the built-in stand-in.
    ///
    /// # Errors
    /// `StandIn` if too many stand-ins run in this process.
    pub fn simulate(options: sim::Options) -> Result<Arc<Self>> {
        Self::simulate_with(options, lock::PATIENCE)
    }

    /// As [`Self::simulate`], with another limit for waits for the turn.
    ///
    /// # Errors
    /// As for [`Self::simulate`].
    pub fn simulate_with(options: sim::Options, patience: Duration) -> Result<Arc<Self>> {
        let nodes = (options.node.clone()).map_or(Nodes::Private, Nodes::File);
        let machine = sim::start(options).map_err(|error| Error::StandIn {
            library: "librknnrt",
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self {
            api: traced::traced(machine.api()),
            turns: Turns::new(nodes),
            patience,
            leftovers: Mutex::default(),
            provider: Provider::StandIn(machine),
        }))
    }

    /// Calls the library while no other thread does, and while nothing runs, here or in another
    /// process.
    ///
    /// SOURCE: airockchip/rknn-toolkit2 issue 533 (2.3.2, driver 0.9.6): memory that one thread
    /// makes or frees while another one runs ends in failed submissions, lockups and kernel panics.
    /// In rk-llama.cpp, too, only runs overlap.
    ///
    /// # Errors
    /// As for [`Self::turn`].
    fn alone<T>(&self, call: impl FnOnce(&Api) -> T) -> Result<T> {
        let _turn = self.turn()?;
        Ok(call(&self.api))
    }

    /// Returns the stand-in, if this is one.
    #[must_use]
    pub fn stand_in(&self) -> Option<&sim::Machine> {
        match &self.provider {
            Provider::StandIn(machine) => Some(machine),
            Provider::Library(_) | Provider::Direct(_) => None,
        }
    }

    /// Asks the NPU the questions about command streams that public sources leave open, if no
    /// library of the vendor's is involved. To be called in a turn.
    ///
    /// # Errors
    /// The driver's, in words, if it has no memory.
    #[must_use]
    pub fn direct_answers(&self) -> Option<Result<Vec<Answer>>> {
        let Provider::Direct(machine) = &self.provider else {
            return None;
        };
        Some(machine.answers().map_err(|error| Error::Direct {
            reason: error.to_string(),
        }))
    }

    /// Returns the number of address spaces, if no library of the vendor's is involved.
    #[must_use]
    pub fn direct_spaces(&self) -> Option<usize> {
        match &self.provider {
            Provider::Direct(machine) => Some(machine.spaces()),
            Provider::Library(_) | Provider::StandIn(_) => None,
        }
    }
}

/// If a run fails after this time, the driver's time-out has ended it.
// SOURCE: runs take microseconds to milliseconds; the driver's time-outs are seconds (rknpu_job.c,
// driver 0.9.8).
const TIMED_OUT: Duration = Duration::from_secs(1);

fn check(call: &'static str, code: i32, what: impl FnOnce() -> String) -> Result<()> {
    if code == ffi::code::SUCC {
        return Ok(());
    }
    Err(Error::Vendor {
        call,
        code,
        name: ffi::error_name(code),
        what: what(),
    })
}

/// As [`check`], for calls that need memory: before anything `ran`, the general error code may mean
/// a lack of memory, and the device can still be used.
fn check_with_room(
    call: &'static str,
    code: i32,
    ran: bool,
    what: impl FnOnce() -> String,
) -> Result<()> {
    if ran || code != ffi::code::FAIL {
        return check(call, code, what);
    }
    Err(Error::MaybeShortage {
        call,
        code,
        name: ffi::error_name(code),
        what: what(),
    })
}

/// One multiplication of a fixed shape on one core.
#[derive(Debug)]
pub struct Context {
    rknn: Arc<Rknn>,
    handle: MatmulCtx,
    info: MatmulInfo,
    attr: Box<IoAttr>,
    /// Identities of the memory that A, B and C are bound to; 0 for none.
    bound: [u64; 3],
    /// `true` if the context has run.
    ran: bool,
}

/// Operands and result of one run, in the native layouts of the context's shape.
#[derive(Debug)]
pub struct RunOperands<'a> {
    /// Activations.
    pub a: &'a Memory,
    /// Weights.
    pub b: &'a MemoryView,
    /// Result.
    pub c: &'a mut Memory,
}

impl RunOperands<'_> {
    fn memories(&self) -> [&TensorMemory; 3] {
        [&self.a.0, &self.b.memory, &self.c.0]
    }
}

impl Context {
    /// Creates a context for `info` on the core of `mask`.
    ///
    /// # Errors
    /// `Vendor` with the shape in it, or `OutOfDescriptors`.
    pub fn new(rknn: &Arc<Rknn>, mut info: MatmulInfo, mask: Option<CoreMask>) -> Result<Self> {
        let mut handle: MatmulCtx = 0;
        let mut attr = Box::new(IoAttr::ZERO);
        let code = rknn.alone(|api| {
            // SAFETY: three valid pointers to structs of the vendor's layout (asserted in `ffi`),
            // alive during the call.
            unsafe { (api.matmul_create)(&raw mut handle, &raw mut info, &raw mut *attr) }
        })?;
        let call = "rknn_matmul_create";
        check_with_room(call, code, false, || describe(&info)).map_err(|error| {
            // The library may return any code when file descriptors run out, so the remaining ones
            // are counted.
            let reached = process::file_limit_reached(process::DESCRIPTORS_PER_CONTEXT);
            reached.map_or(error, |limit| Error::OutOfDescriptors {
                call,
                what: format!("context for {}", describe(&info)),
                limit,
            })
        })?;
        let context = Self {
            rknn: Arc::clone(rknn),
            handle,
            info,
            attr,
            bound: [0; 3],
            ran: false,
        };
        if let Some(mask) = mask {
            // SAFETY: the handle is that of a live context.
            let code = rknn.alone(|api| unsafe { (api.matmul_set_core_mask)(handle, mask) })?;
            check("rknn_matmul_set_core_mask", code, || describe(&info))?;
        }
        Ok(context)
    }

    /// Compares the operands that the library described when it created the context with those of
    /// `native`.
    ///
    /// # Errors
    /// `Geometry` with both for the first one that differs in dimensions or size.
    pub fn expect(&self, native: &MatmulLayout) -> Result<()> {
        let size = |value: i32| usize::try_from(value).unwrap_or(0);
        let [m, k, n] = [self.info.m, self.info.k, self.info.n].map(size);
        let (a, b, c) = (native.a, native.b, native.c);
        let operands: [(&str, &TensorAttr, &[usize], usize); 3] = [
            ("A", &self.attr.a, &a.dims(m, k), a.bytes(m, k)),
            ("B", &self.attr.b, &b.dims(k, n), b.bytes(k, n)),
            ("C", &self.attr.c, &c.dims(m, n), c.bytes(m, n)),
        ];
        for (name, attr, want, bytes) in operands {
            let have = dims(attr);
            if have != want || size_of_attr(attr) != bytes {
                return Err(Error::Geometry {
                    call: "rknn_matmul_create",
                    what: format!("{name} of {}", describe(&self.info)),
                    have: format!("{have:?}, {} bytes", attr.size),
                    want: format!("{want:?}, {bytes} bytes"),
                });
            }
        }
        Ok(())
    }

    /// Returns the columns and elements of K of a tile of native B, as the library described them.
    #[must_use]
    pub fn tile_of_b(&self) -> Option<(usize, usize)> {
        match dims(&self.attr.b)[..] {
            [_, _, gn, gk] => Some((gn, gk)),
            _ => None,
        }
    }

    /// Returns the context's I/O address space.
    #[must_use]
    pub fn domain(&self) -> i32 {
        self.info.iommu_domain_id
    }

    /// Returns the versions of the library and of the kernel's driver, as the library reports them.
    ///
    /// # Errors
    /// `Vendor`.
    pub fn versions(&self) -> Result<(String, String)> {
        let mut version = SdkVersion {
            api_version: [0; 256],
            drv_version: [0; 256],
        };
        let bytes = size_of::<SdkVersion>();
        let to = (&raw mut version).cast::<c_void>();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let code = self.rknn.alone(|api| {
            // SAFETY: this query fills this struct, and the size given is the struct's.
            unsafe { (api.query)(self.handle, ffi::QUERY_SDK_VERSION, to, bytes) }
        })?;
        check("rknn_query", code, || "the library's version".into())?;
        Ok((text(&version.api_version), text(&version.drv_version)))
    }

    /// Computes C from A and B, which it binds.
    ///
    /// # Errors
    /// `Busy`, or as for [`Self::bind`] and [`Self::run`].
    pub fn bind_and_run(&mut self, mut operands: RunOperands) -> Result<()> {
        let rknn = Arc::clone(&self.rknn);
        let turn = rknn.turn()?;
        self.bind(&operands)?;
        self.run(&turn, &mut operands)
    }

    /// Binds the operands of the next run.
    ///
    /// # Errors
    /// `Vendor` or `MaybeShortage` with the shape in it.
    pub fn bind(&mut self, operands: &RunOperands) -> Result<()> {
        for (index, memory) in operands.memories().into_iter().enumerate() {
            if self.bound[index] != memory.identity {
                self.bind_one(index, memory)?;
            }
        }
        Ok(())
    }

    /// Computes C from A and B, in a turn of this thread, or of the thread that waits for it.
    ///
    /// # Errors
    /// `Vendor` with the shape in it.
    ///
    /// # Panics
    /// If these operands are not those of the last [`Self::bind`].
    pub fn run(&mut self, _turn: &Turn, operands: &mut RunOperands) -> Result<()> {
        let identities = operands.memories().map(|memory| memory.identity);
        assert_eq!(self.bound, identities, "other memory than what was bound");
        self.ran = true;
        let begun = Instant::now();
        // SAFETY: the handle is that of a live context, whose operands live during the call, and C
        // is borrowed exclusively.
        let code = unsafe { (self.rknn.api.matmul_run)(self.handle) };
        let is_late = code != ffi::code::SUCC && begun.elapsed() > TIMED_OUT;
        // Linux's own driver has several address spaces and resets one core; the vendor's driver
        // has one and resets all.
        let resets_all = self.rknn.direct_spaces().unwrap_or(1) == 1;
        if (code == ffi::code::TIMEOUT || is_late) && resets_all {
            log::warn!(
                "the NPU did not finish {}: the kernel's driver resets all cores then, and what other programs run on \
                 them fails, too",
                describe(&self.info)
            );
        }
        check("rknn_matmul_run", code, || describe(&self.info))
    }

    fn bind_one(&mut self, index: usize, memory: &TensorMemory) -> Result<()> {
        self.bound[index] = 0;
        let attr: &mut TensorAttr = match index {
            0 => &mut self.attr.a,
            1 => &mut self.attr.b,
            _ => &mut self.attr.c,
        };
        let code = self.rknn.alone(|api| {
            // SAFETY: a live context, a live rknn_tensor_mem (`Memory`), and the attribute that the
            // context itself gave.
            unsafe { (api.matmul_set_io_mem)(self.handle, memory.raw, attr) }
        })?;
        check_with_room("rknn_matmul_set_io_mem", code, self.ran, || {
            format!(
                "operand {} of {}",
                ["A", "B", "C"][index],
                describe(&self.info)
            )
        })?;
        self.bound[index] = memory.identity;
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.rknn.free(Leftover::Context(self.handle, self.info));
    }
}

/// Returns the dimensions that an attribute has; none if it claims more than there is room for.
fn dims(attr: &TensorAttr) -> Vec<usize> {
    // CAST: usize has at least 32 bits.
    let used = attr.dims.get(..attr.n_dims as usize).unwrap_or(&[]);
    used.iter().map(|dim| *dim as usize).collect()
}

fn size_of_attr(attr: &TensorAttr) -> usize {
    // CAST: usize has at least 32 bits.
    attr.size as usize
}

fn describe(info: &MatmulInfo) -> String {
    format!(
        "M={} K={} N={}, matmul type {}",
        info.m, info.k, info.n, info.matmul_type.0
    )
}

fn text(bytes: &[std::ffi::c_char; 256]) -> String {
    let bytes: &[u8] = bytemuck::cast_slice(bytes);
    CStr::from_bytes_until_nul(bytes).map_or_else(
        |_| String::new(),
        |text| text.to_string_lossy().into_owned(),
    )
}

/// Returns the first three numbers of a version text; 0 where there is none.
#[must_use]
pub fn version(text: &str) -> (u32, u32, u32) {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

/// Refuses a library that is too old.
///
/// # Errors
/// `Version`, also if the text is not a version.
pub fn check_version(text: &str) -> Result<()> {
    let (oldest, have) = (caps::MIN_RKNNRT, version(text));
    if have >= oldest {
        return Ok(());
    }
    Err(Error::Version {
        library: "librknnrt",
        have: text.into(),
        want: format!("{}.{}.{}", oldest.0, oldest.1, oldest.2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(check_version("2.3.2 (429f97ae6b@2025-04-09T09:09:27)").is_ok());
        assert!(check_version("2.10.0").is_ok());
        assert!(check_version("3.0.0b1").is_ok());
        for old in ["2.2.0 (x@2024)", "1.6.0", "", "unknown"] {
            let text = check_version(old).unwrap_err().to_string();
            assert!(text.contains(old) && text.contains("2.3.0"), "{text}");
        }
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = Rknn::load(Some(Path::new("/nonexistent/librknnrt.so")))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nonexistent/librknnrt.so") && error.contains("No such file"),
            "{error}"
        );
    }
}
