//! Kernels take no more packets than recorded.

use std::path::Path;

use hexagon_ops::ops::tensor::TASK_PACKETS;

use crate::common::{LIBRARIES, guest};
use crate::units::{Copies, without_units};
use crate::{emulator, float_emulator, request, request_with, run};

/// Packets per kernel as the guest prints them: (name, hundredths).
fn parse_packets(text: &str) -> Vec<(String, u32)> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, count) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), count.replace('.', "").parse().unwrap())
        })
        .collect()
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn kernels_take_the_recorded_packets() {
    let emulator = match emulator() {
        Ok(found) => found,
        Err(reason) => return println!("SKIPPED: {reason}"),
    };
    if !emulator.has_float {
        return println!("SKIPPED: HEXAGON_QEMU does not name an emulator with HVX floating point");
    }
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packets.txt");
    let mut measured = String::new();
    // The library for V69 differs from that for V68 in one instruction.
    for library in LIBRARIES.into_iter().filter(|library| *library != "v69") {
        let guest = match guest(library) {
            Ok(guest) => without_units(&guest, Copies::Free),
            Err(reason) => return println!("SKIPPED: {reason}"),
        };
        let whole = match library {
            // Only operations without a matrix unit are counted: the others take about as many
            // packets as on V79.
            "v68" => -2_i32,
            _ => 0,
        };
        let tables = [request(-1), request_with(-4, whole.cast_unsigned())];
        let tables = tables.map(|request| run(&emulator, &guest, request));
        let text = String::from_utf8(tables.concat()).unwrap();
        for line in text.lines() {
            measured.push_str(&format!("{library} {line}\n"));
        }
    }
    if std::env::var_os("UPDATE_PACKETS").is_some() {
        let nightly = include_str!("../../tools/library.sh")
            .lines()
            .find_map(|line| line.strip_prefix("toolchain="))
            .unwrap();
        let head = "# Packets per 32 x 32 tile or 1024 elements (quantize: per element), K = 1024, warm, counted by qemu-hexagon.\n\
                    # Written by UPDATE_PACKETS=1 cargo test --test qemu; NIGHTLY.\n\
                    # gemv_SxR: S strips by R rows of activations, per tile of weights.\n\
                    # soft_max_inner: less the maximum, exponentials by table, sums; exp_f32: the polynomial.\n\
                    # conventional_*, for comparison: Q4_0 to FP16 tiles from ggml's rows by scatter, and from tiles by arithmetic; as soft_max_inner, a polynomial in FP16.\n\
                    # memcpy_BYTES, memset_BYTES: a call; odd: from an odd address.\n\
                    # attention_T_rR: per position, a head of 64 with R query rows, keys and values of type T; the matrix unit's packets count.\n\
                    # whole_*: a further command of a list, read, checked and executed, on results of earlier ones; copies of the DMA engine are free.\n\
                    # whole_mul_mat_T_mM: per tile, K = N = 2048, activations of one or two rows in 8 bits or 16_bits; on_vectors: without a matrix unit; whole_attention_T_hD_QonK_rR: per position and query head, 1024 positions.\n";
        let head = head.replace("NIGHTLY", nightly);
        std::fs::write(&table, format!("{head}{measured}")).unwrap();
    }
    let recorded = parse_packets(&std::fs::read_to_string(&table).unwrap());
    let measured = parse_packets(&measured);
    assert_eq!(
        recorded.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        measured.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        "the table lists other kernels"
    );
    let mut worse = Vec::new();
    for ((name, recorded), (_, measured)) in recorded.iter().zip(&measured) {
        // More than 1 % and more than the last digit.
        if measured * 100 > recorded * 101 + 100 {
            worse.push(format!(
                "{name}: {measured} hundredths, recorded {recorded}"
            ));
        }
    }
    assert!(worse.is_empty(), "{}", worse.join("\n"));
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn a_step_takes_less_than_the_tasks_that_it_hands_over() {
    /// Cycles in which neither side looks: a worker before it takes a task, and the caller at the
    /// end.
    const PAUSES: usize = 2 * 64;
    let Some(emulator) = float_emulator() else {
        return;
    };
    let guest = match guest("v73") {
        Ok(guest) => guest,
        Err(reason) => return println!("SKIPPED: {reason}"),
    };
    for threads in [2, 4, 8] {
        let answer = run(&emulator, &guest, request_with(-9, threads));
        let text = String::from_utf8(answer).unwrap();
        let counts: Vec<usize> = text.lines().map(|line| line.parse().unwrap()).collect();
        println!("{threads} threads: {counts:?} packets for parts of rows and of columns");
        assert_eq!(counts.len(), 2, "{text}");
        let handed_over = (threads as usize - 1) * TASK_PACKETS;
        for packets in counts {
            assert!(
                packets + PAUSES <= handed_over,
                "{threads} threads: {packets}"
            );
        }
    }
}
