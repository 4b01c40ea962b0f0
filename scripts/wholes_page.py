#!/usr/bin/env python3
"""Writes docs/results/models.md from the counted packets of whole models: hexagon-ops/tests/models.txt and peer.txt."""

from typing import NamedTuple

import encoders
import peer
import shapes
import wholes
from project import LLAMA_VERSION, ROOT, main_with

PAGE = ROOT / "docs" / "results" / "models.md"
THREADS = 4

# A kind of work, and the operations that belong to it. A command that combines several operations is counted as its first one.
# ADD and gated units are counted with the products, because this project's commands combine them.
PRODUCTS = "products, gates and sums"
KINDS = {
    PRODUCTS: ("MUL_MAT", "MUL_MAT_ID", "ADD", "ADD_ID", "SWIGLU", "SWIGLU_OAI", "GEGLU", "GEGLU_ERF", "GEGLU_QUICK", "GELU",
               "GELU_ERF", "REGLU"),
    "attention": ("FLASH_ATTN_EXT",),
    "norms": ("RMS_NORM", "NORM", "L2_NORM"),
    "rotation and stores in caches": ("ROPE", "SET_ROWS"),
    "copies": ("CPY", "CONT", "DUP", "CONCAT", "GET_ROWS", "REPEAT", "PAD", "ROLL"),
    "router": ("SOFT_MAX", "ARGSORT", "TOP_K", "SUM_ROWS", "CLAMP", "DIV"),
}


class Rates(NamedTuple):
    """Rates that a model's time is reckoned with."""

    name: str
    # Packets of a thread in a microsecond, GB/s of memory, and whether the matrix unit runs at the same time as the threads.
    packets: float
    memory: float
    beside: bool


# SOURCE: 12.03 TFLOPS of a V75 (HexRates, src/hexagon/caps.rs).
MATRIX_GFLOPS = 12030
NOMINAL = Rates("nominal", 1100, 60, True)
PUBLISHED = ROOT / "docs" / "results" / "published.txt"
# Workloads whose speed is given in tokens/s.
TOKENS = {"prompt": 512, "token": 1, "sequences": 8}
HEAD = """# Whole models

Packets that real models need on one thread of a Hexagon V73, with this project and with llama.cpp's own backend,
ggml-hexagon ({peer}). Rung of evidence: 3, an emulator.

- `scripts/shapes.py` makes files with each model's dimensions and without weights. llama.cpp {llama} builds the graphs, with
  fusion, for a simulated device that records its commands, and `qemu-hexagon` executes these lists with the DSP's code
  (`scripts/replay.py`). `make models` counts and compares with `hexagon-ops/tests/models.txt`.
- `make peer` counts ggml-hexagon for the nodes of the same graphs. It runs each distinct node alone, through ggml-hexagon's
  dispatcher, with the kernels that its host code chooses. RMS_NORM with MUL is one node. ggml-hexagon can combine two or three
  products of the same activations, and sums with products; these are counted one by one.
- Workloads: *prompt* is 512 tokens in one ubatch, *token* one token with 1,024 cells in the cache, and *sequences* one token of
  each of 8 sequences with 1,024 cells each. Layers repeat, so files with one and with two periods of layers are counted, and
  the difference is added for each further period of the model.
- The packets do not include stalls, the latency of gathers, the time of the matrix unit and of the DMA engine, barriers between
  threads, and the host. Instructions of the matrix unit count as packets; copies of the DMA engine are free on both sides.
- With both backends the CPU looks up embeddings. Weights are Q4_0 with the embedding in Q6_K. gpt-oss has experts in MXFP4 and
  other weights in Q8_0; MiniLM has Q8_0.
- Debian's llama.cpp and whisper.cpp compute SigLIP-base and Whisper-base (`scripts/encoders.py`, weights in F16). *picture* is
  one of 512 × 512 pixels for SmolVLM-256M, *speech* 30 seconds, with the decoder's keys and values.

## Totals

Millions of packets. *Ours / theirs* compares the kinds of operation that ggml-hexagon computes; *only ours* counts kinds
that ggml-hexagon leaves to the CPU.

| model | workload | ours | ggml-hexagon | ours / theirs | only ours |
|---|---|---:|---:|---:|---:|
"""

SPEED = """
## Modelled tokens/s

The model has four threads. The time of a step is the largest of the times for its packets, its copied bytes and its
multiplications ({matrix:.2f} TFLOPS). Some fitted rates assume that the matrix unit does not work at the same time as the
threads; the times for packets and multiplications are then added.

- *Nominal* rates are {nominal} packets in a µs and thread, and {memory} GB/s.
- *Fitted* rates are those with which ggml-hexagon's counted packets give its published speeds. For prompts these are
  {prompt} packets in a µs and thread, the lower one without overlap. For generation they are {token}, with 31 to 60 GB/s.
- *Published* speeds of ggml-hexagon on a V73 are from others. Where the prediction for ggml-hexagon differs from them, the one
  for this project may differ as much.

Predictions are ranges and not measurements.

| model | prompt: nominal | fitted | theirs, fitted | published | token: nominal | fitted | theirs, fitted | published |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""

ENCODER_HEAD = """
## Modelled seconds of encoders

As above, at the rates of prompts.

| model | workload | nominal | fitted | theirs, fitted |
|---|---|---:|---:|---:|
"""

KIND_HEAD = """
## Kinds of operation

Millions of packets, ours and ggml-hexagon's. A dash is a kind that ggml-hexagon does not compute; a star, one that it computes
in part; models without its packets were not counted with it. Kinds of less than 0.1 % of the workload are left out.

| model | workload | kind | ours | ggml-hexagon | ours / theirs |
|---|---|---|---:|---:|---:|
"""


class Sum(NamedTuple):
    """The work of a kind: this project's row, and ggml-hexagon's packets, KiB, nodes and refused nodes."""

    ours: wholes.Row
    packets: int
    kib: int
    nodes: int
    refused: int

    def is_theirs(self):
        return self.nodes > self.refused


def published(kind):
    """Returns the lines of a kind of the table of published speeds, as words."""
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    return [line.split()[1:] for line in lines if line.startswith(kind + " ")]


def fitted(workload):
    """Returns the lowest and the highest rates that fit the published speeds of ggml-hexagon."""
    name = "token" if workload in ("token", "sequences") else "prompt"
    return [Rates(of, float(packets), float(memory), beside == "beside")
            for of, packets, memory, beside in published("rates") if of == name]


def speed_of(shape):
    """Returns the first published speed of ggml-hexagon for a model on this chip: tokens/s of a prompt, of generation, and
    where."""
    model = [shape.arch, str(shape.layers), str(shape.keys["embedding_length"]), wholes.LIBRARY]
    for *key, kind, prompt, token, program, rest in ([*words[:8], " ".join(words[8:])] for words in published("speed")):
        if key == model and program == "ggml-hexagon,":
            return prompt, token, f"{kind}, {rest}"
    return "", "", ""


def kind_of(ops):
    """Returns the kind of a command or node."""
    first = ops.split("+")[0]
    return next((kind for kind, names in KINDS.items() if first in names), first)


def by_kind(model, workload, ours, theirs):
    """Returns the Sum of each kind of a workload."""
    sums = {}
    for (name, work, ops), row in ours.items():
        if (name, work) == (model, workload):
            old = sums.get(kind_of(ops), Sum(wholes.Row(0, 0, 0, 0), 0, 0, 0, 0))
            sums[kind_of(ops)] = old._replace(ours=wholes.Row(*map(sum, zip(old.ours, row))))
    for (name, work, op), (nodes, packets, kib, refused) in theirs.items():
        if (name, work) == (model, workload):
            old = sums.get(kind_of(op), Sum(wholes.Row(0, 0, 0, 0), 0, 0, 0, 0))
            sums[kind_of(op)] = old._replace(packets=old.packets + packets, kib=old.kib + kib, nodes=old.nodes + nodes,
                                             refused=old.refused + refused)
    return sums


def millions(packets):
    return f"{packets / 1e6:,.1f}" if packets >= 10**5 else f"{packets / 1e6:.3f}"


def ratio(ours, theirs):
    return f"{ours / theirs:.2f}" if theirs else ""


def seconds(rates, workload, packets, kib, macs_millions):
    """Returns the time of a workload."""
    vector = packets / (rates.packets * THREADS)
    memory = kib * 1024 / (rates.memory * 1e3)
    # For single tokens, products are dot products of the vector threads.
    matrix = 0 if workload in ("token", "sequences") else 2 * macs_millions * 1e6 / (MATRIX_GFLOPS * 1e3)
    return (max(vector, memory, matrix) if rates.beside else max(vector + matrix, memory)) / 1e6


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def speed_at(rates, workload, packets, kib, macs):
    """Returns the tokens/s of a workload, or the seconds of an encoder's."""
    time = seconds(rates, workload, packets, kib, macs)
    return number(TOKENS[workload] / time) if workload in TOKENS else f"{time:.3f}"


def band(workload, packets, kib, macs):
    """Returns the speeds at the lowest and the highest fitted rates."""
    return "–".join(speed_at(rates, workload, packets, kib, macs) for rates in fitted(workload))


def page():
    """Returns the page's text."""
    ours, theirs = wholes.recorded(), peer.recorded()
    head = peer.TABLE.read_text(encoding="utf-8").split("(")[1].split(")")[0] if peer.TABLE.exists() else ""
    text = HEAD.format(peer=head, llama=LLAMA_VERSION)
    speed = SPEED.format(matrix=MATRIX_GFLOPS / 1e3, nominal=NOMINAL.packets, memory=NOMINAL.memory,
                         prompt=" to ".join(f"{rates.packets:.0f}" for rates in fitted("prompt")),
                         token=" to ".join(f"{rates.packets:.0f}" for rates in fitted("token")))
    kinds = KIND_HEAD
    counted = {name for name, _, _ in ours}
    encoded = ENCODER_HEAD
    for shape in (shape for shape in wholes.MODELS if shape.name in counted):
        cells = []
        for workload in shape.workloads:
            found = by_kind(shape.name, workload, ours, theirs)
            total = sum(it.ours.packets for it in found.values())
            both = [it for it in found.values() if it.is_theirs()]
            mine, peers = sum(it.ours.packets for it in both), sum(it.packets for it in both)
            known = f"{millions(peers)} | {ratio(mine, peers)} | {millions(total - mine)}" if both else " | | "
            text += f"| {shape.name} | {workload} | {millions(total)} | {known} |\n"
            for kind, it in sorted(found.items(), key=lambda it: -it[1].ours.packets):
                if it.ours.packets * 1000 < total:
                    continue
                star = "*" if it.is_theirs() and it.refused else ""
                other = f"{millions(it.packets)}{star} | {ratio(it.ours.packets, it.packets)}" if it.is_theirs() else "| "
                if it.nodes and not it.is_theirs():
                    other = "– | "
                kinds += f"| {shape.name} | {workload} | {kind} | {millions(it.ours.packets)} | {other} |\n"
            if workload != "sequences":
                kib, macs = (sum(getattr(it.ours, name) for it in found.values()) for name in ("kib", "millions"))
                whole = all((it.is_theirs() and not it.refused) or not it.nodes for it in found.values()) and both
                cells += [speed_at(NOMINAL, workload, total, kib, macs), band(workload, total, kib, macs),
                          band(workload, peers, kib, macs) if whole else ""]
                if workload in TOKENS:
                    cells.append(speed_of(shape)[("prompt", "token").index(workload)])
        if shape in encoders.ENCODERS:
            encoded += f"| {shape.name} | {shape.workload} | " + " | ".join(cells) + " |\n"
        else:
            cells += [""] * (8 - len(cells))
            speed += f"| {shape.name} | " + " | ".join(cells) + " |\n"
    known = [f"{shape.name}: {where}" for shape in shapes.SHAPES if (where := speed_of(shape)[2])]
    sources = "\nPublished: " + "; ".join(known) + ".\n"
    return text + speed + sources + encoded + kinds


def main():
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main_with(main)
