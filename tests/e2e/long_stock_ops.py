"""All cases of Debian's build of upstream's test-backend-ops, of ggml 0.27.0, on the plugin's devices: hours."""

import re

from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, device_env
from stocked import DebianStock

from project import JOBS

# Cases with this many experts draw a billion random numbers each: 20 of 3,109 on Rockchip, 20 of 19,879 on Hexagon.
NOT_MANY_EXPERTS = "^(?!.*n_mats=(128|256|512|1024))"

TIMEOUT_S = 12 * 3600


class AllOperations(DebianStock):
    def test_every_case_of_its_test_backend_ops_passes(self):
        for device, chip, least in [(DEVICE, SIMULATED, 3028), (HEXAGON_DEVICE, HEXAGON, 19462)]:
            # With the default, the CPU would compute operands that are not weights.
            settings = {"GGML_RUST_NPU_REPACK": "always"} if chip == SIMULATED else {}
            with self.subTest(device):
                done = self.run_command("test-backend-ops", self.program.command("test-backend-ops", "test", "-b", device, "-j",
                                                                                 JOBS, "-p", NOT_MANY_EXPERTS),
                                        self.with_plugin(device_env(chip, **settings)), timeout=TIMEOUT_S,
                                        cwd=self.program.folder)
                shown = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
                passed = len(re.findall(r"\): OK", shown))
                print(f"   Debian's test-backend-ops on {chip}: {passed} cases OK")
                self.assertEqual(re.findall(r"^.*FAIL.*$", shown, re.M), [])
                self.assertEqual(done.code, 0, done.all[-2000:])
                self.assertGreaterEqual(passed, least)
