"""The simulated Hexagon NPU in llama.cpp's programs: listed, used, together with the other family, and failing in a
controlled way."""

import re
import tempfile
import urllib.error
from functools import cached_property
from pathlib import Path

import models
import vocabularies
from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, Case, cpu_env, device_env, listed_devices, our_lines, server

PROMPT = "Once upon a time, in a small village by the sea,"
TOKENS = 32

# Faults that keep the device from starting, and the text of the single error line for each.
START_FAULTS = {"remote_handle64_open:1=0x80000406": "AEE_EUNABLETOLOAD", "remote_session_control:2=20": "unsigned",
                "rpcmem_alloc:1+=-1,rpcmem_alloc2:1+=-1": "rpcmem_alloc", "remote_handle64_invoke:1=0x8000040e": "start",
                "dsp:1=corrupt": "the DSP failed", "dsp:1=hang": "has not answered", "dsp:1=lost": "AEE_E"}
# Faults in the middle of computing. The self-test has 157 submissions, and each token one.
LATE_FAULTS = {"dsp:165=corrupt": "the DSP failed", "dsp:165=badring": "the DSP failed", "dsp:165=lost": "HEX0",
               "dsp:165=hang": "has not answered"}


class Hexagon(Case):
    env = staticmethod(lambda **settings: device_env(HEXAGON, **settings))

    @cached_property
    def shared_caches(self):
        """A small Gemma 4, whose layers 4 and 5 share the caches of others."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        return vocabularies.model("gemma4small", Path(folder))

    def test_programs_list_it(self):
        for name in ["llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity"]:
            with self.subTest(name):
                shown = self.succeed(name, "--list-devices", env=self.env()).all
                self.assertRegex(shown, rf"{HEXAGON_DEVICE}.*V75.*simulated")
                self.assertEqual(listed_devices(shown), [HEXAGON_DEVICE])

    def test_every_architecture_and_session_has_a_device(self):
        env = device_env("hexagon-v73,hexagon-v79,rk3588,hexagon-v81", GGML_RUST_NPU_HEX_SESSIONS="2")
        shown = self.succeed("llama-completion", "--list-devices", env=env).all
        for index, chip in enumerate(["V73", "V73", "V79", "V79", "V81", "V81"]):
            self.assertRegex(shown, rf"HEX{index}: .*{chip}")
        self.assertIn(DEVICE, shown)
        kept = self.succeed("llama-completion", "--list-devices", env=dict(env, GGML_RUST_NPU_DEVICES="hex3")).all
        self.assertRegex(kept, r"HEX3: .*V79")
        self.assertEqual(listed_devices(kept), ["HEX3"])

    def test_weights_are_packed_for_it(self):
        log = self.complete(PROMPT, 4, self.env(), "-v").log
        sizes = [float(size) for size in re.findall(rf"{HEXAGON_DEVICE}_PACKED model buffer size = +([\d.]+) MiB", log)]
        self.assertGreater(max(sizes, default=0), 100)

    def test_a_token_is_one_submission(self):
        """With every kind of attention and cache; long_models.py has all combinations, and other models."""
        for fa, cache in [("on", "f16"), ("on", "q8_0"), ("on", "q4_0"), ("off", "f16")]:
            with self.subTest(f"-fa {fa} {cache}"):
                self.assert_one_split(self.env(), HEXAGON_DEVICE, "-fa", fa, "-ctk", cache, "-ctv", cache)

    def test_server_agrees_with_completion(self):
        with server(self.model(), self.env(), "-c", 512, "-np", 1, name="hexagon-server") as running:
            served = running.complete(PROMPT, TOKENS)
        alone = self.complete(PROMPT, TOKENS, self.env()).out
        self.assertGreater(len(served), TOKENS)
        self.assertEqual(alone.rstrip("\n"), served.rstrip("\n"))

    def test_strict_coherence_changes_nothing(self):
        relaxed = self.complete(PROMPT, TOKENS, self.env()).out
        strict = self.complete(PROMPT, TOKENS, self.env(GGML_RUST_NPU_SIM_COHERENCE="strict")).out
        self.assertEqual(relaxed, strict)

    def test_the_cpu_reads_a_cache_of_the_device_that_a_later_layer_shares(self):
        """ggml asks the device about no node of such a layer if its weights are on the CPU."""
        shift = ["-c", 256, "--swa-full", "--context-shift"]
        cases = [["-fa", "on"], ["-fa", "off"], ["-fa", "on", *shift], ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", *shift]]
        for arguments in cases:
            with self.subTest(arguments):
                tokens = 300 if shift[0] in arguments else TOKENS
                relaxed, strict = (self.complete(PROMPT, tokens, self.env(GGML_RUST_NPU_SIM_COHERENCE=coherence),
                                                 "-ot", r"blk\.[45]\.=CPU", *arguments, model=self.shared_caches).out
                                   for coherence in ("relaxed", "strict"))
                self.assertEqual(strict, relaxed)

    def test_the_cpu_reads_states_of_the_device(self):
        """ggml does not ask the device about SSM_SCAN if `ssm_a` is on the CPU, which reads the state in place."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        for name in ["mamba2", "granitehybrid"]:
            with self.subTest(name):
                model = vocabularies.model(name, Path(folder))
                relaxed, strict = (self.complete(PROMPT, TOKENS, self.env(GGML_RUST_NPU_SIM_COHERENCE=coherence),
                                                 "-ot", r"blk\.[01]\.=CPU", model=model).out
                                   for coherence in ("relaxed", "strict"))
                self.assertEqual(strict, relaxed)

    def test_both_families_share_a_model(self):
        log = self.complete(PROMPT, 8, device_env("hexagon-v75,rk3588"), "-v").log
        for device in [HEXAGON_DEVICE, DEVICE]:
            self.assertIn(f"{device}_PACKED model buffer size", log)

    def test_two_npus_give_the_text_of_one(self):
        # Weights in F16, so that a part of a row is rounded exactly as the whole row.
        model = models.variant("F16")
        expected = self.complete(PROMPT, TOKENS, self.env(), model=model).out
        for chips, mode in [(HEXAGON, "tensor"), (f"{HEXAGON},{HEXAGON}", "layer"), (f"{HEXAGON},{HEXAGON}", "tensor")]:
            with self.subTest(f"{chips} -sm {mode}"):
                done = self.complete(PROMPT, TOKENS, device_env(chips), "-sm", mode, "-v", model=model)
                self.assertEqual(done.out, expected)
                self.assertEqual("HEX1" in done.log, "," in chips)

    def test_thread_safety(self):
        done = self.succeed("test-thread-safety", "-m", self.model(), "-ngl", 99, "-p", "The meaning of life is",
                            "-n", 16, "-c", 256, "-ub", 32, "-np", 2, "-t", 2, "-v", env=self.env())
        self.assertIn("All threads finished without errors", done.all)

    def env_of(self, fault):
        # A DSP that hangs gets a short time-out; one that only fails must not seem to hang on a busy machine.
        return self.env(GGML_RUST_NPU_SIM_FAULTS=fault, GGML_RUST_NPU_TIMEOUT="1" if fault.endswith("hang") else "30")

    def test_what_keeps_it_from_starting_is_one_line(self):
        want = self.complete(PROMPT, 8, cpu_env()).out
        for fault, word in START_FAULTS.items():
            with self.subTest(fault):
                done = self.complete(PROMPT, 8, self.env_of(fault), "-v")
                self.assertEqual(done.out, want)
                errors = done.ours("E")
                self.assertTrue(errors)
                self.assertIn(word, " ".join(errors))
                self.assertIn(HEXAGON_DEVICE, errors[-1])

    def test_a_dsp_that_fails_later_fails_the_run_with_its_cause(self):
        for fault, word in LATE_FAULTS.items():
            with self.subTest(fault):
                done = self.run_tool("llama-bench", "-v", "-m", self.model(), "-p", 8, "-n", 16, "-r", 1,
                                     env=self.env_of(fault))
                self.assertNotEqual(done.code, 0, "the run succeeded: the fault came in the self-test, or after the last token")
                lines = [line for line in our_lines(done.log) if line.startswith("ggml-rust-npu: HEX0:")]
                self.assertIn("(simulated)", lines[0], "the fault came before the device was there")
                self.assertIn(word, " ".join(lines[1:]), done.log[-2000:])

    def test_server_survives_a_lost_dsp(self):
        with server(self.model(), self.env(GGML_RUST_NPU_SIM_FAULTS="dsp:169=lost"), "-c", 512, "-np", 1,
                    name="hexagon-fault") as running:
            with self.assertRaises(urllib.error.HTTPError) as failed:
                running.complete(PROMPT, 64)
            self.assertGreaterEqual(failed.exception.code, 400)
            failed.exception.close()
            self.assertIsNone(running.process.poll(), "llama-server ended")

    def test_wrong_settings_name_what_is_allowed(self):
        want = self.complete(PROMPT, 8, cpu_env()).out
        for variable, value, word in [("GGML_RUST_NPU_REPACK", "never", "always"), ("GGML_RUST_NPU_TIMEOUT", "0", "1 to"),
                                      ("GGML_RUST_NPU_HEX_SESSIONS", "9", "1 to 4")]:
            with self.subTest(variable):
                done = self.complete(PROMPT, 8, self.env(**{variable: value}), "-v")
                self.assertEqual(done.out, want)
                [error] = done.ours("E")
                for part in [variable, value, word]:
                    self.assertIn(part, error)

    def test_missing_vendor_library(self):
        missing = "/nonexistent/libcdsprpc.so"
        done = self.complete(PROMPT, 8, cpu_env(GGML_RUST_NPU_CDSPRPC_LIB=missing), "-v")
        [error] = done.ours("E")
        self.assertIn(missing, error)
