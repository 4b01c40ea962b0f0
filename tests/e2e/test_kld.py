"""The devices' logits on real text stay close to the exact answer: mean KL divergence under a limit per format.

One chunk of 512 tokens; long_kld.py has three, and tokens one at a time; `make kld` measures 20 and more formats.
"""

from harness import HEXAGON, SIMULATED, Case, device_env

import kld


class Divergence(Case):
    def check(self, chips, setup, kinds):
        print(kld.header(setup))
        for kind in kinds:
            runs = {f"{kind} {chip}": kld.Run(device_env(chip)) for chip in chips}
            for row in kld.measure(kind, setup, runs):
                with self.subTest(row.kind):
                    print(kld.line(row), flush=True)
                    self.assertLessEqual(row.device.divergence, row.limit)
                    # A divergence of nothing from itself would pass any limit.
                    self.assertGreater(row.device.divergence, 0)

    def test_both_families_are_under_their_limits(self):
        self.check([SIMULATED, HEXAGON], kld.Setup(1), kld.FORMATS)
