"""Modelled speed of whole models on V75 against the number of sequences and the length of the prompt."""

from tables import cost
from tables.page import Page, Table, number

SEQUENCES = [1, 2, 4, 8, 16, 32]
PROMPTS = [512, 1024, 2048, 4096]
# Tokens that each sequence has generated after the prompt, which all of them share.
OWN = 128
UBATCH = 512
CACHE = 4096
RATES = {"": 1.0, " at half the rate of packets": 0.5}


def decode(rate):
    model = cost.Model(rate=rate)
    rows = []
    for shape in cost.SHAPES:
        for prompt in PROMPTS:
            cells = [shape.name if prompt == PROMPTS[0] else "", str(prompt)]
            for sequences in SEQUENCES:
                step = model.step(shape, sequences, prompt + sequences * OWN)
                cells.append(number(sequences * 1e6 / step.us, 0))
            rows.append(cells)
    return ["model", "prompt", *map(str, SEQUENCES)], rows


def prefill():
    rows = []
    for shape in cost.SHAPES:
        cells = [shape.name]
        for prompt in PROMPTS:
            for rate in RATES.values():
                model = cost.Model(rate=rate)
                us = 0.0
                for begin in range(0, prompt, UBATCH):
                    end = begin + UBATCH
                    # The mask hides half of the last square.
                    us += model.step(shape, UBATCH, end, share=(begin + UBATCH / 2) / end, head_rows=1).us
                cells.append(number(prompt * 1e6 / us, 0))
        rows.append(cells)
    columns = [f"{prompt}{', half' if rate < 1 else ''}" for prompt in PROMPTS for rate in RATES.values()]
    return ["model", *columns], rows


def parts():
    """Shares of a step's work: what bounds it."""
    rows = []
    for shape in cost.SHAPES:
        for sequences in 1, 16:
            step = cost.Model().step(shape, sequences, 512 + sequences * OWN)
            memory = step.weight_bytes / (1e3 * cost.DMA_GB_PER_S)
            vector = step.packets / (cost.PACKETS_PER_US * cost.THREADS)
            matrix = step.tile_products * 2 * cost.TILE**3 / (1e3 * cost.HMX_GFLOPS)
            rows.append([shape.name if sequences == 1 else "", str(sequences), str(step.commands), number(step.us / 1e3, 2),
                         number(memory / 1e3, 2), number(vector / 1e3, 2), number(matrix / 1e3, 2)])
    return ["model", "sequences", "commands", "step, ms", "weights from memory, ms", "vector units, ms", "matrix unit, "
                                                                                                         "ms"], rows


def memory():
    rows = [[shape.name, number(cost.weight_bytes(shape) / 2**20, 0), number(cost.cache_bytes(shape, CACHE) / 2**20, 0),
             number((cost.weight_bytes(shape) + cost.cache_bytes(shape, CACHE)) / 2**20, 0)] for shape in cost.SHAPES]
    return ["model", "weights, MiB", f"cache of {CACHE} positions, MiB", "both, MiB"], rows


def write():
    tables = [Table(f"## Generation{words}\n\nTokens each second of all sequences together (Figure 11, and 17 for the "
                    f"length of the "
                    f"prompt), by the number of sequences. They share the prompt, and each has generated {OWN} tokens, all "
                    f"in one "
                    "cache in F16; each sequence reads all of it, as no mask spares work here.", *decode(rate))
              for words, rate in RATES.items()]
    tables.append(Table("## What bounds a step\n\nA prompt of 512. The three parts run side by side in each command, so a step "
                        "takes at least the largest and at most the sum.", *parts()))
    tables.append(Table(f"## Prompts\n\nTokens each second by the length of the prompt, ubatches of {UBATCH}; *half*: at "
                        f"half the "
                        "rate of packets.", *prefill()))
    tables.append(Table("## Memory\n\nBytes of the weights and the cache that the NPU reads (Figure 16). Buffers for "
                        "computing are "
                        "not in it.", *memory()))
    return Page("Modelled speed of whole models on Hexagon V75",
                "Q4_0 with ffn_down and the head in Q8_0, the recipe of the EuroSys'26 paper, with the head on the NPU. "
                "Packets of "
                "whole operations are those that the emulator counts (rung 3), at rates that nobody here measured: "
                f"{cost.DMA_GB_PER_S:.0f} GB/s from memory, {cost.HMX_GFLOPS / 1e3:.2f} TFLOPS (both from the paper), "
                f"{cost.THREADS} threads with {cost.PACKETS_PER_US:.0f} packets in a microsecond each, which is an "
                f"assumption; so "
                "the second table has half of it. Sizes between the counted ones are on the line through them.",
                "speed. Read ratios: ggml-hexagon's published figures are 0.4 to 0.75 of what the same rates give for it. "
                "Left out "
                "are the host (a decode step of SmolLM2's graph takes 28 µs of it, docs/results/cost.md), its waking up, "
                "sampling, cache stalls and heat. No power was measured.", tables)
