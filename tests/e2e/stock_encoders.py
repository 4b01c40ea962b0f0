"""Debian's libmtmd computes images and speech with each projector as the CPU does, in one split; so are a voice and a UNet."""

import array
import re
import sys
import tempfile
from pathlib import Path

import projectors
import stock
import vocoder
from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, cpu_env, device_env
from stocked import CHIPS, DebianStock

PROGRAM, TOKENS, UNET = (stock.SOURCES / f"{name}.py" for name in ("vision", "tokens", "unet"))
# The number of pieces in a text-to-speech run.
COUNT = 100
ERROR = 1e-4
# With weights in Q8_0, against the same numbers in F32. Rockchip multiplies in INT8.
QUANTIZED_ERROR = {HEXAGON: 1e-4, SIMULATED: 1e-3}
# An input is computed so often.
RUNS = 2
# Rows of products that take the matrix unit: of fewer, there may be some with other operands.
ROWS = 32


def difference(expected, found):
    """The mean square of the difference, divided by that of the expected numbers."""
    return sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)


class Projectors(DebianStock):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        projectors.write_text_model(self.folder / "text.gguf")
        self.mmproj = self.folder / "mmproj.gguf"

    def embeddings(self, encoder, mmproj, env):
        out = self.folder / "embeddings"
        size = f"{encoder.side}s" if encoder.is_speech else encoder.side
        done = self.run_stock(sys.executable, PROGRAM, self.program.libraries, self.folder / "text.gguf", mmproj, size, out,
                              env=env)
        return array.array("f", out.read_bytes()), done.log

    def test_embeddings_are_those_of_the_cpu(self):
        for projector, encoder in projectors.ENCODERS.items():
            projectors.write(self.mmproj, encoder)
            expected, _ = self.embeddings(encoder, self.mmproj, cpu_env())
            self.assertGreater(len(expected), 0)
            computed = set()
            for chip in HEXAGON, SIMULATED:
                with self.subTest(f"{projector} {chip}"):
                    computed.add(self.compare(projector, encoder, chip, expected))
            with self.subTest(projector):
                self.assertEqual(len(computed), 1, "Rockchip's NPU computes other products than Hexagon's matrix unit")

    def compare(self, projector, encoder, chip, expected):
        """Compares a device's embeddings with the expected ones; returns the number of results of the matrix unit."""
        timeline = self.folder / f"{chip}.json"
        env = self.with_plugin(device_env(chip, GGML_RUST_NPU_TRACE=str(timeline)))
        found, log = self.embeddings(encoder, self.mmproj, env)
        error = difference(expected, found)
        (nodes, all_nodes, splits), = re.findall(r"\w+: (\d+) of (\d+) nodes of a graph of \d+ rows, in (\d+) split.*", log)
        products, on_matrix_unit = self.products(timeline, ROWS)
        print(f"{projector} {chip}: NMSE {error:.1e}, {nodes} of {all_nodes} nodes, {splits} splits, {on_matrix_unit} of "
              f"{products} products")
        self.assertEqual(len(found), len(expected))
        self.assertLess(error, ERROR)
        self.assertNotIn("please report this on github", log)
        self.assertEqual(splits, "1")
        if chip == HEXAGON:
            self.assertEqual(nodes, all_nodes)
            self.assertEqual(on_matrix_unit, products - RUNS * encoder.on_vectors)
        return self.results(timeline, ROWS)

    def test_quantized_weights_are_as_exact_as_the_arithmetic(self):
        for projector in "mlp", "idefics3":
            encoder, exact = projectors.ENCODERS[projector], self.folder / "exact.gguf"
            projectors.write_quantized(self.mmproj, exact, encoder)
            expected, _ = self.embeddings(encoder, exact, cpu_env())
            for chip in HEXAGON, SIMULATED:
                with self.subTest(f"{projector} {chip}"):
                    found, log = self.embeddings(encoder, self.mmproj, self.with_plugin(device_env(chip)))
                    error = difference(expected, found)
                    print(f"{projector} in Q8_0 {chip}: NMSE {error:.1e}")
                    self.assertLess(error, QUANTIZED_ERROR[chip])
                    self.assertRegex(log, "nodes of a graph of .* in 1 split")


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
                    error = difference(expected, found)
                    (nodes, all_nodes, splits), = re.findall(r"\w+: (\d+) of (\d+) nodes of a graph of .* in (\d+) split", log)
                    print(f"wavtokenizer {chip}: NMSE {error:.1e}, {re.findall('.*nodes of a.*', log)}")
                    self.assertLess(error, ERROR)
                    self.assertGreater(error, 0, "the CPU computed both")
                    self.assertEqual(splits, "1")
                    if chip == HEXAGON:
                        self.assertEqual(nodes, all_nodes)


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
            error = difference(expected, found)
            print(f"{device}: NMSE {error:.1e}")
            self.assertLess(error, ERROR)
            self.assertGreater(error, 0, "the CPU computed both")
