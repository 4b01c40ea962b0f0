"""`ggml-npu quantize` without statistics writes the same weights as llama-quantize, byte for byte."""

import struct
import tempfile
import unittest
from pathlib import Path

from harness import Case, cpu_env

import build
import models
from project import LOGS, ROOT, binary, tool_env

TOOL = ROOT / "target" / "debug" / "ggml-npu"

# Sizes of the plain kinds of values of a GGUF, by number, and the kinds that have lengths.
# SOURCE: enum gguf_type, ggml/include/gguf.h of llama.cpp 0.5.0.
PLAIN = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
ALIGNMENT = 32


class Reader:
    """Reads the header of a GGUF."""

    def __init__(self, path):
        self.bytes, self.at = path.read_bytes(), 8

    def number(self, form):
        value, = struct.unpack_from("<" + form, self.bytes, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return self.bytes[self.at - length:self.at].decode()

    def skip(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            each, count = self.number("I"), self.number("Q")
            if each in PLAIN:
                self.at += count * PLAIN[each]
            else:
                for _ in range(count):
                    self.skip(each)
        else:
            self.at += PLAIN[kind]

    def tensors(self):
        """Type and bytes of each tensor, by name. No metadata of these files changes the alignment."""
        tensors, pairs = self.number("Q"), self.number("Q")
        for _ in range(pairs):
            self.text()
            self.skip(self.number("I"))
        found = []
        for _ in range(tensors):
            name = self.text()
            dims = self.number("I")
            self.at += 8 * dims
            found.append((name, self.number("I"), self.number("Q")))
        start = -(-self.at // ALIGNMENT) * ALIGNMENT
        ends = [offset for _, _, offset in found[1:]] + [len(self.bytes) - start]
        return {name: (kind, self.bytes[start + offset:start + end]) for (name, kind, offset), end in zip(found, ends)}


class Quantize(Case):
    @classmethod
    def setUpClass(cls):
        build.tool(LOGS / "tool-quantize.log", tool_env(), "--workspace")

    def test_types_without_statistics_are_those_of_llama_quantize(self):
        model = models.variant("F16")
        for kind in "Q4_0", "Q4_1":
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


if __name__ == "__main__":
    unittest.main()
