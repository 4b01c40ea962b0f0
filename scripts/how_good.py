#!/usr/bin/env python3
"""Writes docs/results/how-good.md, the page for a visitor, from the tables of the other pages.

Usage: how_good.py [--check]     --check: changes nothing, and fails if the page is out of date
"""

import re
import sys
from statistics import median

import coverage
from figures import RESULTS, table
from project import ROOT, Problem, main_with

PAGE = RESULTS / "how-good.md"

HEAD = """# How good is it?

No NPU has run this backend yet. These are the numbers that exist without one, each with its [rung of evidence](evidence.md):
1 reference, 2 simulated device, 3 emulated processor, 4 the vendor's software above an emulated device. `make figures` writes
this page from the tables of the pages that it names.

| question | answer | rung | more |
|---|---|---|---|
"""

FOOT = """
No number on this page can show how fast a device is, how much power it needs, and whether a vendor's newest firmware accepts
the backend. If you have a device, [the first hour](../guide/README.md) shows it.
"""


def number(text):
    return float(re.sub(r"[*,]", "", text).split()[0])


def share(kind, rows):
    """The median of ours / theirs for a workload."""
    ratios = [float(row[4]) for row in rows if row[1] == kind and re.fullmatch(r"[\d.]+", row[4])]
    if not ratios:
        raise Problem(f"models.md has no row of {kind}")
    return f"{median(ratios):.2f}", len(ratios)


def found(page, pattern):
    """The text of a page that a pattern finds."""
    match = re.search(pattern, " ".join((RESULTS / page).read_text(encoding="utf-8").split()))
    if not match:
        raise Problem(f"docs/results/{page} does not say {pattern!r} any more")
    return match.groups()


def answers():
    """(question, answer, rung, page) for each row."""
    everything = table(RESULTS / "operations.md", "| operation | OK |")[0]
    yield ("Does it compute what llama.cpp tests?",
           f"{number(everything[1]):,.0f} cases of upstream's `test-backend-ops` pass on a simulated V75 and none fails; "
           f"{number(everything[2]):,.0f} are left to the CPU", "2", "operations.md")
    loop = table(RESULTS / "evidence.md", "| library | self-test |")
    best = next(row for row in loop if row[0] == "V75")
    cases = best[2].replace(" of ", " cases of ", 1)
    yield ("And under Qualcomm's own library?", f"V75: {cases}", "4", "evidence.md#hexagon-under-libcdsprpc")
    one, of, total = found("architectures.md", r"one split, of those that decode: Q8_0: (\d+) of (\d+).*?; (\d+) models in all")
    yield ("Which models run?",
           f"{one} of {of} architectures with which llama.cpp generates text are computed whole on a simulated Hexagon, of "
           f"{total} that it has a test for", "2", "architectures.md")
    kinds = {row[0]: row for row in table(RESULTS / "accuracy.md", "| format | Rockchip RK3588 |")}
    for kind in ("Q8_0", "Q4_0"):
        _, rockchip, hexagon, cpu = kinds[kind]
        yield (f"How exact is a model in {kind}?", f"KL divergence from the same file in F32: Hexagon {hexagon}, Rockchip "
               f"{rockchip}, llama.cpp's CPU backend {cpu} (smaller is better)", "2", "accuracy.md")
    rows = table(RESULTS / "quantization.md", "| weights in the blocks")
    values = {row[0].replace("`", ""): number(row[1]) for row in rows}
    yield ("How much does the quantizer help?",
           f"KL divergence of a 4-bit model from its F16 file: {values['Q4_0, plain']:.3f} plain, "
           f"{values['Q4_0, --imatrix --awq']:.3f} with `--imatrix --awq`", "CPU", "quantization.md")
    models = table(RESULTS / "models.md", "| model | workload | ours |")
    (token, count), (prompt, _), (several, _) = (share(kind, models) for kind in ("token", "prompt", "sequences"))
    yield ("How much work is a model, compared with llama.cpp's own Hexagon backend?",
           f"Instruction packets, ours / theirs, median of {count} models: {token} for a token, {prompt} for a prompt, "
           f"{several} for a token of 8 sequences", "3", "models.md")
    text = " ".join((RESULTS / "tables" / "whole.md").read_text(encoding="utf-8").split())
    products, *others = [(int(above), int(of)) for above, of in re.findall(r"(\d+) of (\d+) are above 1", text)]
    yield ("Is every operation cheaper than theirs?",
           f"On a V73 {products[0]} of {products[1]} products with weights take more packets, and "
           f"{sum(above for above, _ in others)} of {sum(of for _, of in others)} other operations", "3",
           "tables/whole.md")
    llama = next(row for row in table(RESULTS / "models.md", "| model | prompt: nominal") if row[0] == "Llama-3.2-1B")
    yield ("How fast could it be?",
           f"Llama-3.2-1B Q4_0 on a Hexagon NPU, modelled and not measured: {llama[6]} tokens/s for one user, {llama[2]} for "
           f"a prompt", "3, and a model", "models.md#modelled-tokenss")
    nodes, host = found("cost.md", r"\(30 layers, (\d+) nodes\).*?takes (\d+) µs")
    yield ("How much time does the host need?", f"{host} µs and no allocation for a token's graph of {nodes} nodes", "host",
           "cost.md#hexagon-a-decode-step")
    minutes = sum(number(row[1]) for row in table(RESULTS / "fuzz.md", "| target | CPU minutes"))
    yield ("Is it robust?", f"{minutes / 60:.0f} CPU hours of fuzzing; each crash or wrong value that it found became a test",
           "2", "fuzz.md")
    floors = [floor for _, floor in coverage.FLOORS.values()]
    yield ("Is it tested?",
           f"Rust tests run at least {min(floors)} to {max(floors)} % of the lines of each crate (`make coverage`), and "
           "about 300 end-to-end tests run whole programs", "1, 2", "evidence.md")


def page():
    rows = [f"| {question} | {answer} | {rung} | [{where.split('#')[0]}]({where}) |\n"
            for question, answer, rung, where in answers()]
    return HEAD + "".join(rows) + FOOT


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise Problem("usage: how_good.py [--check]")
    want = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != want:
        if check:
            raise Problem(f"{PAGE.relative_to(ROOT)}: not what the tables say; run `make figures`")
        PAGE.write_text(want, encoding="utf-8")
        print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    main_with(main)
