#!/usr/bin/env python3
"""Prints modelled speeds of encoders for docs/results/cost.md.

Usage: encoder_times.py texts     tokens/s of embedding models on a Hexagon V75 with texts of 512 and 2,000 tokens
       encoder_times.py CHIP...   seconds of a Rockchip's NPU for the products of a picture and of speech

Hexagon: from packets of V73's code, which is V75's, at the rates of docs/results/models.md. Rockchip: attention is not
included, and the CPU's work in between, such as norms and activations, is not either.
"""

import json
import os
import subprocess
import sys

import build
import encoders
import graphs
import project
import replay
import stock
import wholes
import wholes_page
from project import main_with
from shapes import Shape, transformer

# Attention with fewer rows belongs to a decoder.
ROWS = 64
# The number of tokens of a workload.
TEXTS = {"text": 512, "long-text": 2000}
# One model of Qwen3's kind and one of BERT's.
MODELS = [
    Shape("Qwen3-Embedding-0.6B", "qwen3", 28, 1, transformer(1024, 3072, 16, 8, 128, 151669), "q8_0", "q8_0",
          workloads=tuple(TEXTS)),
    Shape("nomic-embed-text-v1.5", "nomic-bert", 12, 1, {
        "vocab_size": 30522, "context_length": 2048, "embedding_length": 768, "feed_forward_length": 3072,
        "attention.head_count": 12, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": 1,
        "rope.freq_base": 1000.0, "tokenizer.ggml.token_type_count": 2}, "q8_0", "q8_0",
        (r"(attn_[qkv]|attn_output|ffn_up|ffn_down)\.bias", "scale$"), workloads=tuple(TEXTS)),
]


def rows(event, dimension):
    return int(event["args"]["shape"].split("x")[dimension])


def microseconds(encoder, layers, chip):
    """Returns the modelled time of the encoder's products with `layers` layers."""
    debian, path = stock.debian_programs(), encoders.FOLDER / f"{encoder.name}-{layers}-{os.getpid()}.model"
    encoders.FOLDER.mkdir(parents=True, exist_ok=True)
    timeline = path.with_suffix(".json")
    env = project.device_env(chip, GGML_BACKEND_PATH=str(build.plugin()), GGML_RUST_NPU_TRACE=str(timeline))
    command = [str(word) for word in encoders.run(encoder, layers, path, debian)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, cwd=debian.folder)
    events = [each for each in json.loads(timeline.read_text(encoding="utf-8")) if "modelled_us" in each.get("args", {})]
    path.unlink()
    timeline.unlink()
    # At its start the library computes a picture, too, so the computed ones are counted.
    computed = sum(each["name"] == "FLASH_ATTN_EXT" and rows(each, 2) >= ROWS for each in events) // layers
    products = [each for each in events if each["name"] == "MUL_MAT" and rows(each, 1) >= ROWS]
    return sum(each["args"]["modelled_us"] for each in products) / computed


def texts():
    graphs.program()
    program = replay.guest(wholes.LIBRARY)
    for shape in MODELS:
        rows = wholes.count(shape, program)
        for workload, tokens in TEXTS.items():
            packets, kib, macs = (sum(getattr(row, name) for (work, _), row in rows.items() if work == workload)
                                  for name in ("packets", "kib", "millions"))
            speeds = [tokens / wholes_page.seconds(rates, workload, packets, kib, macs)
                      for rates in (wholes_page.NOMINAL, *wholes_page.fitted(workload))]
            nominal, slow, fast = (f"{speed:,.0f}" for speed in speeds)
            print(f"| {shape.name} | {tokens:,} | {packets / 1e6:,.1f} | {nominal} | {slow}–{fast} |", flush=True)


def main():
    if sys.argv[1:] == ["texts"]:
        texts()
        return
    for chip in sys.argv[1:] or ["rk3588"]:
        for encoder in encoders.ENCODERS:
            first, second = (microseconds(encoder, layers, chip) for layers in encoder.counted())
            print(f"| {encoder.name} | {chip} | {(first + encoder.periods() * (second - first)) / 1e6:.3f} |", flush=True)


if __name__ == "__main__":
    main_with(main)
