"""Why activation-aware scaling works, and which statistics it needs."""

import fetch
import models
from tables import runs
from tables.page import Page, Table

NAME = "SmolLM2-135M-Instruct"
SHARE = 0.01
FACTORS = [1, 1.25, 1.5, 2, 4]
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
DOMAINS = ["wiki", "c4", "code", "technical", "multilingual"]
DOMAIN_CHUNKS = 16


def text_of(domain):
    member = fetch.TEXT_MEMBER.replace("wiki", domain)
    return fetch.members([(fetch.TEXT, member)], fetch.MODELS / f"{domain}.utf8")


def channels(kept, exact, imatrix):
    """Rounding with the inputs that are used most kept, or scaled."""
    from tables import rounding

    importance = rounding.statistics(imatrix)

    def found(key, rule):
        name = f"{NAME}-{key.replace(' ', '-').replace('/', '-')}.gguf"

        def make(path):
            rounding.rounded(exact, path, rule)
        result = kept.perplexity(key, lambda: runs.made(name, make))
        # Deleted, because it is as large as the F16 file and not used again.
        (runs.FILES / name).unlink(missing_ok=True)
        return result

    rows = [["F16", str(kept.perplexity("F16", exact))]]
    rows.append(["Q4_0, rounded", str(found("rounded", lambda _, weight: rounding.q4_0(weight)))])
    for share in 0.001, SHARE, 0.03:
        def keep(name, weight, share=share):
            return rounding.keeping(weight, rounding.salient(importance[name], share))
        rows.append([f"Q4_0, {share * 100:g} % of the inputs in F16: used most", str(found(f"kept {share}", keep))])

    def keep_large(_, weight):
        return rounding.keeping(weight, rounding.salient((weight ** 2).sum(0), SHARE))
    rows.append([f"Q4_0, {SHARE * 100:g} % of the inputs in F16: largest weights", str(found("kept large", keep_large))])

    def keep_any(name, weight):
        random = rounding.np.random.default_rng(len(name)).random(weight.shape[1])
        return rounding.keeping(weight, rounding.salient(random, SHARE))
    rows.append([f"Q4_0, {SHARE * 100:g} % of the inputs in F16: at random", str(found("kept random", keep_any))])
    for factor in FACTORS[1:]:
        def scale(name, weight, factor=factor):
            return rounding.scaled(weight, rounding.salient(importance[name], SHARE), factor)
        rows.append([f"Q4_0, the {SHARE * 100:g} % used most times {factor:g}", str(found(f"scaled {factor}", scale))])
    return rows


def write():
    kept = runs.Kept("scaling_awq")
    exact = models.variant("F16", fetch.fetched(fetch.SMOLLM2))
    imatrix = runs.statistics(exact, f"{NAME}-40.imatrix", 40)

    def tool(path, *args):
        return lambda: runs.quantized(exact, f"{NAME}-{path.name}-{'-'.join(args)}.gguf", "--type", "q4_0", "--imatrix", path,
                                      *args)

    def pair(key, path):
        return [str(kept.perplexity(f"{key}{words}", tool(path, *args))) for words, args in
                ((", imatrix", ()), (", awq", ("--awq",)))]

    rows = channels(kept, exact, imatrix)
    rows.append(["Q4_0, `--imatrix`", str(kept.perplexity("40 chunks, imatrix", tool(imatrix)))])
    rows.append(["Q4_0, `--imatrix --awq`", str(kept.perplexity("40 chunks, awq", tool(imatrix, "--awq")))])
    ablation = Table("## Which inputs matter\n\nWith one scale for 32 weights. The rows down to the scaled inputs are "
                     "rounded in "
                     "numpy, without statistics in the rounding itself, and stored as F16; the last two are the tool's.",
                     ["weights in the blocks", "perplexity"], rows)
    sizes = Table("## How much text\n\nStatistics of the first chunks of another part of the same text.",
                  ["chunks of 512", "`--imatrix`", "`--imatrix --awq`"],
                  [[str(size), *pair(f"{size} chunks", runs.statistics(exact, f"{NAME}-{size}.imatrix", size))]
                   for size in SIZES])
    domains = Table(f"## Which text\n\nStatistics of {DOMAIN_CHUNKS} chunks of each text of the package exllamav2; the "
                    f"perplexity "
                    "is that of wiki text in all rows.", ["statistics of", "`--imatrix`", "`--imatrix --awq`"],
                    [[domain, *pair(f"of {domain}", runs.statistics(
                        exact, f"{NAME}-{domain}.imatrix", DOMAIN_CHUNKS, None if domain == "wiki" else text_of(domain)))]
                     for domain in DOMAINS])
    return Page("Activation-aware scaling, taken apart",
                f"{NAME}, {runs.CHUNKS} × 512 tokens of wiki text, llama.cpp 0.5.0 on the CPU backend; the questions of "
                "Tables 1 and 2 and of Figure 8 of the AWQ paper, for blocks of Q4_0 in place of its INT3 with groups of "
                "128. The F16 file is the "
                "published one of 4 bits, dequantized, so it lies on a grid already. Embeddings are Q8_0 for the tool's "
                "rows, F16 "
                "for the others.",
                "This page cannot show that scaling helps blocks of Q4_0, or which text and how much of it serves best. Such "
                "rows differ by less than their errors, and the errors of pairs were not computed. Nor does it show "
                "models of billions of "
                "parameters, groups of 128, 3 bits, and tasks.",
                [ablation, sizes, domains], kept.date())
