"""Embeddings and rankings of sentences, and embeddings of long texts, are those of the CPU, on each device."""

import math
import random
import re
import tempfile
from pathlib import Path

import embedders
import minilm
import models
from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, cpu_env, device_env, server

SENTENCES = ["A man is playing a guitar on the street.", "Someone makes music outside with a guitar.",
             "The parliament passed the budget after a long debate.", "Lawmakers agreed on the state's spending.",
             "Bread dough must rest before it is baked.", "x",
             "A long sentence, which is about nothing in particular, goes on and on, so that it has more tokens than the "
             "others, and so that products have more rows than fit into one tile of thirty-two."]
# For each of the first sentences, the one with the same meaning.
PAIRS = {0: 1, 1: 0, 2: 3, 3: 2}
LEAST_COSINE = 0.9999
# The lowest cosine for a text of 2,000 tokens.
LEAST_COSINES = {HEXAGON: 0.9999, SIMULATED: 0.999}
LONG = 2000


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


class Embeddings(Case):
    def model(self):
        return models.variant("F16", minilm.model())

    def run_server(self, env, *args, name):
        return server(self.model(), env, "-c", 512, "-t", 1, *args, name=name)

    def embed(self, env, name):
        with self.run_server(env, "--embedding", name=name) as running:
            data = running.post("/v1/embeddings", {"input": SENTENCES})["data"]
        return [each["embedding"] for each in sorted(data, key=lambda each: each["index"])]

    def test_embeddings_are_those_of_the_cpu(self):
        expected = self.embed(cpu_env(), "embed-cpu")
        for sentence, same in PAIRS.items():
            others = [cosine(expected[sentence], other) for other in expected]
            self.assertEqual(sorted(range(len(others)), key=others.__getitem__)[-2:], [same, sentence])
        for chip in HEXAGON, SIMULATED:
            with self.subTest(chip):
                embeddings = self.embed(device_env(chip), f"embed-{chip}")
                cosines = [cosine(a, b) for a, b in zip(expected, embeddings)]
                print(f"{chip}: least cosine {min(cosines):.7f}")
                self.assertGreaterEqual(min(cosines), LEAST_COSINE)
                self.assertNotEqual(expected, embeddings, "the CPU computed both")

    def test_a_ranking_is_that_of_the_cpu(self):
        def rank(env, name):
            with self.run_server(env, "--reranking", "--pooling", "rank", name=name) as running:
                results = running.post("/v1/rerank", {"query": SENTENCES[0], "documents": SENTENCES[1:]})["results"]
            return {each["index"]: each["relevance_score"] for each in results}

        expected = rank(cpu_env(), "rerank-cpu")
        spread = max(expected.values()) - min(expected.values())
        self.assertGreater(spread, 0)
        for chip in HEXAGON, SIMULATED:
            with self.subTest(chip):
                scores = rank(device_env(chip), f"rerank-{chip}")
                self.assertEqual(scores.keys(), expected.keys())
                error = max(abs(scores[index] - expected[index]) for index in expected) / spread
                print(f"{chip}: {error:.1e} of the scores' spread")
                self.assertLess(error, 0.01)
                self.assertNotEqual(scores, expected, "the CPU computed both")

    def test_a_sentence_is_one_split(self):
        with self.run_server(device_env(HEXAGON, GGML_SCHED_DEBUG="2"), "--embedding", "-v", name="embed-splits") as running:
            running.post("/v1/embeddings", {"input": SENTENCES[:1]})
            log = running.log.read_text()
        last = re.split(r"(?=## SPLIT #0: )", log)[-1]
        self.assertEqual(re.findall(r"## SPLIT #\d+: (\w+)", last), ["CPU", HEXAGON_DEVICE])


class LongTexts(Case):
    """Texts of 2,000 tokens in one ubatch, with models of BERT's and of Qwen3's kind in Q8_0."""

    def embed(self, model, env, name):
        """The embeddings of two texts, the tokens of each, and the log."""
        letters = random.Random(4)
        texts = ["".join(letters.choices(alphabet, k=LONG)) for alphabet in ("abcdefgh ", "QRSTUV,\n")]
        size = embedders.CONTEXT
        with server(model, env, "-c", size, "-b", size, "-ub", size, "-np", 1, "-t", 1, "--embedding", "--no-warmup",
                    name=name) as running:
            answer = running.post("/v1/embeddings", {"input": texts})
        vectors = [each["embedding"] for each in sorted(answer["data"], key=lambda each: each["index"])]
        return vectors, answer["usage"]["prompt_tokens"] // len(texts), running.log.read_text()

    def test_embeddings_of_long_texts_are_the_exact_ones(self):
        for arch in embedders.BERT, embedders.QWEN3:
            with tempfile.TemporaryDirectory() as folder:
                model, exact = (Path(folder) / f"{arch}-{kind}.gguf" for kind in ("Q8_0", "F32"))
                embedders.write(model, exact, arch)
                expected, tokens, _ = self.embed(exact, cpu_env(), f"long-{arch}-cpu")
                self.assertGreaterEqual(tokens, LONG)
                self.assertLess(cosine(*expected), 0.9, "the texts have the same embedding")
                for chip, least in LEAST_COSINES.items():
                    with self.subTest(f"{arch} {chip}"):
                        found, _, log = self.embed(model, device_env(chip), f"long-{arch}-{chip}")
                        cosines = [cosine(a, b) for a, b in zip(expected, found)]
                        told = re.findall(r"(\d+) of (\d+) nodes of a graph of (\d+) rows, in (\d+) split", log)
                        print(f"{arch} {chip}: least cosine {min(cosines):.7f}, {told}")
                        self.assertGreaterEqual(min(cosines), least)
                        self.assertEqual([(int(rows), splits) for *_, rows, splits in told], [(tokens, "1")])
                        if chip == HEXAGON:
                            self.assertEqual(told[0][0], told[0][1])
