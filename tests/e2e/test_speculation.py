"""Drafts change no text: tokens that a smaller model or the text so far proposes are checked by the model in one batch."""

import models
from harness import HEXAGON, SIMULATED, Case, device_env, server

TOKENS = 24
# Texts that repeat themselves. Drafts from the text itself depend on that.
PROMPTS = ["Once upon a time, in a small village by the sea,",
           "one two three four five six seven eight nine ten one two three four five six seven eight nine ten one two three"]


class Speculation(Case):
    def model(self):
        # With F16 one row of activations is rounded as several are, so a batch has exactly the results of single tokens.
        return models.variant("F16")

    def texts(self, chip, name, *args):
        """The texts, and how many tokens of them were proposed."""
        with server(self.model(), device_env(chip), "-c", 512, "-np", 1, "-t", 1, *args, name=name) as running:
            answers = [running.post("/completion", {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "seed": 1,
                                                    "ignore_eos": True, "cache_prompt": False}) for prompt in PROMPTS]
        accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
        return [answer["content"] for answer in answers], accepted

    def check(self, name, *args):
        for chip in HEXAGON, SIMULATED:
            with self.subTest(chip):
                expected, none = self.texts(chip, f"{name}-without-{chip}")
                self.assertEqual(none, 0)
                texts, accepted = self.texts(chip, f"{name}-{chip}", *args)
                print(f"{chip}: {accepted} of {len(PROMPTS) * TOKENS} tokens were drafted")
                self.assertGreater(accepted, 0)
                self.assertEqual(texts, expected)

    def test_a_draft_model(self):
        self.check("draft", "-md", models.variant("Q4_0"), "--spec-type", "draft-simple", "--spec-draft-n-max", 4)

    def test_drafts_from_the_text(self):
        self.check("ngram", "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 3, "--spec-ngram-simple-size-m", 8)
