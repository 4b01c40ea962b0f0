"""On the Hexagon device, more models and more text than `make test` has time for: a token is one submission for each model
and kind of cache, logits stay close to the exact answer, a chat goes on for 500 tokens."""

import itertools

from harness import HEXAGON, HEXAGON_DEVICE, Case, device_env

import fetch
import kld
import models

CACHES = ["f16", "q8_0", "q4_0"]
CHAT_TOKENS = 500


class Models(Case):
    def check_splits(self, model):
        # llama.cpp has no quantized values without flash attention.
        with_fa = [("on", k, v) for k, v in itertools.product(CACHES, CACHES)]
        for fa, k, v in [*with_fa, *(("off", k, "f16") for k in CACHES)]:
            with self.subTest(f"{model.name} -fa {fa} -ctk {k} -ctv {v}"):
                self.assert_one_split(device_env(HEXAGON), HEXAGON_DEVICE, "-fa", fa, "-ctk", k, "-ctv", v, "--no-warmup",
                                      model=model)

    def test_a_token_of_smollm2_is_one_submission(self):
        self.check_splits(models.variant("Q4_0", fetch.fetched(fetch.SMOLLM2)))

    def test_a_token_of_gemma3_is_one_submission(self):
        self.check_splits(models.variant("Q4_0", fetch.gemma()))

    def test_a_token_of_tinyllama_is_one_submission(self):
        self.check_splits(models.variant("Q4_0", fetch.tinyllama()))

    def check_divergence(self, source, chunks, ubatch):
        [row] = kld.measure("Q4_0", kld.Setup(chunks, source, ubatch), {"Q4_0": kld.Run(device_env(HEXAGON))})
        print(kld.line(row), flush=True)
        self.assertLessEqual(row.device.divergence, row.limit)
        self.assertGreater(row.device.divergence, 0)

    def test_gemma3_is_under_its_limit(self):
        self.check_divergence(fetch.gemma(), 2, kld.CHUNK_TOKENS)

    def test_tinyllama_is_under_its_limit(self):
        self.check_divergence(fetch.tinyllama(), 2, kld.CHUNK_TOKENS)

    def test_gemma3_is_under_its_limit_token_by_token(self):
        self.check_divergence(fetch.gemma(), 1, 1)

    def test_a_chat_of_500_tokens(self):
        done = self.succeed("llama-cli", "-m", self.model(), "-st", "-n", CHAT_TOKENS, "--ignore-eos", "-c", 1024, "--temp", 0,
                            "-fit", "off", "--simple-io", "--no-display-prompt", "-v", "-p", "Explain why the sea is salty.",
                            env=device_env(HEXAGON), timeout=900)
        self.assertRegex(done.all, rf"\beval time = .*/ +{CHAT_TOKENS} tokens")
