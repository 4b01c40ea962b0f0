"""The transformations that `ggml-npu quantize` folds into a model change no logit: rotations of SmolLM2, in stock arithmetic
on the CPU."""

import array
import struct
import tempfile
from pathlib import Path

import build
import fetch
import models
from harness import Case
from project import JOBS, LOGS, ROOT, cpu_env, tool_env

CHUNK_TOKENS = 512

# Relative to the largest log-probability. All arithmetic is in F32, and a different order alone stays below this.
LIMIT = 1e-4

# A wrong factor in one tensor gives far more, see `test_another_model_would_be_seen`.
SEEN = 1e-2


def log_probabilities(path):
    """The rows of a file of llama-perplexity's: step, smallest value, and numbers of steps above it for each token.

    The file is a word, the sizes of context and vocabulary, the number of chunks, the tokens, and the rows.
    """
    with open(path, "rb") as file:
        context, vocabulary, chunks = struct.unpack("<iii", file.read(20)[8:])
        file.seek(4 * context * chunks, 1)
        row_bytes = 2 * (2 * ((vocabulary + 1) // 2) + 4)
        while len(row := file.read(row_bytes)) == row_bytes:
            yield *struct.unpack("<ff", row[:8]), array.array("H", row[8:8 + 2 * vocabulary])


def difference(have, want):
    """The largest difference of any two numbers over the largest number of their row, and the rows compared."""
    worst, rows = 0, 0
    for (step, least, x), (other_step, other_least, y) in zip(log_probabilities(have), log_probabilities(want), strict=True):
        largest = max(abs(least), abs(least + step * 65535))
        off = max(abs(p * step + least - q * other_step - other_least) for p, q in zip(x, y, strict=True))
        worst, rows = max(worst, off / largest), rows + 1
    return worst, rows


class Fold(Case):
    @classmethod
    def setUpClass(cls):
        build.tool(LOGS / "tool.log", tool_env(), "--workspace")
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = Path(cls.temporary.name)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def folded(self, name, *args):
        model = self.folder / f"{name}.gguf"
        tool = ROOT / "target" / "debug" / "ggml-npu"
        source = models.variant("F16", fetch.fetched(fetch.SMOLLM2))
        done = self.run_command("ggml-npu", [tool, "quantize", source, "-o", model, "--type", "f32", *args], cpu_env())
        self.assertEqual(done.code, 0, done.all)
        return model

    def logits(self, model):
        out = model.with_suffix(".logits")
        self.succeed("llama-perplexity", "-m", model, "-f", fetch.text(), "-c", CHUNK_TOKENS, "-b", CHUNK_TOKENS, "--chunks", 1,
                     "-t", JOBS, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--kl-divergence-base", out, env=cpu_env())
        return out

    def test_rotations_change_no_logit(self):
        want = self.logits(self.folded("plain"))
        off, rows = difference(self.logits(self.folded("rotated", "--rotate", "r1,r2")), want)
        self.assertEqual(rows, CHUNK_TOKENS // 2 - 1)
        # The file's numbers have 16 bits, so some error is expected. No error at all would mean that a model was compared with
        # itself.
        self.assertGreater(off, 0)
        self.assertLess(off, LIMIT)

    def test_another_model_would_be_seen(self):
        want = self.logits(self.folded("plain"))
        rounded = models.variant("Q8_0", fetch.fetched(fetch.SMOLLM2))
        link = self.folder / "rounded.gguf"
        link.symlink_to(rounded)
        self.assertGreater(difference(self.logits(link), want)[0], SEEN)
