"""The server and llama-completion generate the same text on the device, alone and four at a time."""

from concurrent.futures import ThreadPoolExecutor

from harness import Case, device_env, server

TOKENS = 32

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
]


class Generation(Case):
    def test_server_agrees_with_completion(self):
        with server(self.model(), device_env(), "-c", 512, "-np", 1, name="server-greedy") as running:
            served = running.complete(PROMPTS[1], TOKENS)
        alone = self.complete(PROMPTS[1], TOKENS, device_env()).out
        self.assertGreater(len(served), TOKENS)
        # The program adds line breaks at the end of its output.
        self.assertEqual(alone.rstrip("\n"), served.rstrip("\n"))

    def one_by_one_and_at_once(self, env, name):
        with server(self.model(), env, "-c", 2048, "-np", 4, name=name) as running:
            def ask(prompt):
                return running.ask(prompt, TOKENS, cache_prompt=False)

            single = [ask(prompt) for prompt in PROMPTS]
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                together = list(pool.map(ask, PROMPTS))
        return single, together

    def test_parallel_requests_get_the_texts_of_single_ones(self):
        # The CPU backend computes attention of few tokens, with results that depend on the batch; the NPU computes it for more
        # tokens.
        same = [self.assert_same_or_tied(*pair) for pair in zip(*self.one_by_one_and_at_once(device_env(), "server-parallel"))]
        print(f"{sum(same)} of {len(same)} texts are those of single requests, the others part at a tie")
        self.assertTrue(any(same))
