#!/usr/bin/env python3
"""Draws the charts of docs/figures from the tables in the tree, and writes counted packets into docs/results/cost.md.

Usage: figures.py [--check]     --check: changes nothing, and fails if a file is out of date

Diagrams in docs/figures are drawn by hand. Needs nothing but Python, so that a test can run it anywhere.
"""

import sys
from html import escape
from math import log10
from typing import NamedTuple

import screen
from project import ROOT, Problem, main_with

FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "docs" / "results"
PACKETS = ROOT / "hexagon-ops" / "tests" / "packets.txt"

# The colour of each kind of mark, for light and dark backgrounds.
COLOURS = {"hexagon": ("#0969da", "#4493f8"), "hexagon2": ("#80b8f0", "#27548c"), "rockchip": ("#bc4c00", "#f0883e"),
           "other": ("#818b98", "#656c76")}

STYLE = """  <style>
    text { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: #1f2328; }
    .page { fill: #ffffff; stroke: #d1d9e0; }
    .title { font-size: 15px; font-weight: 600; }
    .head { font-weight: 600; }
    .note, .tick { fill: #59636e; font-size: 12px; }
    .grid { stroke: #d1d9e0; }
    .value { stroke: #ffffff; stroke-width: 4px; paint-order: stroke; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .page { fill: #0d1117; stroke: #3d444d; }
      .note, .tick { fill: #9198a1; }
      .grid { stroke: #3d444d; }
      .value { stroke: #0d1117; }
    }
  </style>"""

# Sizes in pixels: the page, the columns of labels, the plot, and the distance between lines.
WIDTH, MARGIN = 800, 16
PLOT_LEFT, PLOT_RIGHT = 300, 712
TOP, LINE, GAP = 76, 20, 12


class Mark(NamedTuple):
    """A line of a chart: its label, its value, the text next to it, and a key of COLOURS."""

    label: str
    value: float
    text: str
    colour: str


class Chart(NamedTuple):
    """A chart: groups are (heading, marks). With `powers`, (lowest, highest) powers of ten, the axis is logarithmic."""

    title: str
    note: str
    groups: list
    ticks: list
    powers: tuple = None


def table(page, header):
    """The cells of the rows of the first Markdown table of a page whose header starts with `header`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(header)), None)
    if start is None:
        raise Problem(f"{page.relative_to(ROOT)} has no table {header!r}")
    rows = []
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" *") for cell in line.strip().strip("|").split("|")])
    return rows


def packets():
    """Counted packets by (library, kernel)."""
    lines = PACKETS.read_text(encoding="utf-8").splitlines()
    return {tuple(line.split()[:2]): float(line.split()[2]) for line in lines if not line.startswith("#")}


def position(chart, value):
    """The place of a value on the axis, in pixels."""
    if chart.powers:
        low, high = chart.powers
        share = (log10(value) - low) / (high - low)
    else:
        share = value / max(chart.ticks)
    return PLOT_LEFT + share * (PLOT_RIGHT - PLOT_LEFT)


def draw(chart):
    """The SVG of a chart, in which every mark has a label, so that it needs no legend."""
    rows = sum(len(marks) for _, marks in chart.groups)
    bottom = TOP + rows * LINE + (len(chart.groups) - 1) * GAP
    height = bottom + 34
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
           f"  <title>{escape(chart.title)}</title>",
           "  <!-- Drawn by scripts/figures.py; a change belongs there. -->",
           STYLE.replace("  </style>", colours() + "  </style>"),
           f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
           f'  <text class="title" x="{MARGIN}" y="28">{escape(chart.title)}</text>',
           f'  <text class="note" x="{MARGIN}" y="48">{escape(chart.note)}</text>']
    for tick in chart.ticks:
        x = position(chart, tick)
        out.append(f'  <line class="grid" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        number = f"{tick:.6f}".rstrip("0").rstrip(".")
        out.append(f'  <text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{number}</text>')
    y = TOP
    for heading, marks in chart.groups:
        out.append(f'  <text class="head" x="{MARGIN}" y="{y + 14}">{escape(heading)}</text>')
        for mark in marks:
            x = position(chart, mark.value)
            out.append(f'  <text x="{PLOT_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(mark.label)}</text>')
            if chart.powers:
                # On a logarithmic axis the length of a bar means nothing, so only its end is marked.
                out.append(f'  <line class="grid" x1="{PLOT_LEFT}" y1="{y + 10}" x2="{x:.1f}" y2="{y + 10}"/>')
                out.append(f'  <circle class="{mark.colour}" cx="{x:.1f}" cy="{y + 10}" r="5"/>')
            else:
                size = f'width="{max(x - PLOT_LEFT, 1.0):.1f}" height="14"'
                out.append(f'  <rect class="{mark.colour}" x="{PLOT_LEFT}" y="{y + 3}" {size} rx="2"/>')
            out.append(f'  <text class="value" x="{x + 9:.1f}" y="{y + 14}">{escape(mark.text)}</text>')
            y += LINE
        y += GAP
    return "\n".join([*out, "</svg>"]) + "\n"


def colours():
    light = "".join(f"    .{name} {{ fill: {pair[0]}; }}\n" for name, pair in COLOURS.items())
    dark = "".join(f"      .{name} {{ fill: {pair[1]}; }}\n" for name, pair in COLOURS.items())
    return light + "    @media (prefers-color-scheme: dark) {\n" + dark + "    }\n"


def accuracy():
    """KL divergence by format and device."""
    groups = []
    for kind, rockchip, hexagon, cpu in table(RESULTS / "accuracy.md", "| format | Rockchip RK3588 |"):
        marks = [("Hexagon V75", hexagon, "hexagon"), ("Rockchip RK3588", rockchip, "rockchip"), ("CPU backend", cpu, "other")]
        groups.append((kind, [Mark(label, float(text), text, colour) for label, text, colour in marks]))
    return Chart("Mean KL divergence from the exact answer: smaller is better",
                 "SmolLM2-135M-Instruct, 20 × 512 tokens, simulated NPUs. Each grid line is ten times the one before.",
                 groups, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2], (-6, -2))


# The kernels of the table of inner loops: the row's title, the name in packets.txt, and the number of decimals.
KERNELS = {"Q4_0 to FP16 tile": ("dequantize_q4_0", 1), "Q8_0 to FP16 tile": ("dequantize_q8_0", 1),
           "IQ4_NL to FP16 tile": ("dequantize_iq4_nl", 1), "MXFP4 to FP16 tile": ("dequantize_mxfp4", 1),
           "Q4_K to FP16 tile": ("dequantize_q4_k", 1), "Q4_K dot products, one row": ("gemv_2x1_q4_k", 1),
           "Q5_0 to FP16 tile": ("dequantize_q5_0", 1), "Q5_0 dot products, one row": ("gemv_2x1_q5_0", 1),
           "Q5_K to FP16 tile": ("dequantize_q5_k", 1), "Q5_K dot products, one row": ("gemv_2x1_q5_k", 1),
           "Q6_K to FP16 tile": ("dequantize_q6_k", 1), "Q6_K dot products, one row": ("gemv_2x1_q6_k", 1),
           "Q4_0 dot products, one row": ("gemv_2x1_q4_0", 1), "Q8_0 dot products, one row": ("gemv_2x1_q8_0", 1),
           "quantizing activations, per element": ("quantize", 2)}
INNER_LOOPS = "| kernel | V73, V75 (IEEE) | V79 (qfloat) | ggml-hexagon"


def cost():
    """Packets of inner loops, ours and ggml-hexagon's."""
    counted, groups = packets(), []
    for row in table(RESULTS / "cost.md", INNER_LOOPS):
        if row[0] not in KERNELS or row[0].endswith("per element"):
            continue
        name, digits = KERNELS[row[0]]
        ours = [("ours, V73 and V75", counted["v73", name], "hexagon"), ("ours, V79", counted["v79", name], "hexagon2")]
        marks = [Mark(label, value, f"{value:.{digits}f}", colour) for label, value, colour in ours]
        if row[3] != "–":
            marks.append(Mark("ggml-hexagon, V73", float(row[3]), row[3], "other"))
        groups.append((row[0].replace(", one row", ""), marks))
    return Chart("Packets per 32 × 32 tile of weights, inner loops: smaller is better",
                 "Counted by an emulator. ggml-hexagon: at ggml 0.25.3 (Q5_K, Q6_K, Q4_K dot products: 0.26.0).",
                 groups, [0, 20, 40, 60, 80, 100, 120])


def quantizer():
    """KL divergence by options of the quantizer."""
    shown = {"Q4_0, plain": "other", "Q4_0, --imatrix": "hexagon", "Q4_0, --imatrix --awq": "hexagon",
             "--lpbq 32, plain": "other", "--lpbq 32 --imatrix": "hexagon", "--lpbq 32 --imatrix --awq": "hexagon",
             "IQ4_NL, plain": "other", "IQ4_NL, --imatrix --awq": "hexagon", "Q8_0": "other"}
    rows = {row[0].replace("`", ""): row[1] for row in table(RESULTS / "quantization.md", "| weights in the blocks")}
    marks = []
    for name, colour in shown.items():
        value = rows[name].replace("*", "").split()[0]
        marks.append(Mark(name, float(value), value, colour))
    return Chart("KL divergence of quantized SmolLM2-135M from its F16 file: smaller is better",
                 "20 × 512 tokens of wiki text, CPU backend. Grey: without statistics of the model's inputs.",
                 [("", marks)], [0, 0.1, 0.2, 0.3])


CHARTS = {"accuracy": accuracy, "cost": cost, "quantizer": quantizer}


def cost_page():
    """docs/results/cost.md with the packets that packets.txt has."""
    page, counted = RESULTS / "cost.md", packets()
    lines = page.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        cells = line.split("|")
        name = cells[1].strip() if len(cells) > 4 else ""
        if name in KERNELS:
            kernel, digits = KERNELS[name]
            ours = [f" {counted[library, kernel]:.{digits}f} " for library in ("v73", "v79")]
            # Our columns come before the last column.
            lines[i] = "|".join([*cells[:-4], *ours, *cells[-2:]])
    return "\n".join(lines) + "\n"


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise Problem("usage: figures.py [--check]")
    wanted = {RESULTS / "cost.md": cost_page()}
    wanted |= {FIGURES / f"{name}.svg": draw(chart()) for name, chart in CHARTS.items()}
    wanted[FIGURES / "screen.svg"] = screen.draw()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        raise Problem(f"{names}: not what the tables say; run `make figures`")
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    main_with(main)
