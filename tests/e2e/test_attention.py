"""Attention of prompts on the simulated Rockchip NPU, which is on by default."""

import re

from harness import Case, device_env

import fetch
import models

# This fault makes the results of the scores' product (M = 256 rows, K = 64 elements of a head) wrong. The CPU then computes
# attention.
WRONG = "rknn_matmul_run:M256K64=0"


class Attention(Case):
    def perplexity(self, env):
        done = self.succeed("llama-perplexity", "-m", models.variant("F16"), "-f", fetch.text(), "-c", 256, "--chunks", 1, "-t",
                            2, env=env)
        left = re.findall(r"attention is left to the CPU: .*", done.all)
        return float(re.search(r"Final estimate: PPL = ([\d.]+)", done.all).group(1)), left

    def test_perplexity_is_that_of_the_cpus_attention(self):
        have, left = self.perplexity(device_env())
        self.assertEqual(left, [])
        want, left = self.perplexity(device_env(GGML_RUST_NPU_SIM_FAULTS=WRONG))
        self.assertEqual(len(left), 1)
        self.assertRegex(left[0], "FP16 M=256 K=64 N=256")
        self.assertAlmostEqual(have / want, 1, delta=0.001)
