"""On the Hexagon device, more models and more text than `make test` has time for: a token is one submission for each model
and kind of cache, logits stay close to the exact answer, a chat goes on for 500 tokens."""

import itertools

from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, cpu_env, device_env

import fetch
import kld
import models

CACHES = ["f16", "q8_0", "q4_0"]
CHAT_TOKENS = 500


class Models(Case):
    def check_splits(self, model):
        # Without flash attention, llama.cpp cannot quantize the cached values.
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

    def test_a_token_of_qwen_coder_is_one_submission(self):
        # As published: one file has Q5_0, Q8_0, Q4_K and Q6_K, the other Q4_K and Q6_K.
        for model in (fetch.qwen_coder(), fetch.qwen_coder_1_5b()):
            with self.subTest(model.name):
                self.assert_one_split(device_env(HEXAGON), HEXAGON_DEVICE, "--no-warmup", model=model)

    def test_qwen_coder_takes_its_own_size(self):
        for model in (fetch.qwen_coder(), fetch.qwen_coder_1_5b()):
            with self.subTest(model.name):
                self.assert_no_larger_than_its_file(model)

    def test_qwen_coder_1_5b_writes_the_text_of_the_cpu_backend(self):
        model = fetch.qwen_coder_1_5b()
        for prompt in ("The capital of France is", "def is_prime(n):"):
            text = self.complete(prompt, 16, cpu_env(), model=model).out
            for chip in (HEXAGON, SIMULATED):
                with self.subTest(f"{chip} {prompt}"):
                    self.assertEqual(self.complete(prompt, 16, device_env(chip), model=model).out, text)

    def check_divergence(self, source, chunks, ubatch, kind="Q4_0", chips=(HEXAGON,)):
        runs = {f"{kind} {chip}": kld.Run(device_env(chip)) for chip in chips}
        for row in kld.measure(kind, kld.Setup(chunks, source, ubatch), runs):
            with self.subTest(f"{source.name} {row.kind}"):
                print(kld.line(row), flush=True)
                self.assertLessEqual(row.device.divergence, row.limit)
                self.assertGreater(row.device.divergence, 0)

    def test_gemma3_is_under_its_limit(self):
        self.check_divergence(fetch.gemma(), 2, kld.CHUNK_TOKENS)

    def test_tinyllama_is_under_its_limit(self):
        self.check_divergence(fetch.tinyllama(), 2, kld.CHUNK_TOKENS)

    def test_gemma3_is_under_its_limit_token_by_token(self):
        self.check_divergence(fetch.gemma(), 1, 1)

    def test_qwen_coder_is_under_its_limits(self):
        self.check_divergence(fetch.qwen_coder(), 2, kld.CHUNK_TOKENS, "Q4_K_M", (HEXAGON, SIMULATED))

    def test_qwen_coder_1_5b_is_under_its_limits(self):
        self.check_divergence(fetch.qwen_coder_1_5b(), 1, kld.CHUNK_TOKENS, "Q4_K_M", (HEXAGON, SIMULATED))

    def test_qwen_coder_is_under_its_limit_token_by_token(self):
        self.check_divergence(fetch.qwen_coder(), 1, 1, "Q4_K_M")

    def test_smollm2_is_under_its_limit_in_other_types(self):
        # Rows of 576 are not whole blocks of 256, so llama-quantize uses other types for most of Q6_K and Q3_K_M.
        for kind in ("Q5_0", "Q6_K", "Q3_K_M"):
            with self.subTest(kind):
                self.check_divergence(fetch.fetched(fetch.SMOLLM2), 2, kld.CHUNK_TOKENS, kind)

    def test_a_chat_of_500_tokens(self):
        done = self.succeed("llama-cli", "-m", self.model(), "-st", "-n", CHAT_TOKENS, "--ignore-eos", "-c", 1024, "--temp", 0,
                            "-fit", "off", "--simple-io", "--no-display-prompt", "-v", "-p", "Explain why the sea is salty.",
                            env=device_env(HEXAGON), timeout=900)
        self.assertRegex(done.all, rf"\beval time = .*/ +{CHAT_TOKENS} tokens")
