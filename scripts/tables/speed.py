"""Modelled speed of whole models on V75 against the number of sequences and the length of the prompt."""

from tables import cost
from tables.page import Page, Table, number

SEQUENCES = [1, 2, 4, 8, 16, 32]
PROMPTS = [512, 1024, 2048, 4096]
# How many tokens each sequence has generated after the prompt, which all sequences share.
OWN = 128
UBATCH = 512
CACHE = 4096
# Without a matrix unit vector units compute products of many rows; those of a token do not need it.
OLDER = {"hexagon-v68": "V68", "hexagon-v68-hvx": "V68 without a matrix unit"}
RATES = {"": 1.0, " at half the rate of packets": 0.5}


def slower(rate):
    """Arguments for a share of the assumed rate of packets."""
    return ["--packets-per-us", rate * cost.reckoned(cost.SHAPES[0])["packets_per_us"]]


def decode(rate):
    rows = []
    for shape in cost.SHAPES:
        columns = []
        for sequences in SEQUENCES:
            contexts = ",".join(str(prompt + sequences * OWN) for prompt in PROMPTS)
            columns.append(cost.reckoned(shape, "--shared", "--batch", sequences, "--context", contexts, *slower(rate)))
        for i, prompt in enumerate(PROMPTS):
            rows.append([shape.name if i == 0 else "", str(prompt),
                         *(number(column["generation"][i]["tokens_per_s"], 0) for column in columns)])
    return ["model", "prompt", *map(str, SEQUENCES)], rows


def prefill():
    rows = []
    lengths = ",".join(map(str, PROMPTS))
    for shape in cost.SHAPES:
        found = [cost.reckoned(shape, "--ubatch", UBATCH, "--context", lengths, *slower(rate))["prompts"]
                 for rate in RATES.values()]
        rows.append([shape.name, *(number(prompt["tokens_per_s"], 0) for pair in zip(*found) for prompt in pair)])
    columns = [f"{prompt}{', half' if rate < 1 else ''}" for prompt in PROMPTS for rate in RATES.values()]
    return ["model", *columns], rows


def parts():
    """Shares of a step's work, which show the bottleneck."""
    rows = []
    for shape in cost.SHAPES:
        for sequences in 1, 16:
            step = cost.step(shape, sequences, 512 + sequences * OWN, "--shared")
            rows.append([shape.name if sequences == 1 else "", str(sequences), str(step["commands"]),
                         *(number(step[part] / 1e3, 2) for part in ("step_us", "memory_us", "vector_us", "matrix_us"))])
    return ["model", "sequences", "commands", "step, ms", "memory, ms", "vector units, ms", "matrix unit, ms"], rows


def older():
    rows = []
    for chip, words in OLDER.items():
        for i, shape in enumerate(cost.SHAPES):
            report = cost.reckoned(shape, "--batch", "1,8", "--context", 512, "--ubatch", UBATCH, chip=chip)
            rows.append([words if i == 0 else "", shape.name,
                         *(number(row["tokens_per_s"], 0) for row in report["generation"] + report["prompts"])])
    return ["chip", "model", "1 sequence", "8 sequences", "prompt"], rows


def memory():
    rows = []
    for shape in cost.SHAPES:
        report = cost.reckoned(shape)
        weights, cache = report["model_bytes"], CACHE * report["cache_bytes_per_token"]
        rows.append([shape.name, *(number(each / 2**20, 0) for each in (weights, cache, weights + cache))])
    return ["model", "weights, MiB", f"cache of {CACHE} positions, MiB", "both, MiB"], rows


def write():
    rates = cost.reckoned(cost.SHAPES[0])
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
    tables.append(Table("## V68\n\nTokens each second at the rates above, as V68's are not known: of one sequence and of eight "
                        "after 512 tokens, and of a prompt of 512. Kernels are V68's, and so are products without a matrix "
                        "unit; what surrounds them is V79's, which has qfloat, too.", *older()))
    tables.append(Table("## Memory\n\nBytes of the weights and the cache that the NPU reads (Figure 16). Buffers for "
                        "computing are "
                        "not in it.", *memory()))
    return Page("Modelled speed of whole models on Hexagon V75",
                "Q4_0 with ffn_down and the head in Q8_0, the recipe of the EuroSys'26 paper, with the head on the NPU. "
                "Packets of "
                "whole operations are counted by the emulator (rung 3). They are reckoned at rates that this project did not "
                "measure: "
                f"{rates['memory_gb_per_s']:.0f} GB/s from memory, {rates['matrix_gflops'] / 1e3:.2f} TFLOPS (both from the "
                f"paper), {rates['threads']} threads with {rates['packets_per_us']:.0f} packets in a microsecond each. The "
                "last rate is an assumption, so the second table has half of it. Sizes between the counted ones are on "
                "the line through them.",
                "This page cannot show speed. Read ratios: ggml-hexagon's published figures are 0.4 to 0.75 of what the "
                "same rates give for it. "
                "Left out "
                "are the host (a decode step of SmolLM2's graph takes 28 µs of it, docs/results/cost.md), its waking up, "
                "sampling, cache stalls and heat. No power was measured.", tables)
