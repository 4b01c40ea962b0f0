"""The devices' logits on real text stay close to the exact answer: mean KL divergence under a limit per format.

One chunk of 512 tokens; long_kld.py has three, and tokens one at a time; `make kld` measures 20 and more formats.
"""

import contextlib
import io
import math
from unittest import mock

from harness import HEXAGON, SIMULATED, Case, device_env

import kld
from project import Problem


class Divergence(Case):
    def check(self, chips, setup, kinds):
        print(kld.header(setup))
        for kind in kinds:
            runs = {f"{kind} {chip}": kld.Run(device_env(chip)) for chip in chips}
            for row in kld.measure(kind, setup, runs):
                with self.subTest(row.kind):
                    print(kld.line(row), flush=True)
                    self.assertLessEqual(row.device.divergence, row.limit)
                    # A divergence of 0 would pass any limit. It would mean that the CPU computed, or that a model was compared
                    # with itself.
                    self.assertGreater(row.device.divergence, 0)
                    self.assertNotEqual(row.device, row.cpu)

    def test_both_families_are_under_their_limits(self):
        self.check([SIMULATED, HEXAGON], kld.Setup(1), kld.FORMATS)


class Verdict(Case):
    """kld.py's verdict on numbers; no model is needed."""

    def run_script(self, divergence, *formats, **arguments):
        """Its output and its Problem, or None."""
        device = kld.Result(divergence, 0.0001, 99.0, 12.0)
        out, arguments = io.StringIO(), [word for name, value in arguments.items() for word in (f"--{name}", value)]
        with mock.patch.object(kld, "divergence", return_value=device), mock.patch.object(kld, "perplexity"), \
                mock.patch.object(kld.build, "static"), mock.patch.object(kld.models, "exact"), \
                mock.patch.object(kld.models, "variant"), mock.patch.object(kld.fetch, "text"), \
                mock.patch("sys.argv", ["kld.py", "1", *formats, *arguments]), contextlib.redirect_stdout(out):
            try:
                kld.main()
            except Problem as problem:
                return out.getvalue(), str(problem)
        return out.getvalue(), None

    def test_numbers_that_are_not_finite_fail_with_and_without_a_limit(self):
        for value in (math.nan, math.inf):
            self.assertEqual(self.run_script(value, "Q8_0", "BF16")[1], f"Q8_0 is {value}; BF16 is {value}")
            self.assertIsNotNone(self.run_script(value, "Q8_0", rules="blk=int4")[1])

    def test_divergence_over_the_limit_fails(self):
        limit = kld.limit_of("Q8_0", SIMULATED)
        self.assertIsNone(self.run_script(limit, "Q8_0")[1])
        self.assertEqual(self.run_script(1.01 * limit, "Q8_0")[1], "Q8_0 is over the limit")

    def test_row_without_a_limit_says_why(self):
        self.assertIn("BF16 is not compared with a limit: no limit is known for the format", self.run_script(0.1, "BF16")[0])
        self.assertIn("limits hold for the default rules", self.run_script(0.1, "Q8_0", rules="blk=int4")[0])
        self.assertNotIn("not compared", self.run_script(0.001, "Q8_0")[0])

    def test_each_format_that_make_kld_measures_has_limits(self):
        for kind in [*kld.FORMATS, *kld.MORE]:
            for chip in (SIMULATED, HEXAGON):
                for ubatch in (1, 512):
                    self.assertIsNotNone(kld.limit_of(kind, chip, ubatch), (kind, chip, ubatch))
