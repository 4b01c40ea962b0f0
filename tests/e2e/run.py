#!/usr/bin/env python3
"""Runs a file of tests and prints the results as the last line of its output, in JSON.

Usage: run.py test_devices

scripts/test.py runs each file in a process, because some files replace the arguments or the output of their process.
"""

import json
import sys
import unittest

import harness  # noqa: F401  (makes the scripts importable)


class Result(unittest.TestResult):
    """Counts the tests that passed with all their subtests."""

    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    result, tests = Result(), unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    # Counted before they run, because afterwards a skipped class counts as one.
    found = tests.countTestCases()
    tests.run(result)
    print(json.dumps({
        "found": found,
        "passed": result.passed,
        "failed": [(str(test), trace) for test, trace in result.failures + result.errors],
        "skipped": [(str(test), reason) for test, reason in result.skipped],
    }))


if __name__ == "__main__":
    main()
