#!/usr/bin/env python3
"""Measures how far a device's logits are from the exact answer: mean KL divergence over a text.

The exact answer for a file is the same file dequantized to F32, on the CPU backend. The CPU backend on the file itself is
measured as well, because it quantizes activations, too. Limits hold for the default rules.

The exact logits are kept until a format is done, in target/kld: 25 MB a chunk for SmolLM2, 134 MB for Gemma 3,
16 MB for TinyLlama.
"""

import argparse
import math
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import build
import fetch
import models
import project
from project import JOBS, LOGS, TARGET, Problem, cpu_env, main_with, run

CHUNK_TOKENS = 512
# A run may fail to print its result, so it is repeated up to this often.
ATTEMPTS = 3

# The models for `--model`. Without it, the model that all scripts use is measured.
MODELS = {"smollm2": lambda: fetch.fetched(fetch.SMOLLM2), "gemma3": fetch.gemma,
          "tinyllama": fetch.tinyllama, "qwen": fetch.qwen_coder, "qwen-1.5b": fetch.qwen_coder_1_5b}

# The largest divergence that a format may have on a device. Rockchip rounds activations and weights to 8 bits. Hexagon keeps
# weights unchanged, and may round activations to 8 bits for one or two tokens at a time. Products in FP16 are nearly exact:
# their limits are a few times the values in docs/results/accuracy.md, so that a kernel that lost bits would be noticed.
FORMATS = ["Q8_0", "Q4_0", "F16"]
# More formats for the full table: every kind of block that fits rows of 576 and 640, which are not multiples of 256.
MORE = ["Q4_1", "Q5_0", "Q5_1", "IQ4_NL"]
DOWNLOADED = ["Q4_K_M", "Q5_0", "Q6_K", "Q3_K_M"]
EXACT = {"rk": 0.00002, "hexagon": 0.0001}
LIMITS = {"rk": {"Q8_0": 0.003, "Q4_0": 0.005, "F16": EXACT["rk"], **dict.fromkeys(MORE + DOWNLOADED, 0.006)},
          "hexagon": dict.fromkeys(FORMATS + MORE + DOWNLOADED, EXACT["hexagon"])}
# For one or two tokens at a time, for which Hexagon may round activations to 8 bits.
FEW_TOKENS_LIMITS = {"rk": {**LIMITS["rk"], "Q8_0": 0.005, "Q4_0": 0.006},
                     "hexagon": {"Q8_0": 0.004, "Q4_0": 0.004, "F16": EXACT["hexagon"],
                                 **dict.fromkeys(MORE + DOWNLOADED, 0.006)}}
# For one token at a time with activations of 16 bits, which is Hexagon's default for these formats.
WIDE_LIMITS = {"Q8_0": 0.00002, "Q4_0": 0.00002}


class Result(NamedTuple):
    """The numbers that llama-perplexity prints for one run."""

    divergence: float
    error: float
    same_top: float
    perplexity: float


def limit_of(kind, chip, ubatch=CHUNK_TOKENS, act=None):
    """The limit of a format on a chip with a GGML_RUST_NPU_HEX_ACT; None if there is none."""
    family = "hexagon" if chip.startswith("hexagon") else "rk"
    if ubatch > 2:
        return LIMITS[family].get(kind)
    if act != "8" and family == "hexagon" and kind in WIDE_LIMITS:
        # Two rows are multiplied in FP16.
        return WIDE_LIMITS[kind] if ubatch == 1 else LIMITS[family][kind]
    return FEW_TOKENS_LIMITS[family].get(kind)


class Row(NamedTuple):
    """A format, or a format and how its INT4 weights were calibrated."""

    kind: str
    device: Result
    cpu: Result
    limit: float
    # The reason if the row has no limit.
    unlimited: str = ""

    def fault(self):
        """Returns the fault of the device's divergence; None if it has none."""
        if not math.isfinite(self.device.divergence):
            return f"{self.kind} is {self.device.divergence}"
        if self.limit and self.device.divergence > self.limit:
            return f"{self.kind} is over the limit"
        return None


class Run(NamedTuple):
    """The part of a run's parameters that differs between the runs of a format."""

    env: dict
    args: tuple = ()
    # Whether the format's limit applies.
    is_limited: bool = True


class Setup(NamedTuple):
    """The part of a run's parameters that is the same in all runs."""

    chunks: int
    source: Path = None
    ubatch: int = CHUNK_TOKENS


def log_of(setup, name):
    return LOGS / f"kld-{setup.source.stem + '-' if setup.source else ''}{name}.log"


def perplexity(model, setup, name, env, *args):
    log = log_of(setup, name)
    run([project.binary("llama-perplexity"), "-m", model, "-c", CHUNK_TOKENS, "-b", CHUNK_TOKENS, "-ub", setup.ubatch,
         "--chunks", setup.chunks, "-t", JOBS, *args], log, env=env)
    return log.read_text(encoding="utf-8", errors="replace")


def divergence(model, base, setup, name, env, *args):
    # llama.cpp may exit before its logging thread has written the last lines (its issue 22142).
    for _ in range(ATTEMPTS):
        text = perplexity(model, setup, name, env, "--kl-divergence-base", base, "--kl-divergence", *args)
        found = [re.search(pattern, text) for pattern in
                 (r"Mean\s+KLD:\s+(\S+)\s+\S+\s+(\S+)", r"Same top p:\s+(\S+)", r"Mean PPL\(Q\)\s*:\s+(\S+)")]
        if all(found):
            return Result(*(float(number) for match in found for number in match.groups()))
    raise Problem(f"llama-perplexity printed no KL divergence in {ATTEMPTS} runs; see target/logs/{log_of(setup, name).name}")


def measure(kind, setup, runs):
    """One row of the table for each name and Run in `runs`."""
    folder = TARGET / "kld"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind}-") as temp:
        base = Path(temp) / "logits"
        # M = 512 in one piece is the fastest, and the exact result does not depend on it.
        perplexity(models.exact(kind, setup.source), setup._replace(ubatch=CHUNK_TOKENS), f"{kind}-exact", cpu_env(), "-f",
                   fetch.text(), "--kl-divergence-base", base)
        model = models.variant(kind, setup.source)
        cpu = divergence(model, base, setup, f"{kind}-cpu", cpu_env())
        for name, (env, args, is_limited) in runs.items():
            device = divergence(model, base, setup, f"{name.replace(' ', '-')}-device", env, *args)
            chip, act = env["GGML_RUST_NPU_SIM"], env.get("GGML_RUST_NPU_HEX_ACT")
            limit = limit_of(kind, chip, setup.ubatch, act) if is_limited else None
            unlimited = "no limit is known for the format" if is_limited else "limits hold for the default rules"
            yield Row(name, device, cpu, limit, unlimited if limit is None else "")


def header(setup):
    return (f"mean KL divergence from the exact answer, {setup.chunks} chunks of {CHUNK_TOKENS} tokens, "
            f"ubatch {setup.ubatch}\n"
            f"{'format':16} {'device':>10} {'+-':>9} {'limit':>8} {'same top':>9} {'PPL':>9} {'CPU backend':>12}")


def line(row):
    limit = f"{row.limit:8.5f}" if row.limit else f"{'':8}"
    device = row.device
    return (f"{row.kind:16} {device.divergence:10.6f} {device.error:9.6f} {limit} {device.same_top:8.2f}% "
            f"{device.perplexity:9.4f} {row.cpu.divergence:12.6f}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chunks", nargs="?", type=int, default=20, help=f"chunks of {CHUNK_TOKENS} tokens (20)")
    parser.add_argument("formats", nargs="*", help=f"formats that llama-quantize knows ({' '.join([*FORMATS, *MORE])})")
    parser.add_argument("--model", choices=MODELS, help="a fetched model (MODEL of the environment, or smollm2)")
    parser.add_argument("-ub", "--ubatch", type=int, default=CHUNK_TOKENS, help="tokens computed at a time (512)")
    parser.add_argument("--chip", default=project.SIMULATED, help=f"the chip to simulate ({project.SIMULATED})")
    parser.add_argument("-fa", "--flash-attn", help="on, off or on,off: a row for each")
    parser.add_argument("--rules", help="GGML_RUST_NPU_RULES, such as blk=int4")
    parser.add_argument("--calibration", help="values of GGML_RUST_NPU_CALIBRATION, with commas; a row for each")
    parser.add_argument("--act", choices=["8", "16", "auto"], help="GGML_RUST_NPU_HEX_ACT")
    parser.add_argument("--pack", help="GGML_RUST_NPU_PACK: a file of `ggml-npu repack`, made of the model of one format")
    return parser.parse_args()


def device_runs(kind, args):
    """The runs of a format, by the name of their row."""
    settings = {"GGML_RUST_NPU_SIM": args.chip}
    if args.rules:
        settings["GGML_RUST_NPU_RULES"] = args.rules
    if args.act:
        settings["GGML_RUST_NPU_HEX_ACT"] = args.act
    if args.pack:
        settings["GGML_RUST_NPU_PACK"] = args.pack
    if args.flash_attn:
        return {f"{kind} -fa {value}": Run(cpu_env(**settings), ("-fa", value), is_limited=False)
                for value in args.flash_attn.split(",")}
    if not args.calibration:
        return {f"{kind} {args.rules}" if args.rules else kind: Run(cpu_env(**settings), is_limited=not args.rules)}
    return {f"{kind} {method}": Run(cpu_env(**settings, GGML_RUST_NPU_CALIBRATION=method), is_limited=False)
            for method in args.calibration.split(",")}


def main():
    args = arguments()
    build.static()
    setup = Setup(args.chunks, MODELS[args.model]() if args.model else None, args.ubatch)
    print(header(setup))
    failed = []
    for kind in args.formats or [*FORMATS, *MORE]:
        for row in measure(kind, setup, device_runs(kind, args)):
            print(line(row), flush=True)
            if row.unlimited:
                print(f"   {row.kind} is not compared with a limit: {row.unlimited}", flush=True)
            if row.fault():
                failed.append(row.fault())
    if failed:
        raise Problem("; ".join(failed))
    return 0


if __name__ == "__main__":
    main_with(main)
