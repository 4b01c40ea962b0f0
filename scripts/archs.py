#!/usr/bin/env python3
"""Counts, for a random model of each architecture of llama.cpp, how much of a token a Hexagon NPU computes.

`test-llama-archs` writes the models, llama-quantize makes Q8_0 of them, and llama-bench decodes a few tokens on a
simulated device, whose own line about the model says nodes, splits and reasons. Writes docs/results/architectures.md.

Usage: archs.py [--check] [ARCHITECTURE...]

--check  compares with the table instead of writing it: no architecture may have more splits than its row says
"""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import project
from project import JOBS, LOGS, ROOT, TARGET, Problem, main_with

TABLE = ROOT / "docs" / "results" / "architectures.md"
FOLDER = TARGET / "archs"
TYPE = "Q8_0"
# A model of 1 MB decodes at once; one that waits for ever must not stop the others.
LIMIT_S = 300
LINE = re.compile(r"HEX0: (\d+) of (\d+) nodes of a token, in (\d+) splits?(?:; (.*))?")

HEAD = """# Architectures

A random model of each architecture that `test-llama-archs` of llama.cpp {version} writes, quantized to {type} and decoded by
llama-bench on a simulated {chip} ({device}): nodes of a token that the device computes, of those that are computed anywhere,
and the splits that they are in. `scripts/archs.py` writes this file from the device's own line about each model, and `--check`
compares with it. Rung of evidence: 2.

{summary}

| architecture | nodes | of | splits | reason for the others |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """What a device says of an architecture; None where it says nothing."""

    name: str
    nodes: int | None
    all: int | None
    splits: int | None
    reason: str

    def text(self):
        cells = [self.name, *("" if value is None else str(value) for value in self[1:4]), self.reason]
        return "| " + " | ".join(cells) + " |"


def models(names):
    """Writes the models of the named architectures, or of all; returns their paths."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    program = [project.binary("test-llama-archs"), "-o", FOLDER]
    env = project.cpu_env()
    for arguments in [["-a", name] for name in names] or [[]]:
        project.run([*program, *arguments], LOGS / "archs-write.log", env)
    found = sorted(FOLDER.glob("*.gguf"))
    if not found:
        raise Problem("test-llama-archs wrote no model; its output is in target/logs/archs-write.log")
    return found


def measure(model):
    """Returns the row of a model."""
    name = model.stem
    quantized = model.with_suffix(f".{TYPE}.bin")
    log = LOGS / "archs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:

        def run(program, *arguments, env=None):
            return subprocess.run([project.binary(program), *arguments], stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=subprocess.STDOUT, env=env, timeout=LIMIT_S).returncode

        try:
            if run("llama-quantize", model, quantized, TYPE, "1") != 0:
                return Row(name, None, None, None, "llama-quantize refuses it")
            env = project.device_env(project.HEXAGON, OMP_WAIT_POLICY="passive")
            code = run("llama-bench", "-m", quantized, "-dev", project.HEXAGON_DEVICE, "-ngl", "99", "-p", "0", "-n", "3",
                       "-r", "1", "-t", "1", "-v", env=env)
        except subprocess.TimeoutExpired:
            return Row(name, None, None, None, f"longer than {LIMIT_S} s")
        finally:
            quantized.unlink(missing_ok=True)
    found = LINE.search(log.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return Row(name, None, None, None, f"llama-bench ends with code {code}" if code else "no token is decoded")
    nodes, everything, splits = map(int, found.groups()[:3])
    return Row(name, nodes, everything, splits, (found[4] or "").replace("|", "\\|"))


def recorded():
    """Returns the splits of each architecture in the table."""
    rows = re.findall(r"^\| (\S+) \| \d* \| \d* \| (\d*) \|", TABLE.read_text(encoding="utf-8"), re.M)
    return {name: int(splits) if splits else None for name, splits in rows}


def summarize(rows):
    whole = sum(row.splits == 1 and row.nodes == row.all for row in rows)
    decoded = sum(row.splits is not None for row in rows)
    return f"{whole} of {decoded} architectures that decode are one split with all of their nodes; {len(rows)} models in all."


def check(rows):
    """Returns one line for each architecture that is cut more often than its row says."""
    table = recorded()
    worse = []
    for row in rows:
        want = table.get(row.name)
        if want is not None and (row.splits is None or row.splits > want):
            have = "no line" if row.splits is None else f"{row.splits} splits"
            worse.append(f"{row.name}: {have}, not {want}: {row.reason}")
    return worse


def measure_all(names):
    """Returns the rows of the named architectures, or of all."""
    with ThreadPoolExecutor(JOBS) as pool:
        rows = list(pool.map(measure, models(names)))
    print(summarize(rows))
    return rows


def check_all(names=()):
    """Raises Problem if an architecture has more splits than its row of the table."""
    worse = check(measure_all(names))
    if worse:
        raise Problem("\n".join(worse))


def main():
    names = [name for name in sys.argv[1:] if name != "--check"]
    if any(name.startswith("-") for name in names):
        raise Problem(__doc__.strip())
    if "--check" in sys.argv[1:]:
        check_all(names)
        return
    rows = measure_all(names)
    if names:
        print("\n".join(row.text() for row in rows))
        return
    head = HEAD.format(version=project.LLAMA_VERSION, type=TYPE, chip=project.HEXAGON, device=project.HEXAGON_DEVICE,
                       summary=summarize(rows))
    TABLE.write_text(head + "\n".join(row.text() for row in rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_with(main)
