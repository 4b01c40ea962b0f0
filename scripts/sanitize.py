#!/usr/bin/env python3
"""Runs Rust tests with the address sanitizer and the thread sanitizer, and in Miri.

Usage: sanitize.py [step...]     address thread miri; all if not given

All build with the pinned nightly. Devices are the stand-ins. TESTS lists the tests: Miri cannot call foreign functions, so it
runs only the thread pools. Whole outputs are in target/logs/.
"""

import re
import subprocess
import sys

from fuzz import host, toolchain
from project import LOGS, ROOT, TARGET, Problem, main_with, print_tail, say, tool_env

# The test programs of each package, for each sanitizer.
TESTS = {
    "address": {
        "task-pool": ["--lib"],
        "rknpu-ops": ["--lib", "--test=sim"],
        "ggml-rust-npu": ["--lib", "--test=ring", "--test=abi", "--test=buffer", "--test=device", "--test=faults",
                          "--test=fork", "--test=packs", "--test=packfile", "--test=hexagon"],
    },
    "thread": {
        "task-pool": ["--lib"],
        "hexagon-ops": ["--lib", "--test=serve", "--test=sim"],
        "ggml-rust-npu": ["--test=ring", "--test=abi", "--test=faults", "--test=hexagon"],
    },
    "miri": {"task-pool": ["--lib"], "hexagon-ops": ["--lib", "rt::workers"]},
}

# Memory that is left allocated on purpose, by a function that allocates it.
LEFT = {
    "MemoryTable>::": "the stand-in leaves what a caller did not destroy, with a log line: its addresses may be in use",
    "AllocationTable>::": "as above",
    "a_forked_process": "a child leaves alone what is its parent's",
}

# Otherwise kernels are compiled for three kinds of processor, which takes longer than running them slowly.
QUICK = ["--config", "profile.dev.package.hexagon-ops.opt-level=1"]

def summary(text):
    """Passed and failed tests of a cargo run."""
    results = re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed", text, re.M)
    return tuple(sum(int(result[i]) for result in results) for i in range(2))


def cargo(name, arguments, env):
    """Runs cargo with the nightly; returns whether all passed, and how many did."""
    log = LOGS / f"{name}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        code = subprocess.run(["cargo", f"+{toolchain()}", *arguments], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                              stdout=out, stderr=subprocess.STDOUT).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    passed, failed = summary(text)
    reports = len(re.findall(r"ERROR: (?:Address|Leak)Sanitizer|WARNING: ThreadSanitizer|Undefined Behavior", text))
    print(f"   {name}: {passed} passed, {failed} failed, {reports} reports", flush=True)
    if code != 0:
        print_tail(log)
        print(f"   FAILED {name}: code {code}, output in target/logs/{log.name}", flush=True)
    return code == 0 and reports == 0 and passed > 0


def sanitizer(kind):
    """Runs the tests with a sanitizer."""
    build = ["test", "--locked", "--target", host(), "--target-dir", str(TARGET / "sanitize" / kind), "--no-fail-fast", *QUICK]
    env = dict(tool_env(), RUSTFLAGS=f"-Zsanitizer={kind}", RUST_BACKTRACE="1", PROPTEST_CASES="32",
               ASAN_OPTIONS="detect_stack_use_after_return=1")
    # Under a sanitizer every variable has a separate place, so some tests need more than the usual 2 MiB of stack.
    env["RUST_MIN_STACK"] = str(64 << 20)
    if kind == "thread":
        # With a standard library that was built without the sanitizer, it would not see the order that locks give.
        build.append("-Zbuild-std")
    suppressions = LOGS / "sanitize-left.txt"
    LOGS.mkdir(parents=True, exist_ok=True)
    suppressions.write_text("".join(f"leak:{name}\n" for name in LEFT), encoding="utf-8")
    env["LSAN_OPTIONS"] = f"suppressions={suppressions}:print_suppressions=0"
    for name, reason in LEFT.items():
        print(f"   memory left by {name} does not count: {reason}", flush=True)
    results = [cargo(f"sanitize-{kind}-{package}", [*build, "-p", package, *programs], env)
               for package, programs in TESTS[kind].items()]
    return all(results)


def miri():
    """Runs the tests in Miri that call nothing foreign."""
    env = dict(tool_env(), MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance", PROPTEST_CASES="2")
    folder = str(TARGET / "sanitize" / "miri")
    results = [cargo(f"miri-{package}", ["miri", "test", "--locked", "--target-dir", folder, "-p", package, *programs], env)
               for package, programs in TESTS["miri"].items()]
    return all(results)


STEPS = {"address": lambda: sanitizer("address"), "thread": lambda: sanitizer("thread"), "miri": miri}


def main():
    names = sys.argv[1:] or list(STEPS)
    failed = []
    for name in names:
        if name not in STEPS:
            raise Problem(f"unknown step {name}; one of {', '.join(STEPS)}")
        say(name)
        if not STEPS[name]():
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    main_with(main)
