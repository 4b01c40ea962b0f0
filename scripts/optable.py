#!/usr/bin/env python3
"""Counts upstream's test cases by operation, and writes docs/ops.md.

Usage: optable.py [chip]     hexagon-v75 if not given

Runs all of test-backend-ops on the simulated chip, which takes an hour; cases with many experts are left out.
"""

import re
import sys
from collections import Counter

import project
from project import JOBS, ROOT, Problem, cpu_env, device_of, main_with, say
from test import MANY_EXPERTS, capture

HEAD = """# Operations

What `test-backend-ops` of llama.cpp {version} says of `{device}` on a simulated {chip}, case by case (written by `make optable`).
A case that is not supported is one that the device leaves to the CPU; a failure would be listed. Cases with 128 and more experts
are not in it.

| operation | OK | not supported |
|---|---|---|
"""


def main():
    chip = sys.argv[1] if len(sys.argv) > 1 else project.HEXAGON
    say(f"running test-backend-ops on {chip}")
    args = [project.binary("test-backend-ops"), "test", "-b", device_of(chip), "-j", JOBS, "-p", MANY_EXPERTS]
    code, text, log = capture(f"optable-{chip}", args, cpu_env(GGML_RUST_NPU_SIM=chip))
    passed = Counter(re.findall(r"^ *(\w+)\([^\n]*\): OK", text, re.M))
    left = Counter(re.findall(r"^ *(\w+)\([^\n]*\): not supported", text, re.M))
    failed = re.findall(r"(\w+\([^\n]*\)): FAIL", text)
    if code != 0 or failed:
        raise Problem(f"{len(failed)} cases failed, code {code}; see {log.relative_to(ROOT)}")
    rows = [f"| {op} | {passed[op]} | {left[op]} |" for op in sorted({*passed, *left}, key=lambda op: (-passed[op], op))]
    total = f"| **all** | **{passed.total()}** | **{left.total()}** |"
    head = HEAD.format(version=project.LLAMA_VERSION, device=device_of(chip), chip=chip)
    (ROOT / "docs" / "ops.md").write_text(head + "\n".join([total, *rows]) + "\n", encoding="utf-8")
    print(f"{passed.total()} cases OK, {left.total()} not supported: docs/ops.md")


if __name__ == "__main__":
    main_with(main)
