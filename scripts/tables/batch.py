"""llama-batched-bench on the simulated V75, compared with the model of scripts/tables/cost.py."""

import batch
import models
from tables import cost, runs
from tables.page import Page, Table, number

CHIP, KIND = "hexagon-v75", "Q4_0"
PROMPT = 8


def write():
    kept = runs.Kept("batch")
    model, shape = models.variant(KIND), cost.SHAPES[0]
    rows = []
    for sequences in batch.SEQUENCES:
        commands, packets, weight_bytes, products = kept.get(f"{sequences} sequences",
                                                             lambda n=sequences: batch.step(model, CHIP, n))
        # llama.cpp rounds a cache's cells up to 256, and each sequence has a separate cache.
        step = cost.step(shape, sequences, 256, down="q4_0")
        rows.append([str(sequences), number(commands, 0), str(step["commands"]), number(weight_bytes / 1e6),
                     number(step["weight_bytes"] / 1e6), number(products, 0), number(step["tile_products"], 0),
                     number(packets / 1e6, 2), number(step["packets"] / 1e6, 2), number(step["tokens_per_s"], 0)])
    columns = ["sequences", "commands", "modelled", "MB of weights", "modelled", "tile products", "modelled",
               "million packets for weights", "modelled packets of all operations", "modelled tokens/s"]
    return Page("A decode step of llama-batched-bench on the device",
                f"SmolLM2-135M {KIND} on the simulated {CHIP} (rung 2), 1 to 32 sequences: llama-batched-bench with prompts of "
                f"{PROMPT} tokens, one for each sequence. The backend's plan estimates commands, bytes of weights, tile "
                "products and "
                "packets for weights as it sends the commands (`GGML_RUST_NPU_LOG=debug`). *Modelled* columns come from the "
                "model of [the page on speed](speed.md), which knows only the shape of the model.",
                "This page cannot show tokens each second of a device, because a simulated one has the times of the computer "
                "that runs it. The plan "
                "counts the kernels that read weights, and what surrounds a tile on the matrix unit; the model counts whole "
                "operations.",
                [Table("", columns, rows)], kept.date())
