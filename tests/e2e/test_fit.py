"""llama.cpp's -fit shortens a context that does not fit into the machine's memory, which devices report once in all.

A random model's metadata says that it was trained with 131072 tokens. The test sets the memory of the simulated devices'
machine (GGML_RUST_NPU_SIM_MEMORY).
"""

import re
import tempfile
from pathlib import Path

import random_model
from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, device_env, listed_devices, server
from stocked import DebianStock

# The embedding, the feed-forward network's hidden size, and the number of heads.
SIZES = 512, 2560, 8
TRAINED = 131072
# What -fit leaves free on each device, and the shortest context that it chooses by default.
MARGIN_MIB, SHORTEST = 1024, 4096
# Room for the model and for a part of its caches and results.
ROOM_MIB, MORE_MIB = 250, 375
# Enough room for everything.
MUCH_MIB = 32 * 1024

# Without this option llama.cpp would measure attention on Rockchip, whose results take gigabytes.
ATTENTION = ["-fa", "on"]


def env(chip, room_mib, sessions=1, devices=1):
    return device_env(chip, GGML_RUST_NPU_SIM_MEMORY=str(devices * MARGIN_MIB + room_mib),
                      GGML_RUST_NPU_HEX_SESSIONS=str(sessions))


class Fit(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.random_model = random_model.write(Path(folder.name) / "random.gguf", 43, *SIZES, context=TRAINED)

    def fitted(self, environment, *args):
        """The context that llama-fit-params has the programs use."""
        shown = self.succeed("llama-fit-params", "-m", self.random_model, *ATTENTION, *args, env=environment).out
        return int(re.search(r"-c (\d+)", shown).group(1))

    def takes_mib(self, environment, device, context):
        """The memory of a device that model, context and results use."""
        shown = self.succeed("llama-fit-params", "-m", self.random_model, *ATTENTION, "-c", context, "-fitp", "on",
                             env=environment).out
        return sum(map(int, re.search(rf"(?m)^{device} ((?:\d+ )+)$", shown).group(1).split()))

    def test_a_context_that_does_not_fit_is_shortened(self):
        for chip, device in (HEXAGON, HEXAGON_DEVICE), (SIMULATED, DEVICE):
            with self.subTest(chip):
                little, more, much = (self.fitted(env(chip, room)) for room in (ROOM_MIB, MORE_MIB, MUCH_MIB))
                print(f"{chip}: a context of {little} in {ROOM_MIB} MiB, of {more} in {MORE_MIB} MiB")
                self.assertLess(SHORTEST, little)
                self.assertLess(little, more)
                self.assertLess(more, TRAINED)
                self.assertEqual(much, TRAINED)
                # At least nine tenths of the room are used, which is impossible if caches are not counted.
                used = self.takes_mib(env(chip, ROOM_MIB), device, little)
                self.assertTrue(0.9 * ROOM_MIB < used <= ROOM_MIB, used)

    def test_a_context_that_is_asked_for_stays(self):
        self.assertEqual(self.fitted(env(HEXAGON, ROOM_MIB), "-c", 65536), 65536)

    def test_sessions_share_one_memory(self):
        one = self.fitted(env(HEXAGON, ROOM_MIB))
        # Twice the margin, less the unused part when layers do not divide evenly.
        two = self.fitted(env(HEXAGON, ROOM_MIB, sessions=2, devices=2))
        self.assertTrue(SHORTEST < two <= one, (two, one))

    def test_devices_report_the_memory_of_the_machine_once(self):
        for chip, sessions, names in [(HEXAGON, 1, ["HEX0"]), (HEXAGON, 3, ["HEX0", "HEX1", "HEX2"]),
                                      (f"{SIMULATED},{HEXAGON}", 1, ["RKNPU0", "HEX0"])]:
            with self.subTest(names):
                environment = env(chip, ROOM_MIB, sessions)
                shown = self.succeed("llama-bench", "--list-devices", env=environment).all
                self.assertEqual(listed_devices(shown), names)
                sizes = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+) MiB, (\d+) MiB free\)", shown)]
                self.assertEqual(len(sizes), len(names), shown)
                for of_all in map(sum, zip(*sizes)):
                    # Each number is rounded down.
                    self.assertTrue(0 <= MARGIN_MIB + ROOM_MIB - of_all < len(names), sizes)

    def test_a_server_without_a_context_has_one_that_fits(self):
        for chip in HEXAGON, SIMULATED:
            with self.subTest(chip), server(self.random_model, env(chip, ROOM_MIB), "-fit", "on", "-np", 1, "-t", 1, *ATTENTION,
                                            "--no-warmup", name=f"fit-{chip}") as running:
                context = running.get("/props")["default_generation_settings"]["n_ctx"]
                self.assertTrue(SHORTEST < context < TRAINED, context)
                self.assertEqual(running.ask("6 bottles", 4)["tokens_predicted"], 4)

    def test_the_machine_itself_is_asked_without_the_variable(self):
        shown = self.succeed("llama-bench", "--list-devices", env=device_env(HEXAGON)).all
        total, free = map(int, re.search(r"\((\d+) MiB, (\d+) MiB free\)", shown).groups())
        kib = int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text(encoding="utf-8")).group(1))
        self.assertEqual(total, kib // 1024)
        self.assertTrue(0 < free <= total)


class DebianFit(DebianStock):
    """llama.cpp 0.7.0 with the plugin."""

    def test_a_context_that_does_not_fit_is_shortened(self):
        with tempfile.TemporaryDirectory() as folder:
            model = random_model.write(Path(folder) / "random.gguf", 43, *SIZES, context=TRAINED)
            for chip in HEXAGON, SIMULATED:
                with self.subTest(chip):
                    contexts = [int(re.search(r"-c (\d+)", self.run_stock(
                        "llama-fit-params", "-m", model, *ATTENTION, env=self.with_plugin(env(chip, room))).out).group(1))
                        for room in (ROOM_MIB, MUCH_MIB)]
                    self.assertTrue(SHORTEST < contexts[0] < TRAINED, contexts)
                    self.assertEqual(contexts[1], TRAINED)
