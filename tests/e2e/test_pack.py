"""Weights come from pack files that ggml-npu repack wrote, and the text stays the same; a pack that does not fit changes
nothing but one log line."""

import platform
import shutil
import tempfile
import unittest
from pathlib import Path

import build
import models
from harness import HEXAGON, SIMULATED, Case, device_env
from project import LOGS, ROOT, cpu_env, tool_env

PROMPT = "Once upon a time, in a small village by the sea,"
TOKENS = 24

TOOL = ROOT / "target" / "debug" / "ggml-npu"
# An x86-64 processor of 2008, which has no AVX2.
OLD_CPU = ["qemu-x86_64", "-cpu", "Nehalem"]

# The multiplied weights of SmolLM2-135M: seven in each of 30 blocks, and the head.
WEIGHTS = 7 * 30 + 1


class Pack(Case):
    @classmethod
    def setUpClass(cls):
        build.tool(LOGS / "tool.log", tool_env(), "--workspace")
        cls.folder = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def repack(self, kind, chip, name, *args, emulator=()):
        pack = Path(self.folder.name) / name
        command = [*emulator, TOOL, "repack", models.variant(kind), "--chip", chip, "-o", pack, *args]
        done = self.run_command("ggml-npu", command, cpu_env())
        self.assertEqual(done.code, 0, done.all)
        return pack

    def text_with(self, chip, *args, pack=None, kind="Q8_0", **settings):
        if pack is not None:
            settings["GGML_RUST_NPU_PACK"] = str(pack)
        env = device_env(chip, GGML_RUST_NPU_LOG="debug", **settings)
        return self.try_complete(PROMPT, TOKENS, env, *args, model=models.variant(kind))

    def test_weights_come_from_the_pack_and_the_text_stays(self):
        # Q4_K_M has K-quants in addition to the types of other files.
        for chip in (SIMULATED, HEXAGON):
            for kind in ("Q8_0", "Q4_K_M"):
                with self.subTest(f"{chip} {kind}"):
                    pack = self.repack(kind, chip, f"{chip}-{kind}.npu")
                    want = self.text_with(chip, kind=kind)
                    done = self.text_with(chip, "-v", pack=pack, kind=kind, GGML_RUST_NPU_PACK_VERIFY="full")
                    self.assertEqual((done.code, done.out), (0, want.out), done.log[-2000:])
                    # Not by line, because the loader prints dots in between.
                    self.assertEqual(done.log.count("comes packed from"), WEIGHTS)

    def test_int4_weights_with_their_calibration_come_from_the_pack(self):
        rules = "ffn_up=int4"
        pack = self.repack("Q8_0", SIMULATED, "int4.npu", "--rules", rules, "--calibrate", "kl")
        settings = {"GGML_RUST_NPU_RULES": rules}
        want = self.text_with(SIMULATED, GGML_RUST_NPU_CALIBRATION="kl", **settings)
        # The method that the pack was calibrated with applies, not the variable.
        done = self.text_with(SIMULATED, pack=pack, GGML_RUST_NPU_CALIBRATION="absmax", **settings)
        self.assertEqual((done.code, done.out), (0, want.out))

    @unittest.skipIf(platform.machine() != "x86_64", "only x86-64 has processors without the vectors of the kernels")
    @unittest.skipUnless(shutil.which(OLD_CPU[0]), f"{OLD_CPU[0]} is not installed")
    def test_a_cpu_without_avx2_packs_the_same_bytes_and_simulates_no_hexagon(self):
        # Q4_K_M has both K-quants and types with simple blocks.
        want = self.repack("Q4_K_M", HEXAGON, "new.npu").read_bytes()
        self.assertEqual(self.repack("Q4_K_M", HEXAGON, "old.npu", emulator=OLD_CPU).read_bytes(), want)
        env = cpu_env(GGML_RUST_NPU_SIM=f"{HEXAGON},{SIMULATED}")
        shown = self.run_command("ggml-npu", [*OLD_CPU, TOOL, "devices"], env).all
        self.assertIn("HEX0 is not available: cannot start the stand-in of libcdsprpc: "
                      "it needs a CPU with AVX2, FMA, F16C and BMI2", shown)
        self.assertIn("RKNPU0: ", shown)

    def test_a_pack_that_does_not_fit_is_one_line_and_a_normal_load(self):
        want = self.text_with(SIMULATED).out
        folder = Path(self.folder.name)
        good = self.repack("Q8_0", SIMULATED, "good.npu")
        bytes_of = good.read_bytes()
        damaged = bytearray(bytes_of)
        damaged[len(damaged) // 2] ^= 1
        cases = {
            "another model": (self.repack("Q4_0", SIMULATED, "stale.npu").read_bytes(), "is another one"),
            "another chip": (self.repack("Q8_0", "rk3566", "chip.npu").read_bytes(), "the device wants"),
            "truncated": (bytes_of[:-1], "truncated"),
            "foreign": (models.variant("Q8_0").read_bytes()[:4096], "magic"),
            "corrupted": (bytes(damaged), "corrupted"),
        }
        for what, (content, word) in cases.items():
            with self.subTest(what):
                pack = folder / "bad.npu"
                pack.write_bytes(content)
                done = self.text_with(SIMULATED, pack=pack)
                self.assertEqual((done.code, done.out), (0, want))
                lines = done.troubles()
                self.assertEqual(len(lines), 1, lines)
                self.assertIn(word, lines[0])
