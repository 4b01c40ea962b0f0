#!/usr/bin/env python3
"""Counts llama.cpp's own backend for Hexagon at the nodes of whole models, in the emulator that counts ours.

Usage: peer.py [MODEL...|operations|vectors]    single operations and the models of make models, or those that are named;
                                                vectors: products without the matrix unit, which are only printed

Builds the DSP's code of ggml-hexagon, out of the crate that `fetch` checks, with the harness of hexagon-ops/tools/peer, and
writes the rows of hexagon-ops/tests/peer.txt and, for single operations, peer_operations.txt. A node that ggml-hexagon has no
operation for, or refuses, has no packets.
"""

import datetime
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import fetch
import graphs
import peer_operations as operations
import project
import replay
import wholes
from peer_nodes import fused, line
from project import JOBS, LOGS, ROOT, TARGET, main_with, say

FOLDER = TARGET / "peer"
TABLE = ROOT / "hexagon-ops" / "tests" / "peer.txt"
HARNESS = ROOT / "hexagon-ops" / "tools" / "peer"
ARCH = "v73"
# The emulator's processor; it also executes instructions of newer ones.
CPU = "v73"

WHO = "ggml-hexagon ({crate}, ggml {ggml})"
HEAD = """\
# Packets of {who} at the nodes of whole models on one thread of a V73: model, workload,
# operation, such nodes, their packets, KiB that the DMA engine copies, and nodes that it does not compute.
# Written by make peer, {date}; scripts/shapes.py and encoders.py have the models.
"""

def sysroot():
    """Makes a C library and headers for the DSP's code under Linux; returns their folder."""
    def make(part):
        zig = FOLDER / "zig"
        if not zig.exists():
            with zipfile.ZipFile(fetch.download(fetch.ZIG)) as wheel:
                wheel.extractall(zig)
        program = zig / "ziglang" / "zig"
        program.chmod(0o755)
        cache = FOLDER / "zig-cache"
        source = FOLDER / "empty.c"
        source.write_text("int main(void) { return 0; }\n", encoding="utf-8")
        env = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=str(cache), ZIG_LOCAL_CACHE_DIR=str(cache))
        project.run([program, "cc", "-target", "hexagon-linux-musl", "-O2", source, "-o", FOLDER / "empty.elf"],
                    LOGS / "peer-sysroot.log", env)
        (part / "lib").mkdir(parents=True)
        for name in ("crt1.o", "libc.a", "libzigc.a", "libcompiler_rt.a"):
            shutil.copy(next(cache.rglob(name)), part / "lib" / name)
        for folder in ("any-linux-any", "generic-musl", "hexagon-linux-musl"):
            shutil.copytree(zig / "ziglang" / "lib" / "libc" / "include" / folder, part / "include", dirs_exist_ok=True)

    FOLDER.mkdir(parents=True, exist_ok=True)
    return project.made_once(FOLDER / "sysroot", make)


def program(arch=ARCH):
    """Builds the harness for an architecture; returns its path."""
    for tool in ("clang-22", "ld.lld-22"):
        project.need(tool, "on Debian: apt-get install clang-22 lld-22 llvm-22")
    source = fetch.llama("0.6.0") / "ggml" / "src"
    project.run([HARNESS / "build.sh", source, FOLDER, arch], LOGS / "peer-build.log",
                dict(os.environ, HEX_SYSROOT=str(sysroot())))
    return FOLDER / f"nodes-{arch}.elf"


class Counter:
    """Counts each distinct node once."""

    def __init__(self, arch=ARCH, has_matrix=True):
        self.command = [program(arch), *([] if has_matrix else ["vectors"])]
        self.known = {}

    def count(self, lines):
        """Returns packets and KiB of each line; None for a node that is not computed."""
        new = sorted({line for line in lines if line is not None and line not in self.known})
        with ThreadPoolExecutor(JOBS) as pool:
            self.known |= dict(zip(new, pool.map(self.one, new)))
        return [None if line is None else self.known[line] for line in lines]

    def one(self, text):
        # One process for each: a node that ends it is refused.
        done = subprocess.run([replay.emulator(), "-cpu", CPU, *self.command], input=text + "\n", capture_output=True,
                              text=True, timeout=1200)
        answer = done.stdout.split()
        if done.returncode or len(answer) != 2:
            return None
        return tuple(map(int, answer))


def sums(graph_list, workload, counter):
    """Returns the sums (nodes, packets, KiB, refused nodes) of the operations of graphs, by their names."""
    found = {}
    for graph in graph_list:
        nodes = fused(graph.nodes)
        for node, cost in zip(nodes, counter.count([line(node, workload) for node in nodes])):
            one = (1, 0, 0, 1) if cost is None else (1, *cost, 0)
            old = found.get(node["op"], (0, 0, 0, 0))
            found[node["op"]] = tuple(a + b for a, b in zip(old, one))
    return found


def count(shape, counter):
    """Returns the rows of a model, by workload and operation."""
    first, second = (graphs.record(shape, layers, wholes.CHIP) for layers in shape.counted())
    table = {}
    for workload in shape.workloads:
        less = sums(first[workload], workload, counter)
        more = less if shape.periods() == 0 else sums(second[workload], workload, counter)
        for op in sorted({*less, *more}):
            a, b = less.get(op, (0, 0, 0, 0)), more.get(op, (0, 0, 0, 0))
            table[workload, op] = tuple(x + shape.periods() * (y - x) for x, y in zip(a, b))
    return table


def recorded():
    """Returns the rows of the table (nodes, packets, KiB, refused nodes), by model, workload and operation."""
    table = {}
    for text in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []:
        if not text.startswith("#"):
            model, workload, op, *numbers = text.split()
            table[model, workload, op] = tuple(map(int, numbers))
    return table


def ggml_version():
    """Returns the version of ggml in the crate."""
    text = (project.llama_source("0.6.0") / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
    part = {name: text.split(f"set(GGML_VERSION_{name} ")[1].split(")")[0] for name in ("MAJOR", "MINOR", "PATCH")}
    return ".".join(part.values())


def heading(text):
    """Returns the first lines of a table, with who was counted and when."""
    who = WHO.format(crate=fetch.LLAMA_0_6.requirement, ggml=ggml_version())
    return text.format(who=who, date=datetime.date.today())


def count_operations():
    """Writes the table of single operations."""
    rows = []
    for arch in operations.ARCHS:
        say(f"operations on {arch}")
        counted = operations.count(Counter(arch))
        rows += [f"{arch} {name} {packets:.2f} {kib}" for name, (packets, kib) in counted.items()]
        missing = [name for name in operations.nodes() if name not in counted]
        print(f"{len(counted)} operations; not computed: {', '.join(missing) or 'none'}", flush=True)
    operations.TABLE.write_text(heading(operations.HEAD) + "\n".join(rows) + "\n", encoding="utf-8")


def count_models(chosen):
    """Writes the rows of models."""
    graphs.program()
    counter = Counter()
    table = recorded()
    for shape in chosen:
        say(shape.name)
        rows = {(shape.name, *key): row for key, row in count(shape, counter).items()}
        table = {key: row for key, row in table.items() if key[0] != shape.name} | rows
        for workload in shape.workloads:
            mine = {key: row for key, row in rows.items() if key[1] == workload}
            refused = {key[2]: row[3] for key, row in mine.items() if row[3]}
            print(f"{workload}: {sum(row[1] for row in mine.values()):,} packets; not computed: {refused}", flush=True)
        lines = [" ".join(map(str, (*key, *row))) for key, row in wholes.ordered(table)]
        TABLE.write_text(heading(HEAD) + "\n".join(lines) + "\n", encoding="utf-8")


def count_vectors():
    """Prints the packets of products of many rows by ggml-hexagon's vector kernels, which it has for chips without the unit."""
    counter = Counter(has_matrix=False)
    for kind in operations.BLOCKS:
        for rows in (32, 512):
            (found,) = counter.count([operations.product(kind, rows)])
            tiles = (operations.SIZE // operations.TILE) ** 2
            each = "not computed" if found is None else f"{found[0] / tiles / rows:.2f} packets a tile and row"
            print(f"{kind}, {rows} rows: {each}", flush=True)


def main():
    names = sys.argv[1:]
    if names == ["vectors"]:
        count_vectors()
        return
    if not names or "operations" in names:
        count_operations()
    chosen = [wholes.named(name) for name in names if name != "operations"]
    if chosen or not names:
        count_models(chosen or wholes.MODELS)


if __name__ == "__main__":
    main_with(main)
