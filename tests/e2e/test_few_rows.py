"""Multiplications of fewer than GGML_RUST_NPU_MIN_M rows are the CPU backend's, from the bytes of the packed weights."""

import re

from harness import DEVICE, Case, cpu_env, device_env

TOKENS = 48
PROMPT = "Once upon a time, in a small village by the sea,"

# The prompt is also computed one token at a time, with the attention that is used with a device.
DECODE_ONLY = ["-ub", 1, "-fa", "off"]


class FewRows(Case):
    def test_decode_is_the_cpu_backends_to_the_letter(self):
        # Without repacking: weights that the CPU backend repacks would use another kernel.
        want = self.complete(PROMPT, TOKENS, cpu_env(), *DECODE_ONLY, "--no-repack").out
        # The fault ends the program if the device runs after its self-test.
        env = device_env(GGML_RUST_NPU_MIN_M="2", GGML_RUST_NPU_SIM_FAULTS="rknn_matmul_run:100+=-1")
        done = self.complete(PROMPT, TOKENS, env, *DECODE_ONLY, "-v")
        self.assertIn(f"{DEVICE}_PACKED model buffer size", done.log)
        self.assertGreater(len(want), TOKENS)
        self.assertEqual(done.out, want)

    def test_the_device_computes_what_has_enough_rows(self):
        env = device_env(GGML_RUST_NPU_MIN_M="2", GGML_RUST_NPU_SIM_FAULTS="rknn_matmul_run:100+=-1")
        # llama-bench, because llama-completion loses its last log lines when it fails.
        done = self.run_tool("llama-bench", "-v", "-m", self.model(), "-p", 8, "-n", 8, "-r", 1, env=env)
        self.assertNotEqual(done.code, 0)
        self.assertRegex(done.log, r"(?m)^ggml-rust-npu: .*rknn_matmul_run")

    def test_experts_and_batches_agree_with_the_cpu_backend(self):
        env = device_env(GGML_RUST_NPU_MIN_M="65536", GGML_RUST_NPU_SIM_FAULTS="rknn_matmul_run:100+=-1")
        for op in ("MUL_MAT", "MUL_MAT_ID"):
            with self.subTest(op):
                done = self.succeed("test-backend-ops", "-b", DEVICE, "-o", op, "-p", "type_a=q8_0", env=env)
                text = re.sub(r"\x1b\[[0-9;]*m", "", done.all)
                self.assertGreater(len(re.findall(r"\): OK", text)), 10, text[-2000:])
                self.assertNotIn("FAIL", text)
