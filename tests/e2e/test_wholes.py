"""The graphs of a model that has a shape and no weights are those that docs/results/models.md was counted from."""

import json
import os
import subprocess
import unittest

import harness  # noqa: F401
import build
import graphs
import replay
import shapes
import wholes
from project import LOGS, ROOT, Problem, cpu_env, tool_env

TOOL = ROOT / "target" / "debug" / "ggml-npu"
# A small model, which is recorded in seconds.
MODEL = shapes.SHAPES[0]

# Models that `ggml-npu model` knows, and how far its packets may be from the counted ones. It does not know norms that are
# combined with an addition, which cost a fifth of the packets of a Gemma 3 prompt. For rotations of a prompt it uses counts of
# 32 rows with heads of 64; a row of 128 costs more than twice as much, and a sixth of the packets of a Qwen3-0.6B prompt are
# rotations.
RECKONED = {"Qwen3-0.6B": 0.2, "Qwen3-4B": 0.15, "Llama-3.2-1B": 0.15, "Qwen2.5-1.5B": 0.15, "Phi-3-mini": 0.15,
            "Gemma-3-1B": 0.4}
REPORT = ["--chip", wholes.CHIP, "--context", "512,1024", "--batch", "1,8", "--json"]


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

    def test_the_tool_reckons_what_was_counted(self):
        build.tool(LOGS / "tool-wholes.log", tool_env(), "--workspace")
        program = graphs.program()
        counted = wholes.totals(wholes.recorded())
        for shape in (it for it in shapes.SHAPES if it.name in RECKONED):
            path = shapes.write(shape, shape.layers, program)
            self.addCleanup(path.unlink)
            done = subprocess.run([TOOL, "model", path, *REPORT], check=True, stdout=subprocess.PIPE, env=cpu_env())
            report = json.loads(done.stdout)
            steps = {(row["context"], row["batch"]): row["packets"] for row in report["generation"]}
            have = {"prompt": report["prompts"][0]["packets"], "token": steps[1024, 1], "sequences": steps[1024, 8]}
            for workload, packets in have.items():
                ratio = packets / counted[shape.name, workload]
                self.assertLess(abs(ratio - 1), RECKONED[shape.name], f"{shape.name}, {workload}: {ratio:.2f}")

    def test_more_packets_by_over_a_percent_are_told(self):
        want = wholes.totals(wholes.recorded())
        self.assertEqual(wholes.worse(want, want), [])
        for grown, told in ((1.009, 0), (1.011, 1)):
            have = want | {(MODEL.name, "token"): round(want[MODEL.name, "token"] * grown)}
            self.assertEqual(len(wholes.worse(have, want)), told)
        self.assertEqual(len(wholes.worse({("other", "token"): 1}, want)), 1)
