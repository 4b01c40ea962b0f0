"""Wrong settings, missing parts and failing calls give one clear line and a CPU run or a failed one; nothing aborts."""

import os
import tempfile
import urllib.error
from pathlib import Path

from harness import DEVICE, PLAIN_LOG, Case, cpu_env, device_env, free_port, our_lines, server

PROMPT = "The sea is"
TOKENS = 8

# The words of a prompt that has 60 tokens.
LONG_PROMPT = ("The sea is wide and the wind is cold, and the old man in the boat looks at the gulls that fly over the waves. "
               "He thinks of the harbour, of the lamps in the windows, and of the bread that his wife has put on the table "
               "for him")

# Calls that the device needs before it can be offered at all, and calls that come much later.
START_FAULTS = ["rknn_matmul_create:1=-1", "rknn_create_mem:1=-1", "rknn_matmul_run:1=-1", "rknn_query:1=-1",
                "rknn_matmul_set_io_mem:1=-1", "rknn_matmul_set_core_mask:1=-1"]
LATE_FAULTS = ["rknn_matmul_create:81+=-1",
               *(f"{call}{plus}=-1" for call in ["rknn_matmul_run:2000", "rknn_matmul_set_io_mem:2000"]
                 for plus in ["", "+"])]


class BadInput(Case):
    def text(self, env):
        """The text of a run without faults."""
        return self.complete(PROMPT, TOKENS, env).out

    def bench(self, model, **settings):
        """A short run that may fail. llama-completion would lose its last log lines when it does."""
        return self.run_tool("llama-bench", "-v", "-m", model, "-p", 8, "-n", 16, "-r", 1, env=device_env(**settings))

    def check_cpu_run(self, env, *words):
        """The run succeeds on the CPU, and the one error line of the backend holds `words`."""
        done = self.complete(PROMPT, TOKENS, env, "-v")
        self.assertEqual(done.out, self.text(cpu_env()))
        self.assertNotIn(f"{DEVICE}_PACKED", done.log)
        errors = done.ours("E")
        self.assertEqual(len(errors), 1, errors)
        for word in words:
            self.assertIn(word, errors[0])

    def test_unknown_chip_to_simulate(self):
        self.check_cpu_run(cpu_env(GGML_RUST_NPU_SIM="rk9999"), "GGML_RUST_NPU_SIM", "rk9999", "rk3588")

    def test_unknown_log_level(self):
        self.check_cpu_run(device_env(GGML_RUST_NPU_LOG="loud"), "GGML_RUST_NPU_LOG", "loud", "debug")

    def test_unknown_chip(self):
        self.check_cpu_run(cpu_env(GGML_RUST_NPU_CHIP="rk1"), "GGML_RUST_NPU_CHIP", "rk1", "rk3588")

    def test_unknown_fault(self):
        self.check_cpu_run(device_env(GGML_RUST_NPU_SIM_FAULTS="rknn_jump:1=-1"), "GGML_RUST_NPU_SIM_FAULTS",
                           "rknn_jump")

    def test_misspelt_variable(self):
        done = self.complete(PROMPT, TOKENS, cpu_env(GGML_RUST_NPU_SIMM="rk3588"), "-v")
        self.assertEqual(len(done.ours("W")), 1, done.ours())
        self.assertIn("GGML_RUST_NPU_SIMM", done.ours("W")[0])

    def test_missing_vendor_library(self):
        missing = "/nonexistent/librknnrt.so"
        self.check_cpu_run(cpu_env(GGML_RUST_NPU_CHIP="rk3588", GGML_RUST_NPU_RKNN_LIB=missing), missing)

    def test_vendor_library_that_is_none(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(b"not a library")
            file.flush()
            self.check_cpu_run(cpu_env(GGML_RUST_NPU_CHIP="rk3588", GGML_RUST_NPU_RKNN_LIB=file.name), file.name)

    def test_vendor_library_that_is_too_old(self):
        self.check_cpu_run(device_env(GGML_RUST_NPU_SIM_API_VERSION="1.6.0"), "librknnrt", "1.6.0", "2.3.0")

    def test_node_of_a_simulated_npu_that_cannot_be_made(self):
        self.check_cpu_run(device_env(GGML_RUST_NPU_SIM_NODE="/nonexistent/npu"), "/nonexistent/npu")

    def test_call_that_fails_at_the_start(self):
        for fault in START_FAULTS:
            with self.subTest(fault):
                self.check_cpu_run(device_env(GGML_RUST_NPU_SIM_FAULTS=fault), fault.split(":")[0])

    def test_call_that_fails_later(self):
        for fault in LATE_FAULTS:
            with self.subTest(fault):
                # A failed call loses the device even if it would work again, because its effect on the NPU is unknown.
                done = self.bench(self.model(), GGML_RUST_NPU_SIM_FAULTS=fault)
                self.assertNotEqual(done.code, 0, "the run succeeded")
                causes = [line for line in our_lines(done.log) if fault.split(":")[0] in line]
                self.assertEqual(len(causes), 1, done.log[-2000:])
                self.assertIn("MUL_MAT", causes[0])

    def test_context_that_is_refused_once(self):
        # Nothing has run on the NPU yet, and the code may mean a lack of memory, so the call is repeated.
        fault = device_env(GGML_RUST_NPU_SIM_FAULTS="rknn_matmul_create:81=-1")
        self.assertEqual(self.text(fault), self.text(device_env()))

    def test_rows_that_are_computed_wrong_are_computed_in_other_calls(self):
        for fault, repeat in [("rknn_matmul_run:M64=0", 1), ("rknn_matmul_run:M512=0", 9)]:
            with self.subTest(fault):
                def text(repeat=repeat, **settings):
                    return self.complete(" ".join([LONG_PROMPT] * repeat), TOKENS, device_env(**settings), "-v")

                done = text(GGML_RUST_NPU_SIM_FAULTS=fault)
                self.assertEqual(done.out, text().out)
                m = fault.split(":")[1].split("=")[0].replace("M", "M=")
                self.assertTrue(any(m in line and "take their place" in line for line in done.ours("W")), done.ours())

    def test_shape_that_is_computed_wrong_gives_an_error_and_no_text(self):
        for rows, prompt in [(64, 60), (512, 500)]:
            fault = f"rknn_matmul_run:M{rows}K576=0"
            with self.subTest(fault):
                done = self.run_tool("llama-bench", "-v", "-m", self.model(), "-p", prompt, "-n", 0, "-r", 1,
                                     env=device_env(GGML_RUST_NPU_SIM_FAULTS=fault))
                self.assertNotEqual(done.code, 0, "the run succeeded")
                causes = [line for line in done.log.splitlines()
                          if line.startswith("ggml-rust-npu: ") and "first use" in line]
                self.assertEqual(len(causes), 1, done.log[-2000:])
                self.assertIn(f"M={rows} K=576", causes[0])

    def test_server_survives_a_failing_call(self):
        fault = device_env(GGML_RUST_NPU_SIM_FAULTS="rknn_matmul_run:3000+=-1")
        with server(self.model(), fault, "-c", 512, "-np", 1, name="server-fault") as running:
            with self.assertRaises(urllib.error.HTTPError) as failed:
                running.complete(PROMPT, 64)
            self.assertGreaterEqual(failed.exception.code, 400)
            failed.exception.close()
            self.assertIsNone(running.process.poll(), "llama-server ended")

    def test_memory_that_ends_while_weights_load_fails_the_load(self):
        """The model was loaded nevertheless, after a line for each weight, and each request was an error."""
        fault = device_env(GGML_RUST_NPU_SIM_FAULTS="rknn_create_mem_from_fd:60+=-4")
        # A server that starts would run until the time is over.
        done = self.run_tool("llama-server", "-m", self.model(), "--host", "127.0.0.1", "--port", free_port(), "-fit", "off",
                             "--no-webui", *PLAIN_LOG, env=fault, timeout=60)
        self.assertNotEqual(done.code, 0)
        lines = done.ours("EW")
        self.assertEqual(len(lines), 1, done.log[-2000:])
        self.assertRegex(lines[0], r"cannot load \S+: no room for it after [1-9]\d* weights with [1-9]\d* bytes in its buffer: "
                                   r".*rknn_create_mem_from_fd.*fewer layers on the device \(-ngl\)")
        self.assertIn("failed to load model", done.log)

    def test_truncated_model(self):
        whole = Path(self.model())
        for share in [0.0, 0.3, 0.9]:
            with self.subTest(share=share), tempfile.TemporaryDirectory() as folder:
                cut = Path(folder) / "cut.gguf"
                with open(whole, "rb") as source:
                    cut.write_bytes(source.read(int(os.path.getsize(whole) * share)))
                done = self.bench(cut)
                self.assertNotEqual(done.code, 0, "the run succeeded")
                self.assertIn("failed to load model", done.log)
