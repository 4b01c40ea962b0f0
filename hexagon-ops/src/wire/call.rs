//! The calls that go through FastRPC.

use bytemuck::{Pod, Zeroable};

/// FastRPC method: hands over the ring. In: [`Start`]; out: [`Info`].
pub const METHOD_START: u32 = 2;
/// FastRPC method: reads the ring until it has been idle for a while. In: [`Serve`]; no out.
pub const METHOD_SERVE: u32 = 3;

/// Argument of [`METHOD_START`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Start {
    /// [`VERSION`](super::VERSION) of the caller.
    pub version: u32,
    /// File descriptor of the ring's memory.
    pub fd: i32,
    /// Size of that memory.
    pub bytes: u32,
    /// Most threads to compute on; 0 for one on each vector unit.
    pub threads: u32,
    /// A [`Power`].
    pub power: u32,
    /// 1 to compute with the matrix unit if the DSP's system gives it, 0 to leave it alone: vector
    /// units compute all products then.
    pub matrix: u32,
}

impl Start {
    /// Returns the power that the bytes of an argument request; the default if the bytes are not an
    /// argument, for which the call is refused later.
    #[must_use]
    pub fn power_of(input: &[u8]) -> Power {
        let start = bytemuck::try_pod_read_unaligned::<Self>(input).ok();
        let power = start.and_then(|start| Power::from_number(start.power));
        power.unwrap_or_default()
    }

    /// Returns `true` unless the bytes of an argument request to leave the matrix unit alone.
    #[must_use]
    pub fn uses_matrix(input: &[u8]) -> bool {
        let start = bytemuck::try_pod_read_unaligned::<Self>(input).ok();
        start.is_none_or(|start| start.matrix != 0)
    }
}

/// The power that is voted for, from the first command to the end of the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Power {
    /// The highest clocks, and no sleep.
    #[default]
    Burst = 0,
    /// Clocks that follow the load.
    Balanced = 1,
    /// Clocks that follow the load, and begin low.
    Saver = 2,
}

impl Power {
    /// Returns the choice with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Burst),
            1 => Some(Self::Balanced),
            2 => Some(Self::Saver),
            _ => None,
        }
    }
}

/// Result of [`METHOD_START`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Info {
    /// [`VERSION`](super::VERSION) of the DSP's library.
    pub version: u32,
    /// Architecture: 68, 69, 73, 75, 79 or 81.
    pub arch: u32,
    /// Size of the VTCM that commands share, in bytes: everything acquired except the table of
    /// exponentials.
    pub vtcm_bytes: u32,
    /// Number of threads that compute. Fewer than [`Start::threads`] allows and [`Self::units`] has
    /// if the DSP's system refused to start some.
    pub threads: u32,
    /// Number of vector units that this session can use.
    pub units: u32,
    /// 1 if the matrix unit computes products of tiles, 0 if vector units do.
    pub matrix: u32,
    /// Answers of the DSP's system to the votes for power, [`VOTES`]; 0 if granted.
    pub votes: [i32; VOTES.len()],
}

/// The votes for power, as log lines name them.
pub const VOTES: [&str; 4] = ["client", "clocks", "vector units", "matrix unit"];

/// Argument of [`METHOD_SERVE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Serve {
    /// Microseconds without a command after which the call returns.
    pub idle_us: u32,
    /// 0.
    pub reserved: u32,
}

/// Stack that the host requests for the DSP threads on which calls arrive
/// (`FASTRPC_THREAD_PARAMS`), bytes.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c: 16 KiB by default, at most 8 MiB.
pub const STACK_BYTES: u32 = 256 << 10;
/// Smallest stack with which the DSP's library starts, bytes.
pub const STACK_NEEDED_BYTES: u32 = 128 << 10;

/// Error of [`METHOD_START`]: the versions differ.
pub const ERROR_VERSION: i32 = 0x4e01;
/// Error of [`METHOD_START`] and [`METHOD_SERVE`]: the memory holds no ring, or its counters are
/// impossible.
pub const ERROR_RING: i32 = 0x4e02;
/// Error of [`METHOD_START`] and [`METHOD_SERVE`]: no VTCM, matrix unit or vector units available.
pub const ERROR_UNITS: i32 = 0x4e03;
/// Error of all methods: called in the wrong order, or with arguments of the wrong size.
pub const ERROR_CALL: i32 = 0x4e04;
/// Error of [`METHOD_START`]: the calling thread has less than [`STACK_NEEDED_BYTES`] of stack.
pub const ERROR_STACK: i32 = 0x4e05;

/// Error of [`METHOD_SERVE`]: another session or program holds VTCM, or waits for it. The host
/// calls again a little later.
pub const ERROR_LATER: i32 = 0x4e06;

/// Returns the meaning of an error above, or `None` for other codes.
#[must_use]
pub const fn describe_error(code: i32) -> Option<&'static str> {
    Some(match code {
        ERROR_VERSION => "the DSP's library is of another version than this program",
        ERROR_RING => "the DSP cannot use the ring",
        ERROR_UNITS => "no VTCM, matrix unit or vector units to be had",
        ERROR_CALL => "the DSP's library refuses the call",
        ERROR_LATER => "another program holds VTCM",
        ERROR_STACK => "the DSP's threads have too small a stack",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_power_is_the_one_that_a_start_asks_for() {
        let start = |power| Start {
            version: 1,
            fd: 3,
            bytes: 4096,
            threads: 0,
            power,
            matrix: 1,
        };
        for (number, want) in [
            (0, Power::Burst),
            (1, Power::Balanced),
            (2, Power::Saver),
            (3, Power::Burst),
        ] {
            assert_eq!(Start::power_of(bytemuck::bytes_of(&start(number))), want);
        }
        let whole = start(2);
        let short = &bytemuck::bytes_of(&whole)[..16];
        assert_eq!(Start::power_of(short), Power::Burst);
    }

    #[test]
    fn each_error_says_what_is_wrong() {
        for (code, word) in [
            (ERROR_VERSION, "of another version"),
            (ERROR_RING, "the ring"),
            (ERROR_UNITS, "vector units"),
            (ERROR_CALL, "refuses the call"),
            (ERROR_LATER, "holds VTCM"),
            (ERROR_STACK, "too small a stack"),
        ] {
            let text = describe_error(code).unwrap_or_default();
            assert!(text.contains(word), "{code:#x}: {text:?}");
        }
        assert_eq!(describe_error(0), None);
    }

    #[test]
    fn stacks_are_as_large_as_the_system_allows() {
        // SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c: at least 16 KiB, at most 8 MiB.
        for bytes in [STACK_BYTES, STACK_NEEDED_BYTES] {
            assert!((16 << 10..=8 << 20).contains(&bytes), "{bytes}");
        }
    }
}
