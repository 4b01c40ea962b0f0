"""The accuracy that INT8 and INT4 of the Rockchip NPU cost: scales for tensors and for rows, rotated or not."""

import fetch
import models
from project import cpu_env
from tables import runs
from tables.page import Page, Table, number

MODELS = {"SmolLM2-135M-Instruct": lambda: fetch.fetched(fetch.SMOLLM2), "gemma-3-270m": fetch.gemma,
          "Qwen2.5-Coder-0.5B-Instruct": fetch.qwen_coder, "TinyLlama-1.1B-Chat": fetch.tinyllama}
# Models for which the rounding of weights alone is also computed, in numpy.
ROUNDED = ["SmolLM2-135M-Instruct"]
CHIP = "rk3588"
KINDS = ["F16", "Q8_0", "Q4_0"]


def on_device(kept, name, source):
    rows = []
    for kind in KINDS:
        model = models.variant(kind, source)
        cpu = kept.perplexity(f"{name}, {kind}, CPU", model)
        device = kept.perplexity(f"{name}, {kind}, device", model, cpu_env(GGML_RUST_NPU_SIM=CHIP))
        rows.append([name if kind == KINDS[0] else "", kind, str(cpu), str(device),
                     number(device.perplexity / cpu.perplexity, 4)])
    model = models.variant("Q8_0", source)
    cpu = kept.perplexity(f"{name}, Q8_0, CPU", model)
    for words, settings in (("Q8_0, blocks in INT4, `mse`", {}), ("Q8_0, blocks in INT4, `absmax`", {
            "GGML_RUST_NPU_CALIBRATION": "absmax"})):
        env = cpu_env(GGML_RUST_NPU_SIM=CHIP, GGML_RUST_NPU_RULES="blk=int4", **settings)
        device = kept.perplexity(f"{name}, {words}", model, env)
        rows.append(["", words, "", str(device), number(device.perplexity / cpu.perplexity, 4)])
    return rows


def weights_alone(kept, name, source):
    from tables import rounding

    exact = models.variant("F16", source)
    rows = []
    for bits, levels in ((8, 127), (4, 7)):
        for scale, axis in (("tensor", None), ("row", 1)):
            cells = [f"INT{bits}", scale]
            for words in "plain", "rotated":
                def rule(_, weight, words=words, levels=levels, axis=axis):
                    def even(part):
                        return rounding.even(part, levels, axis)
                    return rounding.rotated(weight, even) if words == "rotated" else even(weight)
                file = f"{name}-int{bits}-{scale}-{words}.gguf"
                found = kept.perplexity(f"{name}, int{bits}, {scale}, {words}", lambda file=file, rule=rule: runs.made(
                    file, lambda path: rounding.rounded(exact, path, rule)))
                # Deleted, because it is as large as the F16 file and not used again.
                (runs.FILES / file).unlink(missing_ok=True)
                cells.append(str(found))
            rows.append(cells)
    return Table(f"## {name}, weights alone\n\nThe largest magnitude is the clip. *Rotated*: random signs, then Hadamard "
                 f"transforms "
                 "of 64 inputs, undone after the rounding. Rounded in numpy, and computed by the CPU backend in F16, so "
                 "activations "
                 "lose nothing. The backend has one scale for each row. No row is the scheme published for this chip, which "
                 "has one scale for a tensor, transforms whole rows, and chooses the clip by KL divergence. "
                 f"F16: {kept.perplexity(f'{name}, F16, CPU', exact)}.",
                 ["weights", "one scale for each", "not rotated", "rotated"], rows)


def write():
    kept = runs.Kept("rockchip")
    chosen = runs.chosen(MODELS)
    rows = [row for name, source in chosen.items() for row in on_device(kept, name, source)]
    device = Table(f"## On the simulated {CHIP}\n\nWeights with one scale for each row, rotated, and activations in INT8 "
                   f"(rung 2); the "
                   "CPU backend computes the same file.", ["model", "weights", "CPU backend", CHIP.upper(), "ratio"], rows)
    return Page("INT8 and INT4 on Rockchip",
                f"Perplexity over {runs.CHUNKS} × 512 tokens of wiki text. Q8_0, Q4_0 and F16 are made by llama-quantize "
                f"from the "
                "published file.",
                "This page cannot show speed and power: no board was here. The simulated chip computes exact integers, "
                "as the documentation of "
                "the real "
                "one says of it.", [device, *(weights_alone(kept, name, chosen[name]) for name in ROUNDED if name in chosen)],
                kept.date())
