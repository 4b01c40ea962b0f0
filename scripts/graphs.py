"""Records the graphs that llama.cpp gives a simulated Hexagon NPU for a model of `shapes`: nodes, commands and inputs."""

import json
import os
import subprocess
from typing import NamedTuple

import encoders
import project
import shapes
from project import LOGS, ROOT, TARGET, Problem, llama_build, llama_source

SOURCE = ROOT / "tests" / "e2e" / "graphs" / "graphs.cpp"
PROGRAM = TARGET / "shapes" / "graphs"
# The device's number of threads, on which the number of bits of activations depends.
THREADS = 4


class Graph(NamedTuple):
    """A graph as the device got it; `src/hexagon/stream/record.rs` has its parts."""

    buffers: list
    inputs: list
    nodes: list
    commands: list


def program():
    """Builds the program that requests graphs; returns its path. The static build must be there, or the program alone, as in a
    clone that links programs."""
    source, build = llama_source(), llama_build()
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    libraries = [build / "src" / "libllama.a", *(build / "ggml" / "src" / name for name in (
        "libggml.a", "libggml-cpu.a", "ggml-rust_npu/libggml-rust_npu.a", "libggml-base.a")),
        TARGET / "release" / "libggml_rust_npu.a"]
    if PROGRAM.exists() and not libraries[0].exists():
        return PROGRAM
    newest = max(path.stat().st_mtime for path in [SOURCE, *libraries])
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > newest:
        return PROGRAM
    project.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-I", source / "include", "-I",
                 source / "ggml" / "include", SOURCE, *libraries, "-fopenmp", "-lpthread", "-ldl", "-lm", "-o", PROGRAM],
                LOGS / "graphs-build.log")
    return PROGRAM


def graph(recorded):
    """Returns the graph of a line of a record."""
    return Graph(*(recorded[key] for key in Graph._fields))


def record(shape, layers, chip):
    """Returns the graphs of each workload of a file with `layers` layers on `chip`, by the workload's name."""
    if isinstance(shape, encoders.Encoder):
        return {shape.workload: [graph(each) for each in encoders.record(shape, layers, chip, THREADS)]}
    model = shapes.write(shape, layers, program())
    path = model.with_suffix(".commands")
    path.unlink(missing_ok=True)
    env = project.device_env(chip, GGML_RUST_NPU_TRACE=str(path), GGML_RUST_NPU_HEX_THREADS=str(THREADS))
    done = subprocess.run([PROGRAM, "run", model, path, *shape.workloads], capture_output=True, text=True, env=env)
    model.unlink()
    (LOGS / f"graphs-{shape.name}-{layers}.log").write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        raise Problem(f"{shape.name} with {layers} layers: {done.stderr.strip()[-400:]}")
    graphs = {}
    with open(path, "rb") as file:
        for line in done.stdout.splitlines():
            name, first, end = line.split(" ")
            file.seek(int(first))
            lines = file.read(int(end) - int(first)).splitlines()
            graphs[name] = [graph(json.loads(line)) for line in lines]
    path.unlink()
    return graphs
