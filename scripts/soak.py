#!/usr/bin/env python3
"""Keeps llama-server busy for hours, on both device families in turn, with faults, NaN prompts and cancelled requests.

Usage: soak.py [--hours N | --minutes N] [--seed N]     15 minutes by default

Rounds of a few minutes, each a server of 8 slots with 8 clients, on a simulated Hexagon NPU and a simulated RK3588 in turn.
Every second round has a fault of the stand-in at a random moment. Clients ask for greedy text, hang up in the middle, send a
token whose embedding is NaN, or nonsense. Checked are: a text equals that of a quiet device, except for equally likely tokens,
or the answer is an error, which is allowed only after a fault; memory does not grow after the first third of a round; no thread
is left when clients are gone; the server ends within 30 s of the request.
"""

import argparse
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error

from project import HEXAGON, LOGS, MODELS, ROOT, SIMULATED, Problem, binary, device_env, main_with

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import harness
import models
from test_serving import PROMPTS, SMALL

ROUND_S = 150
SLOTS = 8
TOKENS = 12
# A request without an answer for this long counts as a hang. A stand-in needs a fraction of it, even on a busy machine.
PATIENCE_S = 240

# After the first third of a round, memory may grow by this factor and these MiB, which covers the content of caches.
GROWTH, GROWTH_MIB = 1.05, 32

# A token that does not occur in any of our prompts.
ODD_TOKEN = 49_000

# Faults that occur while the server is working. Those of the DSP lose the device.
FAULTS = {
    HEXAGON: ["dsp:{n}=lost", "dsp:{n}=corrupt", "dsp:{n}=badring", "dsp:{n}=hang"],
    SIMULATED: ["rknn_matmul_run:{n}=-1", "rknn_matmul_run:{n}=-3", "rknn_matmul_run:{n}+=-1"],
}
MOMENTS = {HEXAGON: (20, 150), SIMULATED: (5_000, 60_000)}

# The slot that only NaN prompts use: they spoil later prompts in the same cache, on the CPU backend, too.
NAN_SLOT = SLOTS - 1


# SOURCE: ggml's gguf.h, gguf_type: the bytes of a value of each type, except texts and arrays.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Gguf:
    """Header and tensors of a model file, as far as they are needed to write another one."""

    def __init__(self, data):
        self.data, self.at = data, 4
        self.version, self.n_tensors, self.n_values = self.take("<IQQ")
        begin, self.alignment = self.at, 32
        for _ in range(self.n_values):
            key = self.text()
            value = self.value(self.take("<I")[0])
            if key == b"general.alignment":
                self.alignment = value
        self.values = data[begin:self.at]
        self.tensors = [self.tensor() for _ in range(self.n_tensors)]
        self.begin = -(-self.at // self.alignment) * self.alignment

    def take(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self):
        length, = self.take("<Q")
        self.at += length
        return self.data[self.at - length:self.at]

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("<IQ")
            return [self.value(inner) for _ in range(count)]
        size = VALUE_BYTES[kind]
        self.at += size
        return int.from_bytes(self.data[self.at - size:self.at], "little")

    def tensor(self):
        name = self.text()
        dims, = self.take("<I")
        shape = self.take(f"<{dims}Q")
        return (name, shape, *self.take("<IQ"))


def model():
    """The model with an embedding that is NaN, and with a separate output that is not."""
    path = MODELS / "SmolLM2-135M-Instruct-Q8_0-nan.gguf"
    if path.exists():
        return path
    data = models.variant("Q8_0").read_bytes()
    old = Gguf(data)
    _, shape, kind, offset = next(tensor for tensor in old.tensors if tensor[0] == b"token_embd.weight")
    if kind != 8 or any(tensor[0] == b"output.weight" for tensor in old.tensors):
        raise Problem("the model has no embedding in Q8_0 that its output shares")
    row = shape[0] // 32 * 34
    weights = data[old.begin + offset:old.begin + offset + row * shape[1]]
    end = len(data) - old.begin
    end += -end % old.alignment
    infos = b"".join(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
                     for name, shape, kind, offset in [*old.tensors, (b"output.weight", shape, kind, end)])
    head = data[:4] + struct.pack("<IQQ", old.version, old.n_tensors + 1, old.n_values) + old.values + infos
    head += bytes(-len(head) % old.alignment)
    body = bytearray(data[old.begin:])
    body += bytes(end - len(body)) + weights
    # Changes the scale of each block of the row.
    for block in range(0, row, 34):
        at = offset + ODD_TOKEN * row + block
        body[at:at + 2] = b"\x00\x7e"
    part = path.with_suffix(".part")
    part.write_bytes(head + body)
    os.replace(part, path)
    return path


class Server:
    """llama-server, and the system's figures about it."""

    def __init__(self, chip, name, faults):
        self.port = harness.free_port()
        settings = {"GGML_RUST_NPU_TIMEOUT": "20"}
        if faults:
            settings["GGML_RUST_NPU_SIM_FAULTS"] = faults
        command = [binary("llama-server"), "-m", model(), "--host", "127.0.0.1", "--port", self.port, "-fit", "off",
                   "--no-webui", *harness.PLAIN_LOG, *SMALL, "-c", SLOTS * 256, "-np", SLOTS, "--cache-ram", 0,
                   "-fa", "on"]
        self.log = LOGS / f"soak-{name}.log"
        LOGS.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen([str(arg) for arg in command], env=device_env(chip, **settings),
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            harness.wait_until_ready(self.port, self.process, self.log)
        except BaseException:
            self.kill()
            raise
        self.http = harness.Server(self.port, self.process, self.log)

    def ask(self, prompt, **options):
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "seed": 1, "ignore_eos": True, "n_probs": 5,
                "cache_prompt": False, **options}
        return self.http.post("/completion", body, PATIENCE_S)

    def status(self):
        """Resident MiB, and threads."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"])

    def hang_up(self, after_s, prompt, slot):
        """Begins a request and leaves."""
        body = json.dumps({"prompt": prompt, "n_predict": 64, "stream": True, "id_slot": slot}).encode()
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(after_s)

    def kill(self):
        """Ends it at once if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self):
        """Tells the server to end; returns the failure, if any."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            return "still ran 30 s after it was asked to end"
        return None if code in (0, -signal.SIGTERM) else f"ended with code {code}"


def differs(want, answer):
    """Returns the fault of a text, or None; texts may differ after two equally likely tokens."""
    for (token, likely), (other, others) in zip(harness.places(want), harness.places(answer)):
        if token != other:
            near = token in others and other in likely
            if near and likely[token] - likely[other] < harness.TIE and others[other] - others[token] < harness.TIE:
                return None
            return f"{answer['content']!r} instead of {want['content']!r}"
    return None


NONSENSE = [{"prompt": [-5, 1 << 40]}, {"prompt": {"a": 1}}, {"prompt": "x", "n_predict": "many"}, {}, {"prompt": "x" * 20_000}]


class Round:
    """One server with its clients."""

    def __init__(self, chip, number, faults, seed, quiet):
        self.chip, self.faults, self.quiet, self.seed = chip, faults, quiet, seed
        self.server = Server(chip, f"{number % 4}-{chip}", faults)
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(["right", "errors", "cancelled", "NaN", "nonsense"], 0)
        self.problems = []

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def client(self, number, deadline):
        """One of `SLOTS` clients, each with a separate slot."""
        is_odd = number == NAN_SLOT
        decide = random.Random(f"{self.seed} {number}")
        while time.monotonic() < deadline and self.server.process.poll() is None:
            if self.counts["errors"] >= 3 * SLOTS:
                return
            kind = decide.random()
            prompt = decide.randrange(len(PROMPTS))
            try:
                if is_odd and kind < 0.85:
                    self.server.ask([1, 2, ODD_TOKEN, 5], n_predict=3, n_probs=0, id_slot=number)
                    self.count("NaN")
                elif kind < 0.65:
                    wrong = differs(self.quiet[prompt], self.server.ask(PROMPTS[prompt], id_slot=number))
                    if wrong:
                        self.problems.append(f"wrong text: {wrong}")
                    self.count("right")
                elif kind < 0.85:
                    self.server.hang_up(decide.uniform(0, 4), PROMPTS[prompt], number)
                    self.count("cancelled")
                else:
                    self.count("nonsense")
                    self.server.http.post("/completion", {"n_predict": 2, **decide.choice(NONSENSE)}, PATIENCE_S)
            except urllib.error.HTTPError as error:
                if kind < 0.65 and not is_odd:
                    self.count("errors")
                    if not self.faults:
                        self.problems.append(f"an error without a fault: {error.code} {error.read()[:200]}")
            except (urllib.error.URLError, OSError, ValueError) as error:
                self.problems.append(f"no answer: {error!r}")
                return

    def run(self, seconds):
        """Returns figures; problems are in `problems`."""
        # Memory that a first request allocates is not a leak.
        try:
            self.server.ask(PROMPTS[0], n_predict=2)
        except urllib.error.HTTPError:
            self.count("errors")
        time.sleep(1)
        _, threads = self.server.status()
        began = time.monotonic()
        clients = [threading.Thread(target=self.client, args=(number, began + seconds)) for number in range(SLOTS)]
        for client in clients:
            client.start()
        memory = []
        while any(client.is_alive() for client in clients) and self.server.process.poll() is None:
            memory.append((time.monotonic() - began, self.server.status()[0]))
            time.sleep(1)
        for client in clients:
            client.join()
        if self.server.process.poll() is not None:
            self.problems.append(f"the server died: code {self.server.process.returncode}")
            return {}
        # The server still computes requests whose clients have left.
        left, until = threads + 1, time.monotonic() + 60
        while left > threads and time.monotonic() < until:
            time.sleep(1)
            left = self.server.status()[1]
        if left > threads:
            self.problems.append(f"{left} threads, {threads} before the clients came")
        early = max((mib for at, mib in memory if at <= seconds / 3), default=0)
        most = max((mib for _, mib in memory), default=0)
        if memory and memory[-1][0] > seconds / 2 and most > early * GROWTH + GROWTH_MIB:
            self.problems.append(f"memory grew from {early:.0f} to {most:.0f} MiB")
        problem = self.server.end()
        if problem:
            self.problems.append(problem)
        return {"MiB after a third": round(early), "most MiB": round(most), "threads": f"{threads} to {left}"}


def quiet_texts(chip):
    """A device's answer to each prompt while it has no other request."""
    server = Server(chip, f"quiet-{chip}", None)
    try:
        texts = [server.ask(prompt) for prompt in PROMPTS]
        problem = server.end()
    finally:
        server.kill()
    if problem:
        raise Problem(f"a quiet llama-server {problem} (target/logs/{server.log.name})")
    return texts


def main():
    arguments = argparse.ArgumentParser(description="Keeps llama-server busy on both device families.")
    arguments.add_argument("--hours", type=float)
    arguments.add_argument("--minutes", type=float, default=15)
    arguments.add_argument("--seed", type=int, default=1)
    wanted = arguments.parse_args()
    seconds = wanted.hours * 3600 if wanted.hours else wanted.minutes * 60
    decide = random.Random(wanted.seed)
    began, number, failed = time.monotonic(), 0, 0
    quiet = {}
    while time.monotonic() - began < seconds:
        chip = [HEXAGON, SIMULATED][number % 2]
        if chip not in quiet:
            quiet[chip] = quiet_texts(chip)
        faults = None
        if number % 4 >= 2:
            faults = decide.choice(FAULTS[chip]).format(n=decide.randrange(*MOMENTS[chip]))
        this = Round(chip, number, faults, f"{wanted.seed} {number}", quiet[chip])
        try:
            figures = this.run(min(ROUND_S, max(20, seconds - (time.monotonic() - began))))
        finally:
            this.server.kill()
        shown = ", ".join(f"{value} {name}" for name, value in this.counts.items())
        print(f"round {number}, {chip}, faults {faults or 'none'}: {shown}; {figures}", flush=True)
        for problem in this.problems:
            failed += 1
            print(f"   FAILED {problem} (target/logs/{this.server.log.name})", flush=True)
        number += 1
    print(f"{number} rounds, {failed} problems, {(time.monotonic() - began) / 60:.0f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    main_with(main)
