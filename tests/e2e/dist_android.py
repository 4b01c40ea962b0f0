"""The static library for Android, which needs no NDK: its code is for the target and its C library."""

import re
import subprocess
import unittest

from harness import Case

import dist


class Android(Case):
    @classmethod
    def setUpClass(cls):
        if not dist.is_installed(dist.ANDROID):
            raise unittest.SkipTest(f"no standard library of Rust for {dist.ANDROID}")
        cls.release = dist.built(dist.ANDROID, dist.environment(dist.ANDROID))
        cls.archive = cls.release / "libggml_rust_npu.a"

    def symbols(self):
        shown = subprocess.run(["readelf", "--wide", "--syms", self.archive], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in shown.splitlines()]
        rows = [row for row in rows if len(row) == 8 and row[4] in ("GLOBAL", "WEAK")]
        return {row[7] for row in rows if row[6] != "UND"}, {row[7] for row in rows if row[6] == "UND"}

    def test_members_are_for_the_processor(self):
        shown = subprocess.run(["readelf", "--file-header", self.archive], capture_output=True, text=True, check=True).stdout
        self.assertEqual(set(re.findall(r"Machine: +(.*)", shown)), {"AArch64"})

    def test_it_has_every_function_of_the_header_and_calls_androids_c_library(self):
        defined, undefined = self.symbols()
        header = (dist.ROOT / "include" / "npu.h").read_text(encoding="utf-8")
        functions = set(re.findall(r"\b(npu_\w+)\(", header))
        self.assertGreater(len(functions), 20)
        self.assertEqual(functions - defined, set())
        # Bionic's name for errno; glibc's is different.
        self.assertIn("__errno", undefined - defined)
        self.assertNotIn("__errno_location", undefined)

    def test_release_has_no_path_of_this_machine(self):
        dist.check_paths(self.archive)
