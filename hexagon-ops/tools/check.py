#!/usr/bin/env python3
"""Looks for qfloat values that leave their registers in the machine code of a DSP library, and computes its deepest stack.

Usage: check.py OBJDUMP LIBRARY [stored]     stored: qfloat values may be, because all their bits are in a register: V68, V69

Prints `stack BYTES` and the deepest path of calls. Ends with code 1 if a qfloat value is copied, combined or stored, each of
which is a line of the error output, if a stack exceeds its limit, or if a call cannot be followed (through a register, or
recursion). A worker's calls of tasks through a register are followed to every task.

SOURCE: from V79 on a copy or store of a qfloat register drops four bits of its precision, llvm/llvm-project#198902.
"""

import itertools
import re
import subprocess
import sys

# The functions in which threads start, and how many bytes of stack each may use. A FastRPC thread gets a stack of the size that
# the host requests, which is twice this limit; a worker's stack has exactly this size (STACK_BYTES in src/rt/qurt/threads.rs).
ROOTS = {"ggml_rust_npu_skel_handle_invoke": 128 * 1024, "ggml_rust_npu_worker": 64 * 1024}
# The only function that makes an indirect call, and the function that it calls, as src/rt/workers.rs names them.
CALLER, TASK = "hexagon_ops2rt7workers4call", "hexagon_ops2rt7workers8run_task"


def disassemble(objdump, library):
    """Returns the packets of each function by address: {name: {address: [instruction]}}, instructions as text."""
    # Disassembled for V81: for an older processor, the disassembler leaves out packets that it has no resources for.
    text = subprocess.run([objdump, "-d", "--mcpu=hexagonv81", "--mattr=+hvx,+hvxv81,+hvx-length128b,+hvx-qfloat,+hvx-ieee-fp",
                           library], check=True, capture_output=True, text=True).stdout
    functions, packets, packet, start = {}, None, [], 0
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]{8} <(.+)>:$", line):
            packets = functions.setdefault(head[1], {})
        elif re.match(r" *[0-9a-f]+:\t", line) and packets is not None:
            start = start if packet else int(line.split(":")[0], 16)
            instruction = line.split("\t")[-1]
            packet.append(re.sub(r" *}.*", "", instruction.lstrip("{ ")).strip())
            if "}" in instruction:
                packet += re.findall(r":(endloop[01]+)", instruction)
                packets[start] = packet
                packet = []
    return functions


def numbers(text):
    """Numbers of the vectors that a register or pair such as 1:0 names."""
    return [int(number) for number in re.findall(r"\d+", text)]


def step(packet, held):
    """Returns the qfloat registers after a packet, and its instructions that read one of `held` as another type.

    These are copies, pairs, stores and operations on other types. Any use of a register with itself clears it.
    """
    written, found = {}, []
    # Instructions of the same packet see the values that it loads into these registers, so they do not count.
    held = held - {int(number) for text in packet for number in re.findall(r"v(\d+)\.(?:cur|tmp) =", text)}
    for text in packet:
        if result := re.search(r"(?:^|\) )v(\d+(?::\d+)?)(?:\.(\w+))? [+|&^]?= ", text):
            for number in numbers(result[1]):
                written[number] = (result[2] or "").startswith("qf")
    for text in packet:
        source = text.split("= ", 1)[1] if "= " in text else ""
        if new := re.search(r"v(\d+)\.new", source):
            read = {int(new[1])} if written.get(int(new[1])) else set()
            found += [text] if read else []
        elif not re.search(r"vxor\((v\d+),\1\)|vsub\((v\d+)\.w,\2\.w\)", source):
            operands = re.findall(r"\bv(\d+(?::\d+)?)(?!\.qf|[\d:])", source)
            found += [text] if held & {number for operand in operands for number in numbers(operand)} else []
    after = held - {number for number, is_qfloat in written.items() if not is_qfloat}
    after |= {number for number, is_qfloat in written.items() if is_qfloat}
    # A call does not preserve vector registers.
    return (set() if any(re.match(r"(if .*)?call", text) for text in packet) else after), found


def leaks(packets):
    """Instructions of a function that read a possible qfloat value as another type."""
    addresses = list(packets)
    following = dict(itertools.pairwise(addresses))
    successors, loops = {}, {}
    for address, packet in packets.items():
        code = "\n".join(packet)
        for number, target in re.findall(r"loop([01])\((?:##?)?0x([0-9a-f]+)", code):
            loops[number] = int(target, 16)
        to = [int(target, 16) for target in re.findall(r"jump(?::\w+)?\s+(?:##?)?0x([0-9a-f]+)", code)]
        to += [loops.get(number) for ends in re.findall(r"endloop([01]+)", code) for number in ends]
        is_end = any(re.match(r"(?!if ).*\b(jump|jumpr|dealloc_return)\b", text) for text in packet)
        to += [] if is_end else [following.get(address)]
        successors[address] = [target for target in to if target in packets]
    entry = {address: set() for address in addresses}
    pending, found = list(addresses), {}
    while pending:
        address = pending.pop()
        after, found[address] = step(packets[address], entry[address])
        for target in successors[address]:
            if not after <= entry[target]:
                entry[target] |= after
                pending.append(target)
    return [f"{address:x}: {text}" for address in addresses for text in found[address]]


def frame(packets):
    """Bytes of stack that a function uses, and bytes that aligning may add."""
    total = 0
    for text in (text for packet in packets.values() for text in packet):
        if found := re.search(r"allocframe\((?:r29,)?#(?:0x)?([0-9a-f]+)\)", text):
            total += int(found[1], 16) + 8
        if found := re.search(r"r29 = add\(r29,##?-0x([0-9a-f]+)\)", text):
            total += int(found[1], 16)
        if found := re.search(r"r29 = and\(r29,##?-0x([0-9a-f]+)\)", text):
            total += int(found[1], 16) - 8
    return total


def deepest(functions, root):
    """Returns the bytes of the deepest stack that starts at `root`, and the functions on its path with their frames."""
    calls = {}
    for name, packets in functions.items():
        code = "\n".join(text for packet in packets.values() for text in packet)
        if CALLER in name:
            calls[name] = {task for task in functions if TASK in task}
            continue
        if "callr" in code:
            sys.exit(f"check.py: {name} calls through a register")
        calls[name] = {target for target in re.findall(r"(?:call|jump)[^<\n]*<([^+>]+)", code) if target != name}
    frames = {name: frame(packets) for name, packets in functions.items()}
    known, path = {}, []

    def depth(name):
        if name in path:
            sys.exit(f"check.py: {name} calls itself")
        if name not in known:
            path.append(name)
            below = max((depth(target) for target in calls.get(name, ())), default=(0, []))
            path.pop()
            known[name] = (frames.get(name, 0) + below[0], [(name, frames.get(name, 0)), *below[1]])
        return known[name]

    return depth(root)


def main():
    objdump, library, *stored = sys.argv[1:]
    functions = disassemble(objdump, library)
    if missing := ROOTS.keys() - functions:
        sys.exit(f"check.py: {', '.join(missing)} is not in {library}")
    found = [] if stored else [f"{text} in {name}" for name, packets in functions.items() for text in leaks(packets)]
    found += [f"{address:x}: {text} in {name}" for name, packets in functions.items()
              for address, packet in packets.items() for text in packet if re.search(r"vmpy\(.*\.qf16", text)]
    for text in found:
        print(f"qfloat value read as something else: {text}", file=sys.stderr)
    for root, limit in ROOTS.items():
        stack, path = deepest(functions, root)
        print(f"stack {stack}" if root == next(iter(ROOTS)) else f"stack of a worker {stack}")
        for name, size in path:
            print(f"{size:6} {name}")
        if stack > limit:
            sys.exit(f"check.py: {library} takes {stack} bytes of stack from {root}, more than {limit}")
    if found:
        sys.exit(f"check.py: {len(found)} qfloat values leave their registers in {library}")


main()
