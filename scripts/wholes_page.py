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

# A kind of work, and the operations of nodes that are part of it. A command of several operations is of the kind of its
# first. ADD and the gated units are with the products, of which this project's commands make them a part.
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
    # Packets of a thread in a microsecond, GB/s of memory, and whether the matrix unit works beside the threads.
    packets: float
    memory: float
    beside: bool


# SOURCE: 12.03 TFLOPS of a V75 (HexRates, src/hexagon/caps.rs).
MATRIX_GFLOPS = 12030
NOMINAL = Rates("nominal", 1100, 60, True)
PUBLISHED = ROOT / "docs" / "results" / "published.txt"
# Of a workload whose speed is told in tokens/s.
TOKENS = {"prompt": 512, "token": 1, "sequences": 8}
HEAD = """# Whole models

Packets that real models take on one thread of a Hexagon V73, this project's and those of llama.cpp's own backend,
ggml-hexagon ({peer}). Rung of evidence: 3, an emulator.

- `scripts/shapes.py` has each model's dimensions; weights are holes. llama.cpp {llama} builds the graphs, with fusion, for a
  simulated device that records its commands, and `qemu-hexagon` executes these lists with the DSP's code
  (`scripts/replay.py`). `make models` counts and compares with `hexagon-ops/tests/models.txt`.
- ggml-hexagon is counted at the same graphs' nodes by `make peer`: each distinct node alone, with its own host code's choice of
  kernels, its dispatcher, and RMS_NORM with MUL as one. Products of the same activations are counted one by one, although it
  can combine two or three of them, and so are sums after products.
- prompt: 512 tokens in one ubatch. token: one token, 1,024 cells. sequences: one token of each of 8 sequences, which have 1,024
  cells each. Layers repeat: a file with one period of layers and one with two are counted, and the difference is taken as
  often as the model has more.
- Not in it: stalls, latency of gathers, time of the matrix unit and of the DMA engine, barriers between threads, the host.
  Instructions of the matrix unit count as packets, copies of the DMA engine are free on both sides.
- Embeddings are looked up by the CPU in both. Weights are Q4_0 with the embedding in Q6_K; gpt-oss has MXFP4 experts and Q8_0,
  MiniLM Q8_0.
- SigLIP-base and Whisper-base (`scripts/encoders.py`, weights in F16) are computed by Debian's llama.cpp and whisper.cpp.
  picture: one of 512 × 512 pixels for SmolVLM-256M. speech: 30 seconds, with the decoder's keys and values.

## Totals

Millions of packets. *Ours / theirs* compares the kinds of operation that ggml-hexagon computes; *only ours* counts kinds
that ggml-hexagon leaves to the CPU.

| model | workload | ours | ggml-hexagon | ours / theirs | only ours |
|---|---|---:|---:|---:|---:|
"""

SPEED = """
## Modelled tokens/s

Four threads; a step takes the longest of packets, copied bytes and multiplications ({matrix:.2f} TFLOPS). Where the matrix
unit is not taken to work beside the threads, it takes the sum of packets and multiplications.
*Nominal*: {nominal} packets in a µs and
thread, {memory} GB/s. *Fitted*: rates with which ggml-hexagon's counted packets give its published speeds.
These are {prompt} packets in
a µs and thread for prompts, the lower one without overlap; {token} for generation, with 31 to 60 GB/s. Predictions are bands
and not measurements. *Published* are figures of ggml-hexagon on a V73, by others: where its own prediction misses them, this
project's may miss as much.

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
    # A token's products are dot products of the vector threads.
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
