"""LoRA adapters and control vectors change a model's text on the device as they do on the CPU, and cut no graph."""

import random
import tempfile
from pathlib import Path

import model_file
import models
from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, cpu_env, device_env, server

PROMPT = "Once upon a time, in a small village by the sea,"
TOKENS = 8
# Sizes of SmolLM2-135M: an embedding, all keys of a token, the hidden layer; and the number of blocks.
EMBEDDING, KEYS, HIDDEN, LAYERS = 576, 192, 1536, 30
RANK = 8
# The likeliest tokens' log-probabilities of two programs differ by at most DIFFERENCE. The adapters change them by more than
# CHANGE.
DIFFERENCE, CHANGE = 0.05, 0.2


def lora(path):
    """An adapter of random numbers for a query, a value and the three products of a feed-forward network in each block."""
    numbers, tensors = random.Random(3), {}
    for layer in range(LAYERS):
        for name, inputs, outputs in [("attn_q", EMBEDDING, EMBEDDING), ("attn_v", EMBEDDING, KEYS),
                                      ("ffn_gate", EMBEDDING, HIDDEN), ("ffn_up", EMBEDDING, HIDDEN),
                                      ("ffn_down", HIDDEN, EMBEDDING)]:
            for side, shape in ("a", [inputs, RANK]), ("b", [RANK, outputs]):
                spread = inputs ** -0.5 if side == "a" else 0.02
                tensors[f"blk.{layer}.{name}.weight.lora_{side}"] = (
                    shape, [numbers.gauss(0, spread) for _ in range(shape[0] * shape[1])])
    model_file.write(path, {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora",
                            "adapter.lora.alpha": float(2 * RANK)}, tensors)
    return path


def control_vector(path):
    numbers = random.Random(4)
    # The first block has no direction.
    tensors = {f"direction.{layer}": ([EMBEDDING], [numbers.gauss(0, 0.5) for _ in range(EMBEDDING)])
               for layer in range(1, LAYERS)}
    model_file.write(path, {"general.architecture": "controlvector", "controlvector.model_hint": "llama",
                            "controlvector.layer_count": LAYERS - 1}, tensors)
    return path


class Adapters(Case):
    def model(self):
        # With F16, neither the CPU nor the devices round activations to 8 bits.
        return models.variant("F16")

    def likely(self, env, name, *args):
        """For each place of a text, the logarithms of the likeliest tokens' probabilities."""
        with server(self.model(), env, "-c", 256, "-t", 1, *args, name=name) as running:
            answer = running.post("/completion", {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "n_probs": 5,
                                                  "ignore_eos": True})
        return [{each["id"]: each["logprob"] for each in place["top_logprobs"]} for place in answer["completion_probabilities"]]

    def difference(self, a, b):
        """The most by which logarithms of common tokens' probabilities differ at the first place."""
        common = a[0].keys() & b[0].keys()
        return max((abs(a[0][token] - b[0][token]) for token in common), default=float("inf"))

    def check(self, write, option):
        with tempfile.TemporaryDirectory() as folder:
            file = write(Path(folder) / "adapter.gguf")
            plain = self.likely(cpu_env(), f"{write.__name__}-plain")
            expected = self.likely(cpu_env(), f"{write.__name__}-cpu", option, file)
            self.assertGreater(self.difference(plain, expected), CHANGE)
            for chip in HEXAGON, SIMULATED:
                with self.subTest(chip):
                    found = self.likely(device_env(chip), f"{write.__name__}-{chip}", option, file)
                    print(f"{write.__name__} on {chip}: {self.difference(expected, found):.4f}")
                    self.assertLess(self.difference(expected, found), DIFFERENCE)
                    self.assertEqual([max(place, key=place.get) for place in found],
                                     [max(place, key=place.get) for place in expected])
            self.assert_one_split(device_env(HEXAGON), HEXAGON_DEVICE, option, file, "--no-warmup")

    def test_lora(self):
        self.check(lora, "--lora")

    def test_control_vector(self):
        self.check(control_vector, "--control-vector")
