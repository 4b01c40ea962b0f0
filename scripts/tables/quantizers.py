"""One scale for each row against one for each group, with and without statistics."""

import fetch
import models
from tables import runs
from tables.page import Page, Table, number

MODELS = {"SmolLM2-135M-Instruct": lambda: fetch.fetched(fetch.SMOLLM2), "gemma-3-270m": fetch.gemma}
STATISTICS = 40


def table(kept, name, source):
    from tables import rounding

    exact = models.variant("F16", source)
    imatrix = runs.statistics(exact, f"{name}-{STATISTICS}.imatrix", STATISTICS)

    def tool(*args):
        words = "-".join(arg.strip("-") for arg in args if not arg.startswith("/"))
        return lambda: runs.quantized(exact, f"{name}-{words}.gguf", *args)

    def by_rows(path):
        rounding.rounded(exact, path, lambda _, weight: rounding.even(weight, 7, 1))

    with_statistics = ("--imatrix", str(imatrix))
    methods = {
        "F16": (16, exact),
        "4 bits, one scale for each row": (4, lambda: runs.made(f"{name}-rows.gguf", by_rows)),
        "`--lpbq 32`": (4.13, tool("--type", "q4_0", "--lpbq", "32")),
        "`--lpbq 32 --imatrix --awq`": (4.13, tool("--type", "q4_0", "--lpbq", "32", *with_statistics, "--awq")),
        "Q4_0, groups of 32": (4.5, tool("--type", "q4_0")),
        "Q4_0, `--imatrix`": (4.5, tool("--type", "q4_0", *with_statistics)),
        "Q4_0, `--imatrix --awq`": (4.5, tool("--type", "q4_0", *with_statistics, "--awq")),
        "the same, ffn_down in Q8_0": (None, tool("--type", "q4_0", *with_statistics, "--awq", "--tensor-type",
                                                  "ffn_down=q8_0")),
    }
    rows, base = [], None
    for method, (bits, model) in methods.items():
        found = kept.perplexity(f"{name}, {method}", model)
        base = base or found.perplexity
        rows.append([method, "–" if bits is None else f"{bits:g}", str(found), number(found.perplexity / base, 3)])
    return Table(f"## {name}", ["weights in the blocks", "bits", "perplexity", "of F16"], rows)


def write():
    kept = runs.Kept("quantizers")
    tables = [table(kept, name, source) for name, source in runs.chosen(MODELS).items()]
    return Page("One scale for a row, and one for a group",
                f"Table 1 of the EuroSys'26 paper, on models that can be had here: {runs.CHUNKS} × 512 tokens of wiki text, "
                "llama.cpp 0.5.0 on the CPU backend. The F16 file is the published one of 4 bits, dequantized; statistics "
                "are of "
                f"{STATISTICS} × 512 other tokens of the text. Embeddings are Q8_0, in the second row F16. Bits are those of a "
                "weight with its scales; with `--lpbq` those of the format that an engine for it would hold.",
                "This page cannot show accuracy on tasks, which was not measured, nor Qualcomm's own quantizer: the "
                "second row is the "
                "plain rule of its format, without its calibration.", tables, kept.date())
