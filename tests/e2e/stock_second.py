"""llama.cpp 0.6.0, with version 3 of the backend API and the backend linked in, generates the text of the main version."""

from harness import HEXAGON_DEVICE, Case, device_env

import build
from stocked import CHIPS, PROMPT, TOKENS

# On Rockchip the CPU computes the attention of single tokens. It is compiled with less optimization here, so it rounds
# differently, and later tokens may differ.
TOKENS_WITH_CPU = 16


class Second(Case):
    @classmethod
    def setUpClass(cls):
        cls.program = build.second()

    def test_text_is_that_of_the_main_version(self):
        for device, chip in CHIPS.items():
            tokens = TOKENS if device == HEXAGON_DEVICE else TOKENS_WITH_CPU
            with self.subTest(device):
                done = self.run_command("generate", [self.program, self.model(), PROMPT, tokens], device_env(chip))
                self.assertEqual(done.code, 0, done.all[-2000:])
                self.assertIn(f"using device {device}", done.log)
                main = self.complete(PROMPT, tokens, device_env(chip)).out
                self.assertEqual(done.out.rstrip("\n"), main.rstrip("\n"))
