//! Answers to the questions that public sources leave open, from devices that compute every job
//! that registers describe, and from those that refuse jobs that no board is known to compute.

use std::collections::BTreeMap;
use std::sync::Arc;

use ggml_rust_npu::rockchip::driver::Rknn;

use super::{Change, board_of, rocket};
use crate::device::Computes;
use crate::kernel::{Kernel, Rocket};

fn answers(rknn: &Arc<Rknn>) -> BTreeMap<&'static str, String> {
    let answers = rknn.direct_answers().unwrap().unwrap();
    let count = answers.len();
    let found: BTreeMap<_, _> = (answers.into_iter().map(|it| (it.key, it.text))).collect();
    assert_eq!(found.len(), count);
    found
}

/// Answers over both drivers of a device that computes every job that registers describe.
const COMPUTED: [(&str, &str); 6] = [
    (
        "few_rows",
        "FP16 M=1 right, FP16 M=2 right, FP16 M=3 right, INT8 M=1 right, INT8 M=2 right, INT8 M=3 right",
    ),
    (
        "sums_on_chip",
        "none (not tried: no stream that adds to earlier sums of INT32 is known)",
    ),
    ("k_3840", "INT8 right, FP16 right"),
    ("row_major_fp16", "right, with 80 grains right"),
    (
        "int4",
        "A and B in one order right, in two orders WRONG in 256 of 256 results",
    ),
    (
        "special",
        "inf x 1 = inf, NaN x 1 = NaN, 2^-24 x 1 = 5.960464477539063e-8, -0 x 1 = 0e0, inf x 0 = NaN",
    ),
];

#[test]
fn a_device_that_computes_what_registers_say_answers_all() {
    let rknpu = board_of(Kernel::default(), Change::Nothing).unwrap();
    let rocket = rocket::board_of(Rocket::new(Computes::All), None);
    for (rknn, others) in [
        (
            &rknpu.rknn,
            [
                ("chain", "right"),
                (
                    "without_rdma",
                    "none (other projects' boards run it with this driver)",
                ),
                (
                    "spaces",
                    "not shown to be separate: two objects have two addresses",
                ),
            ],
        ),
        (
            &rocket.rknn,
            [
                ("chain", "none (this driver starts each task by itself)"),
                ("without_rdma", "right"),
                ("spaces", "none (each file has its own)"),
            ],
        ),
    ] {
        let have = answers(rknn);
        assert_eq!(have.len(), COMPUTED.len() + others.len());
        for (key, text) in COMPUTED.iter().chain(&others) {
            assert_eq!(have[key], *text, "{key}");
        }
    }
}

#[test]
fn a_device_that_refuses_what_no_board_ran_says_so_and_goes_on() {
    // Over rocket each refusal takes half a second, its time-out.
    let board = board_of(Kernel::strict(), Change::Nothing).unwrap();
    let have = answers(&board.rknn);
    for key in ["few_rows", "row_major_fp16"] {
        assert!(have[key].contains("does not run ("), "{key}: {}", have[key]);
    }
    assert_eq!(have["k_3840"], "INT8 right, FP16 right");
    assert_eq!(have["int4"], COMPUTED[4].1);
    assert_eq!(have["chain"], "right");
}

#[test]
fn address_spaces_that_are_separate_are_seen() {
    let board = board_of(Kernel::strict(), Change::Spaces).unwrap();
    assert_eq!(
        answers(&board.rknn)["spaces"],
        "separate: two objects have one address"
    );
}
