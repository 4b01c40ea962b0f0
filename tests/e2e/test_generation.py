"""The server and llama-completion generate the same text on the device, alone and four at a time."""

from concurrent.futures import ThreadPoolExecutor

from harness import Case, cpu_env, device_env, server

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
        # The program ends its output with line breaks of its own.
        self.assertEqual(alone.rstrip("\n"), served.rstrip("\n"))

    def one_by_one_and_at_once(self, env, name):
        with server(self.model(), env, "-c", 2048, "-np", 4, name=name) as running:
            single = [running.complete(prompt, TOKENS) for prompt in PROMPTS]
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                together = list(pool.map(lambda prompt: running.complete(prompt, TOKENS), PROMPTS))
        return single, together

    def test_parallel_requests_get_the_texts_of_single_ones(self):
        cpu_single, cpu_together = self.one_by_one_and_at_once(cpu_env(), "server-parallel-cpu")
        single, together = self.one_by_one_and_at_once(device_env(), "server-parallel-device")
        # Attention runs on the CPU backend, whose results may depend on the batch.
        comparable = [i for i in range(len(PROMPTS)) if cpu_single[i] == cpu_together[i]]
        print(f"{len(comparable)} of {len(PROMPTS)} texts do not depend on the batch on the CPU backend alone")
        if not comparable:
            self.skipTest("on the CPU backend alone every text depends on the batch")
        for i in comparable:
            with self.subTest(PROMPTS[i]):
                self.assertEqual(single[i], together[i])
