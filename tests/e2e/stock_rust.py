"""A Rust program with llama-cpp-2 and this library, examples/generate, generates the text of the static build."""

import unittest

from harness import HEXAGON_DEVICE, Case, cpu_env, device_env

import build
from stocked import CHIPS, PROMPT

# llama-cpp-2's CPU backend is compiled for any x86-64, so it rounds differently where the CPU computes attention.
TOKENS = 16


class RustProgram(Case):
    @classmethod
    def setUpClass(cls):
        try:
            cls.program = build.rust_program()
        except build.Missing as missing:
            raise unittest.SkipTest(str(missing)) from missing

    def generate(self, env):
        return self.run_command("generate", [self.program, self.model(), PROMPT, TOKENS], env)

    def test_text_is_that_of_the_static_build(self):
        for device, chip in CHIPS.items():
            with self.subTest(device):
                done = self.generate(device_env(chip))
                self.assertEqual(done.code, 0, done.all[-2000:])
                self.assertIn(f"using device {device}", done.log)
                self.assertEqual(done.out.rstrip("\n"), self.complete(PROMPT, TOKENS, device_env(chip)).out.rstrip("\n"))

    def test_without_an_npu_it_computes_on_the_cpu(self):
        done = self.generate(cpu_env())
        self.assertEqual(done.code, 0, done.all[-2000:])
        self.assertNotIn(HEXAGON_DEVICE, done.log)
        self.assertTrue(done.out.strip())
