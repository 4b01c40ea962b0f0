"""Random models of new architectures with real vocabularies read and write text on the devices as on the CPU backend.

The exact answer is the same file dequantized to F32 on the CPU backend. The best token of a random model is seldom far ahead,
so a device may choose another one where the exact answer has the two within a limit, and then the texts differ. Therefore
logits are also compared token by token, after the tokens of the exact answer.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from harness import HEXAGON, HEXAGON_DEVICE, LOGS, SIMULATED, Case, cpu_env, device_env, server

import models
import vocabularies
from project import TARGET

PROMPT = ("Our ship left the harbour before sunrise, and by noon the coast was out of sight. The captain, who had sailed this "
          "route 27 times, said: \"If the wind holds, we'll see the islands on Thursday.\" Nobody believed him")
QUESTION = [{"role": "user", "content": "Why is the sea salty?"}]
TOKENS = 24
TOP = 20

# The largest root mean square error of the logits, whose standard deviation is `vocabularies.LOGITS`. Two tokens count as a tie
# if the exact answer has them within four times this.
LIMITS = {HEXAGON: 0.15, SIMULATED: 0.35}

# No checkpoints: with them the server computes a chat's prompt in other pieces than llama-completion.
SERVER = ["-c", 512, "-np", 1, "-t", 2, "--ctx-checkpoints", 0]


class Token(NamedTuple):
    """A token of an answer, and the logarithms of the probabilities of the best ones in its place.

    There are none if the text ends inside of a character there, because the server keeps such a token back.
    """

    number: int
    best: dict


def tokens_of(answer):
    """Returns the tokens of an answer. The server gives probabilities only for tokens that it did not hold back."""
    known = answer.get("completion_probabilities", [])
    found = []
    for number in answer["tokens"]:
        best = {}
        if known and known[0]["id"] == number:
            best = {other["id"]: other["logprob"] for other in known[0]["top_logprobs"]}
            known = known[1:]
        found.append(Token(number, best))
    return found


class Answers:
    """The answers of a server."""

    def __init__(self, running):
        self.running = running

    def complete(self, prompt, n_predict, **more):
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1, "ignore_eos": True,
                "cache_prompt": False, "n_probs": 2 * TOP, "return_tokens": True}
        return self.running.post("/completion", body | more)

    def greedy(self, prompt=PROMPT):
        """Returns the text and its tokens."""
        answer = self.complete(prompt, TOKENS)
        return answer["content"], tokens_of(answer)

    def after(self, tokens):
        """Returns the token after the prompt and each beginning of `tokens`. Each request computes one token."""
        prompt = self.running.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
        numbers = [token.number for token in tokens]
        found = []
        for end in range(len(tokens)):
            found += tokens_of(self.complete(prompt + numbers[:end], 1, cache_prompt=True))
        return found

    def chat(self):
        """Returns the text that answers a question, and the prompt that the model's template makes of the question."""
        body = {"messages": QUESTION, "max_tokens": TOKENS, "temperature": 0, "seed": 1, "ignore_eos": True,
                "cache_prompt": False}
        said = self.running.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return said, self.running.post("/apply-template", {"messages": QUESTION})["prompt"]


class Vocabularies(Case):
    @classmethod
    def setUpClass(cls):
        TARGET.mkdir(exist_ok=True)
        cls.folder = Path(tempfile.mkdtemp(dir=TARGET, prefix="vocabularies-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def check(self, name):
        model = vocabularies.model(name, self.folder)
        exact = models.quantize(model, self.folder / f"{name}-as-F32.gguf", "F32")
        with server(exact, cpu_env(), *SERVER, name=f"server-{name}-exact") as running:
            answers = Answers(running)
            text, want = answers.greedy()
            _, wanted_answer = answers.greedy(answers.chat()[1])
        print(f"{name}: {text!r}", flush=True)
        for chip in (HEXAGON, SIMULATED):
            with self.subTest(f"{name} {chip}"):
                self.check_on(name, model, chip, want, wanted_answer)
        self.assert_one_split(device_env(HEXAGON), HEXAGON_DEVICE, "--no-warmup", model=model)
        for path in self.folder.iterdir():
            path.unlink()

    def check_on(self, name, model, chip, want, wanted_answer):
        log = f"server-{name}-{chip}"
        with server(model, device_env(chip), *SERVER, name=log) as running:
            answers = Answers(running)
            text, tokens = answers.greedy()
            after = answers.after(want)
            said, prompt = answers.chat()
            written, answer = answers.greedy(prompt)
        self.assertEqual(said.strip(), written.strip())
        error = self.error(after, want)
        same = [self.count_same(have, wanted, 4 * LIMITS[chip]) for have, wanted in ((tokens, want), (answer, wanted_answer))]
        right = sum(have.number == wanted.number for have, wanted in zip(after, want))
        print(f"   {chip}: logits are off by {error:.3f}; of a text {same[0]} tokens are the same, of a chat {same[1]}; "
              f"{right} of {TOKENS} one by one", flush=True)
        self.assertLessEqual(error, LIMITS[chip])
        alone = self.complete(PROMPT, TOKENS, device_env(chip), "-t", 2, model=model)
        self.assertEqual(alone.out.rstrip("\n"), text.rstrip("\n"))
        lines = [line for line in (LOGS / f"{log}.log").read_text(encoding="utf-8", errors="replace").splitlines()
                 if line.startswith(("E ggml-rust-npu: ", "W ggml-rust-npu: ")) and "nodes of a " not in line]
        self.assertEqual([*lines, *alone.troubles()], [])

    def error(self, have, want):
        """Returns the root mean square of the differences between logits of the exact answer's best tokens.

        A difference that all tokens of a place share does not count, because it comes from the sum of all exponentials.
        """
        squares = []
        pairs = [(mine, theirs) for mine, theirs in zip(have, want, strict=True) if mine.best and theirs.best]
        self.assertGreater(len(pairs), TOKENS // 2)
        for mine, theirs in pairs:
            best = sorted(theirs.best, key=theirs.best.get)[-TOP:]
            differences = [mine.best[token] - theirs.best[token] for token in best if token in mine.best]
            # The device lists twice as many tokens, so most of them are included.
            self.assertGreater(len(differences), TOP // 2)
            mean = sum(differences) / len(differences)
            squares += [(difference - mean) ** 2 for difference in differences]
        return (sum(squares) / len(squares)) ** 0.5

    def count_same(self, have, want, limit):
        """Returns the number of tokens before the first that differ; the exact answer must have those within `limit`."""
        for place, (mine, theirs) in enumerate(zip(have, want, strict=True)):
            if mine.number != theirs.number:
                if theirs.best:
                    self.assertLessEqual(theirs.best[theirs.number] - theirs.best.get(mine.number, float("-inf")), limit)
                return place
        return TOKENS

    def test_qwen35(self):
        self.check("qwen35")

    def test_qwen35moe(self):
        self.check("qwen35moe")

    def test_qwen3next(self):
        self.check("qwen3next")

    def test_gemma4(self):
        self.check("gemma4")

    def test_gemma4moe(self):
        self.check("gemma4moe")

    def test_gpt_oss(self):
        self.check("gpt-oss")

    def test_lfm2(self):
        self.check("lfm2")

    def test_lfm2moe(self):
        self.check("lfm2moe")

    def test_granitehybrid(self):
        self.check("granitehybrid")

    def test_mamba2(self):
        self.check("mamba2")

    def test_deepseek2(self):
        self.check("deepseek2")

    def test_cohere2moe(self):
        self.check("cohere2moe")
