#!/usr/bin/env python3
"""Checks that FastRPC's shells on devices export the symbols that our DSP libraries import.

A shell (`fastrpc_shell_unsigned_3`, of a second NPU `_4`) is the process on the DSP that loads a library. If it lacks a
symbol, a session does not start. Shells are firmware: users have those of their devices, for example from Debian's
packages hexagon-dsp-binaries-* (non-free-firmware):

    apt download hexagon-dsp-binaries-qualcomm-sa8775p     # then dpkg-deb -x <package> shells
    make dsp && python3 scripts/shell_imports.py shells

Only their symbol tables are read. Nothing of them belongs into this repository.
"""

import argparse
import struct
from pathlib import Path

from project import ROOT, Problem, main_with

SKELS = ROOT / "target" / "skel"
# Hexagon's machine number in an ELF header, and the section types and entries that are read: elf(5).
EM_HEXAGON = 164
SHT_DYNSYM = 11
SHN_UNDEF = 0
STB_WEAK = 2
# e_flags has the architecture number in its lower ten bits. SOURCE: llvm/BinaryFormat/ELF.h (EF_HEXAGON_MACH).
ARCH_MASK = 0x3FF


class Elf:
    """The dynamic symbols of a 32-bit ELF file."""

    def __init__(self, path):
        data = path.read_bytes()
        if data[:6] != b"\x7fELF\x01\x01" or len(data) < 52:
            raise Problem(f"{path.name} is no 32-bit little-endian ELF file")
        header = struct.unpack_from("<HHIIIIIHHHHHH", data, 16)
        self.machine, sections_at, flags, entry_bytes, count = header[1], header[5], header[6], header[10], header[11]
        mach = flags & ARCH_MASK
        self.arch = f"v{mach >> 4:x}{mach & 15:x}"
        sections = [struct.unpack_from("<10I", data, sections_at + i * entry_bytes) for i in range(count)]
        # A weak import may be missing.
        self.imports, self.weak, self.exports = set(), set(), set()
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind != SHT_DYNSYM:
                continue
            strings = sections[link][4]
            for at in range(offset + 16, offset + size, 16):
                name_at, _, _, info, _, section = struct.unpack_from("<IIIBBH", data, at)
                start = strings + name_at
                name = data[start : data.index(0, start)].decode()
                if section != SHN_UNDEF:
                    self.exports.add(name)
                elif name:
                    (self.weak if info >> 4 == STB_WEAK else self.imports).add(name)


def hexagon_files(folder, pattern):
    """The Hexagon files below a folder, as (path, symbols)."""
    found = []
    for path in sorted(folder.rglob(pattern)):
        if path.is_file() and not path.is_symlink():
            elf = Elf(path)
            if elf.machine == EM_HEXAGON:
                found.append((path, elf))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shells", nargs="?", type=Path, help="a folder with fastrpc_shell_unsigned_* files anywhere below it")
    parser.add_argument("--skels", type=Path, default=SKELS, help="the folder of our DSP libraries (target/skel)")
    args = parser.parse_args()
    if args.shells is None:
        print("SKIPPED shell imports: no folder of FastRPC shells is named (see --help for where to get them)")
        return
    # Domains 3 and 4 are compute DSPs, and libraries without a signature need the unsigned shells.
    shells = hexagon_files(args.shells, "fastrpc_shell_unsigned_[34]")
    skels = {path.name: elf for path, elf in hexagon_files(args.skels, "libggml_rust_npu_skel_v*.so")}
    for what, found, where in (("FastRPC shell", shells, args.shells), ("DSP library (make dsp)", skels, args.skels)):
        if not found:
            print(f"SKIPPED shell imports: there is no {what} in {where}")
            return
    missing = 0
    for path, shell in shells:
        matching = {name: elf for name, elf in skels.items() if elf.arch == shell.arch}
        shown = path.relative_to(args.shells)
        if not matching:
            print(f"SKIPPED {shown}: {shell.arch}, for which there is no DSP library")
        for name, elf in sorted(matching.items()):
            lacks = sorted(elf.imports - shell.exports)
            missing += len(lacks)
            said = f"lacks {', '.join(lacks)}" if lacks else f"exports all {len(elf.imports)} imports"
            weak = sorted(elf.weak - shell.exports)
            said += f", lacks {', '.join(weak)}, which may be missing," if weak else f" and {len(elf.weak)} weak ones"
            print(f"{'FAILED' if lacks else 'OK'} {shown} ({shell.arch}, {len(shell.exports)} exports) {said} of {name}")
    if missing:
        raise Problem(f"{missing} symbols are missing: the library cannot be loaded there")


if __name__ == "__main__":
    main_with(main)
