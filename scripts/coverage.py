#!/usr/bin/env python3
"""Prints how many lines of each crate the Rust tests run, by cargo-llvm-cov, and fails if a crate is below its floor.

Usage: coverage.py [test options]     such as `--lib`, or `--test serve -- copy`; floors count without options only

Installs cargo-llvm-cov into target/coverage-tools. Rust's LLVM tools are a part of the toolchain: they are installed if
INSTALL=1 or in CI. The tests are compiled with counters in target/llvm-cov-target, which takes minutes and gigabytes.
Functions that only the DSP or another processor runs have no lines here. The page of each file is in target/coverage.
"""

import json
import os
import shutil
import subprocess
import sys

from project import LOGS, ROOT, TARGET, Problem, cpu_env, main_with, may_install, print_tail, run, say, tool_env

VERSION = "0.9.1"

# The lowest share of covered lines, in percent. It is a point below the measured one, so that a lost test is noticed.
FLOORS = {
    "ggml-rust-npu": ("src", 92),
    "hexagon-ops": ("hexagon-ops/src", 95),
    "rknpu-ops": ("rknpu-ops/src", 76),
    "test-time-scaling": ("scale/src", 78),
    "sim-common": ("sim-common/src", 84),
    "task-pool": ("task-pool/src", 98),
    "ggml-npu": ("tool/src", 77),
}

REPORT = TARGET / "coverage"
# A folder apart from target/tools, which is emptied when it contains another checkout's path.
INSTALLED = TARGET / "coverage-tools"


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def installed():
    """Installs missing tools; returns the environment in which cargo finds it."""
    path = f"{INSTALLED / 'bin'}{os.pathsep}{tool_env()['PATH']}"
    env = dict(cpu_env(), PATH=path, CARGO_INCREMENTAL="0", CARGO_PROFILE_DEV_DEBUG="0")
    program = INSTALLED / "bin" / "cargo-llvm-cov"
    if not program.exists() or VERSION not in output(program, "llvm-cov", "--version"):
        say(f"installing cargo-llvm-cov {VERSION} into {INSTALLED.relative_to(ROOT)}")
        run(["cargo", "install", "--locked", "--version", VERSION, "--root", INSTALLED, "cargo-llvm-cov"],
            LOGS / "coverage-install.log")
    if "llvm-tools" not in output("rustup", "component", "list", "--installed"):
        if not may_install():
            raise Problem("Rust's LLVM tools are missing: rustup component add llvm-tools, or INSTALL=1 make coverage")
        run(["rustup", "component", "add", "llvm-tools"], LOGS / "coverage-tools.log", cwd=ROOT)
    return env


def measure(options):
    """Runs the tests, and returns llvm-cov's numbers of each file."""
    env = installed()
    say("running the Rust tests with counters")
    log = LOGS / "coverage.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        command = ["cargo", "llvm-cov", "--no-report", "--locked", "--workspace", "--no-fail-fast", *options]
        code = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT).returncode
    # Programs that a test starts without the variables write their counters into the current folder.
    for folder in (path for path in ROOT.iterdir() if path.is_dir() and path != TARGET):
        for stray in folder.rglob("default_*.profraw"):
            stray.unlink()
    if code != 0:
        print_tail(log)
        raise Problem("a test failed; full output in target/logs/coverage.log")
    shutil.rmtree(REPORT, ignore_errors=True)
    # All packages are named, because otherwise only the root folder's is reported.
    report = ["cargo", "llvm-cov", "report", "--locked", *(word for name in FLOORS for word in ("--package", name))]
    run([*report, "--html", "--output-dir", REPORT], LOGS / "coverage-html.log", env, ROOT)
    summary = REPORT / "summary.json"
    run([*report, "--json", "--summary-only", "--output-path", summary], LOGS / "coverage-json.log", env, ROOT)
    return json.loads(summary.read_text(encoding="utf-8"))["data"][0]["files"]


def crates(files):
    """Yields each crate's name, lines that ran, lines, and floor."""
    for name, (folder, floor) in FLOORS.items():
        lines = [file["summary"]["lines"] for file in files if file["filename"].startswith(f"{ROOT / folder}{os.sep}")]
        if not lines:
            raise Problem(f"llvm-cov reports no file of {folder}")
        yield name, sum(it["covered"] for it in lines), sum(it["count"] for it in lines), floor


def main():
    options, below = sys.argv[1:], []
    for name, covered, count, floor in crates(measure(options)):
        share = 100 * covered / count
        print(f"   {name:18} {covered:6} of {count:6} lines  {share:5.1f} %  (floor {floor} %)")
        if share < floor:
            below.append(name)
    if below and not options:
        raise Problem(f"fewer lines run than before: {', '.join(below)}")
    return 0


if __name__ == "__main__":
    main_with(main)
