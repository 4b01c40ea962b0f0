"""GGML_RUST_NPU_KEEP=off changes no result and takes the packed weights' own bytes out of memory."""

import re
from pathlib import Path

from harness import Case, device_env, server

PROMPT = "The capital of France is"


class Keep(Case):
    def run_with(self, keep):
        """The text, and the memory of its own that the program had at the end of its load, in KiB."""
        # The server stays until it is told to end, so it can be looked at.
        with server(self.model(), device_env(GGML_RUST_NPU_KEEP=keep), "-c", 512, "-np", 1,
                    name=f"server-keep-{keep}") as running:
            text = running.complete(PROMPT, 32)
            status = Path(f"/proc/{running.process.pid}/status").read_text(encoding="ascii")
        return text, int(re.search(r"RssAnon:\s+(\d+)", status).group(1))

    def test_released_bytes_are_not_missed(self):
        text, kib = self.run_with("on")
        released_text, released_kib = self.run_with("off")
        self.assertEqual(released_text, text)
        size = self.model().stat().st_size // 1024
        print(f"anonymous memory: {kib} KiB, without kept bytes {released_kib} KiB; the model has {size} KiB")
        # Embeddings that are read row by row stay with the CPU, and weights give back whole blocks of 64 KiB.
        self.assertLess(released_kib, kib - size // 2)
