"""A model whose activations are beyond FP16's 65,504 is as exact on the devices as others.

Real models have such activations. This one is SmolLM2 with the norm before `ffn_gate` and `ffn_up` times 2^7, and `ffn_gate`
and `ffn_down` divided by it, so that its answers are those of SmolLM2. The first token's inputs of `ffn_down`, 2,969 in
SmolLM2's layer 11, are 380,000. The CPU backend makes FP16 of them if the weights are in FP16, and has no answer then.
"""

import array
import tempfile
from pathlib import Path

from harness import HEXAGON, SIMULATED, Case, cpu_env, device_env

import fetch
import kld
import models
from model_file import Reader, write
from project import LOGS, MODELS, binary, made_once, run

FACTOR = 128
LARGEST = 65_504
TOKENS = 32


def model():
    """Returns SmolLM2 with outliers, in F32, as a file that is made once."""
    dest = MODELS / "SmolLM2-135M-outliers-F32.gguf"
    source = models.exact("Q8_0", fetch.fetched(fetch.SMOLLM2))

    def make(part):
        entries, tensors = Reader(source).contents()
        write(part, entries, {name: (shape, multiplied(data, factor_of(name))) for name, (shape, data, _) in tensors.items()})

    return made_once(dest, make)


def factor_of(name):
    if name.endswith("ffn_norm.weight"):
        return FACTOR
    return 1 / FACTOR if name.endswith(("ffn_gate.weight", "ffn_down.weight")) else 1


def multiplied(data, factor):
    """Returns F32 numbers times a power of two."""
    return data if factor == 1 else array.array("f", [factor * x for x in array.array("f", data)]).tobytes()


class Outliers(Case):
    def test_activations_are_beyond_fp16(self):
        with tempfile.TemporaryDirectory() as folder:
            statistics = Path(folder) / "imatrix.gguf"
            run([binary("llama-imatrix"), "-m", model(), "-f", fetch.text(), "-c", TOKENS, "--chunks", 1, "-o", statistics],
                LOGS / "outliers-imatrix.log", cpu_env())
            sums = [max(array.array("f", data)) for name, (_, data) in Reader(statistics).tensors().items()
                    if name.endswith("ffn_down.weight.in_sum2")]
        # A column's largest input is at least the root mean square of all its inputs.
        self.assertGreater((max(sums) / TOKENS) ** 0.5, LARGEST)

    def test_divergence_is_under_the_limits(self):
        for kind in ("F16", "Q8_0"):
            runs = {f"{kind} {chip}": kld.Run(device_env(chip)) for chip in (SIMULATED, HEXAGON)}
            for row in kld.measure(kind, kld.Setup(1, model()), runs):
                with self.subTest(row.kind):
                    print(kld.line(row), flush=True)
                    self.assertLessEqual(row.device.divergence, row.limit)
                    self.assertGreater(row.device.divergence, 0)
