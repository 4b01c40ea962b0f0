#!/usr/bin/env python3
"""Writes tests/golden/dequantize.bin: random blocks of each quantized type, and their values by the Python package gguf.

The package (numpy code of llama.cpp's own conversion scripts) is the oracle of tests/dequantize.rs. The file is checked
in; it is written again only when a type is added:

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0 numpy && venv/bin/python scripts/golden.py

Of each type: number of the type (u32), bytes of the blocks (u32), the blocks, their values (f32); little-endian.
"""

import struct
from pathlib import Path

import numpy
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "dequantize.bin"
TYPES = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.MXFP4, Type.Q2_K, Type.Q3_K, Type.Q4_K,
         Type.Q5_K, Type.Q6_K, Type.IQ4_XS]
# Where a block has half-precision numbers. Random bits in these places would sometimes be NaN.
HALVES = {Type.Q4_1: [0, 2], Type.Q5_1: [0, 2], Type.MXFP4: [], Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2],
          Type.Q5_K: [0, 2], Type.Q6_K: [208]}
BLOCKS = {32: 4, 256: 2}


def main():
    random = numpy.random.default_rng(6)
    out = bytearray()
    for kind in TYPES:
        elems, size = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (BLOCKS[elems], size), dtype=numpy.uint8)
        for at in HALVES.get(kind, [0]):
            halves = (random.uniform(-1, 1, len(blocks))).astype("<f2")
            blocks[:, at:at + 2] = halves.view(numpy.uint8).reshape(-1, 2)
        if kind == Type.MXFP4:
            blocks[:, 0] = [0, 1, 2, 130]
        values = dequantize(blocks, kind).astype("<f4")
        assert numpy.isfinite(values).all() and values.size == len(blocks) * elems
        out += struct.pack("<II", kind.value, blocks.size) + blocks.tobytes() + values.tobytes()
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_bytes(out)


if __name__ == "__main__":
    main()
