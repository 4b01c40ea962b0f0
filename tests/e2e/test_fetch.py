"""What is fetched is checked: a damaged file is refused with both sums, and half a file is never taken for a whole one."""

import hashlib
import io
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import harness  # noqa: F401  (makes the scripts importable)

import fetch
from project import Problem

CONTENT = b"content of a file in a wheel"


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.wheel = self.folder / "some-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("some/file", CONTENT)
        self.package = fetch.Package("some==1.0", self.wheel.name, hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        for name, value in {"DOWNLOADS": self.folder, "pip_run": mock.Mock(side_effect=Problem("no network")),
                            "tools": mock.Mock()}.items():
            patch = mock.patch.object(fetch, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_whole_file_is_used_without_network(self):
        dest = fetch.members([(self.package, "some/file")], self.folder / "out" / "file")
        self.assertEqual(dest.read_bytes(), CONTENT)
        self.wheel.unlink()
        self.assertEqual(fetch.members([(self.package, "some/file")], dest), dest)

    def test_damaged_file_is_refused_and_removed(self):
        self.wheel.write_bytes(self.wheel.read_bytes()[:-1])
        damaged = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        with self.assertRaises(Problem) as problem:
            fetch.download(self.package)
        self.assertIn(self.package.sha256, str(problem.exception))
        self.assertIn(damaged, str(problem.exception))
        self.assertFalse(self.wheel.exists())

    def test_no_network_is_said_in_one_line(self):
        self.wheel.unlink()
        with self.assertRaises(Problem) as problem:
            fetch.download(self.package)
        self.assertEqual(str(problem.exception), "no network")

    def test_interrupted_unpacking_leaves_no_file(self):
        dest = self.folder / "file"
        with mock.patch("shutil.copyfileobj", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                fetch.members([(self.package, "some/file")], dest)
        self.assertFalse(dest.exists())
        self.assertEqual(fetch.members([(self.package, "some/file")], dest).read_bytes(), CONTENT)

    def test_parts_are_put_together_in_order_and_checked(self):
        parts = [(self.package, "some/file")] * 2
        whole = hashlib.sha256(CONTENT * 2).hexdigest()
        dest = fetch.members(parts, self.folder / "whole", whole)
        self.assertEqual(dest.read_bytes(), CONTENT * 2)
        wrong = self.folder / "wrong"
        with self.assertRaises(Problem) as problem:
            fetch.members(parts[:1], wrong, whole)
        self.assertIn(whole, str(problem.exception))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), [self.wheel.name, "whole"])

    def test_members_of_npm_archives_are_unpacked(self):
        path = self.folder / "some-1.0.tgz"
        with tarfile.open(path, "w:gz") as archive:
            entry = tarfile.TarInfo("package/file")
            entry.size = len(CONTENT)
            archive.addfile(entry, io.BytesIO(CONTENT))
        package = fetch.NpmPackage("some@1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        dest = fetch.members([(package, "package/file"), (self.package, "some/file")], self.folder / "both")
        self.assertEqual(dest.read_bytes(), CONTENT * 2)

    def test_llama_of_the_user_is_checked_and_not_changed(self):
        tree = self.folder / "llama.cpp"
        (tree / "ggml").mkdir(parents=True)
        (tree / "ggml" / "CMakeLists.txt").write_text("")
        before = sorted(tree.rglob("*"))
        with mock.patch.dict("os.environ", LLAMA_CPP_DIR=str(tree)), self.assertRaises(Problem) as problem:
            fetch.llama()
        self.assertIn("patch", str(problem.exception))
        self.assertEqual(sorted(tree.rglob("*")), before)
