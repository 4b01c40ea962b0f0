#!/usr/bin/env python3
"""Counts encoders with weights that have packed copies, and computes their packets with unpacked weights.

Usage: plain_weights.py [LIBRARY...]    v73 and v79 if not given; prints the rows of the table in docs/results/cost.md

A multiplication with an unpacked weight needs as many packets in a picture of 64 patches as in a larger one, whose count would
take hours.
"""

import sys

import encoders
import graphs
import replay
import wholes
from project import main_with

LIBRARIES = ("v73", "v79")
# Pixels on a side of the small picture.
SIDE = 128


def packets_of_one(library):
    """Returns the packets of a multiplication with an unpacked weight: the difference between two small pictures' models, one
    of which has a layer more."""
    siglip, program = encoders.ENCODERS[0], replay.guest(library)
    encoders.SIDE, side = SIDE, encoders.SIDE
    found = []
    for layers in siglip.counted():
        lines = encoders.record(siglip, layers, f"hexagon-{library}", graphs.THREADS, GGML_RUST_NPU_REPACK="off")
        costs = [cost for graph in map(graphs.graph, lines) for cost in zip(graph.commands, replay.count(graph, program))]
        found.append(sum(cost.packets for entry, cost in costs if "MUL_MAT" in entry["ops"]))
    encoders.SIDE = side
    rows = (SIDE // encoders.PATCH) ** 2
    wide, hidden = siglip.embedding, siglip.hidden
    return (found[1] - found[0]) / (rows * (4 * wide * wide + 2 * wide * hidden))


def main():
    for library in sys.argv[1:] or LIBRARIES:
        each = packets_of_one(library)
        print(f"{library}: {each:.4f} packets of a multiplication", flush=True)
        for encoder in encoders.ENCODERS:
            rows = wholes.count(encoder, replay.guest(library), f"hexagon-{library}").values()
            packed = sum(row.packets for row in rows)
            products = [row for row in rows if row.millions]
            plain = packed - sum(row.packets for row in products) + each * 1e6 * sum(row.millions for row in products)
            print(f"| {encoder.name} | {library.upper()} | {plain / 1e6:,.0f} | {packed / 1e6:,.1f} | {packed / plain:.4f} |",
                  flush=True)


if __name__ == "__main__":
    main_with(main)
