#!/usr/bin/env python3
"""Looks in a DSP library for instructions that its architecture does not have.

Usage: newer.py OBJDUMP MC LIBRARY ARCH     OBJDUMP, MC: llvm-objdump, llvm-mc; ARCH: the oldest chip that runs it, such as v68

The disassembler accepts every instruction that it knows, whatever the processor; the assembler refuses those that the processor
named by -mcpu lacks. So each different packet of the library is disassembled and assembled again. Words that the disassembler
does not know are the matrix unit's, which tests/skel.rs checks one by one. Two instructions that share a word are two words as
text, so some packets seem to need too many slots; such a packet is not refused.

Prints `packets COUNT`, of different ones. Ends with code 1 if one is refused; each is a line of the error output.
"""

import re
import subprocess
import sys

HVX = "+hvx,+hvx-length128b,+hvx-qfloat"
# Jump targets differ between libraries, so all are replaced by this word.
TARGET = "target"
SHARED_WORD = "out of slots"


def packets(objdump, library):
    """Returns the different packets of a library as the assembler reads them."""
    text = subprocess.run([objdump, "-d", "--no-show-raw-insn", "--mcpu=hexagonv81",
                           f"--mattr={HVX},+hvxv81,+hvx-ieee-fp", library], check=True, capture_output=True, text=True).stdout
    found, packet = set(), []
    for line in text.splitlines():
        if not re.match(r" *[0-9a-f]+:\s", line):
            continue
        instruction = line.split(":", 1)[1].strip()
        instruction = re.sub(r"(?:##?)?0x[0-9a-f]+ <[^>]*>+", TARGET, instruction)
        packet.append(instruction.replace("\t", " "))
        if "}" in instruction or ("<unknown>" in instruction and "{" not in packet[0]):
            if not any("<unknown>" in part for part in packet):
                found.add("\n".join(part.replace(";", "\n") for part in packet))
            packet = []
    return sorted(found)


def refused(mc, arch, found):
    """Returns the error lines of an assembler for `arch`, with the packets that they are about."""
    source = f".text\n{TARGET}:\n" + "\n".join(found) + "\n"
    done = subprocess.run([mc, "--triple=hexagon", f"-mcpu=hexagon{arch}", f"-mattr={HVX},+hvx{arch}", "-filetype=null"],
                          input=source, capture_output=True, text=True)
    errors = re.findall(r"<stdin>:(\d+):\d+: error: (.*)", done.stderr)
    lines = source.splitlines()
    if done.returncode != 0 and not errors:
        return [done.stderr.strip() or f"{mc} ended with code {done.returncode}"]
    return [f"{lines[int(number) - 1].strip()}: {error}" for number, error in errors if not error.endswith(SHARED_WORD)]


def main():
    objdump, mc, library, arch = sys.argv[1:]
    found = packets(objdump, library)
    wrong = refused(mc, arch, found)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong or not found:
        sys.exit(f"newer.py: {len(wrong)} instructions of {library} are not those of {arch}")
    print(f"packets {len(found)}")


main()
