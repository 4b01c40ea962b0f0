"""Counts the packets of recorded graphs: each command of a graph, executed by the DSP's code under qemu-hexagon.

The guest (`hexagon-ops/tools/guest/src/replay.rs`) gets the same commands that the host sent, buffers of the same sizes, and
the host's data in them; weights and caches are zeros. The matrix unit's instructions do nothing and count as packets.
"""

import os
import shutil
import struct
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from project import ROOT, TARGET, Problem

GUEST = ROOT / "hexagon-ops" / "tools" / "guest.sh"
WORDS = ROOT / "hexagon-ops" / "tools" / "units.txt"
REPLAY = -12
FLOATS, NUMBERS, ONES = 0, 1, 2
# This bit in an input's number of bytes means that the input is zero.
ZEROS = 1 << 31
# SOURCE: OP_MUL_MAT and OP_MUL_MAT_ID, hexagon-ops/src/wire.rs; TYPE_F32, wire/tensor_op.rs.
MUL_MAT, MUL_MAT_ID = 3, 4
F32 = 1
# Offsets in commands. SOURCE: hexagon-ops/src/wire. A command has a head of 16 bytes. A TensorOp has its kernel, parameters and
# tensors of 64 bytes, a MatMulId has weights of 32 bytes and rows of 40.
HEAD, PARAMETERS, TENSOR, WEIGHTS, ROWS = 16, 72, 64, 32, 40


class Tensor(NamedTuple):
    """A tensor of a TensorOp."""

    buffer: int
    dtype: int
    offset: int
    ne: tuple
    nb: tuple


class Cost(NamedTuple):
    """The cost of a command: packets, and bytes that the DMA engine copies."""

    packets: int
    copied: int


def emulator():
    """Returns the emulator that HEXAGON_QEMU names."""
    path = os.environ.get("HEXAGON_QEMU")
    if not path or not shutil.which(path):
        raise Problem("HEXAGON_QEMU does not name a qemu-hexagon with HVX floating point: hexagon-ops/tools/qemu/build.sh")
    return path


def guest(library):
    """Builds the guest of a library, with instructions of the matrix unit and the DMA engine replaced; returns its path."""
    built = subprocess.run([GUEST, library, "replay"], capture_output=True, text=True)
    if built.returncode:
        raise Problem(built.stderr.strip()[-400:])
    path = Path(built.stdout.strip())
    program = bytearray(path.read_bytes())
    rules = []
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            rules.append([int(word, 16) for word in line.split()])
    for at in range(0, len(program) - 3, 4):
        have, = struct.unpack_from("<I", program, at)
        for word, free, to, kept in rules:
            if have & ~free == word:
                struct.pack_into("<I", program, at, to | have & kept)
                break
    out = TARGET / "shapes" / f"guest-{library}"
    # Another process may be executing the old file.
    part = out.with_name(f".{out.name}.{os.getpid()}")
    part.write_bytes(program)
    part.chmod(0o755)
    os.replace(part, out)
    return out


def tensor(command, index):
    """Returns the result of a TensorOp (0), or a source (from 1)."""
    buffer, dtype, offset, *rest = struct.unpack_from("<IIQ4I4Q", command, HEAD + PARAMETERS + index * TENSOR)
    return Tensor(buffer, dtype, offset, tuple(rest[:4]), tuple(rest[4:]))


def numbers(tensor, limit):
    """Returns a filling of a tensor of i32: numbers below `limit` that differ in each row."""
    group = max(tensor.nb[1] // 4, 1) if tensor.ne[1] > 1 else tensor.ne[0]
    count = (tensor.ne[1] - 1) * group + tensor.ne[0]
    return tensor.buffer, tensor.offset, NUMBERS, count, limit, max(group, 1)


def multiplications(entry):
    """Returns the multiplications of a product with packed weights; 0 for another command."""
    command, ops = bytes.fromhex(entry["command"]), entry["ops"].split("+")
    number, = struct.unpack_from("<I", command)
    if number not in (MUL_MAT, MUL_MAT_ID):
        return 0
    k, n = struct.unpack_from("<II", command, HEAD + 16)
    if ops[0] == "MUL_MAT_ID":
        slots, _, tokens, _ = struct.unpack_from("<IIII", command, HEAD + WEIGHTS + 3 * ROWS)
        return slots * tokens * k * n
    m, *planes = struct.unpack_from("<III", command, HEAD + WEIGHTS + 2 * ROWS)
    return m * planes[0] * planes[1] * k * n


def fillings(graph):
    """Yields the data to write before commands whose packets depend on it: (command, buffer, offset, kind, count, limit,
    group)."""
    given = {(buffer, offset) for buffer, offset, _ in graph.inputs}
    for number, entry in enumerate(graph.commands):
        command, ops = bytes.fromhex(entry["command"]), entry["ops"].split("+")
        if "MUL_MAT_ID" in ops:
            weights = struct.unpack_from("<IIQIIII", command, HEAD)
            buffer, _, offset, stride, *_ = struct.unpack_from("<IIQQQQ", command, HEAD + WEIGHTS + 2 * ROWS)
            slots, _, tokens, _ = struct.unpack_from("<IIII", command, HEAD + WEIGHTS + 3 * ROWS)
            yield number, buffer, offset, NUMBERS, (tokens - 1) * stride // 4 + slots, weights[5], stride // 4
        elif ops[0] in ("ARGSORT", "TOP_K", "ARGMAX"):
            source = tensor(command, 1)
            ne = source.ne
            yield number, source.buffer, source.offset, FLOATS, ne[0] * ne[1] * ne[2] * ne[3], 1, 1
        elif ops[0] == "GET_ROWS" and (tensor(command, 2).buffer, tensor(command, 2).offset) not in given:
            yield number, *numbers(tensor(command, 2), tensor(command, 1).ne[1])
        elif ops[0] == "ROPE" and tensor(command, 3).dtype == F32:
            # Weights are filled with zeros, and a factor of 0 would make the keys NaN.
            factors = tensor(command, 3)
            yield number, factors.buffer, factors.offset, ONES, factors.ne[0], 1, 1
        elif ops[0] == "ADD_ID":
            yield number, *numbers(tensor(command, 3), tensor(command, 2).ne[1])


def zero_inputs(graph):
    """Yields the memory that is read before any node of the graph writes it, and that is zero: (buffer, offset, bytes)."""
    known = [(buffer, offset, offset + len(text) // 2) for buffer, offset, text in graph.inputs]

    def place(tensor):
        if tensor is None or tensor["at"] is None:
            return None
        (buffer, offset), (ne, nb) = tensor["at"], (tensor["ne"], tensor["nb"])
        return buffer, offset, offset + nb[1] + sum((n - 1) * step for n, step in zip(ne[1:], nb[1:]))

    for node in graph.nodes:
        for source in node["src"]:
            where = place(source)
            if where is None or source["role"] == "Weights":
                continue
            buffer, first, end = where
            if not any(it[0] == buffer and it[1] < end and first < it[2] for it in known):
                known.append(where)
                yield buffer, first, end - first
        if where := place(node["dst"]):
            known.append(where)


def count(graph, program):
    """Returns the Cost of each command of a graph."""
    filled, zeros = list(fillings(graph)), list(zero_inputs(graph))
    request = struct.pack("<i", REPLAY) + bytes(4 * 128 - 4)
    parts = [request, struct.pack("<4I", len(graph.buffers), len(zeros) + len(graph.inputs), len(filled), len(graph.commands))]
    parts += [struct.pack("<II", *buffer) for buffer in graph.buffers]
    parts += [struct.pack("<III", buffer, offset, size | ZEROS) for buffer, offset, size in zeros]
    for buffer, offset, text in graph.inputs:
        data = bytes.fromhex(text)
        parts.append(struct.pack("<III", buffer, offset, len(data)) + data + bytes(-len(data) % 4))
    parts += [struct.pack("<7I", *filling) for filling in filled]
    parts += [bytes.fromhex(entry["command"]) for entry in graph.commands]
    done = subprocess.run([emulator(), "-cpu", "v73", program], input=b"".join(parts), capture_output=True,
                          env=dict(os.environ, HVX_QFLOAT="strict"))
    lines = done.stdout.decode().split("\n")[:-1]
    if done.returncode or len(lines) != len(graph.commands):
        told = lines[0] if lines and lines[0].startswith("refused") else done.stderr.decode()[-300:]
        raise Problem(f"the guest ended with {done.returncode} after {len(lines)} of {len(graph.commands)} commands: {told}")
    return [Cost(*map(int, line.split())) for line in lines]


def by_kind(graph, costs):
    """Returns the Costs of the operations of a graph, by their names."""
    sums = defaultdict(lambda: [0, 0])
    for entry, cost in zip(graph.commands, costs):
        for i, part in enumerate(cost):
            sums[entry["ops"]][i] += part
    return {ops: Cost(*parts) for ops, parts in sums.items()}
