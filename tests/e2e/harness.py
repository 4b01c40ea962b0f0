"""Code that the end-to-end tests share: running the patched llama.cpp's programs, and requests to its server."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))

import models
import project
from project import (DEVICE, HEXAGON, HEXAGON_DEVICE, LOGS, SIMULATED, binary, cpu_env,  # noqa: F401
                     device_env)

# Every test file imports this module before it starts anything, so this comes first.
project.settle()

# The quantization of the model that most checks use.
KIND = "Q8_0"

# Long enough for a cold page cache on two busy cores; meant for hangs.
TIMEOUT_S = 300

# With these options each log line starts with its level: E, W, I or D.
PLAIN_LOG = ["--log-prefix", "--no-log-timestamps"]


def listed_devices(text):
    """The names of this backend's devices in the output of `--list-devices`. A path in the text may contain such a name."""
    return re.findall(r"^ *((?:HEX|RKNPU)\d+): ", text, re.M)


def our_lines(text):
    """The lines of this project's backend in a log without PLAIN_LOG."""
    return [line for line in text.splitlines() if line.startswith("ggml-rust-npu: ")]


class Done(NamedTuple):
    """A program that ended."""

    code: int
    out: str
    log: str

    @property
    def all(self):
        return self.out + self.log

    def ours(self, level=""):
        """The log lines of this project's backend, all or those of one level (E, W, I, D)."""
        starts = tuple(f"{each} ggml-rust-npu: " for each in level or "EWID")
        return [line for line in self.log.splitlines() if line.startswith(starts)]

    def troubles(self):
        """The warnings and errors, without the lines about where a model's nodes run."""
        return [line for line in self.ours("EW") if not re.search(r"nodes of a (token|graph of \d+ rows), in", line)]


# Two tokens count as equally likely if the logarithms of their probabilities differ by less than this. On Hexagon, one row at a
# time has activations of twice 8 bits, and several rows have FP16. On Rockchip, attention of few rows is computed in FP32, and
# of more rows in FP16.
TIE = 0.5


def places(answer):
    """For each place of an answer, its token and the log-probabilities of the likely tokens."""
    return [(place["id"], {likely["id"]: likely["logprob"] for likely in place["top_logprobs"]})
            for place in answer["completion_probabilities"]]


class Case(unittest.TestCase):
    """A test that runs programs."""

    maxDiff = None

    def model(self):
        return models.variant(KIND)

    def run_tool(self, name, *args, env, timeout=TIMEOUT_S, cwd=None):
        """Runs a program to its end. Dying of a signal (an abort, a crash) or not ending fails the test."""
        return self.run_command(name, [binary(name), *args], env, timeout, cwd)

    def run_command(self, name, command, env, timeout=TIMEOUT_S, cwd=None):
        """As run_tool, for a program with any command line."""
        command = [str(arg) for arg in command]
        try:
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=timeout, cwd=cwd)
        except subprocess.TimeoutExpired:
            self.fail(f"{name} still ran after {timeout} s: {' '.join(command)}")
        result = Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        if result.code < 0:
            self.fail(f"{name} died of {signal.Signals(-result.code).name}: {result.log[-2000:]}")
        return result

    def succeed(self, name, *args, env, timeout=TIMEOUT_S, cwd=None):
        """Runs a program that must end with code 0."""
        done = self.run_tool(name, *args, env=env, timeout=timeout, cwd=cwd)
        self.assertEqual(done.code, 0, f"{name} failed: {done.all[-2000:]}")
        return done

    def with_end(self, run):
        """The result of `run`, for a program that ends its text with an empty line.

        llama.cpp's logger can lose the last lines of a program that ends on a busy machine: such a run is made again.
        """
        for _ in range(3):
            done = run()
            if done.code != 0 or done.out.endswith("\n\n"):
                return done
            print(f"   the end of a text is missing, running again: {done.out[-40:]!r}", flush=True)
        return self.fail(f"the end of the text is missing three times: {done.all[-2000:]}")

    def assert_same_or_tied(self, want, answer):
        """Whether the texts are the same; fails if they part at a token that is not as likely as the other."""
        self.assertEqual(len(places(want)), len(places(answer)))
        for (token, likely), (other, others) in zip(places(want), places(answer)):
            if token != other:
                self.assertIn(other, likely)
                self.assertIn(token, others)
                self.assertLess(likely[token] - likely[other], TIE)
                self.assertLess(others[other] - others[token], TIE)
                return False
        return True

    def try_complete(self, prompt, n_predict, env, *args, model=None):
        """Greedy text from llama-completion, which may fail."""
        return self.with_end(lambda: self.run_tool(
            "llama-completion", "-m", model or self.model(), "-p", prompt, "-n", n_predict, "-c", 512, "--temp", 0, "--seed",
            1, "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off", *PLAIN_LOG, *args, env=env))

    def complete(self, prompt, n_predict, env, *args, model=None):
        """Greedy text from llama-completion."""
        done = self.try_complete(prompt, n_predict, env, *args, model=model)
        self.assertEqual(done.code, 0, f"llama-completion failed: {done.all[-2000:]}")
        return done

    def splits(self, env, *args, model=None):
        """The backends of a decode graph's splits; flash attention stays on."""
        log = self.complete("Once upon a time", 3, dict(env, GGML_SCHED_DEBUG="2"), *args, "-v", model=model).log
        graphs = re.split(r"(?=## SPLIT #0: )", log)[1:]
        self.assertGreater(len(graphs), 1)
        self.assertNotIn("Flash Attention not supported", log)
        return re.findall(r"^.*## SPLIT #\d+: (\w+)", graphs[-1], re.M)

    def assert_one_split(self, env, device, *args, model=None):
        """All of a decode graph is one split, on `device`; on Hexagon all but the lookup of the embedding."""
        splits = self.splits(env, *args, model=model)
        self.assertEqual(splits, [device] if device == DEVICE else ["CPU", device])

    def assert_no_larger_than_its_file(self, model):
        """On Hexagon the tensors need at most 1.05 times the file; an embedding that is also the output is included."""
        log = self.complete("Once upon a time", 1, device_env(HEXAGON), "-v", model=model).log
        sizes = [float(size) for size in re.findall(rf"{HEXAGON_DEVICE}\w* model buffer size = +([\d.]+) MiB", log)]
        self.assertGreater(len(sizes), 0, log[-2000:])
        self.assertLessEqual(sum(sizes) * 2**20, 1.05 * model.stat().st_size)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """llama-server, from ready to stopped."""

    def __init__(self, port, process, log):
        self.port, self.process, self.log = port, process, log

    def post(self, path, body, timeout=TIMEOUT_S):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def get(self, path, timeout=TIMEOUT_S):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as response:
            return json.load(response)

    def ask(self, prompt, n_predict, **options):
        """The server's whole answer: greedy text, with the likeliest tokens at each place."""
        return self.post("/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1,
                                         "ignore_eos": True, "n_probs": 5, **options})

    def complete(self, prompt, n_predict):
        """Greedy text, computed from nothing: without reuse of an earlier request's cache."""
        return self.post("/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1,
                                         "ignore_eos": True, "cache_prompt": False})["content"]


@contextmanager
def server(model, env, *args, name="server", program=None, cwd=None):
    """Runs llama-server on a free port, as a router if `model` is None; `program` is the start of its command line if it is not
    the one built here."""
    port = free_port()
    command = [*(program or [binary("llama-server")]), *([] if model is None else ["-m", model]), "--host", "127.0.0.1",
               "--port", port, "-fit", "off", "--no-webui", *PLAIN_LOG, *args]
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen([str(arg) for arg in command], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT)
    try:
        wait_until_ready(port, process, log)
        yield Server(port, process, log)
        code = terminate(process)
        if code not in (0, -signal.SIGTERM):
            raise AssertionError(f"llama-server ended with code {code}: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()


# How many seconds a server may need to end, and how long its main thread must have slept before its end is requested.
END_S, ASLEEP_S = 30, 0.05


def terminate(process):
    """Ends llama-server with SIGTERM; returns its exit code.

    Its handler locks the mutex of its queue. If the signal interrupts the main thread while that holds the mutex, as it does in
    the instant after an answer, the handler waits for its own thread for ever. So the signal is sent when the main thread has
    slept for a while: it waits for a task then, which releases the mutex. Every second it looks for one, so the hang is
    possible still; it is recognized by the signal that the main thread blocks for as long as the handler runs, and no failure.
    """
    wait_until_asleep(process)
    process.terminate()
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        if not is_in_handler(process.pid, signal.SIGTERM):
            raise
    print(f"   llama-server hangs in its own signal handler, a fault of llama.cpp: killed after {END_S} s", flush=True)
    process.kill()
    process.wait()
    return -signal.SIGTERM


def main_thread(pid):
    """The system's figures about a process's main thread: {name: text}."""
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def wait_until_asleep(process):
    """Waits until the main thread of a process has slept for ASLEEP_S, or is gone, but no longer than END_S."""
    deadline, before = time.monotonic() + END_S, None
    while process.poll() is None and time.monotonic() < deadline:
        now = main_thread(process.pid)
        # If the thread ran in between, the kernel has counted a switch to it and away from it.
        switches = [now["voluntary_ctxt_switches"], now["nonvoluntary_ctxt_switches"]]
        if now["State"].startswith("S") and switches == before:
            return
        before = switches
        time.sleep(ASLEEP_S)


def is_in_handler(pid, number):
    """Returns True if the main thread of a process runs its handler of a signal."""
    return bool(int(main_thread(pid)["SigBlk"], 16) >> (number - 1) & 1)


def wait_until_ready(port, process, log):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"llama-server ended with code {process.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"llama-server was not ready after {TIMEOUT_S} s, see {log}")
