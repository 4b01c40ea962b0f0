"""The device's logits on real text stay close to the exact answer: mean KL divergence under a limit per format.

KLD_CHUNKS (default 3) sets how many chunks of 512 tokens are measured; `make kld` measures 20 and more formats.
"""

import os

from harness import HEXAGON, SIMULATED, Case, device_env

import kld

CHUNKS = int(os.environ.get("KLD_CHUNKS", "3"))


class Divergence(Case):
    def check(self, chip, chunks, ubatch, kinds):
        setup = kld.Setup(chunks, ubatch=ubatch)
        print(kld.header(setup))
        for kind in kinds:
            with self.subTest(f"{chip} {kind}"):
                [row] = kld.measure(kind, setup, {kind: kld.Run(device_env(chip))})
                print(kld.line(row), flush=True)
                self.assertLessEqual(row.device.divergence, row.limit)
                # A divergence of nothing from itself would pass any limit.
                self.assertGreater(row.device.divergence, 0)

    def test_rockchip_is_under_its_limits(self):
        self.check(SIMULATED, CHUNKS, 512, kld.FORMATS)

    def test_hexagon_is_under_its_limits(self):
        self.check(HEXAGON, CHUNKS, 512, kld.FORMATS)

    def test_hexagon_is_under_its_limit_token_by_token(self):
        self.check(HEXAGON, 1, 1, ["Q4_0"])
