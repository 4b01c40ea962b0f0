//! Answers to questions about devices that no device has answered yet: each is a measurement, or a
//! yes or no.
//!
//! Measurements that are reported to stop a kernel are not tried here.

use std::sync::Arc;
use std::time::Duration;

use ggml_rust_npu::config::Config;
use ggml_rust_npu::driver::trace::{self, Calls, Returned};
use ggml_rust_npu::error::{Error, Result};
use ggml_rust_npu::hexagon::device::{DeviceBuffer, HexNpu};
use ggml_rust_npu::hexagon::discovery::SessionPlan;
use ggml_rust_npu::rockchip::caps::Precision;
use ggml_rust_npu::rockchip::driver::{Context, Memory, Rknn, RunOperands, neighbour};
use hexagon_ops::ffi::describe;
use rknpu_ops::ffi::{CoreMask, MatmulInfo};

use super::hexagon::{copy, submit, zeroed};
use super::{Lines, median, microseconds, timed};

/// Buffers that are made and freed one after the other.
const ROUNDS: u32 = 16;
/// Numbers in each buffer.
const ELEMENTS: usize = 1 << 14;
/// More bytes than the last cache of these chips has.
// SOURCE: RK3588 has 3 MiB of L3; its other caches, and other chips' caches, are smaller
// (Rockchip's data sheets).
const CACHE_BYTES: usize = 8 << 20;

/// Adds facts from the calls until now about loading our library and about memory, whether or not
/// the session is open.
pub(super) fn add_loading(lines: &mut Lines) {
    let calls = trace::so_far();
    lines.add("finding.loader", loader(&calls));
    lines.add("finding.rpcmem_init", first_allocation(&calls));
}

/// Returns whether the DSP's loader accepts our library with its imports.
fn loader(calls: &[Calls]) -> String {
    let ours = |calls: &&Calls| {
        calls.function == "remote_handle64_open" && calls.arguments.contains("skel")
    };
    match calls
        .iter()
        .filter(ours)
        .map(|calls| calls.returned)
        .next_back()
    {
        Some(Returned::Code(0)) => "takes our library with all of its imports".into(),
        Some(Returned::Code(code)) => format!("refuses our library: {}", describe(code)),
        _ => "none (our library was not opened)".into(),
    }
}

/// Tells whether memory can be allocated without `rpcmem_init`.
fn first_allocation(calls: &[Calls]) -> String {
    let gave_memory = |calls: &Calls| {
        calls.function.starts_with("rpcmem_alloc") && calls.returned == Returned::Valid(true)
    };
    let has_init = calls.iter().any(|calls| calls.function == "rpcmem_init");
    match (calls.iter().any(gave_memory), has_init) {
        (true, false) => "not needed".into(),
        (true, true) => "needed".into(),
        (false, _) => "none (nothing was allocated)".into(),
    }
}

/// Adds facts about an open session.
pub(super) fn add_session(lines: &mut Lines, npu: &HexNpu, session: &SessionPlan, config: &Config) {
    let reused = (0..ROUNDS).map(|round| reused_buffer(npu, round));
    lines.add_result(
        "finding.reused_buffer",
        reused.collect::<Result<Vec<bool>>>().map(right),
    );
    lines.add("finding.unmap", unmapped(&trace::so_far()));
    match handover(npu, session, config) {
        Ok(time) => {
            lines.add_measured(
                "finding.vtcm_handover",
                format!("{:.1} us", microseconds(time)),
            );
        }
        Err(error) => lines.add("finding.vtcm_handover", format!("none ({error})")),
    }
}

fn right(rounds: Vec<bool>) -> String {
    let (all, right) = (rounds.len(), rounds.iter().filter(|right| **right).count());
    match right == all {
        true => format!("right, {all} buffers"),
        false => format!("FOREIGN memory in {} of {all} buffers", all - right),
    }
}

/// Lets the DSP copy numbers in a buffer that gets the place, and most likely the descriptor, of a
/// freed one. Returns `false` if the DSP copied something else.
fn reused_buffer(npu: &HexNpu, round: u32) -> Result<bool> {
    let buffer: DeviceBuffer = zeroed(npu, ELEMENTS * 8)?;
    let number = (round + 1) as f32;
    buffer.write(0..ELEMENTS * 4, |bytes| {
        for out in bytes.as_chunks_mut::<4>().0 {
            *out = number.to_ne_bytes();
        }
    });
    submit(npu, &copy(&buffer, ELEMENTS))?;
    let is_right = |bytes: &[u8]| {
        let mut numbers = bytes.as_chunks::<4>().0.iter();
        numbers.all(|bytes| f32::from_ne_bytes(*bytes) == number)
    };
    Ok(buffer.read(ELEMENTS * 4..ELEMENTS * 8, is_right))
}

/// Returns whether the system still has mappings that are removed after calls that used them.
fn unmapped(calls: &[Calls]) -> String {
    let mut answers = Vec::new();
    for calls in calls
        .iter()
        .filter(|calls| calls.function == "fastrpc_munmap")
    {
        let answer = match calls.returned {
            Returned::Code(0) => "still mapped".into(),
            Returned::Code(code) => describe(code).to_string(),
            _ => continue,
        };
        match answers.iter_mut().find(|(known, _)| *known == answer) {
            Some((_, count)) => *count += calls.count,
            None => answers.push((answer, calls.count)),
        }
    }
    let answers: Vec<_> = (answers.into_iter())
        .map(|(answer, count)| format!("{answer}, {count} times"))
        .collect();
    match answers.is_empty() {
        true => "none (nothing was unmapped)".into(),
        false => answers.join("; "),
    }
}

/// Returns the time that a second session needs to start and finish work right after this session
/// has worked. VTCM passes from one to the other.
fn handover(npu: &HexNpu, session: &SessionPlan, config: &Config) -> Result<Duration> {
    let device = session.another().untested("a second session", config)?;
    let buffers = [zeroed(npu, 4096)?, zeroed(device.npu(), 4096)?];
    let [here, there] = buffers.each_ref().map(|buffer| copy(buffer, 32));
    median(5, || {
        submit(npu, &here)?;
        timed(|| submit(device.npu(), &there))
    })
}

/// Adds facts about an open Rockchip NPU.
pub(super) fn add_rockchip(lines: &mut Lines, rknn: &Arc<Rknn>, mask: Option<CoreMask>) {
    match fresh_results(rknn, mask) {
        Ok(0) => lines.add_measured("finding.fresh_results", "right without cleaning"),
        Ok(wrong) => {
            let value = format!("{wrong} of {ROUNDS} products differ without cleaning");
            lines.add_measured("finding.fresh_results", value);
        }
        Err(error) => lines.add("finding.fresh_results", format!("none ({error})")),
    }
    lines.add(
        "finding.create_while_running",
        "none (not tried: it is reported to stop the kernel, and this backend never does it)",
    );
    let others = match neighbour::count() {
        _ if lines.is_simulated => "none (a stand-in has no node)".into(),
        0 => "no other process is seen".into(),
        count => format!("{count} have a node of the NPU open"),
    };
    lines.add("finding.other_processes", others);
    match rknn.direct_answers() {
        None => {}
        Some(Ok(answers)) => {
            for answer in answers {
                lines.add_measured(&format!("finding.streams.{}", answer.key), answer.text);
            }
        }
        Some(Err(error)) => lines.add("finding.streams", format!("none ({error})")),
    }
}

/// Rows, inner dimension and columns of the products.
const M: usize = 64;
const K: usize = 256;
const N: usize = 256;

/// Writes products into memory as the kernel returns it, and into memory that was cleaned. Returns
/// how many of the former results differ: zeros that the CPU's cache still held were written back
/// over them.
fn fresh_results(rknn: &Arc<Rknn>, mask: Option<CoreMask>) -> Result<u32> {
    let [rows, k, n] = [M, K, N].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
    let info = MatmulInfo::native(Precision::Fp16.matmul_type(), rows, k, n);
    let mut context = Context::new(rknn, info, mask)?;
    let owner = MatmulInfo::native(Precision::Fp16.matmul_type(), 32, 32, 32);
    let owner = Arc::new(Context::new(rknn, owner, None)?);
    let ones = |elements: usize| {
        // SOURCE: IEEE 754 binary16: 0x3c00 is 1.
        const ONE: [u8; 2] = 0x3c00_u16.to_ne_bytes();
        let mut memory = Memory::new(&owner, elements * 2)?;
        for element in memory.bytes_mut().as_chunks_mut::<2>().0 {
            *element = ONE;
        }
        memory.sync_to_device()?;
        Ok::<_, Error>(memory)
    };
    let (a, weights) = (ones(M * K)?, ones(K * N)?);
    let b = weights.view(0, K * N * 2)?;
    let mut multiply = |mut c: Memory| {
        let (a, b) = (&a, &b);
        context.bind_and_run(RunOperands { a, b, c: &mut c })?;
        // Writing other memory drives the CPU's modified lines out of the cache.
        std::hint::black_box(vec![1u8; CACHE_BYTES]);
        c.sync_from_device()?;
        Ok::<_, Error>(c.bytes().to_vec())
    };
    let right = multiply(Memory::for_results(&owner, M * N * 4)?)?;
    let mut wrong = 0;
    for _ in 0..ROUNDS {
        wrong += u32::from(multiply(Memory::new(&owner, M * N * 4)?)? != right);
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(function: &'static str, arguments: &str, returned: Returned, count: u32) -> Calls {
        Calls {
            function,
            arguments: arguments.into(),
            returned,
            count,
            total: Duration::ZERO,
            longest: Duration::ZERO,
        }
    }

    #[test]
    fn loader_is_judged_by_the_last_library_of_ours() {
        let open = |uri, code| calls("remote_handle64_open", uri, Returned::Code(code), 1);
        let first = open("file:///libggml_rust_npu_skel_v73.so", 0x3039);
        let second = open("file:///libggml_rust_npu_skel_v73q.so", 0);
        let other = open("file:///libanother.so", 0);
        assert!(loader(&[]).starts_with("none ("));
        assert!(loader(std::slice::from_ref(&other)).starts_with("none ("));
        assert!(
            loader(&[first.clone(), other])
                .starts_with("refuses our library: unknown FastRPC code 0x3039")
        );
        assert!(loader(&[first, second]).starts_with("takes "));
    }

    #[test]
    fn rpcmem_init_is_needed_if_memory_came_after_it() {
        let memory = |valid| calls("rpcmem_alloc2", "4096 bytes", Returned::Valid(valid), 1);
        let init = calls("rpcmem_init", "", Returned::Nothing, 1);
        assert!(first_allocation(&[]).starts_with("none ("));
        assert!(first_allocation(&[memory(false)]).starts_with("none ("));
        assert_eq!(first_allocation(&[memory(true)]), "not needed");
        assert_eq!(
            first_allocation(&[memory(false), init, memory(true)]),
            "needed"
        );
    }

    #[test]
    fn answers_to_unmapping_are_counted_by_code() {
        let unmap =
            |bytes, code, count| calls("fastrpc_munmap", bytes, Returned::Code(code), count);
        assert!(unmapped(&[]).starts_with("none ("));
        let some = [unmap("1", 0, 3), unmap("2", 0, 4), unmap("1", 0x3039, 2)];
        let answer = unmapped(&some);
        assert!(
            answer.starts_with("still mapped, 7 times; unknown FastRPC code 0x3039"),
            "{answer}"
        );
        assert!(answer.ends_with(", 2 times"), "{answer}");
    }

    #[test]
    fn foreign_buffers_are_counted() {
        assert_eq!(right(vec![true; 16]), "right, 16 buffers");
        assert_eq!(
            right(vec![true, false, false]),
            "FOREIGN memory in 2 of 3 buffers"
        );
    }
}
