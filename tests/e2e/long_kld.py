"""As test_kld.py, with more text, and with one token at a time.

KLD_CHUNKS (default 3) sets how many chunks of 512 tokens are measured.
"""

import os

import test_kld
from harness import HEXAGON, SIMULATED

import kld

CHUNKS = int(os.environ.get("KLD_CHUNKS", "3"))


class LongDivergence(test_kld.Divergence):
    def test_both_families_are_under_their_limits(self):
        self.check([SIMULATED, HEXAGON], kld.Setup(CHUNKS), kld.FORMATS)

    def test_hexagon_is_under_its_limit_token_by_token(self):
        self.check([HEXAGON], kld.Setup(1, ubatch=1), ["Q4_0"])
