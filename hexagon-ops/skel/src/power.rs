//! Votes for clocks and for the power of the vector and matrix units.
//!
//! A refused vote is remembered and reported to the host, and the session continues, because some
//! firmware refuses the vote for a unit that has power anyway. If the matrix unit has no power,
//! locking it fails, or the host's self-test finds wrong results.
//!
//! A request is 120 bytes: its type in the first byte, the payload from byte 8. Enumerations have
//! the smallest integer that holds their values, as in the DSP's C compilers.
//!
//! SOURCE: layouts as re-derived and asserted by a public BSD-3-Clause-Clear header
//! (CDSP_PEAK_HAP_POWER_H), and by tinygrad (MIT) for the place of the payload; which votes are
//! needed, and those of full speed, llama.cpp ggml-hexagon htp/main.c; numbers of corners and
//! options, public copies of Qualcomm's HAP_power.h; balanced, an example of Qualcomm's SDK (from
//! SVS to TURBO around NOM). Saver has the option and the missing limits of Halide's runtime for
//! Hexagon; its corner is our choice. Not run on a device.

use core::ffi::c_void;

use hexagon_ops::wire::{Power, VOTES};

use crate::hap;

/// Bytes of a request.
const REQUEST_BYTES: usize = 120;
/// Offset of the payload.
const PAYLOAD: usize = 8;

/// `HAP_power_set_HVX`: power of the vector units.
const SET_HVX: u8 = 2;
/// `HAP_power_set_apptype`: the kind of client.
const SET_APPTYPE: u8 = 3;
/// `HAP_power_set_DCVS_v3`: clocks of core and bus.
const SET_DCVS_V3: u8 = 12;
/// `HAP_power_set_HMX`: power of the matrix unit, v73.
const SET_HMX: u8 = 13;
/// `HAP_power_set_HMX_v2`: power and clock of the matrix unit, for v75 and later.
const SET_HMX_V2: u8 = 14;

/// `HAP_POWER_COMPUTE_CLIENT_CLASS`.
const COMPUTE_CLIENT: u8 = 4;
/// `HAP_DCVS_V2_POWER_SAVER_MODE`: clocks rise late.
const POWER_SAVER_MODE: u8 = 0x04;
/// `HAP_DCVS_V2_PERFORMANCE_MODE`: clocks rise early.
const PERFORMANCE_MODE: u8 = 0x10;
/// `HAP_DCVS_VCORNER_DISABLE`: no limit.
const CORNER_NONE: u8 = 0;
/// `HAP_DCVS_VCORNER_SVS`.
const CORNER_SVS: u8 = 2;
/// `HAP_DCVS_VCORNER_NOM`.
const CORNER_NOM: u8 = 4;
/// `HAP_DCVS_VCORNER_TURBO`.
const CORNER_TURBO: u8 = 6;
/// `HAP_DCVS_VCORNER_MAX`, and each byte of `HAP_DCVS_EXP_VCORNER_MAX`.
const CORNER_MAX: u8 = 0xff;

/// One request.
#[repr(C, align(8))]
struct Request([u8; REQUEST_BYTES]);

impl Request {
    /// Returns a request with these bytes of its payload, by offset; the others are zero.
    fn new(kind: u8, payload: &[(usize, u8)]) -> Self {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[0] = kind;
        for (offset, value) in payload {
            bytes[PAYLOAD + offset] = *value;
        }
        Self(bytes)
    }

    /// Allows a vote for the bus to use corners that are reserved for few programs, on chips that
    /// have such corners. From v79 on, the highest corner is one of them.
    fn allow_protected_corners(&mut self) {
        if crate::session::ARCH < 79 {
            return;
        }
        // SAFETY: the loader has set the symbol, and nothing writes it later.
        let Some(allow) = (unsafe { hap::sysmon_set_dcvs_v3_protected_bus_corners }) else {
            return;
        };
        // SAFETY: the call only changes the request, which has the length that the system expects.
        unsafe { allow(self.0.as_mut_ptr().cast(), 1) };
    }

    /// Asks; 0 if it was granted.
    fn send(mut self) -> i32 {
        // The system identifies a client by an address, and this one belongs to nobody else.
        static CLIENT: u8 = 0;
        let client = (&raw const CLIENT).cast_mut().cast::<c_void>();
        let request = self.0.as_mut_ptr().cast();
        // SAFETY: the request has the length that the call reads; the call does not follow the
        // client's address.
        unsafe { hap::HAP_power_set(client, request) }
    }
}

/// A vote for the clocks of core and bus.
struct Clocks {
    /// `false`: the clocks stay at the target.
    follow_load: bool,
    option: u8,
    target: u8,
    min: u8,
    max: u8,
    never_sleep: bool,
}

impl Clocks {
    const fn of(power: Power) -> Self {
        match power {
            Power::Burst => Self {
                follow_load: false,
                option: PERFORMANCE_MODE,
                target: CORNER_MAX,
                min: CORNER_MAX,
                max: CORNER_MAX,
                never_sleep: true,
            },
            Power::Balanced => Self {
                follow_load: true,
                option: PERFORMANCE_MODE,
                target: CORNER_NOM,
                min: CORNER_SVS,
                max: CORNER_TURBO,
                never_sleep: false,
            },
            Power::Saver => Self {
                follow_load: true,
                option: POWER_SAVER_MODE,
                target: CORNER_SVS,
                min: CORNER_NONE,
                max: CORNER_NONE,
                never_sleep: false,
            },
        }
    }

    fn request(&self) -> Request {
        Request::new(
            SET_DCVS_V3,
            &[
                (0, 1),                           // set_dcvs_enable
                (1, u8::from(self.follow_load)),  // dcvs_enable
                (2, self.option),                 // dcvs_option
                (8, 1),                           // set_core_params
                (12, self.target),                // core_params.target_corner
                (13, self.min),                   // core_params.min_corner
                (14, self.max),                   // core_params.max_corner
                (28, 1),                          // set_bus_params
                (32, self.target),                // bus_params.target_corner
                (33, self.min),                   // bus_params.min_corner
                (34, self.max),                   // bus_params.max_corner
                (76, 1),                          // set_sleep_disable
                (77, u8::from(self.never_sleep)), // sleep_disable
            ],
        )
    }
}

/// Votes; the system's answers.
pub fn vote(power: Power, has_matrix: bool) -> [i32; VOTES.len()] {
    let client = Request::new(SET_APPTYPE, &[(0, COMPUTE_CLIENT)]).send();
    let mut clocks = Clocks::of(power).request();
    if power == Power::Burst {
        clocks.allow_protected_corners();
    }
    let clocks = clocks.send();
    let vectors = Request::new(SET_HVX, &[(0, 1)]).send();
    let matrix = if has_matrix { matrix(power) } else { 0 };
    [client, clocks, vectors, matrix]
}

/// Takes all votes back.
pub fn withdraw() {
    let matrix = if crate::session::ARCH >= 75 {
        Request::new(SET_HMX_V2, &[(0, 1)])
    } else {
        Request::new(SET_HMX, &[])
    };
    matrix.send();
    Request::new(SET_HVX, &[]).send();
    Request::new(SET_DCVS_V3, &[(0, 1), (1, 0), (8, 1), (28, 1), (76, 1)]).send();
}

/// Votes for power of the matrix unit, and in a burst for its clock where it has a separate one.
fn matrix(mode: Power) -> i32 {
    if crate::session::ARCH < 75 {
        return Request::new(SET_HMX, &[(0, 1)]).send();
    }
    let power = [(0, 1), (1, 1)]; // set_power, power_up
    if mode != Power::Burst {
        return Request::new(SET_HMX_V2, &[power[0], power[1], (2, 1), (3, 1)]).send(); // set_clock, pick_default
    }
    let corners = (4..10).map(|offset| (offset, CORNER_MAX)); // target, min, max: 2 bytes each
    let mut payload = [(0, 0); 9];
    payload[..2].copy_from_slice(&power);
    payload[2] = (2, 1); // set_clock
    for (to, from) in payload[3..].iter_mut().zip(corners) {
        *to = from;
    }
    match Request::new(SET_HMX_V2, &payload).send() {
        0 => 0,
        _ => Request::new(SET_HMX_V2, &power).send(),
    }
}
