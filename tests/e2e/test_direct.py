"""llama.cpp drives an emulated NPU of Rockchip's by command streams, over two emulated kernel drivers: the vendor's and
Linux's. librknnrt and its stand-in are not involved."""

import re

from harness import DEVICE, LOGS, Case, cpu_env, device_env

import cases
import project
from project import ROOT, TARGET

SETTINGS = {"GGML_RUST_NPU_RKNN": "direct", "GGML_RUST_NPU_CHIP": "rk3588"}

# 54 products in FP16 and INT8, with few and many rows, and with experts.
PRODUCTS = r"type_a=(f16|q8_0|q4_K),type_b=f32,(m=16,n=(1|9),k=(256|1024),|n_mats=4,n_used=2,b=0,m=512,n=(1|32),k=256)"
MIN_PRODUCTS = 53


class Direct(Case):
    # The variable that makes the loop emulate this driver, and the driver's name in a device's description.
    KERNEL = ("RKNN_LOOP_STRICT", "1")
    DRIVER = r"0\.9\.8"

    @classmethod
    def setUpClass(cls):
        # The loop replaces `open` and `ioctl`, and answers for the driver's node.
        project.run(["cargo", "build", "--locked", "--package", "rknn-loop", "--target-dir", TARGET],
                    LOGS / "direct-build.log", cwd=ROOT)
        loop = TARGET / "debug" / "librknn_loop.so"
        cls.emulated = dict(SETTINGS, LD_PRELOAD=str(loop), **dict([cls.KERNEL]))

    def test_a_model_says_what_it_says_on_the_stand_in(self):
        listed = self.succeed("llama-completion", "--list-devices", env=cpu_env(**self.emulated)).all
        self.assertRegex(listed, rf"{DEVICE}: Rockchip RK3588 NPU, streams-\S+, driver {self.DRIVER} \(")
        prompt = "Once upon a time, in a small village,"
        # INT8 sums are exact. FP16 sums are in another order than the stand-in's, so INT8 is used.
        rules = {"GGML_RUST_NPU_RULES": ".*=int8"}
        text = self.complete(prompt, 12, cpu_env(**self.emulated, **rules)).out
        self.assertEqual(text, self.complete(prompt, 12, device_env(**rules)).out)

    def test_upstreams_products_are_right(self):
        env = cpu_env(GGML_RUST_NPU_REPACK="always", **self.emulated)
        done = self.succeed("test-backend-ops", "test", "-b", DEVICE, "-o", "MUL_MAT,MUL_MAT_ID", "-p", PRODUCTS, env=env)
        right = re.findall(r"^ *MUL_MAT\w*\(.*\): \S*OK", done.out, re.M)
        self.assertGreaterEqual(len(right), MIN_PRODUCTS, done.out[-2000:])

    def test_it_claims_the_cases_of_the_stand_in(self):
        def claimed(env):
            return cases.claimed(self.succeed("test-backend-ops", "support", "-b", DEVICE, "--output", "csv", env=env).out)

        have = claimed(cpu_env(**self.emulated))
        self.assertGreater(len(have), 1000)
        self.assertEqual(have, claimed(device_env()))


class Rocket(Direct):
    KERNEL = ("RKNN_LOOP_KERNEL", "rocket")
    DRIVER = "rocket"


class NoDriver(Case):
    def test_without_a_driver_there_is_no_device_but_one_line(self):
        done = self.succeed("llama-bench", "--list-devices", env=cpu_env(**SETTINGS))
        self.assertNotRegex(done.out, DEVICE + ": ")
        words = "cannot drive the NPU without librknnrt: no node in /dev/dri or /dev/accel has the driver rknpu or rocket"
        self.assertIn(words, done.all)
