"""Beside programs that keep every CPU busy, a simulated device with the program's default threads is about as fast as with one
thread: the backend's own threads do not spin while they wait."""

import json
import os
import subprocess
import time
from contextlib import contextmanager

from harness import HEXAGON, SIMULATED, device_env

import stock
from stocked import PROMPT, DebianStock, Stock

TOKENS = 16
# The default may take this many times the time of one thread, plus these seconds for the machine's other work. With threads
# that spin it took over 30 times as long (docs/results/cost.md).
TIMES, SECONDS = 2, 10


@contextmanager
def busy_cpus():
    """Keeps each CPU busy."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Node(Stock):
    fetched = staticmethod(stock.node_program)

    def seconds(self, env, *threads):
        done = self.run_command("node", ["node", "generate.mjs", self.model(), PROMPT, TOKENS, *threads], env, cwd=self.program)
        self.assertEqual(done.code, 0, done.all[-2000:])
        return json.loads(done.out)["seconds"]

    def test_default_threads_on_hexagon_are_as_fast_as_one(self):
        env = self.with_plugin(device_env(HEXAGON))
        with busy_cpus():
            one, default, again = (self.seconds(env, *threads) for threads in ((1,), (), (1,)))
        print(f"   node-llama-cpp on {HEXAGON}: {one:.1f} s with one thread, {default:.1f} s with its default")
        self.assertLess(default, TIMES * max(one, again) + SECONDS)


class Completion(DebianStock):
    def seconds(self, env, *args):
        began = time.monotonic()
        self.run_stock("llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp", 0, "-no-cnv",
                       "--ignore-eos", "-fit", "off", "--no-warmup", *args, env=env)
        return time.monotonic() - began

    def test_default_threads_that_sleep_are_as_fast_as_one(self):
        for chip in (HEXAGON, SIMULATED):
            env = self.with_plugin(device_env(chip))
            self.assertEqual(env["OMP_WAIT_POLICY"], "passive")
            with self.subTest(chip), busy_cpus():
                one, default, again = (self.seconds(env, *threads) for threads in (("-t", 1), (), ("-t", 1)))
                print(f"   llama-completion on {chip}: {one:.1f} s with one thread, {default:.1f} s with its default")
                self.assertLess(default, TIMES * max(one, again) + SECONDS)
