//! I/O address spaces: weights fill them one after another.
//!
//! An address of the NPU has 32 bits, but one space is used for 2 GiB, the cap of rk-llama.cpp, and
//! the driver offers 16. Without librknnrt a space has 4 GiB: the vendor's kernel has one, and
//! Linux's one for each open file. Only one is attached at a time, and a switch waits for all
//! cores: so a space is filled before the next one is begun, and llama.cpp allocates buffers layer
//! by layer, which keeps the weights of a layer together.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rknpu_ops::ffi::MatmulInfo;

use crate::error::{Error, Result};
use crate::host_memory::system_memory;
use crate::rockchip::caps;
use crate::rockchip::caps::Precision;
use crate::rockchip::device::NAME;
use crate::rockchip::driver::{Context, Memory, Rknn, Turn};

/// All address spaces of the device.
#[derive(Debug)]
pub(super) struct Domains {
    rknn: Arc<Rknn>,
    /// The address spaces in use so far, in order. A thread that has locked this has the turn, or
    /// does not wait for it.
    begun: Mutex<Vec<BegunDomain>>,
    limit: AtomicUsize,
    /// Bytes of weights that one space holds.
    weight_bytes: usize,
    /// The log has the line about lost addresses.
    told_of_lost: AtomicBool,
}

/// An address space that holds weights.
#[derive(Debug)]
struct BegunDomain {
    /// Owns the address space; never runs.
    anchor: Arc<Context>,
    used_bytes: Arc<AtomicUsize>,
}

/// A share of a domain, released on drop.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) anchor: Arc<Context>,
    used_bytes: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Domains {
    /// Begins the first address space, which every driver has.
    pub(super) fn new(rknn: &Arc<Rknn>) -> Result<Self> {
        let first = begin(rknn, 0)?;
        Ok(Self {
            rknn: Arc::clone(rknn),
            begun: Mutex::new(vec![first]),
            limit: AtomicUsize::new(caps::IO_DOMAINS),
            weight_bytes: if rknn.direct_spaces().is_some() {
                caps::DIRECT_WEIGHT_BYTES
            } else {
                caps::DOMAIN_WEIGHT_BYTES
            },
            told_of_lost: AtomicBool::new(false),
        })
    }

    /// Returns the context that owns the first address space.
    ///
    /// # Panics
    /// If [`Self::release_idle`] was called and nothing was allocated since.
    pub(super) fn first_anchor(&self) -> Arc<Context> {
        Arc::clone(&self.lock()[0].anchor)
    }

    /// Returns the context that owns the first address space, begun if none is.
    ///
    /// # Errors
    /// As for contexts.
    pub(super) fn anchor(&self) -> Result<Arc<Context>> {
        let mut begun = self.lock();
        if begun.is_empty() {
            begun.push(begin(&self.rknn, 0)?);
        }
        Ok(Arc::clone(&begun[0].anchor))
    }

    /// Uses at most `limit` address spaces.
    pub(super) fn limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Ends all address spaces and releases the place at the NPU, if nothing of it is in use.
    pub(super) fn release_idle(&self, turn: &Turn) {
        let mut begun = self.lock();
        if begun.iter().all(|it| Arc::strong_count(&it.anchor) == 1) {
            begun.clear();
            turn.leave();
        }
    }

    /// Allocates from the first address space that has room, in a turn of this thread.
    ///
    /// Memory of other processes is in the same spaces: if there are any, a lack of it proves
    /// nothing about a space.
    pub(super) fn allocate(&self, bytes: usize) -> Result<(Memory, Share)> {
        let mut begun = self.lock();
        let before = begun.len();
        let allocated = self.allocate_in(&mut begun, bytes);
        if allocated.is_err() {
            begun.truncate(before.max(1));
        }
        allocated
    }

    fn allocate_in(&self, begun: &mut Vec<BegunDomain>, bytes: usize) -> Result<(Memory, Share)> {
        let has_company = self.rknn.has_company();
        let mut shortage = None;
        for index in 0..self.limit.load(Ordering::Relaxed) {
            if index == begun.len() {
                match begin(&self.rknn, index) {
                    Ok(domain) => begun.push(domain),
                    // The new address space was needed because an earlier one was out of memory, so
                    // that shortage is the error to report.
                    Err(error) => return Err(shortage.unwrap_or(error)),
                }
            }
            let domain = &begun[index];
            // The lock prevents other threads from adding; a share that is dropped meanwhile only
            // frees room.
            let used = domain.used_bytes.load(Ordering::Relaxed);
            if used + bytes > self.weight_bytes {
                continue;
            }
            let memory = match Memory::new(&domain.anchor, bytes) {
                Ok(memory) => memory,
                // The library may have less room in an address space than we compute. An empty
                // space has all the room there is, so there the error is final.
                Err(error @ Error::OutOfMemory { .. }) if used > 0 || has_company => {
                    shortage = Some(error);
                    continue;
                }
                // A temporary shortage does not prove that the space is full, so the allocation is
                // tried once more.
                Err(Error::OutOfMemory { .. })
                    if index > 0 && index + 1 == begun.len() && system_has(bytes) =>
                {
                    match Memory::new(&domain.anchor, bytes) {
                        Ok(memory) => memory,
                        Err(error) => {
                            self.share_addresses(index, &error);
                            begun.truncate(index);
                            return Err(shortage.unwrap_or(error));
                        }
                    }
                }
                Err(error) => {
                    if index == 0 && matches!(error, Error::OutOfMemory { .. }) && system_has(bytes)
                    {
                        self.tell_of_lost(bytes);
                    }
                    return Err(error);
                }
            };
            domain.used_bytes.fetch_add(bytes, Ordering::Relaxed);
            let share = Share {
                anchor: Arc::clone(&domain.anchor),
                used_bytes: Arc::clone(&domain.used_bytes),
                bytes,
            };
            return Ok((memory, share));
        }
        Err(shortage.unwrap_or(Error::AddressSpace {
            space: "the NPU's address space",
            bytes: bytes as u64,
        }))
    }

    /// Warns once that the first space had no memory although this process, and each one with our
    /// locks, uses nothing of it.
    fn tell_of_lost(&self, bytes: usize) {
        // SOURCE: README of rknpu-submit: the driver's general path loses addresses of freed memory
        // until the machine is started again.
        if !self.told_of_lost.swap(true, Ordering::Relaxed) {
            log::warn!(
                "{NAME}: the NPU has no addresses for {bytes} bytes, and nothing of ours has any: another program uses \
                 them, or the driver has lost them, and gives them back after a reboot"
            );
        }
    }

    /// Uses no more than the `held` spaces that hold weights: an empty one had no memory, though
    /// the system has.
    fn share_addresses(&self, held: usize, error: &Error) {
        // SOURCE: rknpu_iommu.c: without CONFIG_NO_GKI the switch of spaces is a stub that
        // succeeds.
        log::warn!(
            "{NAME}: this kernel has one address space for the NPU, which its {held} in use share: {error}, in an empty one"
        );
        self.limit(held);
    }

    /// Returns how many bytes of weights the spaces can still hold, and how many they could hold in
    /// total.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let begun = self.lock();
        let used: usize = begun
            .iter()
            .map(|domain| domain.used_bytes.load(Ordering::Relaxed))
            .sum();
        let total = self.limit.load(Ordering::Relaxed) * self.weight_bytes;
        (total - used.min(total), total)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<BegunDomain>> {
        // No code under this lock can panic half-way through a change, so a poisoned lock is still
        // consistent.
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns `true` if the system has `bytes` of memory: a lack of addresses is the only reason left
/// if the library has none.
fn system_has(bytes: usize) -> bool {
    let (free, _) = system_memory();
    free / 2 > bytes
}

fn begin(rknn: &Arc<Rknn>, index: usize) -> Result<BegunDomain> {
    // SOURCE: rk-llama.cpp also allocates from a 32x32x32 FP16 context; every chip accepts that
    // shape.
    let mut info = MatmulInfo::native(Precision::Fp16.matmul_type(), 32, 32, 32);
    info.iommu_domain_id = i32::try_from(index).unwrap_or(0);
    Ok(BegunDomain {
        anchor: Arc::new(Context::new(rknn, info, None)?),
        used_bytes: Arc::default(),
    })
}
