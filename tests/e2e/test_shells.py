"""scripts/shell_imports.py names every symbol that a shell lacks, and reports everything that it could not check."""

import contextlib
import io
import struct
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import harness  # noqa: F401  (makes the scripts importable)

import shell_imports
from project import Problem

STRONG, WEAK = 1, 2


def write_elf(path, mach, symbols):
    """Writes an ELF file with nothing but dynamic symbols: (name, binding, whether it is defined)."""
    strings, table = b"\0", bytes(16)
    for name, binding, is_defined in symbols:
        table += struct.pack("<IIIBBH", len(strings), 0, 0, binding << 4, 0, int(is_defined))
        strings += name.encode() + b"\0"
    table_at = 52 + len(strings)
    sections_at = table_at + len(table)
    header = b"\x7fELF\x01\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIIIIIHHHHHH", 3, shell_imports.EM_HEXAGON, 1, 0, 0, sections_at, mach, 52, 0, 0, 40, 3, 1)
    sections = bytes(40)
    sections += struct.pack("<10I", 0, 3, 0, 0, 52, len(strings), 0, 0, 1, 0)
    sections += struct.pack("<10I", 0, shell_imports.SHT_DYNSYM, 0, 0, table_at, len(table), 1, 1, 4, 16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + strings + table + sections)


class Shells(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        imports = [("HAP_mmap", STRONG, False), ("HAP_extra", WEAK, False), ("entry", STRONG, True)]
        write_elf(self.folder / "skels" / "libggml_rust_npu_skel_v75.so", 0x75, imports)

    def shell(self, place, mach, *exports):
        path = self.folder / "shells" / place / "fastrpc_shell_unsigned_3"
        write_elf(path, mach, [(name, STRONG, True) for name in exports])

    def run_script(self, *args):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch("sys.argv", ["shell_imports.py", *args]):
            try:
                shell_imports.main()
            except Problem as problem:
                return out.getvalue(), str(problem)
        return out.getvalue(), None

    def check(self):
        return self.run_script(str(self.folder / "shells"), "--skels", str(self.folder / "skels"))

    def test_shell_with_all_symbols_passes_and_weak_ones_may_be_missing(self):
        self.shell("a", 0x75, "HAP_mmap", "other")
        text, problem = self.check()
        self.assertIsNone(problem)
        self.assertIn("OK a/fastrpc_shell_unsigned_3 (v75, 2 exports) exports all 1 imports", text)

    def test_missing_symbol_is_named(self):
        self.shell("a", 0x75, "HAP_munmap")
        text, problem = self.check()
        self.assertIn("lacks HAP_mmap, lacks HAP_extra, which may be missing, of libggml_rust_npu_skel_v75.so", text)
        self.assertIn("1 symbols are missing", problem)

    def test_other_architecture_and_missing_folders_are_skipped_with_their_reason(self):
        self.shell("b", 0x68, "HAP_mmap")
        self.assertIn("SKIPPED b/fastrpc_shell_unsigned_3: v68, for which", self.check()[0])
        self.assertIn("SKIPPED shell imports: no folder", self.run_script()[0])
        empty = self.run_script(str(self.folder / "skels"), "--skels", str(self.folder / "skels"))
        self.assertIn("SKIPPED shell imports: there is no FastRPC shell", empty[0])


if __name__ == "__main__":
    unittest.main()
