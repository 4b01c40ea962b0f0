"""The cost of a graph on a Hexagon NPU, from the packets of whole operations that the emulator counts.

A command's time is the largest of three that a device does side by side: bytes from memory, packets of the vector units, and
tile products of the matrix unit. Commands follow each other.
"""

import itertools
import re
from typing import NamedTuple

import figures
from project import ROOT

# SOURCE: HEX_RATES of src/hexagon/caps.rs, which are those of the EuroSys'26 paper for V75; the packets are an assumption.
CAPS = (ROOT / "src" / "hexagon" / "caps.rs").read_text(encoding="utf-8")
DMA_GB_PER_S, HMX_GFLOPS, PACKETS_PER_US = (
    float(re.search(rf"    {name}: ([\d.]+),", CAPS)[1]) for name in ("dma_gb_per_s", "hmx_gflops", "packets_per_us"))

# Vector units of V75.
# SOURCE: upstream starts one thread for each (typically 4), shared by all chips of the table; unmeasured.
THREADS = 4
TILE = 32
# Bytes of a 32 x 32 tile.
# SOURCE: hexagon_ops::layout; ggml's own bytes for a block of 32, and of 256 for Q6_K.
TILE_BYTES = {"q4_0": 576, "q8_0": 1088, "f16": 2048}
# Rows for which whole products were counted.
ROWS = [1, 2, 4, 8, 32, 128, 512]


class Cost(NamedTuple):
    """Work of commands, and their microseconds."""

    commands: int = 0
    weight_bytes: float = 0
    tile_products: float = 0
    packets: float = 0
    us: float = 0

    def __add__(self, other):
        return Cost(*(a + b for a, b in zip(self, other)))


class Shape(NamedTuple):
    """A model of the llama family. Its output head is one with the embeddings if it `is_tied`."""

    name: str
    layers: int
    embed: int
    feed: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool = True
    has_bias: bool = False


# SOURCE: config.json of each model; SmolLM2 from its GGUF.
SHAPES = [Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152),
          Shape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, has_bias=True),
          Shape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, has_bias=True),
          Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256),
          Shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256)]


def between(x, points):
    """The value at `x` of a line through points, which goes on beyond the last two."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1 or (x1, y1) == points[-1]:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(points)


class Model:
    """Costs on one kind of chip, with a share of the assumed rate of packets."""

    def __init__(self, arch="v75", rate=1.0):
        self.counted, self.arch, self.rate = figures.packets(), arch, rate

    def of(self, name):
        return self.counted[self.arch, f"whole_{name}"]

    def command(self, packets, read_bytes=0.0, tile_products=0.0, weight_bytes=0.0):
        memory = (read_bytes + weight_bytes) / (1e3 * DMA_GB_PER_S)
        vector = packets / (PACKETS_PER_US * self.rate * THREADS)
        matrix = tile_products * 2 * TILE**3 / (1e3 * HMX_GFLOPS)
        return Cost(1, weight_bytes, tile_products, packets, max(memory, vector, matrix))

    def product(self, kind, rows, inputs, outputs):
        """Weights of `inputs` x `outputs`."""
        tiles = -(-inputs // TILE) * -(-outputs // TILE)
        points = [(m, self.of(f"mul_mat_{kind}_m{m}")) for m in ROWS
                  if (self.arch, f"whole_mul_mat_{kind}_m{m}") in self.counted]
        # One and two rows are dot products; three and more take the path of four.
        if kind == "q4_0" and rows == 2:
            per_tile, on_matrix = self.of("mul_mat_q4_0_m2"), 0
        elif kind == "q8_0" and rows == 2:
            # Not counted whole: the kernel's part grows as counted, the rest stays.
            grown = self.counted[self.arch, "gemv_1x2_q8_0"] - self.counted[self.arch, "gemv_2x1_q8_0"]
            per_tile, on_matrix = self.of("mul_mat_q8_0_m1") + grown, 0
        elif rows == 1:
            per_tile, on_matrix = self.of(f"mul_mat_{kind}_m1"), 0
        else:
            per_tile, on_matrix = between(max(rows, 4), [point for point in points if point[0] >= 4]), -(-rows // TILE)
        return self.command(per_tile * tiles, tile_products=tiles * on_matrix, weight_bytes=tiles * TILE_BYTES[kind])

    def rows_of(self, name, sizes, rows, size):
        """An operation on `rows` rows of `size` elements, from one row of each of `sizes`."""
        points = [(each, self.of(f"{name}_{each}")) for each in sizes]
        slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        return self.command(points[0][1] + slope * (rows * size - points[0][0]))

    def gate(self, rows, size):
        """The gated unit, which the last of its two products does with its results, so that it is no command."""
        few, many = (self.of(f"swiglu_{each}") for each in (1536, 8192))
        return self.command((many - few) / (8192 - 1536) * rows * size)._replace(commands=0)

    def rope(self, rows, heads, head):
        """Angles of `heads` heads of each row, from 9 heads of 64 and 32 heads of 64."""
        few, many = self.of("rope_neox_64x9"), self.of("rope_neox_64x32")
        return self.command(few + (many - few) / (23 * 64) * (rows * heads * head - 9 * 64))

    def rope_store(self, rows, heads, head):
        """The same, with the results stored in the cache."""
        extra = self.of("rope_set_rows_64x9") - self.of("rope_neox_64x9")
        one = self.rope(rows, heads, head)
        return self.command(one.packets + extra * max(1.0, rows * heads * head / (9 * 64)))

    def store(self, rows, size):
        return self.command(self.of("set_rows_f16_512") * max(1.0, rows * size / 512))

    def attention(self, rows, heads, kv_heads, head, positions, share=1.0, caches=1):
        """`rows` queries to `positions` cells of an F16 cache; a mask hides all but `share` of the scores.

        With several caches, each has its part of the rows and of the positions.
        """
        rows = rows // caches
        size = 64 if head <= 64 else 128
        # Packets for a cell of one head of keys and values, by the query rows that share it.
        name = f"attention_f16_h{size}"
        points = [(4, 4 * self.of(f"{name}_32on8_r1")), (32, self.of(f"{name}_1on1_r32")),
                  (2048, 4 * self.of(f"{name}_4on1_r512"))]
        queries = rows * heads // kv_heads
        cell = points[0][1] if queries <= 4 else between(queries, points)
        tiles = -(-queries // TILE) * (positions / TILE) * 2 * (head / TILE) * kv_heads
        return self.command(cell * positions * kv_heads * share, 2 * 2 * positions * kv_heads * head, tiles * share)

    def step(self, shape, rows, positions, share=1.0, head_rows=None, down="q8_0", caches=1):
        """One graph for `rows` tokens. Weights are Q4_0, the head Q8_0, and ffn_down of type `down` (the paper's: Q8_0)."""
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        norm = [self.rows_of("rms_norm_mul", [576, 2048, 4096], rows, shape.embed)]
        bias = [self.rows_of("add", [576, 2048], rows, size) for size in (queries, keys, keys)] if shape.has_bias else []
        layer = [*norm, self.product("q4_0", rows, shape.embed, queries), self.product("q4_0", rows, shape.embed, keys),
                 self.product("q4_0", rows, shape.embed, keys), *bias, self.rope(rows, shape.heads, shape.head),
                 self.rope_store(rows, shape.kv_heads, shape.head), self.store(rows, keys),
                 self.attention(rows, shape.heads, shape.kv_heads, shape.head, positions, share, caches),
                 self.product("q4_0", rows, queries, shape.embed), *norm, self.product("q4_0", rows, shape.embed, shape.feed),
                 self.product("q4_0", rows, shape.embed, shape.feed), self.gate(rows, shape.feed),
                 self.product(down, rows, shape.feed, shape.embed)]
        total = Cost()
        for part in layer * shape.layers:
            total += part
        head_rows = rows if head_rows is None else head_rows
        total += self.rows_of("rms_norm_mul", [576, 2048, 4096], head_rows, shape.embed)
        return total + self.product("q8_0", head_rows, shape.embed, shape.vocabulary)


def weight_bytes(shape):
    """Bytes of the weights, with those of the embeddings."""
    per_layer = shape.embed * (2 * shape.heads + 2 * shape.kv_heads) * shape.head + 2 * shape.embed * shape.feed
    table = shape.vocabulary * shape.embed
    eight_bits = shape.layers * shape.feed * shape.embed + table * (1 if shape.is_tied else 2)
    return shape.layers * per_layer * 18 / 32 + eight_bits * 34 / 32


def cache_bytes(shape, positions):
    """Bytes of keys and values in F16."""
    return shape.layers * 2 * 2 * shape.kv_heads * shape.head * positions
