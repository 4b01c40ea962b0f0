"""The device's logits on real text stay close to the exact answer: mean KL divergence under a limit per format.

KLD_CHUNKS (default 3) sets how many chunks of 512 tokens are measured; `make kld` measures 20 and more formats.
"""

import os

from harness import Case, device_env

import kld

CHUNKS = int(os.environ.get("KLD_CHUNKS", "3"))


class Divergence(Case):
    def test_mean_divergence_is_under_the_limit(self):
        setup = kld.Setup(CHUNKS)
        print(kld.header(setup))
        for kind, limit in kld.LIMITS.items():
            with self.subTest(kind):
                [row] = kld.measure(kind, setup, {kind: device_env()})
                print(kld.line(row), flush=True)
                self.assertLessEqual(row.device.divergence, limit)
                # A divergence of nothing from itself would pass any limit.
                self.assertGreater(row.device.divergence, 0)
