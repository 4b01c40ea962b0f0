"""The formats of a release without a build: small files in place of the real ones give the same bytes each time, and each
package has the files that its installer needs. tests/e2e/dist_packages.py installs the real ones."""

import base64
import hashlib
import json
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from harness import Case, cpu_env

import cyclonedx
import dist
import fetch
import packages
from project import ROOT

EPOCH = 1_000_000_000
TARGETS = sorted(packages.MACHINES)
PLUGIN = "libggml-rust_npu.so"


def release(folder, target, mtime):
    """A filled folder whose files were made at another time and by another umask."""
    files = {name: f"content of {name}" for name in
             (f"lib/{PLUGIN}", "lib/libggml_rust_npu_skel_v75.so", "lib/libggml_rust_npu.a", "bin/ggml-npu", "LICENSE",
              "CHANGELOG.md", "licences/half-2.7/LICENSE-MIT",
              "share/man/man1/ggml-npu.1", "share/zsh/site-functions/_ggml-npu")}
    files["sbom.cdx.json"] = "{}"
    for path in ("70-ggml-rust-npu.rules", "llama-server.service.d/npu.conf"):
        files[f"board/{path}"] = (ROOT / "dist" / "board" / path).read_text(encoding="utf-8")
    for name in sorted(files, reverse=bool(mtime % 2)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")
        path.chmod(0o600 if mtime % 2 else 0o664)
        os.utime(path, (mtime, mtime))
    return packages.Release(folder, target, "1.2.3", EPOCH, (2, 34))


class Formats(Case):
    def made(self, folder, target=TARGETS[0], mtime=1_000_001):
        return packages.make(release(folder / "content" / "release", target, mtime), folder)

    def one(self, suffix, target=TARGETS[0]):
        """The folder, and the package with a suffix."""
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        (path,) = [path for path in self.made(Path(scratch.name), target) if path.name.endswith(suffix)]
        return path

    def test_same_files_give_the_same_bytes(self):
        for target in TARGETS:
            with self.subTest(target), tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                sums = []
                # The umask also applies to files that are written for a package, so it must not change the result.
                for folder, mtime, umask in ((one, 1_000_001, 0o077), (two, 2_000_000, 0o002)):
                    before = os.umask(umask)
                    try:
                        sums.append({path.name: fetch.sha256(path) for path in self.made(Path(folder), target, mtime)})
                    finally:
                        os.umask(before)
                self.assertEqual(len(sums[0]), 4)
                self.assertEqual(*sums)

    def test_android_has_a_tarball_only(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self.made(Path(folder), dist.ANDROID), [])

    def test_wheel_lists_its_files_with_their_sums(self):
        path = self.one(".whl", "aarch64-unknown-linux-gnu")
        self.assertEqual(path.name, "ggml_rust_npu-1.2.3-py3-none-manylinux_2_34_aarch64.whl")
        with zipfile.ZipFile(path) as archive:
            rows = [row.rsplit(",", 2) for row in archive.read("ggml_rust_npu-1.2.3.dist-info/RECORD").decode().splitlines()]
            self.assertEqual({name for name, _, _ in rows}, set(archive.namelist()))
            for name, digest, size in rows[:-1]:
                content = archive.read(name)
                self.assertEqual(int(size), len(content), name)
                self.assertEqual(base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "="),
                                 hashlib.sha256(content).digest(), name)
            metadata = Parser().parsestr(archive.read("ggml_rust_npu-1.2.3.dist-info/METADATA").decode())
            self.assertEqual((metadata["Name"], metadata["Version"], metadata["License-Expression"]),
                             ("ggml-rust-npu", "1.2.3", "MIT"))
            for licence in metadata.get_all("License-File"):
                self.assertIn(f"ggml_rust_npu-1.2.3.dist-info/licenses/{licence}", archive.namelist())
            self.assertTrue(archive.getinfo("ggml_rust_npu/bin/ggml-npu").external_attr >> 16 & 0o111)

    def test_main_package_of_npm_names_those_of_all_processors(self):
        with tarfile.open(self.one("npu-1.2.3.tgz")) as archive:
            described = json.load(archive.extractfile("package/package.json"))
            files = {entry.name for entry in archive}
            self.assertIsNone(cyclonedx.fault(json.load(archive.extractfile("package/sbom.cdx.json"))))
        self.assertEqual(described["optionalDependencies"],
                         {"ggml-rust-npu-linux-arm64": "1.2.3", "ggml-rust-npu-linux-x64": "1.2.3"})
        for file in (described["types"], *described["bin"].values(), described["exports"]["."]["default"]):
            self.assertIn(f"package/{file.removeprefix('./')}", files)

    def test_package_of_npm_for_a_processor_is_for_it_alone(self):
        with tarfile.open(self.one("arm64-1.2.3.tgz", "aarch64-unknown-linux-gnu")) as archive:
            described = json.load(archive.extractfile("package/package.json"))
            self.assertIn(f"package/lib/{PLUGIN}", archive.getnames())
        self.assertEqual((described["os"], described["cpu"], described["libc"]), (["linux"], ["arm64"], ["glibc"]))

    def test_debian_package_links_the_plugin_where_ggml_looks(self):
        path = self.one(".deb", "aarch64-unknown-linux-gnu")
        listed = self.run_command("dpkg-deb", ["dpkg-deb", "--contents", path], cpu_env()).out
        link = "ggml/backends0/libggml-hexagon.so -> ../../ggml-rust-npu/libggml-rust_npu.so"
        self.assertIn(f"./usr/lib/aarch64-linux-gnu/{link}", listed)
        for name in ("man/man1/ggml-npu.1.gz", "zsh/vendor-completions/_ggml-npu", "doc/ggml-rust-npu/copyright",
                     "doc/ggml-rust-npu/licences/half-2.7/LICENSE-MIT", "doc/ggml-rust-npu/sbom.cdx.json"):
            self.assertRegex(listed, rf"(?m)-rw-r--r-- root/root .* \./usr/share/{re.escape(name)}$")
        self.assertNotIn(".a\n", listed)

    def test_drop_in_of_the_debian_package_names_no_plugin(self):
        text = packages.drop_in((ROOT / "dist" / "board" / "llama-server.service.d" / "npu.conf").read_text(encoding="utf-8"))
        self.assertNotIn("/usr/local", text)
        self.assertIn("SupplementaryGroups=render video\n", text)


class Module(Case):
    """The Python module, without its libraries."""

    def python(self, *args):
        env = cpu_env(PYTHONPATH=str(ROOT / "dist" / "python"), PYTHONDONTWRITEBYTECODE="1")
        return self.run_command("python", [sys.executable, *args], env)

    def test_variable_is_printed_in_quotes_for_a_shell(self):
        path = ROOT / "dist" / "python" / "ggml_rust_npu" / "lib" / PLUGIN
        shown = self.python("-m", "ggml_rust_npu").out
        done = self.run_command("sh", ["sh", "-c", f'{shown}\nprintf %s "$GGML_BACKEND_PATH"'], cpu_env())
        self.assertEqual(done.out, str(path))
        self.assertEqual(self.python("-m", "ggml_rust_npu", "--path").out, f"{path}\n")
        self.assertEqual(self.python("-m", "ggml_rust_npu", "--paht").code, 2)

    def test_process_without_ggml_is_refused_with_what_to_do(self):
        # -S leaves out this machine's packages.
        done = self.python("-S", "-c", "import ggml_rust_npu; ggml_rust_npu.load()")
        self.assertIn("ggml_rust_npu.LoadError: this process has no libggml.so: install llama-cpp-python", done.log)

    def test_library_that_is_no_ggml_is_refused_by_its_name(self):
        done = self.python("-c", "import ggml_rust_npu; ggml_rust_npu.load('libc.so.6')")
        self.assertIn("LoadError: libc.so.6 is no ggml that loads backends: it has no function ggml_backend_load", done.log)
