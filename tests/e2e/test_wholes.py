"""The graphs of a model that has a shape and no weights are those that docs/results/models.md was counted from."""

import os
import unittest

import harness  # noqa: F401
import graphs
import replay
import shapes
import wholes
from project import Problem

# A small model, for which a recording takes seconds.
MODEL = shapes.SHAPES[0]


class Wholes(unittest.TestCase):
    def test_the_device_gets_the_recorded_commands(self):
        graphs.program()
        want = {(workload, ops): row.commands for (model, workload, ops), row in wholes.recorded().items()
                if model == MODEL.name}
        self.assertEqual(wholes.commands(MODEL), want)

    def test_the_commands_take_no_more_packets_than_recorded(self):
        if not os.environ.get("HEXAGON_QEMU"):
            self.skipTest("HEXAGON_QEMU does not name a qemu-hexagon with HVX floating point")
        try:
            replay.guest(wholes.LIBRARY)
        except Problem as problem:
            self.skipTest(f"no guest: {problem}")
        graphs.program()
        self.assertEqual(wholes.worse(wholes.packets(MODEL), wholes.totals(wholes.recorded())), [])

    def test_more_packets_by_over_a_percent_are_told(self):
        want = wholes.totals(wholes.recorded())
        self.assertEqual(wholes.worse(want, want), [])
        for grown, told in ((1.009, 0), (1.011, 1)):
            have = want | {(MODEL.name, "token"): round(want[MODEL.name, "token"] * grown)}
            self.assertEqual(len(wholes.worse(have, want)), told)
        self.assertEqual(len(wholes.worse({("other", "token"): 1}, want)), 1)
