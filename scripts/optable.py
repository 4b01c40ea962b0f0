#!/usr/bin/env python3
"""Counts upstream's test cases by operation, and writes docs/results/operations.md.

Reads the log of `make ops`, which must have passed.
"""

import re
from collections import Counter

import project
from project import LOGS, ROOT, Problem, main_with

HEAD = """# Operations

What `test-backend-ops` of llama.cpp {version} says of `{device}` on a simulated {chip} under strict coherence, case by case.
`make optable` writes this file after `make ops`. *Not supported* means that the device leaves the case to the CPU; 0 OK means
that it leaves the whole operation to the CPU.

| operation | OK | not supported |
|---|---|---|
"""


def main():
    log = LOGS / f"backend-ops-{project.HEXAGON}.log"
    if not log.exists():
        raise Problem(f"{log.relative_to(ROOT)} is missing: run `make ops` first")
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    passed = Counter(re.findall(r"^ *(\w+)\([^\n]*\): OK", text, re.M))
    left = Counter(re.findall(r"^ *(\w+)\([^\n]*\): not supported", text, re.M))
    failed = re.findall(r"(\w+\([^\n]*\)): FAIL", text)
    if failed:
        raise Problem(f"{len(failed)} cases failed, the first is {failed[0]}")
    rows = [f"| {op} | {passed[op]} | {left[op]} |" for op in sorted({*passed, *left}, key=lambda op: (-passed[op], op))]
    total = f"| **all** | **{passed.total()}** | **{left.total()}** |"
    head = HEAD.format(version=project.LLAMA_VERSION, device=project.HEXAGON_DEVICE, chip=project.HEXAGON)
    (ROOT / "docs" / "results" / "operations.md").write_text(head + "\n".join([total, *rows]) + "\n", encoding="utf-8")
    print(f"{passed.total()} cases OK, {left.total()} not supported: docs/results/operations.md")


if __name__ == "__main__":
    main_with(main)
