"""scripts/test.py fails where tests or cases were lost: its floors are within 2 % of the real numbers."""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from harness import cpu_env

import test as script
from project import ROOT

E2E = ROOT / "tests" / "e2e"
# A floor may not be below this part of the count.
CLOSE = 0.98

TWO_SKIPPED = """import unittest
class Skipped(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("reason")
    def test_a(self):
        pass
    def test_b(self):
        pass
"""


class Floors(unittest.TestCase):
    def tally(self, step, answer):
        """The tally of a step in which each program prints the result of `answer` for its arguments."""
        tally = script.Tally()

        def capture(name, args, *_):
            return 0, answer(args), Path("log")

        with mock.patch.object(script, "capture", capture), mock.patch.object(script.fetch, "model"), \
                mock.patch.object(script.fetch, "text"), contextlib.redirect_stdout(io.StringIO()):
            step(tally)
        return tally

    def test_no_tests_are_no_success(self):
        nothing = json.dumps({"found": 0, "passed": 0, "failed": [], "skipped": []})
        for step, pattern in [(script.step_e2e, "test_*.py"), (script.step_long, "long_*.py"),
                              (script.step_stock, "stock_*.py")]:
            with self.subTest(pattern):
                self.assertEqual(self.tally(step, lambda _: nothing).failed, [f"number of tests in {pattern}"])

    def test_floors_of_end_to_end_tests_are_within_2_percent_of_the_tests_that_are_there(self):
        for pattern in ("test_*.py", "long_*.py", "stock_*.py", "dist_*.py"):
            with self.subTest(pattern):
                count = sum(unittest.defaultTestLoader.loadTestsFromName(file.stem).countTestCases()
                            for file in E2E.glob(pattern))
                self.assertLessEqual(script.FLOORS[pattern], count)
                self.assertGreaterEqual(script.FLOORS[pattern], CLOSE * count)

    def test_skipped_class_counts_as_all_of_its_tests(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "two_skipped.py").write_text(TWO_SKIPPED, encoding="utf-8")
            done = subprocess.run([sys.executable, E2E / "run.py", "two_skipped"], stdout=subprocess.PIPE, text=True,
                                  env=cpu_env(PYTHONPATH=folder), check=True)
        result = json.loads(done.stdout)
        self.assertEqual((result["found"], result["passed"], len(result["skipped"])), (2, 0, 1))

    def test_attention_that_was_lost_is_noticed_on_each_number_of_threads(self):
        counts = {"MUL_MAT": 1330, "MUL_MAT_ID": 924, "FLASH_ATTN_EXT": 5300}

        def printed(lost):
            return "".join(f"  {operation}(a=1): OK\n" * (0 if operation == lost else count)
                           for operation, count in counts.items())

        with mock.patch.object(script, "HEXAGONS", ["hexagon-v75"]), mock.patch.object(script, "THREADS", [4]):
            self.assertEqual(self.tally(script.step_thread_ops, lambda _: printed(None)).failed, [])
            for lost in counts:
                failed = self.tally(script.step_thread_ops, lambda _, lost=lost: printed(lost)).failed
                self.assertEqual(failed, [f"backend-ops-hexagon-v75-4-{repack} {lost}" for repack in ("weights", "always")])

    def test_floors_of_hexagon_are_within_2_percent_of_the_table_of_operations(self):
        text = (ROOT / "docs" / "results" / "operations.md").read_text(encoding="utf-8")
        table = text.partition("\n## ")[0]
        counted = dict(re.findall(r"^\| (\*\*all\*\*|\w+) \| \**(\d+)\** \|", table, re.M))
        for operation, floor in script.FLOORS["hexagon"].items():
            with self.subTest(operation):
                count = int(counted[operation or "**all**"])
                self.assertLessEqual(floor, count)
                self.assertGreaterEqual(floor, CLOSE * count)
