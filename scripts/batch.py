#!/usr/bin/env python3
"""Prints the modelled cost of a decode step on the DSP for 1 to 32 sequences at once: llama-batched-bench on the
simulated Hexagon NPU.

Usage: batch.py [chip [format]]     (hexagon-v75, Q4_0)

For each number of sequences two runs differ in the number of steps; the difference belongs to the steps between.
"""

import re
import sys

import build
import models
from project import LOGS, Problem, binary, cpu_env, main_with, run

SEQUENCES = [1, 2, 3, 4, 8, 16, 32]
STEPS = (2, 6)
PATTERN = re.compile(r"HEX0: (\d+) commands, modelled: (\d+) packets for weights, (\d+) bytes of weights, (\d+) tile")


def totals(model, chip, sequences, steps):
    """Commands, packets, bytes and tile products of a whole run."""
    log = LOGS / f"batch-{sequences}-{steps}.log"
    run([binary("llama-batched-bench"), "-m", model, "-c", 2048, "-npp", 8, "-ntg", steps, "-npl", sequences, "-fit", "off",
         "-lv", 5], log, env=cpu_env(GGML_RUST_NPU_SIM=chip, GGML_RUST_NPU_LOG="debug"))
    found = PATTERN.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise Problem(f"no modelled costs in {log}")
    return [sum(int(line[i]) for line in found) for i in range(4)]


def step(model, chip, sequences):
    """Commands, packets, bytes and tile products of a step."""
    few, many = (totals(model, chip, sequences, steps) for steps in STEPS)
    return [(b - a) / (STEPS[1] - STEPS[0]) for a, b in zip(few, many)]


def main():
    chip = sys.argv[1] if len(sys.argv) > 1 else "hexagon-v75"
    kind = sys.argv[2] if len(sys.argv) > 2 else "Q4_0"
    build.static()
    model = models.variant(kind)
    print(f"one decode step, SmolLM2-135M {kind}, {chip}, as modelled")
    print("| sequences | commands | packets for weights | MB of weights | tile products |")
    print("|---|---|---|---|---|")
    for sequences in SEQUENCES:
        commands, packets, weight_bytes, products = step(model, chip, sequences)
        print(f"| {sequences} | {commands:.0f} | {packets:,.0f} | {weight_bytes / 1e6:.1f} | {products:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    main_with(main)
