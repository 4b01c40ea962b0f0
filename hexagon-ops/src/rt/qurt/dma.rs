//! The DMA engine of the calling hardware thread. The copies of a step are a chain of descriptors
//! (`rt/descriptor.rs`): the first is started, and each further one is linked to the one before it,
//! so that the engine copies while the rest of the chain is built.
//!
//! SOURCE: llama.cpp ggml-hexagon htp/dma-queue.h at ggml 0.26.0 links descriptors by `dmlink`
//! after a `release` of each, and regards one as done when its bit is set; QEMU
//! target/hexagon/dma.c: `dmlink` starts an engine that is idle, and does nothing after an error.
//! Not run on a device.

use core::arch::asm;
use core::mem::MaybeUninit;

use crate::rt::descriptor::{LINEAR_WORDS, RowFields, WORDS, linear_words};
use crate::rt::{CopyRows, CopyShape};

/// Most descriptors of a chain. Further copies are made by loads and stores.
const MAX_DESCRIPTORS: usize = 4;
/// Word of a descriptor that the engine changes, and the bit that it sets there.
const CONTROL: usize = 1;
const DONE: u32 = 1 << 31;
/// Number of the last bit of a word.
const LAST: usize = 31;
/// Bits of the engine's status that show its activity, and their value while it copies.
const STATUS: u32 = 3;
const RUNNING: u32 = 1;
/// Polls of an engine until it counts as stuck. With the pause after it a poll lasts 20 to 80
/// cycles, so this many last 56 to 220 ms at 1.5 GHz. The longest copy, 16 MiB, lasts 16 ms at 1
/// GB/s.
const MAX_POLLS: u32 = 1 << 22;

/// A descriptor, at a multiple of its length.
#[repr(C, align(32))]
struct Descriptor([u32; WORDS]);

/// Descriptors of a chain, in cache lines that hold nothing else.
#[repr(C, align(128))]
pub struct Chain {
    descriptors: [MaybeUninit<Descriptor>; MAX_DESCRIPTORS],
    /// Number of those that were started.
    count: usize,
    /// Bit i is set if copy i has bytes but no descriptor; the last bit covers all later copies.
    left_out: u32,
}

impl Chain {
    /// Returns a chain without descriptors.
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            descriptors: [const { MaybeUninit::uninit() }; MAX_DESCRIPTORS],
            count: 0,
            left_out: 0,
        }
    }

    /// Starts copying and returns. Copies that have no descriptor are left out.
    ///
    /// # Safety
    /// - Until [`Self::wait`] has returned, this value does not move and nothing else uses the two
    ///   sides of `copies`.
    /// - No other descriptor of this hardware thread is running.
    /// - The chain is new.
    #[inline(always)]
    pub unsafe fn start(&mut self, copies: &mut [CopyRows<'_>]) {
        let mut tail = core::ptr::null_mut::<Descriptor>();
        let mut free = self.descriptors.iter_mut();
        for (number, copy) in copies.iter_mut().enumerate() {
            if copy.shape.bytes() == 0 {
                continue;
            }
            // The engine receives both addresses, and writes through the second.
            let from = copy.from.as_ptr().expose_provenance();
            let to = copy.to.as_mut_ptr().expose_provenance();
            let written = match ([from, to].map(u32::try_from), free.next()) {
                ([Ok(from), Ok(to)], Some(descriptor)) => {
                    write(descriptor, &copy.shape, [from, to])
                }
                _ => None,
            };
            let Some(descriptor) = written else {
                self.left_out |= 1 << number.min(LAST);
                continue;
            };
            // SAFETY: orders the writes of the descriptor before the engine's reads; touches
            // nothing else.
            unsafe { asm!("release({0}):at", in(reg) descriptor, options(nostack)) };
            // Assembly, because the nightly's intrinsics for the engine have wrong signatures.
            if tail.is_null() {
                // SAFETY: the descriptor is complete, and the caller keeps it and both sides
                // untouched.
                unsafe { asm!("dmstart({0})", in(reg) descriptor, options(nostack)) };
            } else {
                // SAFETY: as above; `tail` is the last descriptor of the chain that was started.
                unsafe {
                    asm!("dmlink({0},{1})", in(reg) tail, in(reg) descriptor, options(nostack))
                };
            }
            tail = descriptor;
            self.count += 1;
        }
    }

    /// Leaves out all copies.
    #[inline(always)]
    pub const fn leave_out_all(&mut self) {
        self.left_out = u32::MAX;
    }

    /// Returns `true` if the engine may leave copy `number` out.
    pub fn leaves_out(&self, number: usize) -> bool {
        self.left_out >> number.min(LAST) & 1 == 1
    }

    /// Returns `true` if the engine makes all copies.
    #[inline(always)]
    pub const fn is_complete(&self) -> bool {
        self.left_out == 0
    }

    /// Waits until the engine has finished or is stuck; neither side of any copy is in use then.
    #[inline(always)]
    pub fn wait(&mut self) -> Waited {
        if self.count == 0 {
            return Waited::Done;
        }
        self.wait_for_engine()
    }

    /// Waits for the engine, for a chain that was started.
    #[inline(never)]
    fn wait_for_engine(&mut self) -> Waited {
        #[cfg(feature = "copies")]
        for descriptor in &mut self.descriptors[..self.count] {
            // SAFETY: a descriptor that `start` has written; nothing else uses its two sides.
            unsafe { npu_copy(descriptor.as_mut_ptr().cast()) };
        }
        // Polls instead of `dmwait`, which sleeps until the engine has finished, and would sleep
        // forever if it never does.
        for _ in 0..MAX_POLLS {
            let status: u32;
            // SAFETY: reads the status of this thread's engine.
            unsafe { asm!("{0} = dmpoll", out(reg) status, options(nostack)) };
            // The status was read before the descriptors' bits: an idle engine has set them by now.
            if self.is_done() {
                return Waited::Done;
            }
            if status & STATUS != RUNNING {
                return Waited::Failed;
            }
            // SAFETY: gives the issue slots of this hardware thread to the others for a few cycles.
            unsafe { asm!("pause(#64)", options(nomem, nostack)) };
        }
        // SAFETY: stops this thread's engine, so that it no longer writes to memory.
        unsafe { asm!("{0} = dmpause", out(reg) _, options(nostack)) };
        Waited::Stuck
    }

    /// Returns `true` if the engine has reported all copies done.
    #[inline(always)]
    fn is_done(&mut self) -> bool {
        self.descriptors[..self.count].iter_mut().all(|descriptor| {
            let words = descriptor.as_mut_ptr().cast::<[u32; LINEAR_WORDS]>();
            // SAFETY: `start` has written these words of the descriptor.
            let control = unsafe { &raw mut (*words)[CONTROL] };
            // SAFETY: the word is initialized; volatile, since the engine writes it.
            let control = unsafe { control.read_volatile() };
            control & DONE != 0
        })
    }
}

#[cfg(feature = "copies")]
unsafe extern "C" {
    /// Makes the copy of a descriptor, which has four or eight words, and sets the bit that reports
    /// its end.
    fn npu_copy(descriptor: *mut u32);
}

/// Writes the words of a descriptor, and returns its address; `None` if there is no descriptor for
/// the copy.
#[inline(always)]
fn write(
    descriptor: &mut MaybeUninit<Descriptor>,
    shape: &CopyShape,
    places: [u32; 2],
) -> Option<*mut Descriptor> {
    let descriptor = descriptor.as_mut_ptr();
    if let Some(words) = linear_words(shape, places) {
        let first = descriptor.cast::<[u32; LINEAR_WORDS]>();
        // SAFETY: the first words of a descriptor; volatile, since the DMA engine reads
        // these words from memory.
        unsafe { first.write_volatile(words) };
        return Some(descriptor);
    }
    let words = RowFields::NATIVE.words(shape, places)?;
    // SAFETY: the pointer comes from a reference; volatile as above.
    unsafe { descriptor.write_volatile(Descriptor(words)) };
    Some(descriptor)
}

/// The end of a wait for the engine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// All copies are done.
    Done,
    /// The engine refused or gave up a copy.
    Failed,
    /// The engine was still copying after [`MAX_POLLS`], and was stopped.
    Stuck,
}
