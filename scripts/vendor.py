#!/usr/bin/env python3
"""The Hexagon vendor loop: programs above Qualcomm's own libcdsprpc, an emulated kernel and the shipped DSP library.

Usage: vendor.py run ARCH PROGRAM [ARGUMENT...]   ARCH: v68 v69 v73 v75 v79 v81; PROGRAM: ggml-npu, or one of Debian's llama.cpp

`make vendor` runs the checks below, `make test` the self-test of each architecture.

LOOP_RULES   strict rules, a comma list: interrupt=N and restart=N (signals in N long calls), map-failed=N (the N-th
             mapping of shared memory), votes (no power for the matrix unit), window=BYTES (the DSP maps no more),
             vtcm-held=MS (another holds VTCM), any-length (mappings need not be whole pages), dma-stuck (a copy
             of the DMA engine never finishes), workers=N (the DSP's system starts N threads in addition to FastRPC's),
             blacklist=NAME (the DSP's loader refuses a library that imports it), no-weak (it refuses one with a weak
             import that is missing), no-priority (the DSP's system cannot lower the priority of who has VTCM),
             vanish (a mapping goes with the call in which the DSP unmapped it), late-unmap (unmapped memory takes
             room until a call ends), unmap-failed=N (the N-th request to unmap fails), no-hmx (the matrix unit's lock
             is refused), vtcm=BYTES, dsps=2 (the chip has a second DSP)
LOOP_STACK   bytes of a FastRPC thread's stack, in place of the size that libcdsprpc asked for
LOOP_LOG=1   a line for each request
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import cases
import models
import project
import shell_imports
import vendor_parts
from project import HEXAGON_DEVICE, LOGS, Problem, cpu_env, device_env, main_with
from vendor_parts import Missing

TIMEOUT_S = 600
TOOL = "ggml-npu"

PROMPT = "Once upon a time"
TOKENS = 16


# The architectures that are run, and how many of upstream's cases must be computed on each.
ARCHS = {"v68": 200, "v69": 200, "v73": 200, "v75": 600, "v79": 200, "v81": 200}
MAIN = "v75"

# Architectures whose libraries store qfloat values.
STORING = ("v68", "v69")

# V73's qfloat library, which is used if the first library's process dies: its chip, the rule that makes it die, and cases.
FALLBACK = "v73q"
FALLBACK_ARCH, FALLBACK_ENV, FALLBACK_CASES = "v73", {"LOOP_RULES": "no-ieee"}, 200

# Architectures with a second library, which is used if the first one's process dies.
LIBRARIES = {"v73": ["v73", FALLBACK]}


class Rule(NamedTuple):
    """A strict rule, and how the self-test ends under it: a pattern that its output must have."""

    name: str
    env: dict
    ends: str
    arch: str = MAIN


PASSED = r"self-test +passed"
BOTH_PASSED = rf"^HEX0(.|\n)*{PASSED}(.|\n)*^HEX1(.|\n)*{PASSED}"
FEWER = r"(.|\n)*computing on {} of 4 threads"
REFUSED = r"^- HEX0 is not available: "


def said(line):
    """The pattern of a line that the DSP library wrote to the DSP's log, after the program's own output."""
    return rf"(.|\n)*HAP_debug: ggml-rust-npu: {line}"


def votes(follow, option, corners, awake):
    """The pattern of the emulated system's log line about the vote for clocks."""
    text = f"clocks: follow {follow}, option {option}, core {corners}, bus {corners}, awake {awake}"
    return rf"(.|\n)*{re.escape(text)}"


def public_imports():
    """The symbols that public unsigned libraries import: those of our table."""
    rows = (line.split() for line in (project.ROOT / "hexagon-ops" / "tests" / "imports.txt").read_text().splitlines())
    return {row[0] for row in rows if len(row) > 1 and row[1] in ("strong", "weak")}


def blacklist_of_all_others(arch):
    """The rule that refuses every symbol of the shell or of our library that is not in the table."""
    shell = (vendor_parts.SOURCE / "dsp" / "shell.c").read_text()
    known = set(re.findall(r"EXPORT(?:_UNUSED)?\((\w+)\),", shell))
    library = next(vendor_parts.dsp_library(arch).glob("*.so"))
    elf = shell_imports.Elf(library)
    others = sorted((known | elf.imports | elf.weak) - public_imports())
    return ",".join(f"blacklist={name}" for name in others)


RULES = [
    Rule("second session", {"GGML_RUST_NPU_HEX_SESSIONS": "2"}, BOTH_PASSED),
    Rule("two DSPs", {"LOOP_RULES": "dsps=2", "LOOP_LOG": "1"},
         rf"^HEX0(.|\n)*{PASSED}(.|\n)*^HEX1(.|\n)*NPU cdsp1(.|\n)*{PASSED}(.|\n)*open of the node of DSP 1"),
    Rule("VTCM held for half a second", {"LOOP_RULES": "vtcm-held=500"}, PASSED),
    Rule("VTCM held for long", {"LOOP_RULES": "vtcm-held=600000"}, REFUSED),
    Rule("window of one page", {"LOOP_RULES": "window=4096"}, REFUSED + ".*fastrpc_mmap"),
    Rule("window that is full later", {"LOOP_RULES": "window=700000"}, REFUSED + ".*fastrpc_mmap"),
    # libcdsprpc's allocator is then initialized again and asked a second time.
    Rule("MAP_FAILED for the first allocation", {"LOOP_RULES": "map-failed=1"}, PASSED),
    Rule("MAP_FAILED for a buffer", {"LOOP_RULES": "map-failed=4"}, REFUSED + "rpcmem_alloc gave no memory"),
    Rule("no power for the matrix unit", {"LOOP_RULES": "votes"}, PASSED + said("vote refused: matrix unit 80000414")),
    Rule("64 KiB of stack", {"LOOP_STACK": "65536"}, REFUSED + ".*too small a stack" + said("too little stack: bytes")),
    # The DSP gives up after a number of polls, which can take an emulator on a busy machine more than 30 s.
    Rule("DMA engine that hangs", {"LOOP_RULES": "dma-stuck", "GGML_RUST_NPU_TIMEOUT": "150"},
         REFUSED + r".*DMA engine \(4\): a copy did not finish"),
    Rule("no worker thread", {"LOOP_RULES": "workers=0"}, rf"1 HVX thread(.|\n)*{PASSED}" + FEWER.format(1)),
    Rule("one worker thread of three", {"LOOP_RULES": "workers=1"}, rf"2 HVX thread(.|\n)*{PASSED}" + FEWER.format(2)),
    # On a busy machine a worker that starts late becomes the matrix unit's thread instead.
    Rule("no thread for the matrix unit", {"LOOP_RULES": "workers=3"},
         rf"4 HVX thread(.|\n)*{PASSED}" + said("no thread for the matrix unit: threads 0")
         + rf"|3 HVX thread(.|\n)*{PASSED}" + FEWER.format(3)),
    Rule("two threads asked for", {"GGML_RUST_NPU_HEX_THREADS": "2"}, rf"2 HVX thread(.|\n)*{PASSED}"),
    Rule("full speed", {"LOOP_LOG": "1"}, PASSED + votes(0, 16, "255 (255 to 255)", 1)),
    Rule("clocks that follow the load", {"GGML_RUST_NPU_POWER": "balanced", "LOOP_LOG": "1"},
         PASSED + votes(1, 16, "4 (2 to 6)", 0)),
    Rule("low clocks", {"GGML_RUST_NPU_POWER": "saver", "LOOP_LOG": "1"}, PASSED + votes(1, 4, "2 (0 to 0)", 0)),
    Rule("calls that signals end", {"LOOP_RULES": "interrupt=2"}, PASSED),
    Rule("calls that signals restart", {"LOOP_RULES": "restart=2"}, PASSED),
    Rule("blacklist of a symbol that is needed", {"LOOP_RULES": "blacklist=qurt_thread_create"},
         REFUSED + r"(.|\n)*symbol qurt_thread_create is blacklisted"),
    *(Rule(f"{arch} with a loader that refuses what is weak and missing", {"LOOP_RULES": "no-weak"}, PASSED, arch)
      for arch in ARCHS),
    Rule("no priorities of VTCM", {"LOOP_RULES": "no-priority", "GGML_RUST_NPU_HEX_SESSIONS": "2"}, BOTH_PASSED),
    Rule("mappings that go with a call", {"LOOP_RULES": "vanish", "LOOP_LOG": "1"}, PASSED + r"(.|\n)*\[loop\] it went before"),
    Rule("mapping that stays", {"LOOP_RULES": "unmap-failed=1", "LOOP_LOG": "1"}, PASSED + r"(.|\n)*\[loop\] it fails"),
    Rule("room that comes late", {"LOOP_RULES": "late-unmap"}, PASSED),
    *(Rule(f"{arch} without a matrix unit", {"LOOP_RULES": "no-hmx"}, rf"without a matrix unit(.|\n)*{PASSED}", arch)
      for arch in ("v68", MAIN)),
    *(Rule(f"v68 with {kib} KiB of VTCM", {"LOOP_RULES": f"vtcm={kib << 10}"}, rf", {kib - 64} KiB VTCM(.|\n)*{PASSED}", "v68")
      for kib in (1024, 2048)),
    Rule("v68 with 256 KiB of VTCM", {"LOOP_RULES": "vtcm=262144"}, REFUSED + r".*KiB of VTCM are needed", "v68"),
    Rule("v68 as a small board", {"LOOP_RULES": "no-hmx,no-priority,votes,vtcm=1048576"},
         rf"without a matrix unit, 960 KiB VTCM(.|\n)*{PASSED}", "v68"),
    Rule("V73 without IEEE floats", {"LOOP_RULES": "no-ieee"}, PASSED, "v73"),
]


class Done(NamedTuple):
    """A program that ended, or was ended: then its code is None."""

    code: int
    out: str
    log: str

    @property
    def all(self):
        return self.out + self.log

    @property
    def deepest(self):
        """Bytes of the deepest stack of all DSP processes, and of a stack."""
        found = re.findall(r"deepest stack (\d+) of (\d+) bytes", self.log)
        return max(((int(used), int(all_)) for used, all_ in found), default=(0, 0))


class Loop:
    """The parts together."""

    def __init__(self, host, libraries):
        # The host's side takes longest to build, so the parts that may be missing are checked first.
        self.process = vendor_parts.dsp_process()
        self.emulator = vendor_parts.emulator()
        self.host = host()
        self.libraries = libraries
        self.deepest = 0

    def environment(self, arch, **settings):
        """The environment of a program above libcdsprpc with an NPU of one architecture."""
        folders = [str(vendor_parts.dsp_library(name)) for name in self.libraries.get(arch, [arch])]
        if self.host.plugin:
            settings["GGML_BACKEND_PATH"] = str(self.host.plugin)
        # The number of bits of activations is fixed, so that it does not depend on the emulator's speed.
        settings = {"GGML_RUST_NPU_HEX_ACT": "16"} | settings
        # In strict mode, a qfloat value that is copied or stored becomes NaN. The libraries for V68 and V69 store qfloat
        # values, with all bits.
        qfloat = "rounded" if arch in STORING else "strict"
        return cpu_env(HVX_QFLOAT=qfloat, LOOP_QEMU=str(self.emulator), LOOP_LOADER=str(self.process),
                       LOOP_ARCH=f"0x{arch[1:]}", DSP_LIBRARY_PATH=";".join(folders),
                       GGML_RUST_NPU_CDSPRPC_LIB=str(self.host.library), OMP_WAIT_POLICY="passive", **settings)

    def command(self, program, *args):
        """The command line of our tool or of one of Debian's programs, and the folder to start it in."""
        if program == TOOL:
            command, folder = [*self.host.runner, self.host.tool, *args], None
        else:
            command, folder = self.host.programs.command(program, *args), self.host.programs.folder
        return [str(part) for part in command], folder

    def run(self, arch, program, *args, timeout=TIMEOUT_S, **settings):
        """Runs a program to its end, or to the time limit."""
        command, folder = self.command(program, *args)
        env = self.environment(arch, **settings)
        try:
            done = subprocess.run(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=timeout)
            done = Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired as late:
            out, log = ((text or b"").decode(errors="replace") for text in (late.stdout, late.stderr))
            done = Done(None, out, log)
        self.deepest = max(self.deepest, done.deepest[0])
        return done


def write_log(name, done):
    log = LOGS / f"vendor-{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"code {done.code}\n{done.all}", encoding="utf-8")
    return f"code {done.code}, output in target/logs/{log.name}"


def self_test(tally, loop, name, arch, pattern=PASSED, **settings):
    """Checks how the self-test ends: never by a signal, never by the time limit."""
    done = loop.run(arch, TOOL, "devices", "--self-test", timeout=180, **settings)
    where = write_log(name, done)
    ended = done.code is not None and 0 <= done.code < 128
    right = ended and re.search(pattern, done.all, re.M) and not re.search("mappings left|is closed while", done.log)
    tally.check(right, f"vendor {name}", where)
    used, stack = done.deepest
    print(f"   {name}: deepest stack {used} of {stack} bytes", flush=True)


# Cases with more elements or products than this take the emulator too long.
MAX_ELEMENTS = 1 << 17
MAX_PRODUCTS = 1 << 22

# An argument of a program may have at most 128 KiB.
CASES_OF_A_RUN = 200
TIMEOUT_OPS_S = 1800

# On a busy machine, an emulator needs longer for a large case, or a token, than the backend waits by default.
PATIENT = {"GGML_RUST_NPU_TIMEOUT": "300"}


def cost(parameters):
    """Elements of a case's largest tensor, and products of a multiplication or updates of a state, from its parameters."""
    elements = [math.prod(max(int(number), 1) for number in numbers.split(","))
                for numbers in re.findall(r"\[([\d,]+)\]", parameters)]
    named = dict(re.findall(r"\b(m|n|k|n_mats|hsk|nh|kv|nb|head_count|head_size|n_seq_tokens|n_seqs)=(\d+)", parameters))
    return max(elements, default=1), math.prod(max(int(value), 1) for value in named.values())


def supported_cases(loop, arch, **settings):
    """The cases that the device claims, by operation, without those that are too slow for the emulator."""
    done = loop.run(arch, "test-backend-ops", "support", "-b", HEXAGON_DEVICE, "--output", "csv", **settings)
    by_operation = {}
    for operation, parameters in cases.claimed(done.out):
        elements, products = cost(parameters)
        if elements <= MAX_ELEMENTS and products <= MAX_PRODUCTS:
            by_operation.setdefault(operation, []).append(f"{operation}({parameters})")
    return by_operation


def sample(by_operation, count):
    """About `count` cases, as many of each operation as there are, and evenly spaced among those."""
    share = 1
    while sum(min(share, len(of_op)) for of_op in by_operation.values()) < min(count, sum(map(len, by_operation.values()))):
        share += 1
    chosen = []
    for of_op in by_operation.values():
        taken = min(share, len(of_op))
        chosen += [of_op[i * len(of_op) // taken] for i in range(taken)]
    return chosen


def check_ops(tally, loop, library, arch, least, **settings):
    """Upstream's own test, a sample of each operation that the device claims; the cases that ran are counted."""
    name = f"{library} operations"
    settings = PATIENT | settings
    claimed = supported_cases(loop, arch, **settings)
    chosen = sample(claimed, least * 21 // 20)
    passed, failed = Counter(), []
    for first in range(0, len(chosen), CASES_OF_A_RUN):
        part = chosen[first:first + CASES_OF_A_RUN]
        done = loop.run(arch, "test-backend-ops", "test", "-b", HEXAGON_DEVICE, "-o", ",".join(part), "-j", 1,
                        timeout=TIMEOUT_OPS_S, **settings)
        where = write_log(f"{name} {first}", done)
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.all)
        passed.update(re.findall(r"^ *(\w+)\([^\n]*\): OK", text, re.M))
        wrong = re.findall(r"(\w+\([^\n]*\)): FAIL", text)
        failed += [f"{case}: {where}" for case in wrong]
        if done.code != 0 and not wrong:
            failed.append(f"the run: {where}")
    for failure in failed:
        tally.fail(f"vendor {name}", failure)
    without = sorted(set(claimed) - set(passed))
    if without:
        tally.fail(f"vendor {name}", f"no case of {', '.join(without)}")
    tally.passed += passed.total()
    tally.check(passed.total() >= least, f"vendor {name}",
                f"{passed.total()} cases OK, at least {least} are there")
    print(f"   {name}: {passed.total()} cases of {len(passed)} operations OK, {len(failed)} failed", flush=True)


def check_generation(tally, loop):
    """A model generates the same text in Debian's llama.cpp as on the stand-in in the static build."""
    program = "llama-completion"
    args = ["-m", models.variant("Q4_0"), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp", 0, "--seed", 1,
            "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off"]
    command = [str(part) for part in (project.binary(program), *args)]
    want = subprocess.run(command, env=device_env(f"hexagon-{MAIN}"), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode(errors="replace")
    done = loop.run(MAIN, program, *args, "-t", 1, timeout=TIMEOUT_OPS_S, **PATIENT)
    where = write_log("generation", done)
    tally.check(done.code == 0 and want.strip() and done.out.rstrip("\n") == want.rstrip("\n"), "vendor generation",
                f"{json.dumps(done.out)} is not {json.dumps(want)}; {where}")
    print(f"   {TOKENS} tokens: {json.dumps(done.out)}")


def unless_missing(tally, name, check, *args, **settings):
    """Runs a check; skips it if this machine lacks something that it needs."""
    try:
        return check(*args, **settings)
    except Missing as missing:
        tally.skip(f"vendor {name}", str(missing))
        return None


def self_tests(tally, loop):
    for arch in ARCHS:
        unless_missing(tally, f"{arch} self-test", self_test, tally, loop, f"{arch} self-test", arch)


def check_short(tally):
    """The self-test of each architecture."""
    # No second library, so that a first one that fails is noticed.
    loop = unless_missing(tally, "loop", Loop, vendor_parts.tool_host, {})
    if loop:
        self_tests(tally, loop)
        unless_missing(tally, f"{MAIN} loader", check_loader, tally, loop, MAIN)


def check_loader(tally, loop, arch):
    """A DSP whose loader refuses all symbols that no public unsigned library imports, and weak ones that are missing."""
    rules = f"no-weak,{blacklist_of_all_others(arch)}"
    self_test(tally, loop, f"{arch} strictest loader", arch, LOOP_RULES=rules)


RATES = r"^hexagon-v\d\d threads=\d+ power=0 packets_per_us=[\d.]+ gb_per_s=[\d.]+\n$"


def check_rates(tally, loop, arch):
    """A device measures its rates once, and keeps them."""
    with tempfile.TemporaryDirectory() as folder:
        file, kept = Path(folder) / "ggml-rust-npu" / "rates", []
        for attempt in ("first", "second"):
            done = loop.run(arch, TOOL, "devices", timeout=180, XDG_CACHE_HOME=folder, GGML_RUST_NPU_HEX_ACT="auto")
            where = write_log(f"rates {attempt}", done)
            kept.append((done.code, file.read_text() if file.exists() else None))
    tally.check(kept[0][0] == 0 and re.fullmatch(RATES, kept[0][1] or "") and kept[0] == kept[1], "vendor rates",
                f"{kept}; {where}")
    print(f"   {kept[0][1]}", end="")


def check_all(tally):
    loop = unless_missing(tally, "loop", Loop, vendor_parts.whole_host, LIBRARIES)
    if not loop:
        return
    self_tests(tally, loop)
    for arch in ARCHS:
        unless_missing(tally, f"{arch} loader", check_loader, tally, loop, arch)
    for rule in RULES:
        unless_missing(tally, rule.name, self_test, tally, loop, rule.name, rule.arch, rule.ends, **rule.env)
    for arch, least in ARCHS.items():
        unless_missing(tally, f"{arch} operations", check_ops, tally, loop, arch, arch, least)
    unless_missing(tally, f"{FALLBACK} operations", check_ops, tally, loop, FALLBACK, FALLBACK_ARCH, FALLBACK_CASES,
                   **FALLBACK_ENV)
    unless_missing(tally, "generation", check_generation, tally, loop)
    unless_missing(tally, "rates", check_rates, tally, loop, MAIN)
    print(f"   deepest stack of all: {loop.deepest} bytes")


def main():
    if len(sys.argv) < 4 or sys.argv[1] != "run":
        raise Problem("usage: vendor.py run ARCH PROGRAM [ARGUMENT...]")
    try:
        loop = Loop(vendor_parts.tool_host if sys.argv[3] == TOOL else vendor_parts.whole_host, LIBRARIES)
        settings = {name: value for name, value in os.environ.items() if name.startswith("GGML_RUST_NPU_")}
        env = loop.environment(sys.argv[2], **settings)
    except Missing as missing:
        raise Problem(str(missing)) from missing
    command, folder = loop.command(*sys.argv[3:])
    return subprocess.run(command, env=env, cwd=folder).returncode


if __name__ == "__main__":
    main_with(main)
