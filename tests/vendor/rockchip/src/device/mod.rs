//! The device: one core of an RK3588's NPU, as far as matrix products need it.
//!
//! A program is a stream of 64-bit words, each of which writes a register of one unit: `target <<
//! 48 | value << 16 | offset`. The program counter (PC) reads it; its last words name the next
//! stream and start the units. Then the units compute one convolution with a kernel of 1 × 1, as
//! their registers specify: a product of matrices.
//!
//! ```text
//! memory --features, weights--> CNA --> CORE (multiply, add) --> DPU --results--> memory
//! ```
//!
//! It computes everything that registers can specify; boards compute less. A caller may let it
//! refuse products that no board is known to compute ([`proven`]).
//!
//! Three things end the job with the register's name: a register that is not in
//! [`register::KNOWN`], a value that specifies anything but such a product, and a register that
//! matters but was not written.
//!
//! SOURCE: src/gallium/drivers/rocket/{registers.xml,rkt_regcmd.c,rkt_task.c} of Mesa 25.3 (MIT).

mod arithmetic;
mod product;
mod proven;
mod register;

use self::product::Product;
use self::register::{Registers, Target};

/// The value that the driver reads from the registers VERSION and VERSION_NUM.
// SOURCE: the value that the driver `rocket` of Linux prints for an RK3588's core.
pub const HARDWARE_VERSION: u32 = 0x4649_5245;

/// Words that end each stream, which a task's length does not count.
// SOURCE: RKNPU_PC_DATA_EXTRA_AMOUNT, drivers/rknpu/include/rknpu_ioctl.h of Rockchip's kernel.
pub const TAIL_WORDS: u32 = 4;

/// Memory by its device address.
pub trait Memory {
    /// Fills `bytes` with memory starting at `address`.
    ///
    /// # Errors
    /// `Address` if any of it is not memory.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Writes `bytes` to memory starting at `address`.
    ///
    /// # Errors
    /// `Address` if any of it is not memory.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error>;
}

/// Why a job ends without a result.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the device reaches {bytes} bytes at {address:#x}, where no memory is")]
    Address { address: u64, bytes: usize },
    #[error("word {word:#018x} writes to target {target:#x}, which is unknown")]
    Target { word: u64, target: u16 },
    #[error("{target:?} has no known register at {offset:#06x} (value {value:#x})")]
    Register {
        target: Target,
        offset: u16,
        value: u32,
    },
    #[error("{name} = {value:#x}: {expected} is all that is emulated")]
    Value {
        name: &'static str,
        value: u32,
        expected: &'static str,
    },
    #[error("{name} has an influence, but was not written")]
    Unwritten { name: &'static str },
    #[error("{0}")]
    Shape(String),
    #[error("outside of the proven envelope: {0}")]
    Unproven(String),
    #[error("a stream names {stream:x?} as the next one, the list of tasks has {listed:x?}")]
    Chain { stream: Program, listed: Program },
    #[error("the streams end after {done} of {tasks} tasks")]
    Stopped { done: u64, tasks: u32 },
}

/// A stream of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Device address of the first word.
    pub address: u64,
    /// Words before the [`TAIL_WORDS`].
    pub words: u32,
}

/// Which products a device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Computes {
    /// All products that registers can specify.
    #[default]
    All,
    /// Only those of kinds that boards are known to compute.
    Proven,
}

/// Runs one stream to the end; returns the stream that it names as the next one.
///
/// # Errors
/// A value that the device does not know, memory that does not exist, or a product that it does not
/// compute.
pub fn run(
    memory: &impl Memory,
    program: Program,
    computes: Computes,
) -> Result<Option<Program>, Error> {
    let words = program.words.saturating_add(TAIL_WORDS) as usize;
    let mut bytes = vec![0; words * 8];
    memory.read(program.address, &mut bytes)?;
    let mut registers = Registers::default();
    for word in bytes.as_chunks::<8>().0 {
        registers.write(u64::from_le_bytes(*word))?;
    }
    let product = Product::new(&registers)?;
    if computes == Computes::Proven {
        proven::check(&registers, &product)?;
    }
    product.run(memory)?;
    Ok(registers.next())
}

#[cfg(test)]
mod tests;
