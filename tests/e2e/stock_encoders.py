"""Debian's libmtmd computes an image with many projectors as the CPU does, each in one split; a voice and a UNet, too."""

import array
import re
import sys
import tempfile
from pathlib import Path

import models
import projectors
import stock
import vocoder
from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, cpu_env, device_env
from stocked import CHIPS, DebianStock

PROGRAM, TOKENS, UNET = (stock.SOURCES / f"{name}.py" for name in ("vision", "tokens", "unet"))
# Of a text to speech.
COUNT = 100
ERROR = 1e-4
# Rows of products that take the matrix unit: of fewer, there may be some with other operands.
ROWS = 32


class Projectors(DebianStock):
    def embeddings(self, mmproj, side, env):
        out = mmproj.with_name("embeddings")
        model = models.variant("F16")
        done = self.run_stock(sys.executable, PROGRAM, self.program.libraries, model, mmproj, side, out, env=env)
        return array.array("f", out.read_bytes()), done.log

    def test_embeddings_of_an_image_are_those_of_the_cpu(self):
        for projector, encoder in projectors.ENCODERS.items():
            with tempfile.TemporaryDirectory() as folder:
                mmproj = projectors.write(Path(folder) / "mmproj.gguf", projector)
                expected, _ = self.embeddings(mmproj, encoder.side, cpu_env())
                self.assertGreater(len(expected), 0)
                for chip in HEXAGON, SIMULATED:
                    with self.subTest(f"{projector} {chip}"):
                        timeline = Path(folder) / f"{chip}.json"
                        env = self.with_plugin(device_env(chip, GGML_RUST_NPU_TRACE=str(timeline)))
                        found, log = self.embeddings(mmproj, encoder.side, env)
                        error = sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)
                        told = re.findall(r"\w+: (\d+) of (\d+) nodes of a graph of \d+ rows, in (\d+) split.*", log)
                        products, on_matrix_unit = self.products(timeline, ROWS)
                        print(f"{projector} {chip}: NMSE {error:.1e}, {told}, {on_matrix_unit} of {products} products")
                        self.assertEqual(len(found), len(expected))
                        self.assertLess(error, ERROR)
                        self.assertNotIn("please report this on github", log)
                        self.assertEqual([splits for *_, splits in told], ["1"])
                        self.assertEqual(on_matrix_unit, products)
                        if chip == HEXAGON:
                            self.assertEqual(told[0][0], told[0][1])


class Voice(DebianStock):
    """The decoder of text to speech."""

    def frequencies(self, model, env):
        out = model.with_name("frequencies")
        done = self.run_stock(sys.executable, TOKENS, self.program.libraries, model, COUNT, out, env=env)
        return array.array("f", out.read_bytes()), done.log

    def test_wavtokenizer_computes_what_it_computes_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            model = vocoder.write(Path(folder) / "vocoder.gguf")
            expected, _ = self.frequencies(model, cpu_env())
            self.assertEqual(len(expected), COUNT * vocoder.OUT)
            for chip in HEXAGON, SIMULATED:
                with self.subTest(chip):
                    found, log = self.frequencies(model, self.with_plugin(device_env(chip)))
                    error = sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)
                    told = re.findall(r"\w+: (\d+) of (\d+) nodes of a graph of .*", log)
                    print(f"wavtokenizer {chip}: NMSE {error:.1e}, {re.findall('.*nodes of a.*', log)}")
                    self.assertLess(error, ERROR)
                    self.assertEqual(len(told), 1)
                    self.assertGreater(error, 0, "the CPU computed both")
                    if chip == HEXAGON:
                        # The CPU multiplies with four kernels of one column, which are packed as matrices of another shape.
                        nodes, all_nodes = map(int, told[0])
                        self.assertLessEqual(all_nodes - nodes, 4)


class Generator(DebianStock):
    """A block of a UNet, in a program that knows ggml alone: convolutions, a time, attention to itself and to a text."""

    def test_a_block_of_a_unet_is_one_split(self):
        results = {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "values"
            settings = {"CPU": cpu_env()} | {device: self.with_plugin(device_env(chip)) for device, chip in CHIPS.items()}
            for device, env in settings.items():
                done = self.run_stock(sys.executable, UNET, self.program.libraries, device, out, env=env)
                results[device] = array.array("f", out.read_bytes())
                self.assertEqual(done.out, "splits 1\n")
                if device == HEXAGON_DEVICE:
                    told, = re.findall(r"(\d+) of (\d+) nodes of a graph of 256 rows, in 1 split", done.log)
                    self.assertEqual(*told)
        expected = results.pop("CPU")
        for device, found in results.items():
            error = sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)
            print(f"{device}: NMSE {error:.1e}")
            self.assertLess(error, ERROR)
            self.assertGreater(error, 0, "the CPU computed both")
