"""Devices used through ggml's RPC server, as Debian ships it: two servers on this machine share a model with one program."""

import re
import socket
import subprocess
import tempfile
import time
import unittest
from contextlib import ExitStack, contextmanager

from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, PLAIN_LOG, SIMULATED, TIMEOUT_S, cpu_env, device_env, free_port
from stocked import CHIPS, PROMPT, DebianStock

import fetch
from project import ROOT

# How many tokens a model on two devices computes; two devices round differently from one.
TOKENS = 16
# The number of layers of SmolLM2-135M.
LAYERS = 30
PRODUCTS_OF_LAYER = [f"blk.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                                       "ffn_down")]


class Rpc(DebianStock):
    def setUp(self):
        self.logs = {}

    @contextmanager
    def serve(self, device, chip, ends=False, **settings):
        """Runs an RPC server with a device; gives its address. With `ends` the server has to end in an error of the device.
        Its log is in `self.logs` afterwards."""
        port = free_port()
        env = self.with_plugin(device_env(chip, **settings))
        command = self.program.command("ggml-rpc-server", "-p", port, "-d", device)
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen([str(word) for word in command], env=env, cwd=self.program.folder,
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                self.wait_for(port, process, log)
                yield f"127.0.0.1:{port}"
                if ends:
                    self.assertNotEqual(process.wait(TIMEOUT_S), 0)
                    self.assertRegex(self.text_of(log), rf"ggml-rust-npu: {device}: .*AEE_E")
                else:
                    self.assertIsNone(process.poll(), self.text_of(log)[-2000:])
                self.logs[device] = self.text_of(log)
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    raise

    def wait_for(self, port, process, log):
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.assertIsNone(process.poll(), self.text_of(log)[-2000:])
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        self.fail(f"the RPC server does not listen: {self.text_of(log)[-2000:]}")

    @staticmethod
    def text_of(log):
        log.seek(0)
        return log.read().decode(errors="replace")

    def arguments(self, *args):
        return ["llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp", 0, "--seed", 1,
                "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off", "-fa", "on", "-t", 1, *PLAIN_LOG, "-v", *args]

    def generate(self, env, *args):
        return self.with_end(lambda: self.run_stock(*self.arguments(*args), env=env))

    def test_text_is_that_of_the_device_in_this_process(self):
        here = self.generate(self.with_plugin(device_env(HEXAGON))).out
        with self.serve(HEXAGON_DEVICE, HEXAGON, GGML_RUST_NPU_REPACK="always") as server:
            there = self.generate(cpu_env(), "--rpc", server)
        self.assertEqual(there.out, here)
        self.assertEqual(self.servers(there), 1)

    @staticmethod
    def servers(done):
        """The number of servers that have weights."""
        return len(set(re.findall(r"(RPC\S+) model buffer size", done.log)))

    def test_one_model_on_two_servers_gives_the_text_of_one_machine(self):
        both = self.with_plugin(device_env(f"{HEXAGON},{SIMULATED}"))
        here = self.generate(both, "--device", f"{HEXAGON_DEVICE},{DEVICE}", "-ts", "2,1").out
        with ExitStack() as stack:
            servers = [stack.enter_context(self.serve(HEXAGON_DEVICE, HEXAGON, GGML_RUST_NPU_REPACK="always")),
                       stack.enter_context(self.serve(DEVICE, SIMULATED))]
            there = self.generate(cpu_env(), "--rpc", ",".join(servers), "-ts", "2,1")
        self.assertEqual(self.servers(there), 2, there.log[-3000:])
        self.assertEqual(there.out, here)

    def test_weights_are_packed_once(self):
        """The servers do not know which tensors are weights."""
        with ExitStack() as stack:
            servers = [stack.enter_context(self.serve(device, chip, GGML_RUST_NPU_LOG="debug"))
                       for device, chip in CHIPS.items()]
            self.generate(cpu_env(), "--rpc", ",".join(servers), "-ts", "1,1")
        names = []
        for device, log in self.logs.items():
            packed = re.findall(r"(\S+) is packed beside it", log)
            print(f"{device}: {len(packed)} weights")
            self.assertGreater(len(packed), LAYERS * len(PRODUCTS_OF_LAYER) // 3)
            names += packed
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(sorted(re.sub(r"\.\d+\.", ".", name) for name in names if name.startswith("blk.")),
                         sorted(LAYERS * PRODUCTS_OF_LAYER))

    def test_a_device_that_is_lost_ends_server_and_program_and_the_server_says_why(self):
        """ggml's RPC code asserts that graphs succeed, as the guide warns."""
        # The self-test has 157 submissions, so this fault comes after it.
        fault = {"GGML_RUST_NPU_REPACK": "always", "GGML_RUST_NPU_SIM_FAULTS": "dsp:165=lost", "GGML_NO_BACKTRACE": "1"}
        with self.serve(HEXAGON_DEVICE, HEXAGON, ends=True, **fault) as server:
            command = self.program.command(*self.arguments("--rpc", server))
            done = subprocess.run([str(word) for word in command], env=cpu_env(GGML_NO_BACKTRACE="1"), cwd=self.program.folder,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  timeout=TIMEOUT_S)
            self.assertNotEqual(done.returncode, 0)

    def test_layers_behind_a_server_and_on_a_device_here_share_their_activations(self):
        both = self.with_plugin(device_env(f"{SIMULATED},{HEXAGON}"))
        here = self.generate(both, "--device", f"{DEVICE},{HEXAGON_DEVICE}", "-ts", "1,1").out
        # The server's results reach memory that the NPU shares with the CPU.
        strict = self.with_plugin(device_env(HEXAGON, GGML_RUST_NPU_SIM_COHERENCE="strict"))
        with self.serve(DEVICE, SIMULATED) as server:
            there = self.generate(strict, "--rpc", server, "-ts", "1,1")
        self.assertEqual(self.servers(there), 1, there.log[-3000:])
        self.assertRegex(there.log, r"HEX0\S* model buffer size")
        self.assertEqual(there.out, here)


class Protocol(unittest.TestCase):
    def test_the_guide_names_the_version_of_the_protocol(self):
        text = (fetch.llama("0.5.0") / "ggml" / "include" / "ggml-rpc.h").read_text(encoding="utf-8")
        version, = re.findall(r"^#define RPC_PROTO_MAJOR_VERSION +(\d+)", text, re.M)
        guide = (ROOT / "docs" / "guide" / "programs.md").read_text(encoding="utf-8")
        self.assertIn(f"server with version {version} (0.5.0) refuse each other", guide)
