"""One, two or four NPUs, by each of llama.cpp's ways to share a model out (-sm): the text is that of one NPU."""

import re
import tempfile
from pathlib import Path

import models
from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, device_env

TOKENS = 16
TWO_HEXAGONS = f"{HEXAGON},{HEXAGON}"
FOUR_HEXAGONS = ",".join([HEXAGON] * 4)
BOTH_FAMILIES = f"{HEXAGON},{SIMULATED}"
DEVICES = {HEXAGON: [HEXAGON_DEVICE], SIMULATED: [DEVICE], TWO_HEXAGONS: ["HEX0", "HEX1"],
           FOUR_HEXAGONS: ["HEX0", "HEX1", "HEX2", "HEX3"],
           BOTH_FAMILIES: [HEXAGON_DEVICE, DEVICE]}
MODES = ["layer", "row", "tensor"]

# Counting, because a different order of sums, or the other family's rounding, must not decide between two equally likely words.
PROMPT = "One, two, three, four, five,"

# Seven products in each of the model's layers, and a last one.
LAYERS = 30
PRODUCTS = 7 * LAYERS + 1


class Split(Case):
    # The text with one NPU, computed at its first use.
    text = None

    def split(self, chips, mode, **settings):
        # Weights in F16, so that a part of a row is rounded exactly as the whole row.
        return self.complete(PROMPT, TOKENS, device_env(chips, **settings), "-sm", mode, "-fa", "on", "-t", 1, "-v",
                             model=models.variant("F16"))

    def of_one(self):
        Split.text = Split.text or self.split(HEXAGON, "none").out
        return Split.text

    def assert_text_of_one(self, chips):
        for mode in MODES:
            with self.subTest(f"{chips} -sm {mode}"):
                done = self.split(chips, mode)
                self.assertEqual(done.out, self.of_one())
                for device in DEVICES[chips]:
                    nodes = re.search(rf"{device}: (\d+) of \d+ nodes of a token", done.log)
                    # With slices on several NPUs, a token is computed in many graphs, and the log line counts some of them.
                    is_sliced = mode == "tensor" and len(DEVICES[chips]) > 1
                    least = 1 if is_sliced else PRODUCTS // len(DEVICES[chips]) * 3 // 4
                    self.assertGreaterEqual(int(nodes[1]), least, nodes[0])
                told = [line for line in done.ours("W") if "-sm row" in line]
                self.assertEqual(len(told), mode == "row", told)

    def test_one_hexagon(self):
        self.assert_text_of_one(HEXAGON)

    def test_one_rockchip(self):
        self.assert_text_of_one(SIMULATED)

    def test_four_hexagons(self):
        self.assert_text_of_one(FOUR_HEXAGONS)

    def test_both_families(self):
        self.assert_text_of_one(BOTH_FAMILIES)

    def test_rockchip_computes_the_products_of_slices(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            done = self.split(SIMULATED, "tensor", GGML_RUST_NPU_TRACE=str(trace))
            products = re.findall(r'"tid":1,[^\n]*"name":"MUL_MAT"', trace.read_text(encoding="utf-8"))
        self.assertEqual(done.out, self.of_one())
        # The last token is generated, but not computed with.
        self.assertGreaterEqual(len(products), TOKENS * PRODUCTS)

    def test_an_npu_without_a_part_of_a_tensor_adds_zeros(self):
        """The model has three groups of heads, so in some layers one of two NPUs has none. Its part was memory that had never
        been written, times zero: under strict coherence that is NaN."""
        strict = self.split(TWO_HEXAGONS, "tensor", GGML_RUST_NPU_SIM_COHERENCE="strict")
        self.assertEqual(strict.out, self.of_one())
