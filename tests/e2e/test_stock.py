"""Programs that others built and shipped load the plugin and get the same results on its devices as the static build."""

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import (DEVICE, HEXAGON, HEXAGON_DEVICE, PLAIN_LOG, SIMULATED, cpu_env, device_env, listed_devices, our_lines,
                     server)

import build
import models
import stock
from project import ROOT
from stocked import CHIPS, PROMPT, TOKENS, DebianStock, Stock

# The libraries that the plugin may need, because every program has them.
LIBRARIES = r"(libc|libm|libdl|libgcc_s|ld-linux[\w-]*)\.so\.\d+"

WHISPER = stock.SOURCES / "whisper.py"

# The squared error of a whole model with random weights. With flash attention the CPU adds 1,536 values in F16, which causes
# most of the difference: docs/results/accuracy.md compares both with a reference in F64.
WHISPER_ERRORS = {"flash": 1e-3, "plain": 1e-5}
# Products with at least 1,500 rows: two convolutions, an encoder of two layers, the decoder's keys and values. Hexagon divides
# the first convolution in two.
WHISPER_PRODUCTS = {HEXAGON: 3 + 2 * 6 + 2 * 2, SIMULATED: 2 + 2 * 6 + 2 * 2}

# Loads a plugin as a program does whose ggml is in no global scope.
LOADER = """
import ctypes, sys
ggml = ctypes.CDLL(sys.argv[1])
ggml.ggml_backend_load.restype = ctypes.c_void_p
print("loaded" if ggml.ggml_backend_load(sys.argv[2].encode()) else "refused")
"""


class File(Stock):
    """The file itself."""

    def readelf(self, *args):
        return subprocess.run(["readelf", "--wide", *args, str(self.plugin)], capture_output=True, text=True, check=True).stdout

    def test_exports_the_entry_point_alone(self):
        rows = [row.split() for row in self.readelf("--dyn-syms").splitlines()]
        rows = [row for row in rows if len(row) >= 8 and row[0][:-1].isdigit() and row[6] != "UND"]
        self.assertEqual([row[7] for row in rows], ["ggml_backend_init"])

    def test_needs_no_library_of_ggml(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", self.readelf("--dynamic"))
        self.assertIn("libc.so.6", needed)
        self.assertEqual([name for name in needed if not re.fullmatch(LIBRARIES, name)], [])
        undefined = re.findall(r" UND (ggml\w*|npu_\w*|glue_\w*)", self.readelf("--dyn-syms"))
        self.assertEqual(undefined, [])


class Debian(DebianStock):
    """llama.cpp 0.7.0 and whisper.cpp 1.9.5."""

    def devices(self, env):
        return self.run_stock("llama-bench", "--list-devices", env=self.with_plugin(env)).all

    def test_devices_are_listed(self):
        for device, chip in CHIPS.items():
            self.assertRegex(self.devices(device_env(chip)), rf"(?m)^ *{device}: .*simulated")
        shown = self.devices(cpu_env())
        self.assertEqual((listed_devices(shown), our_lines(shown)), ([], []), shown)

    def test_wrong_settings_are_said_in_one_line(self):
        for env, words in [(cpu_env(GGML_RUST_NPU_SIM="rk9999"), ["GGML_RUST_NPU_SIM", "rk9999", "rk3588"]),
                           (cpu_env(GGML_RUST_NPU_CHIP="rk3588", GGML_RUST_NPU_RKNN_LIB="/nonexistent/librknnrt.so"),
                            ["/nonexistent/librknnrt.so"])]:
            shown = self.devices(env)
            lines = our_lines(shown)
            self.assertEqual(len(lines), 1, shown)
            for word in words:
                self.assertIn(word, lines[0])
            self.assertIn("(none)", shown)

    def test_text_is_that_of_the_static_build(self):
        for device, chip in CHIPS.items():
            with self.subTest(device):
                done = self.complete_stock(self.with_plugin(device_env(chip)))
                self.assertIn(f"using device {device}", done.log)
                self.assertEqual(done.out.rstrip("\n"), self.text_of_static_build(chip))

    def complete_stock(self, env):
        return self.with_end(lambda: self.run_stock(
            "llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp", 0, "--seed", 1, "-no-cnv",
            "--no-display-prompt", "--ignore-eos", "-fit", "off", *PLAIN_LOG, "-v", env=env))

    def test_slices_are_loaded_by_reading(self):
        """llama.cpp read the file into addresses that are placeholders, because memory of ours counts as the host's."""
        # Weights in F16, so that a part of a row is rounded exactly as the whole row.
        model, prompt, words = models.variant("F16"), "One, two, three, four, five,", 8
        for device, chip in CHIPS.items():
            want = self.complete(prompt, words, device_env(chip), "-sm", "none", "-fa", "on", "-t", 1, model=model).out
            for mode in "none", "mmap":
                with self.subTest(f"{device} -lm {mode}"):
                    done = self.with_end(lambda chip=chip, mode=mode: self.run_stock(
                        "llama-completion", "-m", model, "-sm", "tensor", "-lm", mode, "-p", prompt, "-n", words, "-c", 512,
                        "--temp", 0, "--seed", 1, "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off", "-fa", "on",
                        "-t", 1, *PLAIN_LOG, "-v", env=self.with_plugin(device_env(chip))))
                    self.assertEqual(done.out.rstrip("\n"), want.rstrip("\n"))
                    self.assertIn("using device Meta", done.log)

    def test_options_that_do_not_help_are_those_of_the_program(self):
        page = (ROOT / "docs" / "guide" / "programs.md").read_text(encoding="utf-8")
        options = re.findall(r"^\| `(--[\w-]+)` of llama.cpp 0\.7\.0 \|", page, re.M)
        self.assertEqual(options, ["--moe-cache-mib"])
        self.assertIn(options[0], self.run_stock("llama-completion", "--help", env=cpu_env()).out)

    def test_bench_runs(self):
        done = self.run_stock("llama-bench", "-m", self.model(), "-p", 16, "-n", 4, "-r", 1,
                              env=self.with_plugin(device_env(HEXAGON)))
        self.assertRegex(done.out, r"RUST_NPU.*tg4")

    def test_server_generates_the_text_of_the_static_build(self):
        with server(self.model(), self.with_plugin(device_env(HEXAGON)), "-c", 512, name="stock-server",
                    program=self.program.command("llama-server"), cwd=self.program.folder) as running:
            text = running.complete(PROMPT, TOKENS)
        self.assertEqual(text.rstrip("\n"), self.text_of_static_build(HEXAGON))


    def whisper_logits(self, model, attention, env):
        """whisper.cpp's results for a tone and five tokens."""
        library = self.program.libraries / "libwhisper.so.1"
        with tempfile.NamedTemporaryFile() as file:
            done = self.run_stock(sys.executable, WHISPER, "run", library, model, file.name, attention, env=env)
            return struct.unpack("<51865f", file.read()), done.log

    def test_whisper_computes_what_it_computes_on_the_cpu(self):
        """Each product of many rows uses the matrix unit, also those of convolutions."""
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "random.bin"
            subprocess.run([sys.executable, WHISPER, "make", model], check=True)
            for attention, limit in WHISPER_ERRORS.items():
                expected, _ = self.whisper_logits(model, attention, cpu_env())
                for device, chip in CHIPS.items():
                    with self.subTest(f"{device} {attention}"):
                        timeline = Path(folder) / f"{device}-{attention}.json"
                        env = device_env(chip, GGML_RUST_NPU_TRACE=str(timeline))
                        logits, log = self.whisper_logits(model, attention, self.with_plugin(env))
                        self.assertIn(f"using {device} backend", log)
                        error = sum((a - b) ** 2 for a, b in zip(expected, logits)) / sum(a * a for a in expected)
                        print(f"{device} {attention}: NMSE {error:.1e}")
                        self.assertLess(error, limit)
                        self.assertGreater(error, 0, "the CPU computed both")
                        if attention == "flash":
                            self.assertEqual(self.products(timeline, 100), (WHISPER_PRODUCTS[chip],) * 2)


class Node(Stock):
    """node-llama-cpp 3.22.1: ggml 0.25.1, API 2, ggml's symbols hidden from libraries that are loaded later."""

    fetched = staticmethod(stock.node_program)

    def generate(self, env, tokens=TOKENS, *layers):
        # One thread: this ggml has no OpenMP, so its threads spin at each barrier, and on a busy machine they wait there for a
        # CPU.
        threads = 1
        done = self.run_command("node", ["node", "generate.mjs", self.model(), PROMPT, tokens, threads, *layers], env,
                                cwd=self.program)
        self.assertEqual(done.code, 0, done.all[-2000:])
        return json.loads(done.out), done.log

    def test_text_is_that_of_the_static_build(self):
        for device, chip in CHIPS.items():
            with self.subTest(device):
                made, log = self.generate(self.with_plugin(device_env(chip)))
                self.assertEqual(made["build"], "prebuilt")
                self.assertGreater(made["layers"], 0)
                self.assertIn(f"using device {device}", log)
                # Without the CPU backend the graph is cut in other places than in the static build. After five words two tokens
                # are equally likely to within 0.0003.
                words = 5 if device == DEVICE else TOKENS
                made, wanted = (text.split()[:words] for text in (made["text"], self.text_of_static_build(chip, "-fa", "off")))
                self.assertEqual(made, wanted)


    def test_by_itself_it_puts_no_layer_on_the_device(self):
        """The guide says that gpuLayers has to be a number. If this test fails, that is no longer necessary."""
        made, log = self.generate(self.with_plugin(device_env(HEXAGON)), 1, "auto")
        self.assertEqual(made["layers"], 0)
        self.assertIn("HEX0", log)


class BuiltIn(Stock):
    """A program with shared libraries of ggml that has the backend itself, as after a build with -DGGML_RUST_NPU=ON."""

    fetched = staticmethod(build.shared)

    def test_the_plugin_leaves_its_devices_alone(self):
        done = self.run_command("list_devices", [self.program], self.with_plugin(device_env(f"{HEXAGON},{SIMULATED}")))
        self.assertEqual(done.code, 0, done.all)
        names = [line.split("\t")[0] for line in done.out.splitlines()]
        self.assertEqual([names.count(name) for name in (HEXAGON_DEVICE, DEVICE)], [1, 1], done.out)
        self.assertIn("this program has the backend RUST_NPU already", done.log)


class OldGgml(Stock):
    """pywhispercpp 1.5.1: ggml 0.13.1, where 42 operations have other numbers under the same API version."""

    fetched = staticmethod(stock.pywhispercpp)

    def test_is_refused_with_both_versions_and_what_to_install(self):
        ggml = next(self.program.glob("libggml-[0-9a-f]*.so*"))
        done = self.run_command("python", [sys.executable, "-c", LOADER, ggml, self.plugin], device_env())
        self.assertEqual(done.out, "refused\n")
        lines = our_lines(done.log)
        self.assertEqual(len(lines), 1, done.log)
        self.assertRegex(lines[0], r"ggml 0\.13\.1.*ggml-rust-npu \d.*install")
