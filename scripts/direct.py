"""Tests of Rockchip devices without librknnrt and its stand-in: an RK3588 driven by our own command streams, over two
emulated kernel drivers. docs/internals/vendor-loop.md has the picture.

Not among them: tests/faults.rs, whose faults the stand-in makes (tests/vendor/rockchip has those of the drivers), and
tests/golden.rs, which needs no device.
"""

import re
import subprocess

from aarch64 import KERNELS
from project import LOGS, ROOT, TARGET, cpu_env, run, tool_env

FILES = ["device", "int4", "int8_unrotated", "packs"]

# How many tests must have passed. Other packages have test files of the same names, so theirs count, too.
MIN_TESTS = 57


def loop():
    """Builds the emulated drivers and NPU."""
    run(["cargo", "build", "--locked", "--package", "rknn-loop", "--target-dir", TARGET], LOGS / "direct-build.log", cwd=ROOT)
    return TARGET / "debug" / "librknn_loop.so"


def host():
    """The name that rustc has for this machine."""
    text = subprocess.run(["rustc", "-vV"], cwd=ROOT, env=tool_env(), capture_output=True, text=True, check=True).stdout
    return re.search(r"^host: (\S+)$", text, re.M)[1]


def check(tally):
    """Runs the tests of an RK3588's device over both drivers. Those of other chips run on the stand-in again."""
    file = loop()
    # Only the test programs may see the emulated driver, because cargo opens files, too.
    runner = "CARGO_TARGET_" + host().upper().replace("-", "_") + "_RUNNER"
    for kernel, settings in KERNELS.items():
        env = cpu_env(**settings, **{runner: f"env LD_PRELOAD={file}", "NPU_TEST_DIRECT": "1"})
        log = LOGS / f"direct-{kernel}.log"
        command = ["cargo", "test", "--locked", "--workspace", "--no-fail-fast"]
        with open(log, "wb") as out:
            code = subprocess.run([*command, *(f"--test={name}" for name in FILES)], cwd=ROOT, env=env,
                                  stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT).returncode
        text = log.read_text(encoding="utf-8", errors="replace")
        results = re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed", text, re.M)
        passed, failed = (sum(int(result[i]) for result in results) for i in range(2))
        tally.passed += passed
        for name in re.findall(r"^test (.+) \.\.\. FAILED$", text, re.M):
            tally.fail(f"direct {kernel} {name}", f"see target/logs/{log.name}")
        if code != 0 and failed == 0:
            tally.fail(f"direct {kernel}", f"code {code}, see target/logs/{log.name}")
        tally.check(passed >= MIN_TESTS, f"direct {kernel}, number of tests",
                    f"{passed} passed, at least {MIN_TESTS} are there")
        print(f"   {kernel}: {passed} passed, {failed} failed")
    calls = ["cargo", "test", "--locked", "--package", "rknn-loop", "--lib", "ten_thousand", "--", "--ignored"]
    log = LOGS / "direct-calls.log"
    with open(log, "wb") as out:
        code = subprocess.run(calls, cwd=ROOT, env=cpu_env(), stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT).returncode
    passed = "1 passed" in log.read_text(encoding="utf-8", errors="replace")
    tally.check(code == 0 and passed, "direct, ten thousand calls", f"code {code}, see target/logs/{log.name}")
