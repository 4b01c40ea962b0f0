#!/usr/bin/env python3
"""Runs the tests for aarch64, the processor of the boards, under qemu-aarch64; counts instructions; builds the archive.

test     the Rust tests, vector code included, on a Cortex-A53: the smallest core of these chips, so that an instruction
         outside of the base set ends a test (the default)
count    instructions per element of each host stage, portable and vector version, on a Cortex-A76
archive  the static library, without a C compiler or linker for aarch64

`test` and `count` report missing parts. With INSTALL=1 (or in CI) they install it: packages as root on Debian, and the standard
library with rustup.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from project import (LOGS, ROOT, TARGET, Problem, cpu_env, main_with, may_install, print_tail, run as run_logged,
                     say)

RUST_TARGET = "aarch64-unknown-linux-gnu"

# Debian's cross compiler keeps the libraries of the target here.
SYSROOT = Path("/usr/aarch64-linux-gnu")

LINKER = "aarch64-linux-gnu-gcc"

TEST_CPU = "cortex-a53"
COUNT_CPU = "cortex-a76"

# The tool and the library are selected together, as for `build.tool`, so that each crate is compiled once for both.
TOOL_PACKAGES = ["--package", "ggml-rust-npu", "--package", "ggml-npu"]

# For tests that do not run the Hexagon kernels on this machine: optimizing those takes longer than everything else.
QUICK = ["--config", "profile.dev.package.hexagon-ops.opt-level=0"]

# K of the counts: a short row with a Hadamard block of 64, and a long one with a block of 4096.
DEPTHS = [576, 4096]


class Missing(Exception):
    """A tool is missing; the text names it and how to get it."""


def is_root_on_debian():
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def qemu():
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def missing_packages():
    """Debian packages of the tools that are not there."""
    return [package for package, there in {
        "gcc-aarch64-linux-gnu": shutil.which(LINKER),
        "libc6-dev-arm64-cross": (SYSROOT / "lib" / "libc.so.6").exists(),
        "qemu-user": qemu(),
    }.items() if not there]


def need_packages():
    packages = missing_packages()
    if not packages:
        return
    names = " ".join(packages)
    if not (may_install() and is_root_on_debian()):
        raise Missing(f"{names} not installed; on Debian: apt-get install {names}, or as root INSTALL=1 make test")
    say(f"installing {names} with apt-get")
    env = cpu_env(DEBIAN_FRONTEND="noninteractive")
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
        try:
            run_logged(["apt-get", *command], LOGS / f"aarch64-apt-{command[0]}.log", env)
        except Problem as problem:
            raise Missing(f"{names} not installed: {problem}") from problem
    if missing_packages():
        raise Missing(f"{' '.join(missing_packages())} installed, but not what was expected of it")


def need_rust_target():
    """The standard library for the target, through rustup if it is not there."""
    root = subprocess.run(["rustc", "--print", "sysroot"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    library = Path(root.stdout.strip()) / "lib" / "rustlib" / RUST_TARGET
    if not library.exists() and may_install() and shutil.which("rustup"):
        say(f"rustup target add {RUST_TARGET}")
        try:
            run_logged(["rustup", "target", "add", RUST_TARGET], LOGS / "aarch64-rustup.log", cwd=ROOT)
        except Problem as problem:
            raise Missing(f"no Rust standard library for {RUST_TARGET}: {problem}") from problem
    if not library.exists():
        raise Missing(f"no Rust standard library for {RUST_TARGET}; rustup target add {RUST_TARGET}, or INSTALL=1 make test")


def need_all():
    if platform.machine() == "aarch64":
        raise Missing("this machine is aarch64; the ordinary tests run the same code")
    need_rust_target()
    need_packages()


def emulator(cpu):
    # The test archive is built before the emulator is installed, so the plain name must do.
    return [qemu() or "qemu-aarch64", "-cpu", cpu, "-L", str(SYSROOT)]


def cargo_env():
    name = "CARGO_TARGET_" + RUST_TARGET.upper().replace("-", "_")
    return cpu_env(**{f"{name}_LINKER": LINKER, f"{name}_RUNNER": " ".join(emulator(TEST_CPU))})


def run():
    """Runs the tests; returns the number that passed, the names of those that failed, and why nothing ran, if so."""
    try:
        need_all()
    except Missing as missing:
        return 0, [], str(missing)
    passed, failed = 0, []
    # rknpu-ops has this processor's vector code. task-pool depends on its memory order, which is weaker than x86-64's.
    selections = {"rknpu-ops": ["--package", "rknpu-ops", "--lib", "--tests"],
                  "task-pool": ["--package", "task-pool", "--lib"],
                  "ggml-rust-npu": [*TOOL_PACKAGES, "--lib"]}
    for package, selection in selections.items():
        more = run_tests(package, selection)
        passed += more[0]
        failed += more[1]
    wrong = direct_devices()
    return passed + len(KERNELS) - len(wrong), failed + wrong, None


# The emulated kernel drivers of tests/vendor/rockchip, by the variable that chooses one.
KERNELS = {"rknpu": {"RKNN_LOOP_STRICT": "1"}, "rocket": {"RKNN_LOOP_KERNEL": "rocket"}}


def direct_devices():
    """Self-tests of an RK3588 with three cores by our own command streams; returns the names of those that did not pass."""
    run_logged(["cargo", "build", "--locked", "--target", RUST_TARGET, *TOOL_PACKAGES, "--package", "rknn-loop"],
               LOGS / "aarch64-direct-build.log", cargo_env(), ROOT)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", TARGET)) / RUST_TARGET / "debug"
    # The emulator's own loader must not see the other processor's library.
    command = [*emulator(TEST_CPU), "-E", f"LD_PRELOAD={folder / 'librknn_loop.so'}", folder / "ggml-npu", "devices",
               "--self-test"]
    logs, processes = {kernel: LOGS / f"aarch64-direct-{kernel}.log" for kernel in KERNELS}, []
    for kernel, settings in KERNELS.items():
        env = cpu_env(GGML_RUST_NPU_RKNN="direct", GGML_RUST_NPU_CHIP="rk3588", **settings)
        with open(logs[kernel], "wb") as out:
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT))
    for process in processes:
        process.wait()
    texts = {kernel: log.read_text(encoding="utf-8", errors="replace") for kernel, log in logs.items()}
    # If cores disturb each other, it passes with one of them.
    return [f"self-test over {kernel}, see {logs[kernel].relative_to(ROOT)}" for kernel, text in texts.items()
            if not re.search(r"^  self-test  passed", text, re.M) or "one core is used" in text]


def run_tests(package, selection):
    """Runs the tests of one package under the emulator; returns the number of passes and the names of failures."""
    log = LOGS / f"aarch64-{package}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    args = ["cargo", "test", "--locked", "--target", RUST_TARGET, "--no-fail-fast", *selection]
    with open(log, "wb") as out:
        code = subprocess.run(args, cwd=ROOT, env=cargo_env(), stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    passed = sum(map(int, re.findall(r"^test result: \w+\. (\d+) passed", text, re.M)))
    failed = re.findall(r"^test (.+) \.\.\. FAILED$", text, re.M)
    if code != 0 and not failed:
        print_tail(log)
        failed = [f"cargo test of {package}, code {code}, output in {log.relative_to(ROOT)}"]
    return passed, failed


def archive():
    """Builds the static library as the tests have it; a C compiler or linker for the target would be an error."""
    try:
        need_rust_target()
    except Missing as missing:
        return str(missing)
    # The file stands in the linker's place. Setting another linker would make cargo compile everything again.
    none = TARGET / "no-linker" / LINKER
    none.parent.mkdir(parents=True, exist_ok=True)
    none.unlink(missing_ok=True)
    none.symlink_to(shutil.which("false"))
    env = cargo_env()
    env["PATH"] = os.pathsep.join([str(none.parent), env["PATH"]])
    run_logged(["cargo", "build", "--locked", *TOOL_PACKAGES, "--lib", "--target", RUST_TARGET, "--target-dir", TARGET],
               LOGS / "aarch64-archive.log", env, ROOT)
    archive = TARGET / RUST_TARGET / "debug" / "libggml_rust_npu.a"
    if not archive.is_file():
        raise Problem(f"cargo built no {archive.relative_to(ROOT)}")
    return None


def instructions(program, *args):
    """Instructions that a run executes: lines of a log with one line for each."""
    options = subprocess.run([qemu(), "--help"], stdout=subprocess.PIPE, text=True).stdout
    single = "-one-insn-per-tb" if "-one-insn-per-tb" in options else "-singlestep"
    read, write = os.pipe()
    command = [*emulator(COUNT_CPU), single, "-d", "exec,nochain", "-D", f"/proc/self/fd/{write}", program,
               *map(str, args)]
    # An empty environment: its size would move the stack, and change the number of instructions before main.
    process = subprocess.Popen(command, pass_fds=[write], env={}, stdin=subprocess.DEVNULL)
    os.close(write)
    lines = 0
    with open(read, "rb", buffering=0) as log:
        while block := log.read(1 << 20):
            lines += block.count(b"\n")
    if process.wait() != 0:
        raise Problem(f"{program.name} {' '.join(map(str, args))} failed with code {process.returncode}")
    return lines


def count():
    """Prints instructions per element, as the difference of runs of two lengths, without their start and end."""
    need_all()
    say("building rknpu-ops/examples/instructions.rs")
    run_logged(["cargo", "build", "--locked", "--release", "--target", RUST_TARGET, "--package", "rknpu-ops",
                "--example", "instructions"], LOGS / "aarch64-instructions.log", cargo_env(), ROOT)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", TARGET))
    program = folder / RUST_TARGET / "release" / "examples" / "instructions"
    listed = subprocess.run([*emulator(COUNT_CPU), program], stdout=subprocess.PIPE, text=True, check=True)
    heads = [f"{version} K={k}" for k in DEPTHS for version in ("scalar", "neon")]
    print(f"{'instructions per element':26} {'M':>3}" + "".join(f"{head:>15}" for head in heads))
    for stage, rows in (line.split() for line in listed.stdout.splitlines()):
        line = f"{stage:26} {rows:>3}"
        for k in DEPTHS:
            for version in ("scalar", "neon"):
                once, twice = (instructions(program, stage, version, k, times) for times in (1, 2))
                line += f"{(twice - once) / k / int(rows):15.2f}"
        print(line, flush=True)


def main():
    task = sys.argv[1] if len(sys.argv) > 1 else "test"
    if task == "test":
        passed, failed, reason = run()
        for name in failed:
            print(f"   FAILED {name}")
        print(f"   skipped: {reason}" if reason else f"   {passed} passed, {len(failed)} failed")
        return 1 if failed else 0
    if task == "archive":
        reason = archive()
        print(f"   skipped: {reason}" if reason else "   built")
        return 0
    if task == "count":
        try:
            count()
        except Missing as missing:
            print(f"   skipped: {missing}")
        return 0
    raise Problem(f"unknown task {task}; one of test, count, archive")


if __name__ == "__main__":
    main_with(main)
