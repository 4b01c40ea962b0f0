#!/usr/bin/env python3
"""Measures how far a device's logits are from the exact answer: mean KL divergence over a text.

The exact answer for a file is the same file dequantized to F32, on the CPU backend. The CPU backend on the file itself
is measured beside the device, because it quantizes activations, too.

Usage: kld.py [chunks [format...]]
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import build
import fetch
import models
import project
from project import JOBS, LOGS, TARGET, Problem, main_with, run

CHUNK_TOKENS = 512

# The most that a format may cost on the device. F16 weights are exact; 8 bits for activations and weights are not.
LIMITS = {"Q8_0": 0.005, "Q4_0": 0.006, "F16": 0.0005}

# Further formats for the full table: every kind of block that SmolLM2's row length (576, no multiple of 256) allows.
MORE = ["Q4_1", "Q5_0", "Q5_1", "IQ4_NL"]


class Row(NamedTuple):
    kind: str
    device: float
    cpu: float
    perplexity: float


def perplexity(model, chunks, name, env, *args):
    log = LOGS / f"kld-{name}.log"
    run([project.binary("llama-perplexity"), "-m", model, "-c", CHUNK_TOKENS, "-b", CHUNK_TOKENS, "--chunks", chunks,
         "-t", JOBS, *args], log, env=env)
    return log.read_text(encoding="utf-8", errors="replace")


def divergence(model, base, chunks, name, env):
    text = perplexity(model, chunks, name, env, "--kl-divergence-base", base, "--kl-divergence")
    mean = re.search(r"Mean\s+KLD:\s+(\S+)", text)
    ppl = re.search(r"Mean PPL\(Q\)\s*:\s+(\S+)", text)
    if not mean or not ppl:
        raise Problem(f"llama-perplexity printed no KL divergence; see target/logs/kld-{name}.log")
    return float(mean.group(1)), float(ppl.group(1))


def measure(kind, chunks, device_env, cpu_env):
    """One row of the table. The exact logits (25 MB a chunk) are kept until both runs are done."""
    folder = TARGET / "kld"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind}-") as temp:
        base = Path(temp) / "logits"
        perplexity(models.exact(kind), chunks, f"{kind}-exact", cpu_env, "-f", fetch.text(),
                   "--kl-divergence-base", base)
        device, ppl = divergence(models.variant(kind), base, chunks, f"{kind}-device", device_env)
        cpu, _ = divergence(models.variant(kind), base, chunks, f"{kind}-cpu", cpu_env)
    return Row(kind, device, cpu, ppl)


def header(chunks):
    return (f"mean KL divergence from the exact answer, {chunks} chunks of {CHUNK_TOKENS} tokens\n"
            f"{'format':8} {'device':>10} {'limit':>8} {'CPU backend':>12} {'device PPL':>11}")


def line(row):
    limit = f"{LIMITS[row.kind]:8.4f}" if row.kind in LIMITS else f"{'':8}"
    return f"{row.kind:8} {row.device:10.6f} {limit} {row.cpu:12.6f} {row.perplexity:11.4f}"


def main():
    chunks = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    kinds = sys.argv[2:] or [*LIMITS, *MORE]
    build.static()
    print(header(chunks))
    failed = []
    for kind in kinds:
        row = measure(kind, chunks, project.device_env(), project.cpu_env())
        print(line(row), flush=True)
        if row.device > LIMITS.get(kind, float("inf")):
            failed.append(kind)
    if failed:
        raise Problem(f"over the limit: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    main_with(main)
