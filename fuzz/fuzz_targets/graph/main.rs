//! Graphs of random operations on both families' stand-ins, through the C interface: each result is
//! compared with the reference. Then the same graph is computed again, with other inputs, from
//! memory where the device remembers it.
//!
//! `build` makes a graph from the bytes, in `memory`; `compare` computes and checks it.
//!
//! ```text
//! input = device, shape, seed of the numbers, { operation, operands, choices }
//! ```
#![no_main]

mod build;
mod compare;
mod memory;

use ggml_rust_npu::abi::*;
use ggml_rust_npu_fuzz::Input;
use ggml_rust_npu_fuzz::border::*;
use libfuzzer_sys::fuzz_target;

use build::{Graph, LARGEST, NODES};
use test_kit::Numbers;

/// Elements that must affect their own row only: NaN, infinity, numbers beyond FP16's range, below
/// it, and below F32's normal numbers.
const ODD: [f32; 8] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    262_144.0,
    -1e6,
    1e-30,
    1e-40,
    -0.0,
];

fuzz_target!(|bytes: &[u8]| {
    start();
    let mut input = Input::new(bytes);
    let device = if input.byte().is_multiple_of(4) {
        RK
    } else {
        HEX
    };
    let k = input.one_of(&[32, 64, 96, 128, 256, 40, 7]);
    let m = input.one_of(&[1, 2, 3, 4, 5, 8, 9, 31, 32, 33]);
    let planes = 1 + input.below(2);
    let seed = input.word();
    let mut numbers = Numbers::fixed(u64::from(seed));
    let mut graph = Graph::new(device, (2 * NODES + 4) * (LARGEST + 64) * 4);
    for _ in 0..1 + input.below(2) {
        graph.value([k, m, planes, 1], NPU_ROLE_STATE);
        graph.inputs += 1;
    }
    while !input.is_empty() && graph.steps.len() < NODES {
        graph.step(&mut input, &mut numbers);
    }
    if graph.steps.is_empty() {
        return;
    }
    graph.mark(&mut input);
    let supported: Vec<bool> = graph
        .steps
        .iter()
        .map(|step| supports(device, &step.node))
        .collect();
    // If the CPU computes the next node, the result has to be stored.
    for at in 0..graph.steps.len() {
        let both = supported[at] && supported.get(at + 1).copied().unwrap_or(false);
        graph.steps[at].node.feeds_next &= both && device == HEX;
    }
    let stream = Stream::new(device);
    for round in 0..3 {
        // Odd numbers in the middle round only: the other rounds show that nothing of them is left.
        let odd = ODD.get(seed as usize >> 8 & 15).filter(|_| round == 1);
        graph.fill(&mut numbers, odd.copied());
        graph.spoil();
        match (round, stream.replay(1)) {
            (1.., Some(status)) => assert_eq!(status, NPU_STATUS_OK, "FUZZ_LOG=1 says why"),
            _ => graph.compute(&stream, &supported, 1),
        }
        graph.check(round);
    }
});
