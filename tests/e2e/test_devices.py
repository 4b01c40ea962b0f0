"""Every program sees the device when GGML_RUST_NPU_SIM names it, uses it, and sees no NPU when it is not set."""

import re

from harness import DEVICE, HEXAGON, SIMULATED, Case, cpu_env, device_env

from project import ROOT, device_of

LISTING = ["llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity", "llama-batched-bench",
           "llama-imatrix"]


class Devices(Case):
    def shown(self, name, *args, env):
        """The output of a program, without the name of this checkout's folder, which varies."""
        return self.succeed(name, *args, env=env).all.replace(str(ROOT), "")

    def check(self, name, *args):
        """`name` shows the device, and that it is simulated, exactly when the variable is set."""
        with self.subTest(name):
            shown = self.shown(name, *args, env=device_env())
            self.assertIn(DEVICE, shown)
            self.assertIn("simulated", shown)
            self.assertNotRegex(self.shown(name, *args, env=cpu_env()), r"RKNPU|HEX\d")

    def test_programs_list_it(self):
        for name in LISTING:
            self.check(name, "--list-devices")

    def test_quantize_lists_it(self):
        self.check("llama-quantize", "--allow-requantize", "--dry-run", self.model(), "Q4_0")

    def test_backend_ops_lists_it(self):
        self.check("test-backend-ops", "test", "-o", "ARGMAX")

    def test_two_simulated_chips_have_their_own_names(self):
        for chip in ["rk3588", "rk3576", "rk3566"]:
            with self.subTest(chip):
                shown = self.shown("llama-completion", "--list-devices", env=cpu_env(GGML_RUST_NPU_SIM=chip))
                self.assertIn(DEVICE, shown)
                self.assertIn(chip.upper(), shown.upper())

    def test_weights_are_packed_for_it(self):
        log = self.complete("The sea is", 4, device_env(), "-v").log
        sizes = [float(size) for size in re.findall(rf"{DEVICE}_PACKED model buffer size = +([\d.]+) MiB", log)]
        self.assertGreater(max(sizes, default=0), 100)

    def test_one_line_tells_what_runs_where_without_an_option(self):
        for chip in (HEXAGON, SIMULATED):
            with self.subTest(chip):
                log = self.complete("The sea is", 8, device_env(chip)).log
                told = [line for line in log.splitlines() if "nodes of a token" in line]
                self.assertEqual(len(told), 1, log)
                self.assertRegex(told[0], rf"ggml-rust-npu: {device_of(chip)}: \d+ of \d+ nodes of a token, in \d+ split")

    def test_a_token_is_one_split_without_an_option(self):
        self.assert_one_split(device_env(), DEVICE)
        self.assert_one_split(device_env(), DEVICE, "-ctk", "q8_0", "-ctv", "q4_0")

    def test_layers_on_the_cpu_are_not_cut(self):
        self.assertEqual(self.splits(device_env(), "-ngl", 10), ["CPU", DEVICE])
        self.assertEqual(self.splits(device_env(), "-ngl", 0), ["CPU"])

    def test_layers_with_a_matrix_on_the_cpu_are_not_cut(self):
        self.assertEqual(self.splits(device_env(), "-ot", "ffn_down=CPU"), [DEVICE])

    def test_nothing_of_ours_runs_without_it(self):
        self.assertEqual(self.complete("The sea is", 4, cpu_env(), "-v").ours(), [])

    def test_no_device_can_be_asked_for(self):
        log = self.complete("The sea is", 4, device_env(), "-v", "--device", "none").log
        self.assertNotIn(f"{DEVICE}_PACKED", log)

    def test_bench_runs_on_it(self):
        table = self.succeed("llama-bench", "-m", self.model(), "-p", 16, "-n", 4, "-r", 1, env=device_env()).out
        self.assertIn("RUST_NPU", table)

    def test_batched_bench_runs_on_it(self):
        log = self.succeed("llama-batched-bench", "-m", self.model(), "-c", 512, "-npp", 16, "-ntg", 4, "-npl", "1,2",
                           "-v", env=device_env()).all
        self.assertIn(f"{DEVICE}_PACKED model buffer size", log)
