#!/usr/bin/env python3
"""Runs every test of the project and counts them; the last line is `N passed, N failed, N skipped`.

Usage: test.py [step...]     without a step: those of STEPS below, in this order
       test.py everything    these, and with all cases (hours)

Whole outputs are in target/logs/. Something that cannot run on this machine is skipped with its reason.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import aarch64
import archs
import build
import cases
import debian
import direct
import dist
import fetch
import project
import vendor
import vendor_parts
import vendor_rknn
from project import (DEVICE, HEXAGON, JOBS, LOGS, ROOT, SIMULATED, TARGET, Problem, cpu_env, device_env, device_of, main_with,
                     print_tail, say, settle, tool_env)

# How many tests and OK cases there must be at least. The numbers are within 2 % of the real ones, so that lost tests are
# noticed.
FLOORS = {
    "cargo": 1203,
    "aarch64": 257,
    # All tests of tests/e2e, those that are skipped too.
    "test_*.py": 307,
    "long_*.py": 41,
    "stock_*.py": 14,
    "dist_*.py": 16,
    # For all cases; the entry None is the sum of all operations.
    "rockchip": {"MUL_MAT": 1086, "MUL_MAT_ID": 854, "FLASH_ATTN_EXT": 5194},
    # For all cases except those with many experts.
    "hexagon": {"MUL_MAT": 1304, "MUL_MAT_ID": 906, "FLASH_ATTN_EXT": 5194, None: 19177},
    # These replace the numbers above if cases with many experts run, too.
    "hexagon, many experts": {"MUL_MAT_ID": 926, None: 19197},
    # For the samples that `make test` runs.
    SIMULATED: 510,
    HEXAGON: 4520,
    "packed operands": 555,
}

# Cases with this many experts draw a billion random numbers each, and take longer than all other cases together.
MANY_EXPERTS = "^(?!.*n_mats=(128|256|512|1024))"

# How many cases of an operation with the same types `make test` runs on a device at most, by GGML_RUST_NPU_REPACK.
CASES_OF_A_KIND = {"weights": 8, "always": 4}
# Operations whose operands may be packed.
PACKED = {"MUL_MAT", "MUL_MAT_ID", "CPY", "GET_ROWS", "SET_ROWS"}
# Whole graphs, which are missing in upstream's list of supported cases, so all of their cases run.
GRAPHS = ["ADD_ADD", "ADD_RMS_NORM", "GELU_MUL", "L2_NORM_BATCH", "MOE_REDUCE", "MUL_MAT_ID_FUSION", "MUL_MAT_VEC_FUSION",
          "NORM_MUL_ADD", "NORM_SCALE", "RELU_SQR", "RMS_NORM_MUL_ADD", "RMS_NORM_MUL_ROPE", "RMS_NORM_SCALE", "ROPE_SET_ROWS",
          "SIGMOID_MUL", "SILU_MUL", "SNAKE_FUSE", "SOFTCAP", "SOFTPLUS_MUL", "SSM_CONV_BIAS_SILU", "TOPK_MOE", "TOPK_QSA"]
# ggml needs half a minute of one core to build the tables for quantizing to these types. Other runs cover them.
SLOW_TO_QUANTIZE = "=iq[12]_"

# The flags with which ggml itself is compiled, but every warning is an error.
GLUE_FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wcast-qual", "-Wshadow", "-Wstrict-prototypes",
              "-Wpointer-arith", "-Wmissing-prototypes", "-Wno-unused-function", "-Werror"]


class Tally:
    """Counts, and the reasons of tests that did not pass."""

    def __init__(self):
        self.passed = 0
        self.failed = []
        self.skipped = []

    def check(self, ok, name, reason=""):
        if ok:
            self.passed += 1
        else:
            self.fail(name, reason)

    def fail(self, name, reason):
        self.failed.append(name)
        print(f"   FAILED {name}: {reason}", flush=True)

    def skip(self, name, reason):
        self.skipped.append(name)
        print(f"   skipped {name}: {reason}", flush=True)

    def line(self):
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def capture(name, args, env=None, cwd=ROOT):
    """Runs a command with its output in a log; returns the exit code and the output without colours."""
    log = LOGS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        code = subprocess.run([str(arg) for arg in args], env=env or tool_env(), cwd=cwd, stdin=subprocess.DEVNULL,
                              stdout=out, stderr=subprocess.STDOUT).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    return code, re.sub(r"\x1b\[[0-9;]*m", "", text), log


def command(tally, name, args, env=None):
    """A check that passes if a command ends with code 0."""
    code, _, log = capture(name, args, env)
    if code != 0:
        print_tail(log)
    tally.check(code == 0, name, f"code {code}, output in target/logs/{log.name}")


def step_format(tally):
    command(tally, "format", ["cargo", "fmt", "--all", "--check"])


def step_lint(tally):
    command(tally, "clippy", ["cargo", "clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"])
    # A separate workspace, which no other step compiles.
    command(tally, "clippy-fuzz", ["cargo", "clippy", "--locked", "--manifest-path", ROOT / "fuzz" / "Cargo.toml",
                                   "--target-dir", TARGET, "--", "-D", "warnings"])
    command(tally, "doc", ["cargo", "doc", "--locked", "--workspace", "--no-deps"],
            dict(tool_env(), RUSTDOCFLAGS="-D warnings"))
    for name in ("python", "c", "actions", "locks", "windows"):
        command(tally, f"lint-{name}", [sys.executable, ROOT / "scripts" / "lint.py", name])
    for name in ("sentences", "tics", "comments", "names"):
        command(tally, f"lint-{name}", [sys.executable, ROOT / "scripts" / f"{name}.py"])


def step_cargo(tally):
    """All Rust tests, counted one by one."""
    code, text, log = capture("cargo-test", ["cargo", "test", "--locked", "--workspace", "--no-fail-fast"], cpu_env())
    results = re.findall(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", text, re.M)
    passed, failed, ignored = (sum(int(result[i]) for result in results) for i in range(3))
    tally.passed += passed
    for name in re.findall(r"^test (.+) \.\.\. FAILED$", text, re.M):
        tally.fail(name, f"see target/logs/{log.name}")
    # An ignored test gives a reason, unless it is a benchmark or an example in the documentation.
    for name, reason in re.findall(r"^test (.+) \.\.\. ignored(?:, (.*))?$", text, re.M):
        # The step `glue` runs the tests that compare with headers, or says why it cannot.
        if not reason.endswith(HEADERS_FETCHED):
            tally.skip(name, reason or "ignored in the source")
    if code != 0 and failed == 0:
        print_tail(log)
        tally.fail("cargo test", f"code {code}, output in target/logs/{log.name}")
    if passed < FLOORS["cargo"]:
        tally.fail("number of Rust tests", f"{passed} passed, at least {FLOORS['cargo']} are there")
    print(f"   {passed} passed, {failed} failed, {ignored} ignored")


def step_aarch64(tally):
    """The archive builds for the boards that have the NPU, and the Rust tests pass on their processor, under qemu."""
    reason = aarch64.archive()
    if reason:
        tally.skip("archive for aarch64", reason)
    else:
        tally.check(True, "archive for aarch64")
    passed, failed, reason = aarch64.run()
    tally.passed += passed
    for name in failed:
        tally.fail(f"aarch64 {name}", "see target/logs/aarch64-*.log")
    if reason:
        tally.skip("tests on aarch64", reason)
    elif passed < FLOORS["aarch64"]:
        tally.fail("number of tests on aarch64", f"{passed} passed, at least {FLOORS['aarch64']} are there")
    print(f"   {passed} passed, {len(failed)} failed")


def step_glue(tally):
    """The C files compile without a warning for each version of the backend API, for a static and for a loadable backend. The
    structs for the vendors' libraries agree with the vendors' headers, and `register()` of Rust programs compiles."""
    for version in fetch.LLAMA_SOURCES:
        source = fetch.llama(version)
        include = [f"-I{folder}" for folder in (ROOT / "include", source / "ggml" / "include", source / "ggml" / "src")]
        # Clang 22 compiles the kernels, so a machine has it more often than a Clang without a number.
        for compiler, *others in [["gcc"], ["clang", "clang-22"]]:
            program = next(filter(shutil.which, [compiler, *others]), None)
            if program is None:
                tally.skip(f"glue with {compiler}", f"{compiler} is not installed")
                continue
            for kind, defines in {"static": [], "dl": ["-DGGML_BACKEND_DL", "-DGGML_BACKEND_SHARED"]}.items():
                files = [*sorted((ROOT / "ggml-glue").glob("*.c")), ROOT / "plugin" / "glue" / "host.c"]
                command(tally, f"glue-{version}-{compiler}-{kind}",
                        [program, *GLUE_FLAGS, *defines, *include, "-fsyntax-only", *files])


    # No other crate of the workspace enables this feature.
    command(tally, "register", ["cargo", "clippy", "--locked", "--package", "ggml-rust-npu", "--features", "register", "--",
                                "-D", "warnings"])
    vendors_headers(tally)


# The reason of every ignored test that compares with C headers ends with these words.
HEADERS_FETCHED = "make test fetches them"
# Tests that compare with headers, by a part of their names, and the variable for bindgen's output.
HEADER_TESTS = {"rockchips_headers": (1, "RKNN_BINDINGS"), "fastrpcs_headers": (2, "FASTRPC_BINDINGS"),
                "ggmls_headers": (1, "GGML_BINDINGS")}


def header_bindings(name):
    """bindgen's output for the headers with which the tests of this name compare; several files are separated by colons."""
    folder = TARGET / "bindings"
    if name == "rockchips_headers":
        headers = fetch.rknn_headers()
        made = [build.bindings([headers / file for file in ("rknn_api.h", "rknn_matmul_api.h")], folder / "rknn.rs",
                               f"-I{headers}")]
    elif name == "fastrpcs_headers":
        headers = vendor_parts.fastrpc_headers()
        made = [build.bindings([headers / file for file in ("remote.h", "rpcmem.h", "AEEStdErr.h")], folder / "fastrpc.rs",
                               f"-I{headers}")]
    else:
        made = []
        for version in fetch.LLAMA_SOURCES:
            ggml = fetch.llama(version) / "ggml"
            made.append(build.bindings([ggml / "include" / "ggml.h", ggml / "src" / "ggml-common.h"], folder / f"{version}.rs",
                                       f"-I{ggml / 'include'}", "-DGGML_COMMON_DECL_C"))
    return ":".join(map(str, made))


def vendors_headers(tally):
    """The tests that compare structs and values with headers, which are ignored without them."""
    env, names = tool_env(), []
    for name, (_, variable) in HEADER_TESTS.items():
        try:
            env[variable] = header_bindings(name)
            names.append(name)
        except (debian.Missing, build.Missing) as missing:
            tally.skip(name, str(missing))
    if not names:
        return
    # The whole workspace is selected, because with another selection cargo would compile its packages again.
    code, text, log = capture("headers", ["cargo", "test", "--locked", "--workspace", "--lib", "--test", "header", "--",
                                          "--ignored", *names], env)
    passed = re.findall(r"^test (\S+) \.\.\. ok$", text, re.M)
    found = {name: sum(test.endswith(name) for test in passed) for name in names}
    print(f"   tests passed: {found}")
    tally.passed += sum(found.values())
    for name in names:
        wanted = HEADER_TESTS[name][0]
        if code != 0 or found[name] != wanted:
            tally.fail(name, f"{found[name]} of {wanted} passed, code {code}, output in target/logs/{log.name}")


def step_build(tally):
    build.static()
    for name in build.PROGRAMS + build.TESTS:
        tally.check(project.binary(name).is_file(), name, "not built")


def step_shared(tally):
    """A shared build links, and its libraries work together."""
    program = build.shared()
    for name, env, expected in [("with", device_env(), True), ("without", cpu_env(), False)]:
        code, text, _ = capture(f"shared-{name}", [program], env)
        listed = any(line.startswith(f"{DEVICE}\t") for line in text.splitlines())
        tally.check(code == 0 and listed == expected, f"devices of a shared build {name} the variable", text.strip())


def step_ops(tally):
    """Upstream's own test of every operation that the devices claim, whole graphs included, under strict coherence.

    A sample: at most `CASES_OF_A_KIND` of each operation and types. `make ops` runs all cases, on every chip.
    """
    runs = [(HEXAGON, "weights", FLOORS[HEXAGON]), (SIMULATED, "always", FLOORS[SIMULATED]),
            (HEXAGON, "always", FLOORS["packed operands"])]
    # Each run begins with tables that a single thread computes, so several runs go at the same time.
    with ThreadPoolExecutor(JOBS) as pool:
        for done in [pool.submit(sampled_ops, tally, *run) for run in runs]:
            done.result()


def sampled_ops(tally, chip, repack, floor):
    """Runs a sample of the cases that a chip's device claims."""
    claimed = [case for case in cases.supported(chip) if re.match(MANY_EXPERTS, case[1])]
    if chip == SIMULATED:
        # The CPU backend computes all other operations inside the device's graphs.
        claimed = [case for case in claimed if case[0] in FLOORS["rockchip"]]
    elif repack == "always":
        claimed = [case for case in claimed if case[0] in PACKED and not re.search(SLOW_TO_QUANTIZE, case[1])]
    chosen = cases.of_each_kind(claimed, CASES_OF_A_KIND["weights" if chip == SIMULATED else repack])
    runs = [["-o", part] for part in cases.arguments(chosen)]
    names = {operation for operation, _ in chosen}
    if repack == "weights":
        runs.append(["-o", ",".join(GRAPHS), "-p", MANY_EXPERTS])
        names.update(GRAPHS)
    ops(tally, chip, {**dict.fromkeys(names, 1), None: floor}, *runs, what="sample", GGML_RUST_NPU_REPACK=repack)


# Chips whose layouts or arithmetic differ.
ROCKCHIPS = ["rk3588", "rk3576", "rk3566"]
HEXAGONS = ["hexagon-v68", "hexagon-v68-hvx", "hexagon-v69", "hexagon-v73", "hexagon-v75", "hexagon-v79", "hexagon-v81"]


def step_all_ops(tally):
    """All cases, for each chip that differs in layouts or arithmetic; on Hexagon also with all operands packed."""
    for chip in ROCKCHIPS:
        ops(tally, chip, FLOORS["rockchip"], GGML_RUST_NPU_REPACK="always")
    for chip in HEXAGONS:
        for repack in ("weights", "always"):
            floors, some = dict(FLOORS["hexagon"]), ["-p", MANY_EXPERTS]
            if (chip, repack) == (HEXAGON, "weights"):
                floors, some = floors | FLOORS["hexagon, many experts"], []
            ops(tally, chip, floors, some, GGML_RUST_NPU_REPACK=repack)


# Operations that are divided among threads in several ways, also with the matrix unit's thread; and numbers of threads.
SHARED = ["MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT"]
THREADS = [1, 2, 4, 8]


def step_thread_ops(tally):
    """Products and attention on each number of threads, for each Hexagon architecture."""
    floors = {operation: FLOORS["hexagon"][operation] for operation in SHARED}
    for chip in HEXAGONS:
        for threads in map(str, THREADS):
            for repack in ("weights", "always"):
                ops(tally, chip, floors, ["-o", ",".join(SHARED), "-p", MANY_EXPERTS],
                    GGML_RUST_NPU_HEX_THREADS=threads, GGML_RUST_NPU_REPACK=repack)


# Rows of test-llama-archs for one device, and for all devices with `-sm tensor` (ggml's device Meta): a dense model of an
# architecture, one with experts, or both. llama.cpp's logger may lose the last rows.
ARCHS_ROWS = {"device": 131, "Meta": 100}
# Each device alone, and two sessions or devices with slices.
ARCHS_DEVICES = [HEXAGON, "hexagon-v79", SIMULATED, f"{HEXAGON},{HEXAGON}", f"{HEXAGON},{SIMULATED}"]


def step_archs(tally):
    """Random models of all architectures: no more splits than in docs/results/architectures.md, and logits like the CPU's, with
    each device alone, and with all of them by `-sm tensor`."""
    try:
        archs.check_all()
        tally.check(True, "architectures in as few splits as recorded")
    except Problem as problem:
        tally.fail("architectures", str(problem))
    for chips in ARCHS_DEVICES:
        name = f"test-llama-archs-{chips}"
        env = device_env(chips, GGML_RUST_NPU_SIM_COHERENCE="strict")
        code, text, log = capture(name, [project.binary("test-llama-archs")], env)
        right = re.findall(r"^\|[^|]*\|\s*([^|]*)\|[^|]*\|\s*OK", text, re.M)
        rows = {"device": sum("(simulated)" in device for device in right) // (chips.count(",") + 1),
                "Meta": right.count("Meta")}
        print(f"   {name}: rows OK: {rows}")
        enough = all(rows[kind] >= least for kind, least in ARCHS_ROWS.items())
        tally.check(code == 0 and enough, name, f"code {code}, output in target/logs/{log.name}")


def ops(tally, chip, floors, *runs, what="", **settings):
    """Runs cases on a chip, those of each list of arguments in `runs`, or all.

    `floors` are the least numbers of OK cases by operation, None for all together. The exit code is 0 even if no case ran, so
    the cases are counted.
    """
    name = "-".join(filter(None, ["backend-ops", chip, what, *settings.values()]))
    env = cpu_env(GGML_RUST_NPU_SIM=chip, GGML_RUST_NPU_SIM_COHERENCE="strict", **settings)
    program = [project.binary("test-backend-ops"), "test", "-b", device_of(chip), "-j", 1 if what else JOBS]
    passed, failed = Counter(), []
    for number, args in enumerate(runs or [[]]):
        code, text, log = capture(f"{name}-{number}" if number else name, [*program, *args], env)
        passed.update(re.findall(r"^ *(\w+)\([^\n]*\): OK", text, re.M))
        wrong = re.findall(r"^ *(?:\[.*?\] )?[^\n]*?(\w+\([^\n]*\)): FAIL", text, re.M)
        failed += [(case, log) for case in wrong]
        if code != 0 and not wrong:
            print_tail(log)
            tally.fail(name, f"code {code}, output in target/logs/{log.name}")
    shown = ", ".join(f"{count} of {op}" for op, count in passed.most_common(8))
    print(f"   {name}: {passed.total()} cases of {len(passed)} operations: {shown}" + (", …" if len(passed) > 8 else ""))
    tally.passed += passed.total()
    for case, log in failed:
        if not is_tie(case, name, env, device_of(chip)):
            tally.fail(f"{name} {case}", f"see target/logs/{log.name}")
    for op, minimum in floors.items():
        count = passed[op] if op else passed.total()
        if count < minimum:
            tally.fail(f"{name} {op or 'all'}", f"{count} cases OK, at least {minimum} are there")


# A case whose choice failed by chance is drawn again this often, and must then be right. One in 10,000 cases fails by chance.
TIE_DRAWS = 20


def is_tie(case, name, env, device):
    """Returns True if a failed choice of experts is right with other draws of random scores.

    Two scores on both sides of the limit that are apart by a last bit of the exponential, or not at all, may be chosen
    either way. In 1,185 runs of the 96 cases of 160 to 288 experts 7 failed, each by the last expert chosen, whose score was
    within two last bits of the CPU backend's. Of a million rows of 288 sigmoids 4 are chosen otherwise, and 23 tie.
    """
    op, _, parameters = case.partition("(")
    if op != "TOPK_MOE":
        return False
    again = [project.binary("test-backend-ops"), "test", "-b", device, "-o", op, "-p", re.escape(parameters[:-1])]
    right = sum("1/1 tests passed" in capture(f"{name}-again", again, env)[1] for _ in range(TIE_DRAWS))
    print(f"   {name}: {case} failed; with other draws {right} of {TIE_DRAWS} are right")
    return right == TIE_DRAWS


def step_e2e(tally):
    """tests/e2e. Most programs keep one core busy, so files of tests run at the same time."""
    end_to_end(tally, "test_*.py", JOBS)


def step_long(tally):
    """The longer tests of tests/e2e: more models, more text."""
    end_to_end(tally, "long_*.py", 1)


def step_stock(tally):
    """llama.cpp 0.6.0, a Rust program, busy CPUs, the guide's commands, and operations in Debian's test-backend-ops."""
    end_to_end(tally, "stock_*.py", 1)


def step_release(tally):
    """The files of this machine's target work, and another folder gives the same ones."""
    end_to_end(tally, "dist_*.py", 1)
    dist.check(f"{platform.machine()}-unknown-linux-gnu")
    tally.check(True, "two builds")


def step_packages(tally):
    end_to_end(tally, "dist_packages.py", 1, ["dist_packages"])


E2E = ROOT / "tests" / "e2e"
# For each file of tests, how many seconds it took in its last run.
SECONDS = LOGS / "e2e-seconds.json"
# Files that took longer are not part of `quick`. Exceptions are these tests, which check the log lines about devices.
QUICK_S = 60
ALWAYS = ["test_stock.Debian.test_devices_are_listed", "test_stock.Debian.test_wrong_settings_are_said_in_one_line"]


def last_seconds():
    return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}


def quick_tests(seconds, files):
    """Returns those of `files` that are quick, and tests of others; a file that never ran may be."""
    quick = [name for name in files if seconds.get(name, 0) < QUICK_S]
    return quick + [test for test in ALWAYS if test.partition(".")[0] not in quick]


def step_quick(tally):
    """The tests that scripts/anywhere.py runs: all Rust tests, and tests/e2e except files that run longer than a minute.
    QUICK_E2E names files, or tests, to run instead."""
    step_cargo(tally)
    named, seconds = os.environ.get("QUICK_E2E"), last_seconds()
    names = named.split(",") if named else quick_tests(seconds, sorted(file.stem for file in E2E.glob("test_*.py")))
    slow = [f"{name} ({taken:.0f} s)" for name, taken in sorted(seconds.items()) if name not in names and taken >= QUICK_S]
    print(f"   {len(names)} of tests/e2e; not {', '.join(slow) or 'those that another run finds to take a minute'}", flush=True)
    end_to_end(tally, "test_*.py", JOBS, names)


def end_to_end(tally, pattern, jobs, names=None):
    """Runs the test files that match a pattern, which must have at least as many tests as in `FLOORS`; or runs the named
    ones."""
    fetch.model()
    fetch.text()
    found, taken = 0, {}

    def run(name):
        began = time.monotonic()
        code, text, log = capture(f"e2e-{name}", [sys.executable, E2E / "run.py", name], dict(os.environ), E2E)
        return name, code, text.splitlines(), log, time.monotonic() - began

    with ThreadPoolExecutor(jobs) as pool:
        for name, code, lines, log, seconds in pool.map(run, names or sorted(file.stem for file in E2E.glob(pattern))):
            if code != 0:
                print_tail(log)
                tally.fail(name, f"code {code}, output in target/logs/{log.name}")
                continue
            result = json.loads(lines.pop())
            found += result["found"]
            if result["found"] and "." not in name:
                taken[name] = round(seconds)
            tally.passed += result["passed"]
            for test, trace in result["failed"]:
                tally.fail(test, trace.strip().splitlines()[-1])
            for test, reason in result["skipped"]:
                tally.skip(test, reason)
            for line in lines:
                print(f"   {line}")
            print(f"   {name}: {result['passed']} tests passed in {seconds:.0f} s", flush=True)
    SECONDS.parent.mkdir(parents=True, exist_ok=True)
    SECONDS.write_text(json.dumps(last_seconds() | taken), encoding="utf-8")
    if names is None and found < FLOORS[pattern]:
        tally.fail(f"number of tests in {pattern}", f"{found} found, at least {FLOORS[pattern]} are there")


STEPS = {
    "format": step_format,
    "lint": step_lint,
    "cargo": step_cargo,
    "aarch64": step_aarch64,
    "glue": step_glue,
    "build": step_build,
    "shared": step_shared,
    "ops": step_ops,
    "e2e": step_e2e,
    "vendor": vendor.check_short,
}

# Too long to be part of `make test`.
EXTRA_STEPS = {"all-ops": step_all_ops, "thread-ops": step_thread_ops, "archs": step_archs, "long": step_long,
               "quick": step_quick, "stock": step_stock, "release": step_release, "packages": step_packages,
               "all-vendor": vendor.check_all, "rknn-vendor": vendor_rknn.check, "direct": direct.check}

# Left out of `make test-all`: steps whose cases another step includes, and steps that need a licence to be accepted.
PARTS_OF_OTHERS = ["ops", "vendor", "rknn-vendor", "quick", "packages"]


def build_beside(background):
    """Starts to compile llama.cpp at the same time as the Rust tests: one crate, and some tests, keep one core busy for
    minutes."""
    try:
        # In the foreground, because other steps fetch files as well.
        fetch.tools()
        fetch.llama()
    except (Problem, OSError):
        # Ignored here: the step that needs llama.cpp fails with the same error.
        return None
    return background.submit(build.static)


def main():
    settle()
    names = sys.argv[1:] or list(STEPS)
    if names == ["everything"]:
        names = [name for name in STEPS | EXTRA_STEPS if name not in PARTS_OF_OTHERS]
    for name in names:
        if name not in STEPS | EXTRA_STEPS:
            raise Problem(f"unknown step {name}; one of {', '.join(STEPS | EXTRA_STEPS)}")
    tally = Tally()
    with ThreadPoolExecutor(1) as background:
        building = None
        for name in names:
            say(name)
            began = time.monotonic()
            try:
                if name == "cargo" and "build" in names:
                    building = build_beside(background)
                if name == "build" and building:
                    building.result()
                (STEPS | EXTRA_STEPS)[name](tally)
            except (Problem, OSError) as problem:
                tally.fail(name, str(problem))
            print(f"   {time.monotonic() - began:.0f} s", flush=True)
    print(tally.line())
    return 1 if tally.failed else 0


if __name__ == "__main__":
    main_with(main)
