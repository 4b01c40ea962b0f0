"""Whole operations as counted packets, ours and ggml-hexagon's."""

import math

import figures
import peer_operations
from tables.page import Page, Table, number

# The unit in which an operation is counted, by the start of its name. For others the unit is the operation.
UNITS = {"mul_mat": "tile", "attention": "position and query head"}
PARTS = [("mul_mat", "## Products with weights\n\n`mul_mat_T_mM`: weights of type T, K = N = 2048, M rows, with the "
          "preparation of activations. `16_bits`: activations of 16 bits, which devices have where they cost no time; "
          "ggml-hexagon has 8."),
         ("attention", "## Attention\n\n`attention_T_hD_QonK_rR`: Q query heads of D elements on K heads of keys and values, R "
          "rows, 1024 positions, a cache of type T, an F16 mask."),
         ("", "## Other operations\n\nSizes are elements of a row, then heads or rows.")]


def unit(name):
    return next((unit for start, unit in UNITS.items() if name.startswith(start)), "operation")


def digits(value):
    return number(value, 0 if value >= 1000 else 1)


def rows(counted, theirs, names):
    """The rows of operations, and the ratios on V73."""
    found, ratios = [], []
    for name in names:
        cells = [f"`{name}`"]
        for arch in peer_operations.ARCHS:
            ours, other = counted[arch, f"whole_{name}"], theirs.get((arch, name.removesuffix("_16_bits")))
            ratio = ours / other[0] if other else None
            if arch == "v73" and ratio:
                ratios.append(ratio)
            cells += [digits(ours), digits(other[0]) if other else "–", number(ratio, 2) if ratio else "–"]
        kib = theirs.get(("v73", name.removesuffix("_16_bits")))
        found.append([*cells, str(kib[1]) if kib else "–"])
    return found, ratios


def write():
    counted, theirs = figures.packets(), peer_operations.recorded()
    left = [name.removeprefix("whole_") for arch, name in counted if arch == "v73" and name.startswith("whole_")]
    columns = ["operation", "V73", "ggml-hexagon", "ratio", "V79", "ggml-hexagon", "ratio", "KiB"]
    tables = []
    for start, text in PARTS:
        names = [name for name in left if name.startswith(start)]
        left = [name for name in left if name not in names]
        cells, ratios = rows(counted, theirs, names)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        more = sum(ratio > 1 for ratio in ratios)
        summary = (f"Packets for a{'n' if unit(names[0])[0] in 'aeio' else ''} {unit(names[0])}. On V73 the geometric mean of "
                   f"the ratios is {mean:.2f}; {more} of {len(ratios)} are above 1.")
        tables.append(Table(f"{text}\n\n{summary}", columns, cells))
    who = peer_operations.TABLE.read_text(encoding="utf-8").split("Packets of ")[1].split(" for whole")[0]
    return Page("Whole operations on Hexagon",
                f"Packets of whole operations on one thread, this project's (`hexagon-ops/tests/packets.txt`, which `make dsp` "
                f"compares) and those of {who}. The latter runs with its own dispatcher and its host's choice of kernels, "
                "compiled by clang 22 (`hexagon-ops/tests/peer_operations.txt`, which `make peer` writes). One emulator "
                "counts both "
                f"(rung 3). V75 "
                "takes V73's packets, V81 V79's.\n\nA figure is the cost of a further command of a repeated graph: it is "
                "read, "
                f"compared with that of the last run, and executed, and its results are written. Activations and results are "
                f"those of earlier commands, which stay in the cache; weights of norms and caches of keys and values are new "
                f"in each layer. Results are cleaned once, when the fence of the submission is answered, which is not in these "
                f"figures, nor in ggml-hexagon's, which cleans what later operations read.\n\nA ratio below 1 says that this "
                f"project takes fewer packets. *KiB*: what ggml-hexagon's DMA engine copies, which is free here. This "
                f"project's products and attention have weights and caches copied, too; its other operations read and write "
                f"through the cache.",
                "This page cannot show time. Copies of the DMA engine are free on both sides, although they take time on "
                "a device, and the matrix "
                "unit's instructions count as packets and do nothing. Waiting for memory and for gathers is not in it. On a "
                "device both use several threads. [Whole models](../models.md) says how often models need what.", tables)
