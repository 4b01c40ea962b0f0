"""Tile groups against blocks of 32, and attention by table against FP32, on the simulated V75."""

import fetch
import models
from project import cpu_env
from tables import mmlu, runs
from tables.page import Page, Table, number

NAME = "SmolLM2-135M-Instruct"
LARGER = "Qwen2.5-Coder-0.5B-Instruct"
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

    def answers(words, model, args=(), pack=False):
        env = dict(device, GGML_RUST_NPU_PACK=str(model.with_suffix(".groups.npu"))) if pack else device
        return words, kept.get(f"MMLU-STEM, {words}", lambda: mmlu.right(model, env, *args))

    larger = models.variant("F16", fetch.qwen_coder())
    blocks = runs.quantized(larger, f"{LARGER}-plain.gguf", "--type", "q4_0")
    tiles = runs.quantized(larger, f"{LARGER}-grouped.gguf", "--type", "q4_0", "--tile-group")
    asked = [answers("F16, by table, FP16 tiles", larger), answers("F16, FP32 attention", larger, ("-fa", "off")),
             answers("Q4_0, by table, FP16 tiles", blocks), answers("Q4_0, FP32 attention", blocks, ("-fa", "off")),
             answers("groups of 2 × 16, by table, FP16 tiles", tiles, pack=True)]

    def table(text, rows):
        base = rows[0][1].perplexity
        return Table(text, ["", "perplexity", "of the first row"],
                     [[words, str(found), number(found.perplexity / base, 4)] for words, found in rows])

    return Page("Tile groups, and attention by table",
                f"Tables 4 and 5 of the EuroSys'26 paper: {NAME}, the whole model on the simulated {CHIP} (rung 2), "
                f"{runs.CHUNKS} × "
                "512 tokens of wiki text; statistics of 40 × 512 other tokens of it.",
                f"This page cannot show knowledge: {LARGER} answers little better than by chance, which is 25 %, so its "
                "answers show how often "
                "arithmetic changes a choice, and hardly how good it is. A device's FP16 may round in other places than the "
                "simulated one.",
                [table("## Groups of weights\n\nOne scale for 32 × 1 or for 2 × 16 weights.", groups),
                 table("## Attention\n\nExponentials by a table of FP16 and products on FP16 tiles (`-fa on`), or FP32 "
                       "(`-fa off`).",
                       attention),
                 changed(asked)], kept.date())


def changed(asked):
    first = asked[0][1]
    count = len(first)
    rows = []
    for words, right in asked:
        percent = 100 * sum(right) / count
        error = (percent * (100 - percent) / (count - 1)) ** 0.5
        rows.append([words, f"{number(percent, 1)} ± {number(error, 1)}",
                     str(sum(mine != other for mine, other in zip(right, first)))])
    return Table(f"## MMLU-STEM\n\n{LARGER} (its Q4_K_M file, dequantized to F16 and quantized again), {count} of 3,018 "
                 "questions at equal distances, by `llama-perplexity --multiple-choice`: the answer with the greatest "
                 "probability for each token is the model's.",
                 ["", "percent right", "questions whose result is another than in the first row"], rows)
