"""The plugin for the boards' processor generates text in Debian's llama.cpp for arm64, under qemu-aarch64."""

from harness import PLAIN_LOG, device_env
from stocked import CHIPS, PROMPT, Stock

import dist
import stock

TARGET = "aarch64-unknown-linux-gnu"
TOKENS = 8


class Aarch64(Stock):
    fetched = staticmethod(stock.debian_arm64_programs)

    @classmethod
    def made_plugin(cls):
        return dist.built(TARGET, dist.environment(TARGET)) / "libggml_rust_npu_plugin.so"

    def test_plugin_needs_no_newer_glibc_than_the_boards_have(self):
        dist.check_binary(self.plugin)

    def test_text_is_that_of_the_static_build(self):
        for device, chip in CHIPS.items():
            with self.subTest(device):
                command = self.program.command("llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512,
                                               "--temp", 0, "--seed", 1, "-no-cnv", "--no-display-prompt", "--ignore-eos",
                                               "-fit", "off", "-t", 1, *PLAIN_LOG, "-v")
                done = self.run_command("llama-completion", command, self.with_plugin(device_env(chip)), timeout=1200,
                                        cwd=self.program.folder)
                self.assertEqual(done.code, 0, done.all[-2000:])
                self.assertIn(f"using device {device}", done.log)
                expected = self.complete(PROMPT, TOKENS, device_env(chip)).out
                self.assertEqual(done.out.rstrip("\n"), expected.rstrip("\n"))
