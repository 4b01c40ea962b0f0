"""As test_direct.py, with all of upstream's products, and with the logits of a text."""

import re

import test_direct
from harness import DEVICE, cpu_env, device_env

import kld
from project import JOBS

PRODUCTS = "MUL_MAT,MUL_MAT_ID"


def right(text):
    return sorted(re.findall(r"^ *(MUL_MAT\w*\(.*\)): \S*OK", text, re.M))


class LongDirect(test_direct.Direct):
    def products(self, env):
        """The cases that are right; one that is wrong fails."""
        return right(self.succeed("test-backend-ops", "test", "-b", DEVICE, "-o", PRODUCTS, "-j", JOBS, env=env,
                                  timeout=7200).out)

    def test_all_of_upstreams_products_are_right_and_none_is_missing(self):
        want = self.products(device_env(GGML_RUST_NPU_REPACK="always", GGML_RUST_NPU_SIM_COHERENCE="strict"))
        have = self.products(cpu_env(GGML_RUST_NPU_REPACK="always", **self.emulated))
        print(f"{self.DRIVER}: {len(have)} products, the stand-in has {len(want)}", flush=True)
        self.assertEqual(have, want)

    def test_divergence_has_the_digits_of_the_stand_in(self):
        runs = {f"Q8_0 {type(self).__name__} {name}": kld.Run(env)
                for name, env in {"stand-in": device_env(), "direct": cpu_env(**self.emulated)}.items()}
        want, have = (row.device for row in kld.measure("Q8_0", kld.Setup(1), runs))
        print(f"{self.DRIVER}: {have}", flush=True)
        self.assertEqual(have, want)


class LongRocket(LongDirect):
    KERNEL, DRIVER = test_direct.Rocket.KERNEL, test_direct.Rocket.DRIVER
