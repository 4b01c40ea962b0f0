"""Debian's build of upstream's test-backend-ops, of ggml 0.27.0, finds no wrong operation on the plugin's devices."""

import re

from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, device_env
from stocked import DebianStock

# Cases of upstream's test-backend-ops that take only seconds.
SMALL_CASES = "type_a=(q8_0|q4_0),type_b=f32,m=(16|32|64),|ne=\\[(64|16|10|128|1),"


class Operations(DebianStock):
    def test_cases_of_its_test_backend_ops_pass(self):
        for device, chip, operations, least in [(HEXAGON_DEVICE, HEXAGON, "MUL_MAT,SOFT_MAX,RMS_NORM,ADD", 100),
                                                (DEVICE, SIMULATED, "MUL_MAT", 30)]:
            # With the default, the CPU would compute operands that are not weights.
            settings = {"GGML_RUST_NPU_REPACK": "always"} if chip == SIMULATED else {}
            done = self.run_stock("test-backend-ops", "test", "-b", device, "-o", operations, "-p", SMALL_CASES,
                                  env=self.with_plugin(device_env(chip, **settings)))
            shown = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
            self.assertGreaterEqual(len(re.findall(r"\): OK", shown)), least, shown[-2000:])
            self.assertNotIn("FAIL", shown)
