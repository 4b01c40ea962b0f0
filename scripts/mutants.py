#!/usr/bin/env python3
"""Puts small faults into the code, one at a time, and counts those that the Rust tests notice, by cargo-mutants.

Usage: mutants.py [--jobs N] [--shard K/N] [module...]     a module is a name of MODULES; all if none is given: hours

Each fault is compiled, and the tests that belong to the module run. The lists of faults that were caught, missed, hung or
did not compile are in target/mutants/MODULE/mutants.out/. Fails if a module is below LEAST.

With --shard 0/4 every fourth fault is put in, which soon shows untested code; the numbers 1/4 to 3/4 have the others.

Faults are put into copies of the project, target/mutants/tree-N, which keep their build results: a fault then costs one crate,
and cargo-nextest stops at the first test that fails.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from project import LOGS, ROOT, TARGET, Problem, main_with, say, tool_env

# The share of compiling faults that tests must notice.
LEAST = 0.9
# A fault may make a test hang. It counts as noticed after this many times the usual duration of the tests, but not before this
# many seconds.
TIMES, LEAST_S = 4, 40
# Less optimized than in other tests and without debug information, because every fault is compiled.
QUICK = ["--config", "profile.dev.package.hexagon-ops.opt-level=1", "--config", "profile.dev.debug=false"]


class Module(NamedTuple):
    """Files that faults are put into, and the tests that are to notice them."""

    package: str
    files: list
    tests: list
    # A regular expression for tests that are left out because they are long and test something else.
    without: str = ""


MODULES = {
    "ring": Module("ggml-rust-npu", ["src/hexagon/driver/ring.rs"], ["--lib", "--test=ring"]),
    "address-space": Module("ggml-rust-npu", ["src/hexagon/device/address.rs"], ["--lib", "--test=hexagon"]),
    "session": Module("ggml-rust-npu", ["src/hexagon/device/*.rs"], ["--lib", "--test=hexagon"],
                      "^(groups|pack|product|recurrence|requantized|selftest)::"),
    "submission": Module("ggml-rust-npu", ["src/hexagon/stream.rs", "src/hexagon/stream/*.rs"],
                         ["--lib", "--test=hexagon", "--test=abi"]),
    "buffer": Module("ggml-rust-npu", ["src/{hexagon,rockchip}/buffer.rs", "src/*/buffer/*.rs"],
                     ["--lib", "--test=hexagon", "--test=buffer", "--test=packs", "--test=abi"],
                     "^(recurrence|requantized|selftest)::"),
    "border": Module("ggml-rust-npu", ["src/abi/*.rs"], ["--lib", "--test=abi", "--test=fork", "--test=log"]),
    "packfile": Module("ggml-rust-npu", ["src/packfile/*.rs", "src/packfile.rs"],
                       ["--lib", "--test=packs", "--test=packfile", "--test=hexagon"]),
    "gguf": Module("ggml-rust-npu", ["src/gguf/*.rs"], ["--lib", "--test=tool_gguf"]),
    "plans": Module("ggml-rust-npu", ["src/*/plan.rs", "src/*/plan/**/*.rs"],
                    ["--lib", "--test=hexagon", "--test=device"], "^(faults|pack|selftest)::|^every_chip_and_arithmetic"),
    "rockchip-device": Module("ggml-rust-npu", ["src/rockchip/device/*.rs"],
                              ["--lib", "--test=device", "--test=faults", "--test=int4"]),
    "wire": Module("hexagon-ops", ["hexagon-ops/src/wire/*.rs"], ["--lib", "--test=serve"]),
    "drivers": Module("hexagon-ops", [f"hexagon-ops/src/{name}.rs" for name in (
        "ops/run", "ops/matmul/*driver", "ops/matmul/plan", "ops/matmul/experts", "serve/kernel", "serve/list",
        "serve/matmul*", "serve/region", "serve/work")], ["--lib", "--test=serve", "--test=matmul", "--test=schedule"],
                      "^(attention|score)::"),
}


def copy_project(tree):
    """Brings a copy of the project up to date; files that are the same keep their times, so that cargo keeps their crates."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    wanted = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        source, copy = ROOT / name, tree / name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    built = tree / "target"
    for copy in list(tree.rglob("*")):
        if not copy.is_relative_to(built) and copy.is_file() and str(copy.relative_to(tree)) not in wanted:
            copy.unlink()


def run(name, shard, tree):
    """Returns the numbers of faults of a module by outcome; `tree` is a copy of the project."""
    module = MODULES[name]
    output = TARGET / "mutants" / (f"{name}-{shard.replace('/', '-of-')}" if shard else name)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    copy_project(tree)
    command = ["cargo", "mutants", "--dir", tree, "--in-place", "--test-tool", "nextest", "--package", module.package,
               "--output", output, "--colors", "never", "--no-shuffle", "--timeout-multiplier", TIMES,
               "--minimum-test-timeout", LEAST_S]
    # Arguments after `--` would apply to the run only, so all tests would be built.
    command += [f"--cargo-arg={argument}" for argument in (*QUICK, *module.tests)]
    for file in module.files:
        command += ["--file", file]
    if shard:
        command += ["--shard", shard, "--sharding", "round-robin"]
    if module.without:
        command += ["--", "-E", f"not test(/{module.without}/)"]
    log = LOGS / f"mutants-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"faults in {', '.join(module.files)}")
    with open(log, "wb") as out:
        subprocess.run([str(part) for part in command], cwd=tree, stdin=subprocess.DEVNULL, stdout=out,
                       stderr=subprocess.STDOUT, env=dict(tool_env(), CARGO_INCREMENTAL="1", OMP_WAIT_POLICY="passive"))
    outcomes = output / "mutants.out" / "outcomes.json"
    if not outcomes.is_file():
        raise Problem(f"cargo mutants made no result; its output is in target/logs/{log.name}")
    counts = json.loads(outcomes.read_text(encoding="utf-8"))
    counts = {kind: counts[kind] for kind in ("caught", "missed", "timeout", "unviable")}
    if not any(counts.values()):
        raise Problem(f"{name}: no fault was put in, see target/logs/{log.name}")
    return counts


def count(name, shard, tree):
    """Prints how many faults of a module are noticed; returns True if they are enough."""
    counts = run(name, shard, tree)
    # A fault that makes a test hang counts as noticed.
    noticed = counts["caught"] + counts["timeout"]
    seen = noticed + counts["missed"]
    share = noticed / seen if seen else 1.0
    print(f"   {name}: {noticed} of {seen} noticed ({share:.0%}), {counts['timeout']} of them by waiting for ever; "
          f"{counts['unviable']} do not compile", flush=True)
    return share >= LEAST


def main():
    arguments = argparse.ArgumentParser(description="Counts the faults that the Rust tests notice.")
    arguments.add_argument("--jobs", type=int, default=1, help="modules at a time, each in a copy of the project")
    arguments.add_argument("--shard", help="K/N: every Nth fault, beginning with the Kth")
    arguments.add_argument("module", nargs="*")
    wanted = arguments.parse_args()
    names = wanted.module or list(MODULES)
    for name in names:
        if name not in MODULES:
            raise Problem(f"unknown module {name}; one of {', '.join(MODULES)}")
    for tool in ("cargo-mutants", "cargo-nextest"):
        if shutil.which(tool, path=os.environ.get("PATH")) is None:
            raise Problem(f"{tool} is not installed: cargo install --locked {tool}")
    trees = queue.SimpleQueue()
    for number in range(max(1, wanted.jobs)):
        trees.put(TARGET / "mutants" / f"tree-{number}")

    def is_enough(name):
        tree = trees.get()
        try:
            return count(name, wanted.shard, tree)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(max(1, wanted.jobs)) as pool:
        low = [name for name, enough in zip(names, pool.map(is_enough, names)) if not enough]
    if low:
        raise Problem(f"under {LEAST:.0%}: {', '.join(low)}")


if __name__ == "__main__":
    main_with(main)
