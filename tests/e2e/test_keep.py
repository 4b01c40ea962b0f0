"""ggml's bytes of packed weights are not kept in memory, except with GGML_RUST_NPU_KEEP=on, and no result depends on that. On
Hexagon a model needs no more memory than its file."""

import re
from pathlib import Path

from harness import Case, device_env, server

import models

PROMPT = "The capital of France is"


class Keep(Case):
    def run_with(self, keep):
        """The text, and the program's private memory at the end of its load, in KiB."""
        # The server runs until the test ends it, so its memory can be read.
        env = device_env(GGML_RUST_NPU_KEEP=keep) if keep else device_env()
        with server(self.model(), env, "-c", 512, "-np", 1, name=f"server-keep-{keep or 'default'}") as running:
            text = running.complete(PROMPT, 32)
            status = Path(f"/proc/{running.process.pid}/status").read_text(encoding="ascii")
        return text, int(re.search(r"RssAnon:\s+(\d+)", status).group(1))

    def test_released_bytes_are_not_missed(self):
        text, kib = self.run_with("on")
        released_text, released_kib = self.run_with(None)
        self.assertEqual(released_text, text)
        size = self.model().stat().st_size // 1024
        print(f"anonymous memory: {kib} KiB, without kept bytes {released_kib} KiB; the model has {size} KiB")
        # The CPU keeps embeddings, which are read row by row. Weights give back whole blocks of 64 KiB.
        self.assertLess(released_kib, kib - size // 2)

    def test_a_file_of_k_quants_takes_its_own_size_on_hexagon(self):
        self.assert_no_larger_than_its_file(models.variant("Q4_K_M"))
