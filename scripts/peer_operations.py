"""The nodes of single operations at the shapes of hexagon-ops/tests/packets.txt's `whole_*`, as the harness of ggml-hexagon
reads them."""

import struct

from peer_nodes import COUNTED, MASK, NUMBERS, RANDOM, TYPES, WEIGHTS, ZEROS
from project import ROOT

# For quantized types: the elements and the bytes of a block.
BLOCKS = {"Q4_0": (32, 18), "Q8_0": (32, 34)}
BYTES = {"F32": 4, "F16": 2, "I32": 4, "I64": 8}
# The side of a tile of weights, and the rows and columns of the counted products.
TILE, SIZE = 32, 2048
TABLE = ROOT / "hexagon-ops" / "tests" / "peer_operations.txt"
ARCHS = ("v73", "v79")
HEAD = """\
# Packets of {who} for whole operations, on one thread: architecture, operation and
# packets by the names and in the units of packets.txt, and KiB that the DMA engine copies. Written by make peer, {date}.
"""
# The number of cache cells in the counted attentions.
CELLS = 1024


def bits(number):
    return struct.unpack("<i", struct.pack("<f", number))[0]


def tensor(kind, *ne, use=(ZEROS,), nb=None):
    """A tensor whose elements follow each other, or are `nb` bytes apart."""
    ne = [*ne, *[1] * (4 - len(ne))]
    elems, size = BLOCKS.get(kind) or (1, BYTES[kind])
    step = [size, ne[0] // elems * size]
    while len(step) < 4:
        step.append(step[-1] * ne[len(step) - 1])
    step = [*(nb or step), *step[len(nb or step):]]
    return " ".join(map(str, [TYPES[kind], *ne, *step, *use]))


def node(op, params, dst, *src):
    return " ".join([op, *map(str, [*params, *[0] * (16 - len(params))]), dst, *src])


def floats(*ne, **more):
    return tensor("F32", *ne, **more)


def norm(n, *rows, op="RMS_NORM+MUL"):
    src = [floats(n, *rows)] + ([floats(n, use=(WEIGHTS,))] if op == "RMS_NORM+MUL" else [])
    return node(op, [bits(1e-6)], floats(n, *rows), *src)


def two(op, n, *rows, other=None, params=()):
    return node(op, params, floats(n, *rows), floats(n, *rows), floats(*(other or (n, *rows))))


def one(op, n, *rows, params=(), use=(ZEROS,)):
    return node(op, params, floats(n, *rows), floats(n, *rows, use=use))


def glu(op, kind, n, *rows):
    return two(op, n, *rows, params=[kind, 0, bits(1.702), bits(7.0)])


def rope(n, heads, rows=1, mode=2):
    angles = [0, n, mode, 0, 32768, bits(1e4), bits(1), 0, bits(1), bits(32), bits(1)]
    return node("ROPE", angles, floats(n, heads, rows), floats(n, heads, rows), tensor("I32", rows, use=(COUNTED,)))


def soft_max(n, rows=1, mask=None):
    src = [floats(n, rows)] + ([tensor(mask, n, rows, use=(MASK, n))] if mask else [])
    return node("SOFT_MAX", [bits(0.125), 0], floats(n, rows), *src)


def sort(op, n, k, rows=1):
    return node(op, [1] if op == "ARGSORT" else [], tensor("I32", k, rows), floats(n, rows, use=(RANDOM,)))


def concat(dim, a, b):
    joined = [x + y if i == dim else x for i, (x, y) in enumerate(zip(a, b))]
    return node("CONCAT", [dim], floats(*joined), floats(*a), floats(*b))


def set_rows(n, rows):
    cache = tensor("F16", n, 512)
    return node("SET_ROWS", [], cache, floats(n, rows), tensor("I64", rows, use=(COUNTED,)), cache)


def get_rows(kind, n, rows):
    return node("GET_ROWS", [], floats(n, rows), tensor(kind, n, 64), tensor("I32", rows, use=(NUMBERS, 64)))


def copy(kind, *ne, nb=None):
    return node("CPY", [], tensor(kind, *ne), floats(*ne, nb=nb))


def copy_halves(*ne, **more):
    return node("CPY", [], tensor("F16", *ne), tensor("F16", *ne, **more))


def product(kind, rows):
    return node("MUL_MAT", [], floats(SIZE, rows), tensor(kind, SIZE, SIZE, use=(WEIGHTS,)), floats(SIZE, rows))


def attention(kind, head, heads, kv_heads, rows):
    cache = tensor(kind, head, CELLS, kv_heads)
    return node("FLASH_ATTN_EXT", [bits(head**-0.5), 0, 0, 10], floats(head, heads, rows), floats(head, rows, heads), cache,
                cache, tensor("F16", CELLS, rows, use=(MASK, CELLS)))


def nodes():
    """Returns the operations by the names of packets.txt: the number of units in it, and the nodes."""
    planes = [64, 64, 32]
    found = {
        "rms_norm_mul_576": [norm(576)], "rms_norm_mul_2048": [norm(2048)], "rms_norm_mul_4096": [norm(4096)],
        "add_576": [two("ADD", 576)], "add_2048": [two("ADD", 2048)], "mul_2048": [two("MUL", 2048)],
        "swiglu_1536": [glu("SWIGLU", 2, 1536)], "swiglu_8192": [glu("SWIGLU", 2, 8192)],
        "rope_neox_64x9": [rope(64, 9)], "rope_neox_64x32": [rope(64, 32)], "rope_neox_128x32": [rope(128, 32)],
        "rope_norm_64x32": [rope(64, 32, mode=0)], "rope_set_rows_64x9": [rope(64, 9), set_rows(576, 1)],
        "soft_max_1024_mask_f16": [soft_max(1024, mask="F16")], "soft_max_1024_mask_f32": [soft_max(1024, mask="F32")],
        "soft_max_1024": [soft_max(1024)], "set_rows_f16_512": [set_rows(512, 1)],
        "get_rows_f16_2048": [get_rows("F16", 2048, 1)],
        "copy_f16_2048": [copy_halves(2048)], "copy_f16_64x32": [copy_halves(64, 32, nb=[2, 256])],
        "concat_128_64x16": [concat(0, (128, 16), (64, 16))], "concat_3_1x2048": [concat(0, (3, 2048), (1, 2048))],
        "add_2048_32_rows": [two("ADD", 2048, 32)], "swiglu_2048_32_rows": [glu("SWIGLU", 2, 2048, 32)],
        "rms_norm_mul_2048_32_rows": [norm(2048, 32)], "rope_set_rows_64x9_32_rows": [rope(64, 9, 32), set_rows(576, 32)],
        "rms_norm_mul_128x24": [norm(128, 24)], "rms_norm_mul_128x2048": [norm(128, 2048)],
        "rms_norm_mul_5120_48_rows": [norm(5120, 48)], "norm_3072_48_rows": [norm(3072, 48, op="NORM")],
        "l2_norm_128x16": [norm(128, 16, op="L2_NORM")], "add_3072_48_rows": [two("ADD", 3072, 48)],
        "mul_3072_48_rows_by_row": [two("MUL", 3072, 48, other=(3072,))],
        "mul_2880x4_by_element": [two("MUL", 2880, 4, other=(1, 4))], "div_3072": [two("DIV", 3072)],
        "scale_3072_48_rows": [one("SCALE", 3072, 48, params=[bits(0.5)])], "neg_11008": [one("NEG", 11008)],
        "clamp_11008": [one("CLAMP", 11008, params=[bits(-0.5), 0])],
        **{f"{op.lower()}_11008": [one(op, 11008)] for op in ("SILU", "SIGMOID", "TANH", "EXP", "LOG", "SQRT")},
        "gelu_4096_48_rows": [one("GELU", 4096, 48)], "swiglu_11008_48_rows": [glu("SWIGLU", 2, 11008, 48)],
        "geglu_11008": [glu("GEGLU", 1, 11008)], "swiglu_oai_2880x4": [glu("SWIGLU_OAI", 3, 2880, 4)],
        "rope_neox_128x8_300_rows": [rope(128, 8, 300)], "rope_neox_96x24_48_rows": [rope(96, 24, 48)],
        "set_rows_f16_1024_48_rows": [set_rows(1024, 48)], "argsort_32_48_rows": [sort("ARGSORT", 32, 32, 48)],
        "argsort_128_48_rows": [sort("ARGSORT", 128, 128, 48)], "argsort_4096": [sort("ARGSORT", 4096, 4096)],
        "top_k_128_8_48_rows": [sort("TOP_K", 128, 8, 48)], "top_k_4096_40": [sort("TOP_K", 4096, 40)],
        "argmax_32000": [node("ARGMAX", [], tensor("I32", 1), floats(32000, use=(RANDOM,)))],
        "soft_max_32_48_rows": [soft_max(32, 48)], "soft_max_128_48_rows": [soft_max(128, 48)],
        "soft_max_4096_mask_f16_48_rows": [soft_max(4096, 48, "F16")],
        "sum_rows_3072_48_rows": [node("SUM_ROWS", [], floats(1, 48), floats(3072, 48))],
        "cumsum_64x64x32": [one("CUMSUM", *planes)], "solve_tri_64x64x32": [two("SOLVE_TRI", *planes)],
        "tri_64x64x32": [one("TRI", *planes, params=[3])], "diag_64x32": [node("DIAG", [], floats(*planes), floats(64, 1, 32))],
        "fill_3072_48_rows": [one("FILL", 3072, 48, params=[bits(1.5)])],
        "add_id_2880x4_8_rows": [node("ADD_ID", [], floats(2880, 4, 8), floats(2880, 4, 8), floats(2880, 32, use=(WEIGHTS,)),
                                      tensor("I32", 4, 8, use=(NUMBERS, 32)))],
        "im2col_1d_3x80_300": [node("IM2COL", [1, 0, 1, 0, 1, 0, 0], tensor("F16", 240, 300), tensor("F16", 3, 80, 80),
                                    floats(300, 80))],
        "concat_3_1x6144": [concat(0, (3, 6144), (1, 6144))], "concat_3_64x6144": [concat(0, (3, 6144), (64, 6144))],
        "concat_192_64x32": [concat(0, (192, 32), (64, 32))], "concat_rows_1024x8_8": [concat(1, (1024, 8), (1024, 8))],
        "copy_f32_3072_48_rows": [copy("F32", 3072, 48)], "copy_f16_3072_48_rows": [copy("F16", 3072, 48)],
        "copy_permuted_96x48x24": [copy("F32", 96, 48, 24, nb=[4, 96 * 24 * 4, 96 * 4])],
        "copy_transposed_256x64": [copy("F32", 256, 64, nb=[256, 4])],
        "roll_3072_48_rows": [one("ROLL", 3072, 48, params=[5])],
        "pad_128x50x32": [node("PAD", [0, 0, 0, 14], floats(128, 64, 32), floats(128, 50, 32))],
        "repeat_1x64_to_1024": [node("REPEAT", [], floats(1024, 64), floats(1, 64))],
        "get_rows_f32_3072_48_rows": [get_rows("F32", 3072, 48)],
    }
    found = {name: (1, nodes) for name, nodes in found.items()}
    for kind in ("Q4_0", "Q8_0", "F16"):
        for rows in (1, 2, 4, 8, 32, 128, 512):
            found[f"mul_mat_{kind.lower()}_m{rows}"] = ((SIZE // TILE) ** 2, [product(kind, rows)])
    for kind, head, heads, kv_heads, rows in (
            *(("F16", head, *shape) for head in (64, 128) for shape in ((1, 1, 1), (32, 8, 1), (1, 1, 32), (4, 1, 512))),
            ("F16", 96, 32, 8, 7), ("F16", 256, 32, 8, 1), ("Q8_0", 64, 1, 1, 1)):
        name = f"attention_{kind.lower()}_h{head}_{heads}on{kv_heads}_r{rows}"
        found[name] = (CELLS * heads, [attention(kind, head, heads, kv_heads, rows)])
    return found


def count(counter):
    """Returns packets and KiB of each operation that ggml-hexagon has, in the units of packets.txt."""
    table = {}
    for name, (units, lines) in nodes().items():
        costs = counter.count(lines)
        if None not in costs:
            packets, kib = map(sum, zip(*costs))
            table[name] = packets / units, kib
    return table


def recorded():
    """Returns packets and KiB by the architecture and the operation's name."""
    table = {}
    for text in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []:
        if not text.startswith("#"):
            arch, name, packets, kib = text.split()
            table[arch, name] = float(packets), int(kib)
    return table

