"""Ablations of the Hexagon kernels as counted packets: dequantization, softmax, and the parts of attention."""

import figures
import peer_operations
from tables.page import Page, Table, number

# The numbers of positions and of query rows in the EuroSys'26 paper's softmax ablation.
KEYS = [1024, 4096, 16384]
QUERIES = [1, 4, 16]
# The number of positions in the counted attentions and softmax rows.
COUNTED = 1024
ARCHS = {"v73": "V73, V75 (IEEE)", "v79": "V79 (qfloat)"}

# Packets for a tile of ggml-hexagon's dequantizer, ggml 0.26.0, on V73 and V79.
# SOURCE: counted in the same emulator, compiled by clang 22, 2026-11-22.
GGML_HEXAGON_DEQUANTIZE = {"v73": 55.3, "v79": 55.3}


def dequantization(counted):
    """Packets for a tile of 32 x 32 weights, by kernel and in a whole product."""
    def whole(arch, kind, rows):
        return number(counted[arch, f"whole_mul_mat_{kind}_m{rows}"])

    others = peer_operations.recorded()

    def other(arch, kind, rows):
        return number(others[arch, f"mul_mat_{kind}_m{rows}"][0])

    rows = []
    for arch in ARCHS:
        rows += [
            [ARCHS[arch], "rows of Q4_0 blocks, scatter", number(counted[arch, "conventional_rows_q4_0"]), "–", "–", "–"],
            ["", "tiles of Q4_0, arithmetic", number(counted[arch, "conventional_tiles_q4_0"]), "–", "–", "–"],
            ["", "ggml-hexagon's tiles of Q4_0", number(GGML_HEXAGON_DEQUANTIZE[arch]),
             *(other(arch, "q4_0", m) for m in (4, 32, 128))],
            ["", "groups of 2 × 16 (`--tile-group`)", number(counted[arch, "dequantize_q4_tile"]), "–", "–", "–"],
            ["", "the same, of 8 bits", number(counted[arch, "dequantize_q8_tile"]), "–", "–", "–"],
            ["", "Q4_0, this backend", number(counted[arch, "dequantize_q4_0"]),
             *(whole(arch, "q4_0", m) for m in (4, 32, 128))],
            ["", "Q8_0, this backend", number(counted[arch, "dequantize_q8_0"]),
             *(whole(arch, "q8_0", m) for m in (4, 32, 128))],
            ["", "none: F16 weights, this backend", "0", *(whole(arch, "f16", m) for m in (4, 32, 128))],
            ["", "none: F16 weights, ggml-hexagon", "0", *(other(arch, "f16", m) for m in (4, 32, 128))],
        ]
    return Table("## Dequantization\n\nPackets for a tile of 32 × 32 weights: the dequantizer alone, and the whole product of "
                 "M rows with weights of K = N = 2048, with the preparation of activations and the writing of results. The "
                 "paper's Figure 15 compares a conventional order with scatter, the matrix unit's order, its own groups, and "
                 "no dequantization. The first two rows are counted for this comparison and not used. The first row masks, "
                 "shifts, widens, converts and multiplies the nibbles of a row of ggml's blocks, and a scatter writes the "
                 "results to the tile. The second has the same arithmetic on this backend's tiles, where this backend has one "
                 "lookup.",
                 ["chip", "weights", "dequantizer", "M = 4", "M = 32", "M = 128"], rows)


def softmax(counted):
    rows = []
    for keys in KEYS:
        for queries in QUERIES:
            cells = [str(queries), str(keys)]
            for arch in ARCHS:
                scores = queries * keys / COUNTED
                table = counted[arch, "soft_max_inner"] * scores
                single = counted[arch, "exp_f32"] * scores
                half = counted[arch, "conventional_exp_f16"] * scores
                cells += [number(single, 0), number(half, 0), number(table, 0), number(single / table),
                          number(half / table)]
            rows.append(cells)
    columns = ["query rows", "positions"]
    for arch in ARCHS:
        columns += [f"FP32, {arch.upper()}", f"FP16, {arch.upper()}", f"table, {arch.upper()}", "FP32 to table",
                    "FP16 to table"]
    return Table("## Softmax\n\nPackets for the scores of one head, by the number of query rows and of positions (Figure 14). "
                 f"Three inner loops are counted on a row of {COUNTED} and multiplied. FP32 is a polynomial of FP32 lanes, the "
                 "exponential alone. FP16 is a polynomial of FP16 lanes, counted for this comparison and not used: each result "
                 "is off by at most 1.53 units in the last place on V73 and 1.70 on V79. The table of FP16 exponentials, "
                 "within half a unit, is gathered from VTCM. The last two include the subtraction of the maximum and the sum.",
                 columns, rows)


def attention(counted):
    rows = []
    for name, dims, heads, queries in (("one head", 64, "1on1", 1), ("32 heads on 8", 64, "32on8", 1),
                                       ("one head", 64, "1on1", 32), ("4 heads on 1", 64, "4on1", 512),
                                       ("one head", 128, "1on1", 1), ("32 heads on 8", 128, "32on8", 1),
                                       ("one head", 128, "1on1", 32), ("4 heads on 1", 128, "4on1", 512)):
        cells = [name, str(dims), str(queries)]
        for arch in ARCHS:
            whole = counted[arch, f"whole_attention_f16_h{dims}_{heads}_r{queries}"]
            # For one query head: exponentials and sums of the scores of all its rows at one position.
            scores = counted[arch, "soft_max_inner"] / COUNTED * queries
            cells += [number(whole), number(scores), f"{scores / whole:.0%}".replace("%", " %")]
        rows.append(cells)
    columns = ["heads", "head size", "query rows"]
    for arch in ARCHS:
        columns += [f"whole, {arch.upper()}", f"softmax by table, {arch.upper()}", "share"]
    return Table("## Attention by query rows\n\nPackets for a position and a query head of a whole attention to "
                 f"{COUNTED} positions with an F16 mask and an F16 cache (Figure 8). The rest is locating rows, moving keys, "
                 "values and scores to and from tiles, and the instructions of the matrix unit, which take one packet each and "
                 "no time here.", columns, rows)


def write():
    counted = figures.packets()
    return Page("Ablations of the Hexagon kernels",
                "Packets that qemu-hexagon counts for the kernels of the DSP library, and for a few that others use (rung 3; "
                "`hexagon-ops/tests/packets.txt`, which `make dsp` compares). They are exact and repeatable.",
                "This page cannot show time. A packet is a group of instructions that the DSP issues together, not a "
                "cycle. The "
                "numbers leave out waiting for memory, gathers (24 to 48 packets on V75), scatters and the time of the matrix "
                "unit. No power was measured.",
                [dequantization(counted), softmax(counted), attention(counted)])
