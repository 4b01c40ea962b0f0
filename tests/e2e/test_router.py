"""Several processes on one NPU: llama-server as a router of two models, and two servers with a model each. Each answer is the
one that the model gives when it has the NPU for itself.

A file replaces the node of the simulated Rockchip NPU, which the processes share as on a board. The stand-in fails for good if
two of them are in the library at once.
"""

import os
import re
import signal
import tempfile
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import models
import random_model
from harness import HEXAGON, SIMULATED, Case, device_env, server

PROMPT, TOKENS = "The quick brown fox jumps over the lazy dog", 6
# A request that takes a while: the products of its prompt take long, and the prompt is computed repeatedly.
LONG, LONG_TOKENS = " ".join(str(number) for number in range(150)), 100
NAMES = ["one", "two"]
ALTERNATIONS = 20
SMALL = ["-t", 1, "-c", 1024, "-np", 1, "-ngl", 99]

# The bytes of the node that processes lock. SOURCE: rknpu-ops/src/node.rs.
TURN, SEAT = 0, 2
# How many seconds a process waits for its turn (src/rockchip/driver/lock.rs), and a reserve for the machine's other work.
PATIENCE_S, SLACK_S = 10, 15


def locked_bytes(pid, node):
    """The bytes of a file that a process has locked."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry) == str(node):
                info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text(encoding="utf-8")
                found |= {int(byte) for byte in re.findall(r"^lock:.*OFDLCK.* (\d+) \d+$", info, re.M)}
        except FileNotFoundError:
            pass
    return found


def said(running, name=None, prompt=PROMPT, n_predict=TOKENS):
    """A model's answer: each token and its log-probability, which shows more than the text of a random model."""
    model = {} if name is None else {"model": name}
    answer = running.post("/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True,
                                          "cache_prompt": False, "n_probs": 1, "logit_bias": random_model.ascii_only(),
                                          **model})
    return [(place["id"], place["logprob"]) for place in answer["completion_probabilities"]]


class Shared(Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.models = cls.folder / "models"
        cls.models.mkdir()
        for seed, name in enumerate(NAMES):
            plain = random_model.write(cls.folder / f"{name}-F32.gguf", seed, embedding=256, hidden=768, heads=4, context=1024)
            models.quantize(plain, cls.models / f"{name}.gguf", "Q8_0")
        cls.alone = {}

    def env(self, chip):
        """That of processes which share an NPU for this test alone."""
        self.node = Path(self.folder / f"{self.id()}.node").resolve()
        return device_env(chip, GGML_RUST_NPU_SIM_NODE=str(self.node))

    @contextmanager
    def one_model(self, name, env):
        with server(self.models / f"{name}.gguf", env, *SMALL, name=f"{self.id()}-{name}") as running:
            yield running

    def answers(self, chip, **asked):
        """Each model's answer if nothing else runs on the chip."""
        key = (chip, *asked)
        if key not in self.alone:
            self.alone[key] = {}
            for name in NAMES:
                with self.one_model(name, device_env(chip)) as running:
                    self.alone[key][name] = said(running, **asked)
            self.assertNotEqual(*self.alone[key].values())
        return self.alone[key]

    def assert_no_trouble(self, running):
        text = running.log.read_text(errors="replace")
        for words in "locked up", "out of use", "cannot be used now":
            self.assertNotIn(words, text)


class Router(Shared):
    def alternate(self, chip, most):
        want = self.answers(chip)
        began = time.monotonic()
        with server(None, self.env(chip), "--models-dir", self.models, "--models-max", most, *SMALL, name=self.id()) as running:
            for number in range(ALTERNATIONS):
                name = NAMES[number % 2]
                self.assertEqual(said(running, name), want[name], f"request {number}")
        self.assert_no_trouble(running)
        loaded = re.findall("nodes of a token", running.log.read_text(errors="replace"))
        self.assertEqual(len(loaded), ALTERNATIONS if most == 1 else len(NAMES))
        print(f"   {ALTERNATIONS} alternations, at most {most} loaded: {time.monotonic() - began:.1f} s")

    def test_both_models_loaded_on_rockchip(self):
        self.alternate(SIMULATED, 2)

    def test_one_model_loaded_at_a_time_on_rockchip(self):
        self.alternate(SIMULATED, 1)

    def test_both_models_loaded_on_hexagon(self):
        self.alternate(HEXAGON, 2)

    def test_one_model_loaded_at_a_time_on_hexagon(self):
        self.alternate(HEXAGON, 1)


class TwoServers(Shared):
    @contextmanager
    def both(self):
        env = self.env(SIMULATED)
        with self.one_model(NAMES[0], env) as one, self.one_model(NAMES[1], env) as two:
            yield one, two

    def stop_in_turn(self, running):
        """Stops a server while it has the turn."""
        deadline = time.monotonic() + SLACK_S
        while time.monotonic() < deadline:
            running.process.send_signal(signal.SIGSTOP)
            if TURN in locked_bytes(running.process.pid, self.node):
                return
            running.process.send_signal(signal.SIGCONT)
            time.sleep(0.003)
        self.fail("the server never has the turn")

    def test_answers_at_the_same_time(self):
        want = self.answers(SIMULATED, prompt=LONG, n_predict=LONG_TOKENS)
        with self.both() as pair, ThreadPoolExecutor(2) as pool:
            together = pool.map(lambda running: [said(running, None, LONG, LONG_TOKENS) for _ in range(2)], pair)
            for name, answers in zip(NAMES, together):
                self.assertEqual(answers, [want[name]] * 2)
        for running in pair:
            self.assert_no_trouble(running)

    def test_a_server_that_is_stopped_in_its_turn(self):
        """The other one's request fails after the wait for its turn. Its next request works, and the stopped server's request
        continues."""
        want, wants = self.answers(SIMULATED), self.answers(SIMULATED, prompt=LONG, n_predict=LONG_TOKENS)
        with self.both() as (stopped, other), ThreadPoolExecutor(1) as pool:
            long = pool.submit(said, stopped, None, LONG, LONG_TOKENS)
            self.stop_in_turn(stopped)
            began = time.monotonic()
            with self.assertRaises(urllib.error.HTTPError) as refused:
                said(other)
            waited = time.monotonic() - began
            stopped.process.send_signal(signal.SIGCONT)
            self.assertEqual(refused.exception.code, 500)
            self.assertGreater(waited, PATIENCE_S / 2)
            self.assertLess(waited, PATIENCE_S + SLACK_S)
            self.assertEqual(said(other), want[NAMES[1]])
            self.assertEqual(long.result(), wants[NAMES[0]])
        self.assert_no_trouble(stopped)
        log = other.log.read_text(errors="replace")
        self.assertIn(f"({stopped.process.pid}, stopped) has used it", log)
        self.assertNotIn("out of use", log)

    def test_a_server_that_is_killed_in_its_turn(self):
        want = self.answers(SIMULATED)
        env = self.env(SIMULATED)
        with (self.one_model(NAMES[1], env) as other, ThreadPoolExecutor(1) as pool,
              self.assertRaises((urllib.error.URLError, ConnectionError)), self.one_model(NAMES[0], env) as killed):
            long = pool.submit(said, killed, None, LONG, LONG_TOKENS)
            self.stop_in_turn(killed)
            killed.process.kill()
            killed.process.wait()
            began = time.monotonic()
            self.assertEqual(said(other), want[NAMES[1]])
            self.assertLess(time.monotonic() - began, PATIENCE_S)
            self.assert_no_trouble(other)
            long.result()
