"""`ggml-npu quantize` compared with llama-quantize: the same bytes where both only round, and no larger errors where both
search."""

import array
import math
import tempfile
import unittest
from pathlib import Path
from random import Random

import model_file
from harness import Case, cpu_env
from model_file import Reader

import build
import models
from project import LOGS, ROOT, binary, tool_env

TOOL = ROOT / "target" / "debug" / "ggml-npu"

# One size has rows of two super-blocks, the other has rows that are not whole super-blocks.
EMBED, FFN = 512, 320
HEADS, KV_HEADS = 8, 4

# The largest error, relative to that of llama-quantize.
LIMIT = 1.02


def numbers(random, n, spread):
    """Numbers of both signs, whose sizes differ by more the larger `spread` is."""
    return [random.gauss(0, 0.03) * math.exp(random.gauss(0, spread)) for _ in range(n)]


def small_model(folder):
    """A random model of one block and statistics of its inputs, as files, and the statistics."""
    random = Random(5)
    kv = EMBED // HEADS * KV_HEADS
    weights = {"attn_q": (EMBED, EMBED), "attn_k": (EMBED, kv), "attn_v": (EMBED, kv), "attn_output": (EMBED, EMBED),
               "ffn_gate": (EMBED, FFN), "ffn_up": (EMBED, FFN), "ffn_down": (FFN, EMBED)}
    tensors = {"token_embd.weight": ((EMBED, 64), numbers(random, EMBED * 64, 0)),
               "output_norm.weight": ((EMBED,), [1.0] * EMBED), "blk.0.attn_norm.weight": ((EMBED,), [1.0] * EMBED),
               "blk.0.ffn_norm.weight": ((EMBED,), [1.0] * EMBED)}
    statistics, means = {}, {}
    for number, (part, (k, n)) in enumerate(weights.items()):
        name = f"blk.0.{part}.weight"
        tensors[name] = ((k, n), numbers(random, k * n, 0.2 * number))
        means[name] = [math.exp(random.gauss(0, 1.5)) for _ in range(k)]
        statistics[f"{name}.in_sum2"] = ((k, 1), [16 * mean for mean in means[name]])
        statistics[f"{name}.counts"] = ((1, 1), [16.0])
    sizes = {"context_length": 64, "embedding_length": EMBED, "block_count": 1, "feed_forward_length": FFN,
             "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": 64,
             "attention.layer_norm_rms_epsilon": 1e-5}
    entries = {"general.architecture": "llama"} | {f"llama.{key}": size for key, size in sizes.items()}
    model, imatrix = folder / "model.gguf", folder / "imatrix.gguf"
    model_file.write(model, entries, tensors)
    model_file.write(imatrix, {"general.type": "imatrix", "imatrix.datasets": ["none"], "imatrix.chunk_count": 1,
                               "imatrix.chunk_size": 16}, statistics)
    return model, imatrix, means


class Quantize(Case):
    @classmethod
    def setUpClass(cls):
        build.tool(LOGS / "tool-quantize.log", tool_env(), "--workspace")

    def test_types_without_statistics_are_those_of_llama_quantize(self):
        model = models.variant("F16")
        for kind in "Q4_0", "Q4_1", "Q5_0":
            with self.subTest(kind), tempfile.TemporaryDirectory() as folder:
                theirs, ours = Path(folder) / "theirs.gguf", Path(folder) / "ours.gguf"
                for command in ([binary("llama-quantize"), "--pure", "--token-embedding-type", "q8_0", model, theirs, kind],
                                [TOOL, "quantize", model, "-o", ours, "--type", kind.lower()]):
                    done = self.run_command("quantize", command, cpu_env())
                    self.assertEqual(done.code, 0, done.all)
                theirs, ours = Reader(theirs).tensors(), Reader(ours).tensors()
                self.assertEqual(theirs.keys(), ours.keys())
                self.assertGreater(len(theirs), 200)
                differ = [name for name in theirs if theirs[name] != ours[name]]
                self.assertEqual(differ, [])

    def dequantized(self, model):
        """The numbers of each tensor, by ggml."""
        plain = model.with_suffix(".f32.gguf")
        self.succeed("llama-quantize", "--allow-requantize", model, plain, "F32", env=cpu_env())
        tensors = Reader(plain).tensors()
        self.assertEqual({kind for kind, _ in tensors.values()}, {model_file.F32})
        return {name: array.array("f", data) for name, (_, data) in tensors.items()}

    def test_types_that_are_searched_lose_no_more_than_with_llama_quantize(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            model, imatrix, means = small_model(folder)
            want = {name: array.array("f", data) for name, (_, data) in Reader(model).tensors().items()}
            theirs, ours = folder / "theirs.gguf", folder / "ours.gguf"
            for kind, word in (("Q4_K_S", "Q4_K"), ("Q3_K_S", "q3_k"), ("Q5_0", "q5_0")):
                for statistics in [], ["--imatrix", imatrix]:
                    with self.subTest(kind, statistics=bool(statistics)):
                        self.succeed("llama-quantize", "--pure", "--token-embedding-type", "q8_0", *statistics, model, theirs,
                                     kind, env=cpu_env())
                        done = self.run_command("quantize", [TOOL, "quantize", model, "-o", ours, "--type", word, *statistics],
                                                cpu_env())
                        self.assertEqual(done.code, 0, done.all)
                        both = [Reader(path).tensors() for path in (theirs, ours)]
                        types = [{name: number for name, (number, _) in tensors.items()} for tensors in both]
                        self.assertEqual(*types)
                        values = [self.dequantized(path) for path in (theirs, ours)]
                        for name, squares in means.items():
                            weights = squares if statistics else [1.0] * len(squares)
                            errors = [sum(weights[i % len(weights)] * (x - y) ** 2 for i, (x, y) in enumerate(zip(want[name],
                                      tensors[name], strict=True))) for tensors in values]
                            self.assertGreater(errors[1], 0)
                            self.assertLessEqual(errors[1], LIMIT * errors[0], f"{kind} {name}")


if __name__ == "__main__":
    unittest.main()
