"""The tarball of this machine's target: unpacked elsewhere and installed, its plugin works in Debian's llama.cpp."""

import json
import platform
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from harness import HEXAGON, HEXAGON_DEVICE, cpu_env, device_env
from stocked import CHIPS, PROMPT, TOKENS, DebianStock

import cyclonedx
import dist

TARGET = f"{platform.machine()}-unknown-linux-gnu"


class Release(DebianStock):
    @classmethod
    def made_plugin(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        root = Path(scratch.name)
        with tarfile.open(dist.make(TARGET)[0]) as archive:
            archive.extractall(root, filter="data")
        (cls.release,) = root.iterdir()
        cls.prefix = root / "prefix"
        done = subprocess.run(["sh", cls.release / "install.sh", "--prefix", cls.prefix], stdout=subprocess.PIPE, text=True,
                              check=True, env=cpu_env(PATH="/usr/bin:/bin"))
        (plugin,) = re.findall(r"export GGML_BACKEND_PATH=(.*)", done.stdout)
        return plugin

    def test_sums_are_those_of_the_files(self):
        done = self.run_command("sha256sum", ["sha256sum", "-c", "SHA256SUMS"], cpu_env(), cwd=self.release)
        self.assertEqual(done.code, 0, done.all)
        summed = {line.split("  ", 1)[1] for line in (self.release / "SHA256SUMS").read_text(encoding="utf-8").splitlines()}
        files = {path.relative_to(self.release).as_posix() for path in self.release.rglob("*") if path.is_file()}
        self.assertEqual(files - summed, {"SHA256SUMS"})

    def test_list_of_contents_is_valid_by_the_schema_of_cyclonedx(self):
        self.assertIsNone(cyclonedx.fault(json.loads((self.release / "sbom.cdx.json").read_text(encoding="utf-8"))))

    def test_it_has_the_libraries_of_all_architectures(self):
        for library in dist.DSP_LIBRARIES:
            name = f"libggml_rust_npu_skel_{library}.so"
            self.assertEqual((self.prefix / "lib" / "ggml-rust-npu" / name).read_bytes()[:4], b"\x7fELF", name)

    def test_installed_tool_finds_a_device_that_passes_its_self_test(self):
        done = self.run_command("ggml-npu", [self.prefix / "bin" / "ggml-npu", "devices", "--self-test"], device_env(HEXAGON))
        self.assertEqual(done.code, 0, done.all)
        self.assertIn(HEXAGON_DEVICE, done.out)

    def test_text_is_that_of_the_static_build(self):
        for device, chip in CHIPS.items():
            with self.subTest(device):
                done = self.run_stock("llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp",
                                      0, "--seed", 1, "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off",
                                      "--device", device, env=self.with_plugin(device_env(chip)))
                self.assertEqual(done.out.rstrip("\n"), self.text_of_static_build(chip))

    def test_archive_links_with_the_glue_of_the_tarball(self):
        """A program with ggml's registry entry, from nothing but the tarball and ggml's headers."""
        ggml = dist.fetch.llama() / "ggml"
        glue = sorted((self.release / "ggml-glue").glob("*.c"))
        include = [f"-I{folder}" for folder in (self.release / "include", ggml / "include", ggml / "src")]
        out = self.prefix / "glue.so"
        done = self.run_command("gcc", ["gcc", "-shared", "-fPIC", "-O1", *include, *glue,
                                        self.release / "lib" / "libggml_rust_npu.a", "-lm", "-ldl", "-lpthread", "-o", out],
                                cpu_env())
        self.assertEqual(done.code, 0, done.all)
        shown = subprocess.run(["nm", "-D", "--defined-only", out], stdout=subprocess.PIPE, text=True, check=True).stdout
        self.assertIn(" T ggml_backend_rust_npu_reg", shown)
