"""scripts/build.py configures a build again if CMake would otherwise use old options or another source."""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import harness  # noqa: F401  (makes the scripts importable)

import build
import project
from project import Problem


class Configure(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.cmake = mock.Mock()
        for module, name, value in [(build, "ROOT", self.root), (build, "run", self.cmake), (project, "TARGET", self.root)]:
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def configure(self, archive):
        folder = self.root / "build"
        folder.mkdir(exist_ok=True)
        build.configure("source", folder, "Ninja", {"GGML_RUST_NPU_LIB": archive}, "name")

    def test_same_options_are_configured_once(self):
        self.configure("")
        self.configure("")
        self.assertEqual(self.cmake.call_count, 1)

    def test_options_of_a_configure_that_failed_do_not_stay(self):
        self.configure("")
        self.cmake.side_effect = Problem("no such file")
        with self.assertRaises(Problem):
            self.configure("/none")
        self.cmake.side_effect = None
        self.configure("")
        self.assertEqual(self.cmake.call_count, 3)

    def test_each_llama_of_the_user_has_a_build_folder(self):
        folders = []
        for name in ("one", "two", "one", ""):
            with mock.patch.dict("os.environ", LLAMA_CPP_DIR=str(self.root / name) if name else ""):
                folders.append(project.llama_build())
        self.assertEqual(len(set(folders)), 3)
        self.assertEqual(folders[0], folders[2])
        self.assertEqual(folders[3], self.root / f"llama-{project.LLAMA_VERSION}")
