#!/usr/bin/env python3
"""Counts upstream's test cases by operation, and writes docs/results/operations.md.

Reads the log of `make ops`, which must have passed, and queries the device again about the cases that it refused.
"""

import re
import subprocess
from collections import Counter

import cases
import project
from project import LOGS, ROOT, Problem, device_env, main_with

HEAD = """# Operations

Results of the cases of llama.cpp {version}'s `test-backend-ops` for `{device}` on a simulated {chip}, with strict coherence and
`GGML_RUST_NPU_REPACK=always`. `make optable` writes this file after `make ops`. *Refused* means that the device leaves the
case to the CPU, for a reason in the table below. *Nothing to compare with* means that the device computes the case but
llama.cpp's CPU backend does not.

| operation | OK | refused | nothing to compare with |
|---|---|---|---|
"""
REASONS = """
## Refused cases, and the reasons

The reasons are the device's log lines (`GGML_RUST_NPU_LOG=trace`). If a case has several operations,
a reason names the refused one.

| operation | cases | reason |
|---|---|---|
"""
# The glue passes no operation to the device that it has no number for.
UNKNOWN = "not an operation of npu.h"
CASE = re.compile(r"^ *(\w+)(\([^\n]*\)): (OK|not supported \[([^\]]*)\])", re.M)
REPACK = {"GGML_RUST_NPU_REPACK": "always"}


def read(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def reasons(refused):
    """Returns how many of the cases have which reason, by operation."""
    found = Counter()
    for wanted in cases.arguments(refused):
        env = device_env(project.HEXAGON, GGML_RUST_NPU_LOG="trace", **REPACK)
        program = [project.binary("test-backend-ops"), "test", "-b", project.HEXAGON_DEVICE, "-j", "1", "-o", wanted]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=env, errors="replace")
        said = []
        for line in read(done.stdout).splitlines():
            refusal = re.search(rf"{project.HEXAGON_DEVICE}: not (\w+)[^:]*: (.+)", line)
            if refusal:
                said.append(refusal.groups())
            case = CASE.match(line)
            if case and case[3] != "OK":
                operation = case[1]
                words = {reason if op == operation else f"{op}: {reason}" for op, reason in said} or {UNKNOWN}
                found[operation, "; ".join(sorted(words))] += 1
            if case:
                said = []
    return found


def main():
    log = LOGS / f"backend-ops-{project.HEXAGON}-always.log"
    if not log.exists():
        raise Problem(f"{log.relative_to(ROOT)} is missing: run `make ops` first")
    text = read(log.read_text(encoding="utf-8", errors="replace"))
    failed = re.findall(r"(\w+\([^\n]*\)): FAIL", text)
    if failed:
        raise Problem(f"{len(failed)} cases failed, the first is {failed[0]}")
    passed, refused, alone = Counter(), [], Counter()
    for operation, parameters, result, by in CASE.findall(text):
        if result == "OK":
            passed[operation] += 1
        elif project.HEXAGON_DEVICE in by.split(", "):
            refused.append((operation, parameters[1:-1]))
        else:
            alone[operation] += 1
    left = Counter(operation for operation, _ in refused)
    names = sorted({*passed, *left, *alone}, key=lambda op: (-passed[op], op))
    rows = [f"| {op} | {passed[op]} | {left[op]} | {alone[op]} |" for op in names]
    total = f"| **all** | **{passed.total()}** | **{left.total()}** | **{alone.total()}** |"
    why = reasons(list(dict.fromkeys(refused)))
    lines = [f"| {op} | {count} | {reason} |" for (op, reason), count in sorted(why.items(), key=lambda item: (
        -left[item[0][0]], item[0][0], -item[1]))]
    head = HEAD.format(version=project.LLAMA_VERSION, device=project.HEXAGON_DEVICE, chip=project.HEXAGON)
    page = head + "\n".join([total, *rows]) + "\n" + REASONS + "\n".join(lines) + "\n"
    (ROOT / "docs" / "results" / "operations.md").write_text(page, encoding="utf-8")
    print(f"{passed.total()} cases OK, {left.total()} refused, {alone.total()} not compared: docs/results/operations.md")


if __name__ == "__main__":
    main_with(main)
