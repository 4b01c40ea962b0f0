"""Fetched files are checked: a damaged file is refused with both sums, and an incomplete file is never used."""

import base64
import hashlib
import functools
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import harness  # noqa: F401  (makes the scripts importable)

import aarch64
import fetch
from project import Problem

CONTENT = b"content of a file in a wheel"


def names_in(folder):
    """The names of a folder's files; locks stay where they are, because another process may wait for them."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def side_by_side(function, *args):
    """Two results of a function that is called by two threads at once."""
    both = threading.Barrier(2)

    def call():
        both.wait()
        return function(*args)

    with ThreadPoolExecutor(2) as pool:
        return [done.result() for done in [pool.submit(call) for _ in range(2)]]


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.wheel = self.folder / "some-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("some/file", CONTENT)
        self.package = fetch.Package("some==1.0", self.wheel.name, hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        for module, name, value in [(fetch, "DOWNLOADS", self.folder), (fetch, "environment", mock.Mock()),
                                    (fetch.index, "download", mock.Mock(side_effect=Problem("no network")))]:
            patch = mock.patch.object(module, name, value)
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
        broken = mock.patch("shutil.copyfileobj", side_effect=KeyboardInterrupt)
        with broken, self.assertRaises(KeyboardInterrupt):
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
        self.assertEqual(names_in(self.folder), [self.wheel.name, "whole"])

    def test_members_of_npm_archives_are_unpacked(self):
        path = self.folder / "some-1.0.tgz"
        with tarfile.open(path, "w:gz") as archive:
            entry = tarfile.TarInfo("package/file")
            entry.size = len(CONTENT)
            archive.addfile(entry, io.BytesIO(CONTENT))
        package = fetch.NpmPackage("some@1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        dest = fetch.members([(package, "package/file"), (self.package, "some/file")], self.folder / "both")
        self.assertEqual(dest.read_bytes(), CONTENT * 2)

    def test_two_at_once_fetch_a_package_once(self):
        wheel = self.wheel.read_bytes()
        self.wheel.unlink()

        def get(project, filename, dest, pip):
            time.sleep(0.1)
            dest.write_bytes(wheel)

        with mock.patch.object(fetch.index, "download", side_effect=get) as download:
            self.assertEqual(side_by_side(fetch.download, self.package), [self.wheel, self.wheel])
        self.assertEqual(download.call_count, 1)

    def test_two_at_once_put_a_file_together_once(self):
        dest, copied = self.folder / "file", []

        def slowly(source, out):
            content = source.read()
            copied.append(content)
            for part in (content[:5], content[5:]):
                out.write(part)
                out.flush()
                time.sleep(0.1)

        with mock.patch("shutil.copyfileobj", side_effect=slowly):
            self.assertEqual(side_by_side(fetch.members, [(self.package, "some/file")], dest), [dest, dest])
        self.assertEqual((copied, dest.read_bytes()), ([CONTENT], CONTENT))

    def test_two_at_once_unpack_llama_once(self):
        tree = self.folder / "llama.cpp"

        def unpack(version, dest):
            time.sleep(0.1)
            (dest / "file").touch()

        with mock.patch.object(fetch.project, "llama_source", return_value=tree), mock.patch.object(fetch, "apply_patch"), \
                mock.patch.dict("os.environ", LLAMA_CPP_DIR=""), \
                mock.patch.object(fetch, "unpack_llama", side_effect=unpack) as unpacked:
            self.assertEqual(side_by_side(fetch.llama), [tree, tree])
        self.assertEqual(unpacked.call_count, 1)

    def test_llama_of_the_user_is_checked_and_not_changed(self):
        tree = self.folder / "llama.cpp"
        (tree / "ggml").mkdir(parents=True)
        (tree / "ggml" / "CMakeLists.txt").write_text("")
        before = sorted(tree.rglob("*"))
        with mock.patch.dict("os.environ", LLAMA_CPP_DIR=str(tree)), self.assertRaises(Problem) as problem:
            fetch.llama()
        self.assertIn("patch", str(problem.exception))
        self.assertEqual(sorted(tree.rglob("*")), before)


# A stand-in for Python. It makes a venv of three files, as `python3 -m venv --clear FOLDER` does, and records that it did. If
# another one makes the same venv at the same time, both are spoilt.
PYTHON = """#!/bin/sh
echo made >>{log}
rm -rf "$4" && mkdir -p "$4/bin" "$4/lib/pip" && sleep 0.1
ln -s {python} "$4/bin/python" || exit 1
echo 'home = {home}' >"$4/pyvenv.cfg"
cat >"$4/bin/pip" <<END
#!$4/bin/python
import sys
print(f"pip 24.0 from {{sys.prefix}}/lib/pip (python 3.11)")
END
chmod +x "$4/bin/pip"
"""


class Environment(unittest.TestCase):
    """target/tools, with a stand-in for Python, which makes it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.log = self.folder / "log"
        python = self.folder / "python"
        real = Path(sys.executable).resolve()
        python.write_text(PYTHON.format(log=self.log, python=real, home=real.parent), encoding="utf-8")
        python.chmod(0o755)
        patch = mock.patch.object(sys, "executable", str(python))
        patch.start()
        self.addCleanup(patch.stop)
        self.tools_are(self.folder / "tools")

    def tools_are(self, folder):
        for patch in (mock.patch.object(fetch, "TOOLS", folder), mock.patch.object(fetch, "PIP", folder / "bin" / "pip")):
            patch.start()
            self.addCleanup(patch.stop)

    def assert_made(self, times):
        """It was made that many times, and pip installs into it."""
        self.assertEqual(self.log.read_text(encoding="utf-8").count("made"), times)
        place = subprocess.run([fetch.PIP, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
        self.assertIn(f"from {fetch.TOOLS}/", place)

    def test_two_at_once_make_it_once(self):
        side_by_side(fetch.environment)
        self.assert_made(1)
        fetch.environment()
        self.assert_made(1)

    def test_pip_that_installs_into_another_python_is_replaced(self):
        fetch.environment()
        (fetch.TOOLS / "pyvenv.cfg").unlink()
        self.assertTrue(fetch.works(fetch.PIP, "--version"))
        fetch.environment()
        self.assert_made(2)

    def test_copy_of_another_checkouts_venv_is_made_again(self):
        fetch.environment()
        copy = shutil.copytree(fetch.TOOLS, self.folder / "copy", symlinks=True)
        self.tools_are(copy)
        self.assertTrue(fetch.works(fetch.PIP, "--version"))
        fetch.environment()
        self.assert_made(2)


# A build backend inside the package, so that no index is needed. pip runs each of its functions.
BACKEND = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
def get_requires_for_build_wheel(config_settings=None): return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "evil-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: evil\\nVersion: 1.0\\n")
    return info.name
def build_wheel(folder, config_settings=None, metadata_directory=None): raise SystemExit(1)
def build_sdist(folder, config_settings=None): raise SystemExit(1)
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Index(unittest.TestCase):
    """A package index on this machine, with a source package that runs code when it is built."""

    NAME = "evil-1.0.tar.gz"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.marker = self.folder / "marker"
        served = self.folder / "served"
        (served / "evil").mkdir(parents=True)
        self.archive = served / self.NAME
        members = {"pyproject.toml": PYPROJECT, "PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
                   "backend.py": BACKEND.format(marker=str(self.marker)),
                   "setup.py": BACKEND.format(marker=str(self.marker))}
        with tarfile.open(self.archive, "w:gz") as archive:
            for name, text in members.items():
                entry = tarfile.TarInfo(f"evil-1.0/{name}")
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
        self.digest = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        self.page = served / "evil" / "index.html"
        self.page.write_text(f'<html><body><a href="../{self.NAME}#sha256={self.digest}">{self.NAME}</a></body></html>')
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(served)))
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.variables = {"PIP_INDEX_URL": self.url, "PIP_NO_INDEX": "", "PIP_FIND_LINKS": "",
                          "PIP_CONFIG_FILE": "/dev/null", "no_proxy": "127.0.0.1"}
        self.downloads = self.folder / "downloads"
        for patch in (mock.patch.object(fetch, "DOWNLOADS", self.downloads), mock.patch.object(fetch, "environment"),
                      mock.patch.dict("os.environ", self.variables)):
            patch.start()
            self.addCleanup(patch.stop)

    def package(self, digest):
        return fetch.Package("evil==1.0", self.NAME, digest)

    def test_code_of_a_source_package_does_not_run_when_it_is_fetched(self):
        path = fetch.download(self.package(self.digest))
        self.assertEqual(path.read_bytes(), self.archive.read_bytes())
        self.assertFalse(self.marker.exists(), "code of the package ran")

    def test_code_of_another_source_package_does_not_run_and_nothing_is_kept(self):
        with self.assertRaises(Problem) as problem:
            fetch.download(self.package("0" * 64))
        self.assertIn(self.digest, str(problem.exception))
        self.assertFalse(self.marker.exists(), "code of the package ran")
        self.assertEqual(names_in(self.downloads), [])

    def test_the_package_does_run_code_under_pip_download(self):
        """Otherwise the tests above could not fail."""
        venv.create(self.folder / "venv", with_pip=True)
        pip = self.folder / "venv" / "bin" / "pip"
        subprocess.run([pip, "download", "--no-deps", "--dest", self.folder / "pip", "evil==1.0"],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertTrue(self.marker.exists())

    def test_an_index_that_answers_in_json_is_read(self):
        answer = json.dumps({"files": [{"filename": self.NAME, "url": f"../{self.NAME}", "hashes": {}}]}).encode()
        opened = fetch.index.opened

        def as_json(url, pip, accept="*/*"):
            if not url.endswith("/evil/"):
                return opened(url, pip, accept)
            response = mock.MagicMock()
            response.__enter__.return_value = response
            response.geturl.return_value = url
            response.read.return_value = answer
            response.headers.get_content_type.return_value = fetch.index.JSON
            return response

        with mock.patch.object(fetch.index, "opened", as_json):
            self.assertTrue(fetch.download(self.package(self.digest)).exists())

    def test_a_file_that_the_index_does_not_have_and_one_of_another_kind_of_address_are_said_in_one_line(self):
        self.page.write_text("<html></html>")
        with self.assertRaises(Problem) as problem:
            fetch.download(self.package(self.digest))
        self.assertIn(self.NAME, str(problem.exception))
        self.page.write_text(f'<a href="file://{self.archive}">{self.NAME}</a>')
        with self.assertRaises(Problem) as problem:
            fetch.download(self.package(self.digest))
        self.assertIn("not of the web", str(problem.exception))

    def test_build_tools_are_installed_with_their_sums(self):
        with mock.patch.object(fetch, "works", return_value=False), mock.patch("shutil.which", return_value=None), \
                mock.patch.object(fetch, "client_run") as client:
            fetch.tools()
        command = [str(word) for word in client.call_args.args[1]]
        self.assertIn("--require-hashes", command)
        for line in fetch.REQUIREMENTS.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            if line and not line.startswith("#"):
                self.assertRegex(line, r"^(cmake|ninja)==[\d.]+( +--hash=sha256:[0-9a-f]{64})+$")


class Answers(BaseHTTPRequestHandler):
    """Answers with the code, headers and body of the server's `answer`; records the requests."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Authorization"]))
        code, headers, body = self.server.answer(self.path, self.headers["Authorization"])
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Transfer(unittest.TestCase):
    """Faults of an index, and of the network, in a download."""

    NAME = "some-1.0.tar.gz"
    PAGE = f'<a href="/files/{NAME}">{NAME}</a>'.encode()
    LOGIN = "Basic " + base64.b64encode(b"user:p@ss").decode()

    def server(self, answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.answer, server.asked = answer, []
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def download(self, server, login=""):
        """The bytes that came."""
        url = f"http://{login}127.0.0.1:{server.server_address[1]}/simple"
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict("os.environ", PIP_INDEX_URL=url, PIP_CONFIG_FILE="/dev/null", no_proxy="127.0.0.1"):
            fetch.index.download("some", self.NAME, Path(folder) / self.NAME, "pip")
            return (Path(folder) / self.NAME).read_bytes()

    def answers(self, *transfers):
        """A server that lists the file, and answers requests for it one after the other."""
        left = list(transfers)
        return self.server(lambda path, _: left.pop(0) if path.endswith(self.NAME) else (200, {}, self.PAGE))

    def test_body_that_is_cut_off_is_fetched_again(self):
        whole, cut = (200, {}, CONTENT), (200, {"Content-Length": len(CONTENT)}, CONTENT[:-5])
        self.assertEqual(self.download(self.answers(cut, cut, whole)), CONTENT)
        with self.assertRaises(Problem) as problem:
            self.download(self.answers(cut, cut, cut))
        self.assertIn(f"{len(CONTENT) - 5} of {len(CONTENT)} bytes came", str(problem.exception))

    def test_page_that_is_cut_off_is_fetched_again(self):
        pages = [(200, {"Content-Length": len(self.PAGE)}, self.PAGE[:-5]), (200, {}, self.PAGE)]
        server = self.server(lambda path, _: (200, {}, CONTENT) if path.endswith(self.NAME) else pages.pop(0))
        self.assertEqual(self.download(server), CONTENT)

    def guarded(self, path, login):
        if login != self.LOGIN:
            return 401, {}, b""
        return 200, {}, CONTENT if path.endswith(self.NAME) else self.PAGE

    def test_files_of_the_index_are_asked_for_with_its_password(self):
        self.assertEqual(self.download(self.server(self.guarded), "user:p%40ss@"), CONTENT)

    def test_redirect_on_the_same_server_keeps_the_password(self):
        def answer(path, login):
            return (302, {"Location": "/other" + path}, b"") if path.startswith("/files") else self.guarded(path, login)

        self.assertEqual(self.download(self.server(answer), "user:p%40ss@"), CONTENT)

    def test_password_does_not_follow_to_another_server(self):
        other = self.answers((200, {}, CONTENT), (200, {}, CONTENT), (200, {}, CONTENT))
        place = f"http://127.0.0.1:{other.server_address[1]}"
        link = f'<a href="{place}/{self.NAME}">{self.NAME}</a>'.encode()
        for answer in (lambda path, _: (302, {"Location": place + path}, b""),
                       lambda path, _: (302, {"Location": place + path}, b"") if path.endswith(self.NAME) else
                       (200, {}, self.PAGE),
                       lambda path, _: (200, {}, link)):
            self.assertEqual(self.download(self.server(answer), "user:p%40ss@"), CONTENT)
        self.assertEqual([login for _, login in other.asked], [None] * 4)


class Machine(unittest.TestCase):
    """Nothing is installed on the machine unless the user requests it."""

    def installs(self, **variables):
        variables = {"INSTALL": "", "CI": "", **variables}
        with mock.patch.dict("os.environ", variables), mock.patch.object(aarch64, "missing_packages", return_value=["x"]), \
                mock.patch.object(aarch64, "is_root_on_debian", return_value=True), \
                mock.patch.object(aarch64, "run_logged") as client, self.assertRaises(aarch64.Missing) as missing:
            aarch64.need_packages()
        self.assertIn("x", str(missing.exception))
        return client.called

    def test_root_installs_packages_only_where_it_is_asked_to(self):
        self.assertFalse(self.installs())
        self.assertTrue(self.installs(INSTALL="1"))
        self.assertTrue(self.installs(CI="true"))
