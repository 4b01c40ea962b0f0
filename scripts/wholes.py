#!/usr/bin/env python3
"""Counts whole models: the packets of every command that llama.cpp's graphs give a Hexagon NPU.

Usage: wholes.py [--update] [MODEL...]    those of `shapes` and `encoders`, or those that are named

Compares with hexagon-ops/tests/models.txt: no workload of a model may need over 1 % more packets than in its row.
--update writes the rows of the models that it counts, and docs/results/models.md.
"""

import sys
from collections import Counter
from typing import NamedTuple

import encoders
import graphs
import replay
import shapes
from project import ROOT, Problem, main_with, say

TABLE = ROOT / "hexagon-ops" / "tests" / "models.txt"
LIBRARY = "v73"
CHIP = "hexagon-v73"
MODELS = [*shapes.SHAPES, *encoders.ENCODERS]
WORKLOADS = ("prompt", "token", "sequences", encoders.PICTURE, encoders.SPEECH)

HEAD = """\
# Packets of whole models on one thread of a V73: model, workload, operations of a command, such commands, their packets, KiB
# that the DMA engine copies for them, and millions of multiplications with packed weights. Written by make models UPDATE=1;
# scripts/shapes.py has the models, scripts/replay.py says what counts. prompt: 512 tokens; token: one token, 1,024 cells;
# sequences: a token of each of 8 sequences of 1,024 cells; picture: one of 512 x 512 pixels; speech: 30 seconds.
"""

# The sums of an empty list of commands.
NOTHING = (0, 0, 0, 0)


class Row(NamedTuple):
    """The commands of a workload that have the same operations."""

    commands: int
    packets: int
    kib: int
    millions: int


def named(name):
    """Returns the model of a name."""
    for model in MODELS:
        if model.name == name:
            return model
    raise Problem(f"no model {name}; one of {', '.join(model.name for model in MODELS)}")


def sums(graph_list, program):
    """Returns the sums (commands, packets, bytes, multiplications) of the operations of graphs, by their names."""
    found = {}
    for graph in graph_list:
        for entry, cost in zip(graph.commands, replay.count(graph, program)):
            old = found.get(entry["ops"], NOTHING)
            one = (1, *cost, replay.multiplications(entry))
            found[entry["ops"]] = tuple(a + b for a, b in zip(old, one))
    return found


def count(shape, program, chip=CHIP):
    """Returns the rows of a model on a chip, by workload and operations: those of the file with fewest layers, and as often as
    the model has more layers the difference between the two files."""
    first, second = (graphs.record(shape, layers, chip) for layers in shape.counted())
    table = {}
    for workload in shape.workloads:
        less = sums(first[workload], program)
        more = less if shape.periods() == 0 else sums(second[workload], program)
        for ops in sorted({*less, *more}):
            a, b = less.get(ops, NOTHING), more.get(ops, NOTHING)
            commands, packets, copied, products = (x + shape.periods() * (y - x) for x, y in zip(a, b))
            table[workload, ops] = Row(commands, packets, copied // 1024, products // 10**6)
    return table


def recorded():
    """Returns the rows of the table, by model, workload and operations."""
    table = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []:
        if not line.startswith("#"):
            model, workload, ops, *numbers = line.split()
            table[model, workload, ops] = Row(*map(int, numbers))
    return table


def totals(table):
    """Returns the packets of each workload, by its model and name."""
    found = {}
    for (model, workload, _), row in table.items():
        found[model, workload] = found.get((model, workload), 0) + row.packets
    return found


def worse(have, want):
    """Returns a line for each workload whose packets grew by more than 1 %, or that has no row."""
    lines = []
    for key, packets in have.items():
        old = want.get(key)
        if old is None or packets * 100 > old * 101:
            lines.append(f"{key[0]} {key[1]}: {packets} packets, recorded {old}")
    return lines


def ordered(table):
    """Returns the rows in the order of the models, of workloads, and of packets."""
    models = {shape.name: number for number, shape in enumerate(MODELS)}
    works = {name: number for number, name in enumerate(WORKLOADS)}
    return sorted(table.items(), key=lambda it: (models[it[0][0]], works[it[0][1]], -it[1][1], it[0][2]))


def write(table):
    """Writes the table."""
    lines = [" ".join(map(str, (*key, *row))) for key, row in ordered(table)]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def commands(shape):
    """Returns how many commands of each name llama.cpp gives the device for a model, by workload and name; no emulator runs."""
    first, second = (graphs.record(shape, layers, CHIP) for layers in shape.counted())
    table = {}
    for workload in shape.workloads:
        less, more = (Counter(entry["ops"] for graph in found[workload] for entry in graph.commands)
                      for found in (first, second))
        table |= {(workload, ops): less[ops] + shape.periods() * (more[ops] - less[ops]) for ops in {*less, *more}}
    return table


def packets(shape):
    """Returns the packets of each workload of a model, by the model and the workload."""
    return totals({(shape.name, *key): row for key, row in count(shape, replay.guest(LIBRARY)).items()})


def main():
    arguments = sys.argv[1:]
    update = "--update" in arguments
    names = [name for name in arguments if name != "--update"]
    chosen = [named(name) for name in names] or MODELS
    graphs.program()
    program = replay.guest(LIBRARY)
    old = recorded()
    have = {}
    for shape in chosen:
        say(shape.name)
        have |= {(shape.name, *key): row for key, row in count(shape, program).items()}
        for (model, workload), packets in totals(have).items():
            if model == shape.name:
                print(f"{workload}: {packets:,} packets")
        if update:
            counted = {name for name, _, _ in have}
            write({key: row for key, row in recorded().items() if key[0] not in counted} | have)
    if not update and (lines := worse(totals(have), totals(old))):
        raise Problem("more packets than recorded; make models UPDATE=1 records them:\n" + "\n".join(lines))


if __name__ == "__main__":
    main_with(main)
