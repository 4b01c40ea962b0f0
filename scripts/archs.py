#!/usr/bin/env python3
"""Counts, for a random model of each architecture of llama.cpp, how much of a token a Hexagon NPU computes.

`test-llama-archs` writes the models, llama-quantize makes a file of each of TYPES, and llama-bench computes a prompt and a few
tokens on a simulated device, which logs a line with nodes, splits and reasons; llama.cpp logs the splits of each graph. Writes
docs/results/architectures.md.

Usage: archs.py [--check] [ARCHITECTURE...]

--check  compares with the table instead of writing it: no architecture may have more splits than in its row
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
TYPES = ["Q8_0", "Q4_K_M", "Q4_0"]
# A model of 1 MB decodes at once; the limit keeps one that hangs from stopping the others.
LIMIT_S = 300
LINE = re.compile(rf"{project.HEXAGON_DEVICE}: (\d+) of (\d+) nodes of a token, in (\d+) splits?(?:; (.*))?")
# llama.cpp's list of the splits of a graph.
SPLIT = re.compile(r"## SPLIT #(\d+): (\w+)")

HEAD = """# Architectures

A random model of each architecture that `test-llama-archs` of llama.cpp {version} writes, quantized to {types}.
llama-bench computes a prompt of 16 tokens and decodes a few on a simulated {chip} ({device}). *Nodes* are those of a token that
the device computes, *of* those that are computed anywhere (both of the {first} file). Then come the device's splits in a
token's graph for each type of file; in brackets stand those of the prompt's graph, if there are more. The lookup of the
embedding, which llama.cpp leaves to the CPU, comes before them. `scripts/archs.py` writes this file from the device's own
line about each model and llama.cpp's list of splits, and `--check` compares with it. Rung of evidence: 2.

`test-llama-archs` itself, whose models have F32 weights, compares the logits with the CPU backend's (error at most 1e-4,
normalized). It does so for each device alone, and for all devices by `-sm tensor`, where ggml's device for it cuts each tensor
into slices. `scripts/test.py archs` runs it so on V75, V79, RK3588, two V75, and a V75 with an RK3588, all simulated. None
fails of 133 models on one device, nor of the 102 whose architectures llama.cpp takes for `-sm tensor`.

Models of 128 tokens write no text. `tests/e2e/long_vocabularies.py` (`make test-all`) gives 10 of these models, and two
models of Gemma 4, vocabularies of 49,000 to 262,000 tokens from llama.cpp's tree; files are in Q4_K_M, Q8_0 and MXFP4. Logits
of 24 tokens after a text differ from the exact answer's by 0.03 to 0.09 on V75 and 0.08 to 0.27 on RK3588 (root mean square;
logits themselves deviate by 3). A token is one split on V75. 2026-11-24.

{summary}

| architecture | nodes | of | {columns} | reason for the others |
|---|---|---|{lines}|---|
"""


class Count(NamedTuple):
    """The answers about a file; None if an answer is missing."""

    nodes: int | None
    all: int | None
    splits: int | None
    # The largest number of splits of any graph; a prompt's graph may have more than a token's.
    most: int | None
    reason: str

    def is_whole(self):
        return self.splits == self.most == 1

    def cell(self):
        if self.splits is None:
            return ""
        return f"{self.splits} ({self.most})" if self.most > self.splits else str(self.splits)


class Row(NamedTuple):
    """An architecture, and a Count for each of TYPES."""

    name: str
    counts: list

    def text(self):
        first = self.counts[0]
        numbers = ["" if value is None else str(value) for value in (first.nodes, first.all)]
        reasons = "; ".join(dict.fromkeys(count.reason for count in self.counts if count.reason and not count.is_whole()))
        return "| " + " | ".join([self.name, *numbers, *(count.cell() for count in self.counts), reasons]) + " |"


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
    return Row(model.stem, [count(model, kind) for kind in TYPES])


def count(model, kind):
    """Returns the Count of a model's file in one of TYPES."""
    quantized = model.with_suffix(f".{kind}.bin")
    log = LOGS / "archs" / f"{model.stem}-{kind}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:

        def run(program, *arguments, env=None):
            return subprocess.run([project.binary(program), *arguments], stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=subprocess.STDOUT, env=env, timeout=LIMIT_S).returncode

        try:
            if run("llama-quantize", model, quantized, kind, "1") != 0:
                return Count(None, None, None, None, "llama-quantize refuses it")
            env = project.device_env(project.HEXAGON, OMP_WAIT_POLICY="passive", GGML_SCHED_DEBUG="1")
            code = run("llama-bench", "-m", quantized, "-dev", project.HEXAGON_DEVICE, "-ngl", "99", "-p", "16", "-n", "3",
                       "-r", "1", "-t", "1", "-v", env=env)
        except subprocess.TimeoutExpired:
            return Count(None, None, None, None, f"longer than {LIMIT_S} s")
        finally:
            quantized.unlink(missing_ok=True)
    text = log.read_text(encoding="utf-8", errors="replace")
    found = LINE.search(text)
    if found is None:
        return Count(None, None, None, None, f"llama-bench ends with code {code}" if code else "no token is decoded")
    nodes, everything, splits = map(int, found.groups()[:3])
    return Count(nodes, everything, splits, most_splits(text), (found[4] or "").replace("|", "\\|"))


def most_splits(text):
    """Returns the most splits of the device in any graph of a log."""
    most = splits = 0
    for number, device in SPLIT.findall(text):
        splits = (0 if number == "0" else splits) + (device == project.HEXAGON_DEVICE)
        most = max(most, splits)
    return most


def recorded():
    """Returns the most splits of each architecture and type in the table."""
    table = {}
    for name, *cells in re.findall(r"^\| (\S+) \| \d* \| \d* " + r"\| ([^|]*) " * len(TYPES) + r"\|",
                                   TABLE.read_text(encoding="utf-8"), re.M):
        for kind, cell in zip(TYPES, cells):
            numbers = re.findall(r"\d+", cell)
            table[name, kind] = int(numbers[-1]) if numbers else None
    return table


def summarize(rows):
    lines = []
    for kind, counts in zip(TYPES, zip(*(row.counts for row in rows))):
        whole = sum(count.is_whole() for count in counts)
        decoded = sum(count.splits is not None for count in counts)
        lines.append(f"{kind}: {whole} of {decoded}")
    return f"Architectures that are one split, of those that decode: {', '.join(lines)}; {len(rows)} models in all."


def check(rows):
    """Returns one line for each architecture that is cut more often than in its row."""
    table = recorded()
    worse = []
    for row in rows:
        for kind, count in zip(TYPES, row.counts):
            want = table.get((row.name, kind))
            if want is not None and (count.most is None or count.most > want):
                have = "no line" if count.most is None else f"{count.most} splits"
                worse.append(f"{row.name} {kind}: {have}, not {want}: {count.reason}")
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
    head = HEAD.format(version=project.LLAMA_VERSION, types=", ".join(TYPES), first=TYPES[0], columns=" | ".join(TYPES),
                       lines="|".join(["---"] * len(TYPES)), chip=project.HEXAGON, device=project.HEXAGON_DEVICE,
                       summary=summarize(rows))
    TABLE.write_text(head + "\n".join(row.text() for row in rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_with(main)
