"""The scorers of `ggml-npu scale` that use a reward model, against other ways to get the same numbers from llama-server.

No reward model can be had: SmolLM2 plays it, with a head of random numbers. That checks the route, not the judgement.
"""

import json
import math
import random

from harness import cpu_env, server
from scripted_server import scripted_server
from test_scale import TOOL, ScaleCase, questions, write_lines

import models

WIDTH = 576
SIGNS = ["+", "-"]


def steps(text):
    return [step.strip() for step in text.split("\n\n") if step.strip()] or [""]


class Reward(ScaleCase):
    def setUp(self):
        super().setUp()
        write_lines(self.problems, questions(3))

    def scored(self, *args):
        """The questions with the texts and scores of their solutions, which a scripted server writes in steps."""
        with scripted_server() as running:
            running.options = {"ends": 2}
            done = self.run_scale(running.url, "--method", "beam", "-n", 2, "--width", 2, "--max-steps", 3, *args)
        self.assertEqual(done.code, 0, done.all)
        asked = {row["id"]: row["question"] for row in questions(3)}
        found = [(asked[entry["id"]], solution["text"], solution["scores"])
                 for entry in self.lines()[1:] for solution in entry["solutions"]]
        self.assertTrue(any(len(steps(text)) > 1 for _, text, _ in found), found)
        return found

    def test_plus_and_minus_are_the_probabilities_of_the_whole_vocabulary(self):
        with server(models.variant("Q8_0"), cpu_env(), "-c", 1024, "-np", 2, "-kvu", name="scale-signs") as reward:
            url = f"http://127.0.0.1:{reward.port}"
            found = self.scored("--scorer", "plus-minus", "--reward-url", url, "--reward-prompt", "{question}\n{steps} ?")
            ids = [reward.post("/tokenize", {"content": sign})["tokens"] for sign in SIGNS]
            self.assertEqual([len(each) for each in ids], [1, 1])
            for question, text, scores in found:
                parts = steps(text)
                self.assertEqual(len(scores), len(parts))
                for count, score in enumerate(scores, 1):
                    prompt = question + "\n" + "\n\n".join(parts[:count]) + " ?"
                    answer = reward.post("/completion", {"prompt": prompt, "n_predict": 1, "n_probs": 60000,
                                                         "cache_prompt": False})
                    likely = {each["id"]: each["logprob"] for each in answer["completion_probabilities"][0]["top_logprobs"]}
                    plus, minus = (math.exp(likely[sign]) for sign, in ids)
                    # With another batch size, llama.cpp's CPU backend rounds differently; differences of 0.18 occurred.
                    self.assertAlmostEqual(math.log(score / (1 - score)), math.log(plus / minus), delta=0.4)
            done = self.run_scale(url, "--scorer", "plus-minus", "--reward-url", url, "--plus", "excellent idea")
            self.assertEqual((done.code, "not 1" in done.log), (1, True), done.all)

    def test_a_value_head_is_applied_to_the_last_state_of_each_step(self):
        chance = random.Random(1)
        weight = [chance.gauss(0, 0.01) for _ in range(WIDTH)]
        head = self.folder / "head.json"
        head.write_text(json.dumps({"weight": weight, "bias": -0.25}), encoding="utf-8")
        options = ["--embedding", "-c", 1024, "-np", 2]
        args = ["--scorer", "head", "--head", head]
        with server(models.variant("Q8_0"), cpu_env(), *options, "--pooling", "none", name="scale-head") as reward:
            url = f"http://127.0.0.1:{reward.port}"
            found = self.scored(*args, "--reward-url", url)
            short = self.folder / "short.json"
            short.write_text('{"weight": [1.0], "bias": 0}', encoding="utf-8")
            self.out.unlink()
            with scripted_server() as running:
                done = self.run_scale(running.url, "--scorer", "head", "--head", short, "--reward-url", url)
            self.assertEqual((done.code, f"embeddings of {WIDTH} numbers, and a head of 1" in done.log), (1, True), done.all)
        # With another pooling, the server itself uses the last state of a text that ends with the step.
        with server(models.variant("Q8_0"), cpu_env(), *options, "--pooling", "last", name="scale-last") as reward:
            for question, text, scores in found:
                parts = steps(text)
                self.assertEqual(len(scores), len(parts))
                tokens = reward.post("/tokenize", {"content": question + "\n", "add_special": True})["tokens"]
                line_feed = reward.post("/tokenize", {"content": "\n"})["tokens"][-1:]
                for part, score in zip(parts, scores):
                    tokens += reward.post("/tokenize", {"content": part})["tokens"] + line_feed
                    answer = reward.post("/embedding", {"content": [tokens], "embd_normalize": -1})
                    state, = answer[0]["embedding"]
                    value = sum(x * w for x, w in zip(state, weight, strict=True)) - 0.25
                    self.assertAlmostEqual(score, 1 / (1 + math.exp(-value)), delta=0.01)
        self.assertGreater(len({round(score, 4) for _, _, scores in found for score in scores}), 3)

    def test_a_verifier_prints_a_score(self):
        count = "python3 -c 'import json; print(len(json.loads(input())[\"text\"]))'"
        for _, text, scores in self.scored("--scorer", "command", "--verifier", count):
            self.assertEqual(scores[-1], len(text))
        for command, words in (("echo good", 'printed "good", not a number'), ("exit 3", "exit status: 3"),
                               ("echo nan", "not a number")):
            self.out.unlink()
            with scripted_server() as running:
                done = self.run_scale(running.url, "--scorer", "command", "--verifier", command)
            self.assertEqual((done.code, words in done.log), (1, True), done.all)
            self.assertEqual(done.log.count("\n"), 1)

    def test_a_scorer_without_its_server_is_a_wrong_argument(self):
        for scorer in "plus-minus", "head", "command":
            done = self.run_scale("http://127.0.0.1:9", "--scorer", scorer)
            self.assertEqual((done.code, "required" in done.log), (2, True), done.all)
        self.assertTrue(TOOL.exists())
