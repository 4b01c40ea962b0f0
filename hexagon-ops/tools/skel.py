#!/usr/bin/env python3
"""Turns the DT_FLAGS entry of a linked library into DT_HEXAGON_VER = 3, which FastRPC's loader requires.

lld never writes DT_HEXAGON_VER. DT_FLAGS only means that the library prefers its own symbols (DF_SYMBOLIC); it exports one,
which nothing in it calls, so nothing is lost.

SOURCE: DT_HEXAGON_VER (0x70000001) is 3 in Qualcomm's prebuilt libraries, qualcomm/fastrpc test/v75.
"""

import struct
import sys

PT_DYNAMIC = 2
DT_NULL, DT_FLAGS, DT_HEXAGON_VER = 0, 30, 0x70000001


def edit(elf: bytearray) -> None:
    assert elf[:6] == b"\x7fELF\x01\x01", "not a 32-bit little-endian ELF file"
    (table,) = struct.unpack_from("<I", elf, 28)
    entry_bytes, count = struct.unpack_from("<HH", elf, 42)
    for i in range(count):
        kind, offset = struct.unpack_from("<II", elf, table + i * entry_bytes)
        if kind != PT_DYNAMIC:
            continue
        while True:
            tag, _ = struct.unpack_from("<II", elf, offset)
            if tag == DT_FLAGS:
                struct.pack_into("<II", elf, offset, DT_HEXAGON_VER, 3)
                return
            if tag == DT_NULL:
                sys.exit("skel.py: no DT_FLAGS entry to replace")
            offset += 8
    sys.exit("skel.py: no dynamic segment")


def main() -> None:
    path = sys.argv[1]
    with open(path, "r+b") as file:
        elf = bytearray(file.read())
        edit(elf)
        file.seek(0)
        file.write(elf)


main()
