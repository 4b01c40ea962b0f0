#!/usr/bin/env python3
"""Benchmarks: the library's own, then tokens/s in llama.cpp on the simulated device and on the CPU backend.

BENCH_KINDS (default "Q8_0 F16") sets the formats. A simulated device is as fast as this computer, not as an NPU.
"""

import os
import subprocess

import build
import models
import project
from project import JOBS, ROOT, Problem, cpu_env, device_env, main_with, say


def cargo_bench():
    say("cargo bench")
    if subprocess.run(["cargo", "bench", "--locked", "--workspace"], cwd=ROOT, env=cpu_env()).returncode != 0:
        raise Problem("cargo bench failed")


def llama_bench(kind, name, env):
    say(f"{kind} on {name}")
    command = [project.binary("llama-bench"), "-m", models.variant(kind), "-t", JOBS, "-p", "128", "-n", "32", "-r", "3"]
    done = subprocess.run([str(arg) for arg in command], env=env, stderr=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Problem(f"llama-bench failed with code {done.returncode}")


def main():
    cargo_bench()
    build.static()
    for kind in os.environ.get("BENCH_KINDS", "Q8_0 F16").split():
        llama_bench(kind, f"{project.DEVICE} (simulated)", device_env())
        llama_bench(kind, "the CPU backend", cpu_env())
    return 0


if __name__ == "__main__":
    main_with(main)
