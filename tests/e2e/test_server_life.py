"""A server's life apart from requests, on each simulated device: it sleeps and wakes, loads in each mode, changes adapters, and
continues from kept slots, checkpoints and parts of prompts."""

import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path

import model_file
import models
import random_model
from harness import HEXAGON, SIMULATED, Case, device_env, server
from test_router import SEAT, SMALL, TURN, locked_bytes, said

EMBEDDING, HIDDEN, RANK = 256, 768, 8
# The random model's tokens are bytes.
PROMPT = "".join(chr(97 + number * 7 % 26) for number in range(96))


def adapter(path):
    """Of random numbers, for the products of the feed-forward network."""
    numbers, tensors = random.Random(5), {}
    for layer in range(2):
        for name, inputs, outputs in ("ffn_up", EMBEDDING, HIDDEN), ("ffn_down", HIDDEN, EMBEDDING):
            for side, shape in ("a", [inputs, RANK]), ("b", [RANK, outputs]):
                tensors[f"blk.{layer}.{name}.weight.lora_{side}"] = (
                    shape, [numbers.gauss(0, 0.3) for _ in range(shape[0] * shape[1])])
    model_file.write(path, {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora",
                            "adapter.lora.alpha": float(RANK)}, tensors)
    return path


def get(running, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}{path}", timeout=60) as response:
        return json.load(response)


def ask(running, prompt, **options):
    """The whole answer, computed with the server's cache."""
    return running.post("/completion", {"prompt": prompt, "n_predict": 6, "temperature": 0, "ignore_eos": True,
                                        "return_tokens": True, **options})


class ServerLife(Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name).resolve()
        plain = random_model.write(cls.folder / "F32.gguf", 7, EMBEDDING, HIDDEN, heads=4, context=1024)
        cls.small = models.quantize(plain, cls.folder / "small.gguf", "Q8_0")

    def running(self, env, *args):
        return server(self.small, env, *SMALL, *args, name=self.id())

    def test_sleep_and_wake(self):
        """While it sleeps it has no weights, and on Rockchip nothing of the NPU open."""
        for chip in SIMULATED, HEXAGON:
            node = self.folder / "node"
            with self.subTest(chip), self.running(device_env(chip, GGML_RUST_NPU_SIM_NODE=str(node)),
                                                  "--sleep-idle-seconds", 1) as running:
                want = said(running)
                for _ in range(2):
                    if chip == SIMULATED:
                        self.assertIn(SEAT, locked_bytes(running.process.pid, node))
                    deadline = time.monotonic() + 30
                    while not get(running, "/props")["is_sleeping"]:
                        self.assertLess(time.monotonic(), deadline, "it does not go to sleep")
                        time.sleep(0.1)
                    self.assertFalse({SEAT, TURN} & locked_bytes(running.process.pid, node))
                    self.assertEqual(said(running), want)

    def test_load_modes(self):
        for chip in SIMULATED, HEXAGON:
            answers = []
            for mode in "mmap", "none", "dio":
                with self.running(device_env(chip), "-lm", mode) as running:
                    answers.append(said(running))
            self.assertEqual(answers, answers[:1] * 3, chip)

    def test_adapters_are_switched_on_and_off(self):
        file = adapter(self.folder / "adapter.gguf")
        for chip in SIMULATED, HEXAGON:
            with self.running(device_env(chip)) as running:
                plain = said(running)
            with self.subTest(chip), self.running(device_env(chip), "--lora", file) as running:
                def with_scale(scale):
                    running.post("/lora-adapters", [{"id": 0, "scale": scale}])
                    return said(running)

                changed = said(running)
                self.assertNotEqual(changed, plain)
                self.assertEqual([with_scale(scale) for scale in (0.0, 1.0, 0.0)], [plain, changed, plain])

    def test_slots_and_parts_of_prompts_on_rockchip(self):
        """tests/e2e/test_serving.py has slots on Hexagon."""
        with self.running(device_env(SIMULATED), "--slot-save-path", self.folder, "--cache-reuse", 16) as running:
            want = ask(running, PROMPT)
            saved = running.post("/slots/0?action=save", {"filename": "slot"})
            ask(running, PROMPT[::-1])
            restored = running.post("/slots/0?action=restore", {"filename": "slot"})
            self.assertEqual(restored["n_restored"], saved["n_saved"])
            again = ask(running, PROMPT)
            self.assertGreater(again["timings"]["cache_n"], len(PROMPT) // 2)
            self.assertEqual(again["tokens"], want["tokens"])
            self.check_reuse(running)

    def test_parts_of_prompts_on_hexagon(self):
        with self.running(device_env(HEXAGON), "--cache-reuse", 16) as running:
            ask(running, PROMPT)
            self.check_reuse(running)

    def test_checkpoints_on_hexagon(self):
        """A model with a sliding window no longer has the cache that a repeated prompt needs, and continues from a checkpoint
        before the prompt's end."""
        plain = random_model.write(self.folder / "window-F32.gguf", 8, EMBEDDING, HIDDEN, heads=4, context=1024, window=32)
        model = models.quantize(plain, self.folder / "window.gguf", "Q8_0")
        other_end = PROMPT + "some other words"
        for checkpoints in 8, 0:
            # More tokens than the cache of a sliding window can hold.
            with server(model, device_env(HEXAGON), *SMALL, "-b", 32, "-ub", 32, "--ctx-checkpoints", checkpoints,
                        name=self.id()) as running:
                running.ask(PROMPT, 300, n_probs=0)
                again, fresh = (running.ask(other_end, 6, logit_bias=random_model.ascii_only(), cache_prompt=cached)
                                for cached in (True, False))
            self.assertEqual(again["timings"]["cache_n"] > len(PROMPT) // 2, checkpoints > 0, again["timings"])
            self.assert_same_or_tied(fresh, again)

    def check_reuse(self, running):
        """Without its beginning, a prompt's rest is moved in the cache and not computed again."""
        rest = PROMPT[:8] + PROMPT[40:]
        reused = ask(running, rest, n_cache_reuse=16)
        self.assertGreater(reused["timings"]["cache_n"], len(rest) // 2)
        self.assertEqual(len(reused["tokens"]), 6)
