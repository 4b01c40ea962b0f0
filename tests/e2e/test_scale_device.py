"""`ggml-npu scale` with a llama-server whose model is on a simulated NPU: the tries of a problem share the computed prompt and
each decode step, give the same texts as single requests, and a run outlives its device.

The tool talks to the server through a proxy, which notes each request with the server's whole answer.
"""

import json
import math
import tempfile
import threading
import unittest
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import random_model
import reference_scaling as reference
from harness import HEXAGON, SIMULATED, TIE, TIMEOUT_S, device_env, server
from test_scale import TOOL, ScaleCase, write_lines

import models
from project import binary

N, TOKENS, CONTEXT = 4, 8, 256
# The context has room for one of these prompts and the tokens of four tries, but not for four prompts. The words teach the
# model to end a step after each word.
WORDS = ("red", "blue", "green", "grey", "black", "white", "brown", "pink", "purple", "orange", "yellow", "silver", "gold")

# This is not a list of colours, so other tokens are likely after it.
OTHER = "The distance from the Earth to the Moon is about"


def question(number):
    """Raw text; the first word differs, so that no question begins as another does."""
    words = WORDS[number * 3:] + WORDS[:number * 3]
    return f"{words[0]} comes first in this list:\n\n" + "".join(word + "\n\n" for word in words * 2)


class Asked(NamedTuple):
    """A request of the tool, and the server's answer."""

    path: str
    body: dict
    answer: object


@contextmanager
def noting(port):
    """Runs a proxy of the server on `port`; returns its address, and the list to which it adds requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def forward(self, body):
            if body is not None and "n_cmpl" in body:
                # Asks for the whole answer, with the likeliest tokens at each place; the tool picks the fields that it knows.
                body.pop("response_fields", None)
                body["n_probs"] = max(body["n_probs"], 10)
            request = urllib.request.Request(f"http://127.0.0.1:{port}{self.path}",
                                             None if body is None else json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    status, text = response.status, response.read()
            except urllib.error.HTTPError as error:
                status, text = error.code, error.read()
            asked.append(Asked(self.path, body, json.loads(text)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.forward(None)

        def do_POST(self):
            self.forward(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", asked
    finally:
        httpd.shutdown()
        httpd.server_close()


def places(completion):
    """For each place of a completion: its token, the logarithm of its probability, and those of the likeliest ones."""
    return [(place["id"], place["logprob"], {likely["id"]: likely["logprob"] for likely in place["top_logprobs"]})
            for place in completion["completion_probabilities"]]


def completions(asked):
    """Each request for completions with the list of its answers."""
    return [(each.body, each.answer if isinstance(each.answer, list) else [each.answer]) for each in asked
            if each.path == "/completion" and "n_cmpl" in each.body]


class OnDevice(ScaleCase):
    """With one server for each family, which all tests share."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        stack = ExitStack()
        cls.addClassCleanup(stack.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cls.served = {}
        for chip in HEXAGON, SIMULATED:
            timeline = folder / f"{chip}.json"
            running = stack.enter_context(server(
                models.variant("Q8_0"), device_env(chip, GGML_RUST_NPU_TRACE=str(timeline)), "-c", CONTEXT, "-np", N, "-kvu",
                "-t", 1, name=f"scale-{chip}"))
            cls.served[chip] = running, timeline

    def products(self, chip):
        """The rows of each product on the device so far."""
        events = json.loads(self.served[chip][1].read_text(encoding="utf-8"))
        return [int(event["args"]["shape"].split("x")[1]) for event in events
                if event["name"].startswith("MUL_MAT") and "device" in event["args"]]

    def counted(self, chip, run):
        """The result of `run`, and how many products of how many rows the device computed for it."""
        before = len(self.products(chip))
        done = run()
        return done, Counter(self.products(chip)[before:])

    def tried(self, chip, number, *args):
        """Runs the tool on a question; returns its requests."""
        self.out.unlink(missing_ok=True)
        write_lines(self.problems, [{"id": "q0", "question": question(number), "answer": "1"}])
        with noting(self.served[chip][0].port) as (url, asked):
            reward = ["--reward-url", url] if "plus-minus" in args else []
            done = self.run_scale(url, "--no-chat", "--prompt", "{question}\n\n", "-n", N, "--max-tokens", TOKENS, *args,
                                  *reward)
        self.assertEqual(done.code, 0, done.all)
        return asked

    def single(self, chip, body, number):
        """The answer to a separate request with the seed of a try, computed without the cache."""
        alone = {**body, "n_cmpl": 1, "seed": body["seed"] + number, "cache_prompt": False}
        return self.served[chip][0].post("/completion", alone)

    def assert_same_draws(self, want, have):
        """Returns at how many places both have the same token; fails if the model saw another text in one of them.

        Texts may differ after a draw near the border of two probabilities, which are rounded differently. Up to that draw, the
        likely tokens are the same.
        """
        for same, (one, two) in enumerate(zip(places(want), places(have))):
            (token, logprob, likely), (other, other_logprob, others) = one, two
            both = set(likely) & set(others)
            self.assertGreater(len(both), len(likely) // 2, "other tokens are likely")
            for each in both:
                self.assertAlmostEqual(likely[each], others[each], delta=TIE)
            if token != other:
                return same
            self.assertAlmostEqual(logprob, other_logprob, delta=TIE)
        self.assertEqual(len(places(want)), len(places(have)))
        return len(places(want))

    def assert_tries_of_single_requests(self, chip, asked, known=None):
        """In each pair of a request and its completions, the completions equal those of separate requests, or differ from a
        draw on.

        known: answers of such requests, by the number of the try
        """
        tries = [((known or {}).get(number) or self.single(chip, body, number), completion)
                 for body, answers in asked for number, completion in enumerate(answers)]
        same, all_places = sum(self.assert_same_draws(*pair) for pair in tries), sum(len(places(one)) for one, _ in tries)
        print(f"{chip}: {same} of {all_places} tokens of {len(tries)} tries are those of single requests, then draws part")
        self.assertGreater(same, 0)

    def test_tries_share_their_prompt_and_each_step(self):
        for chip in self.served:
            with self.subTest(chip):
                asked, of_all = self.counted(chip, lambda chip=chip: self.tried(chip, 0))
                (body, tries), = completions(asked)
                self.assertEqual((body["n_cmpl"], len({each["id_slot"] for each in tries})), (N, N))
                self.assertEqual([each["tokens_predicted"] for each in tries], [TOKENS] * N)
                prompt = tries[0]["tokens_evaluated"]
                self.assertGreater(N * prompt, CONTEXT)
                first, of_one = self.counted(chip, lambda chip=chip, body=body: self.single(chip, body, 0))
                self.assertEqual(first["tokens_predicted"], TOKENS)
                # There are as many products as for one try, so weights are read as often. A step has a row for each try.
                self.assertEqual(of_all.total(), of_one.total())
                self.assertEqual(of_all[prompt], of_one[prompt])
                self.assertEqual(of_all[N] % (TOKENS - 1), 0)
                self.assertEqual(of_all[N], of_one[1] - of_all[1])
                self.assertGreater(of_all[N], of_all[prompt])
                self.assertEqual(set(of_all), {1, N, prompt})
                self.assert_tries_of_single_requests(chip, [(body, tries)], {0: first})
                # Another prompt in the cache would change the answer.
                with self.assertRaises(AssertionError):
                    self.assert_same_draws(self.single(chip, dict(body, prompt=OTHER), 0), tries[0])

    def test_the_best_try_by_its_probability(self):
        for chip in self.served:
            with self.subTest(chip):
                asked = self.tried(chip, 2, "--method", "best-of-n", "--scorer", "logprob")
                (_, tries), = completions(asked)
                entry, = self.lines()[1:]
                scores = [math.exp(sum(logprob for _, logprob, _ in places(each)) / len(places(each))) for each in tries]
                for solution, each, score in zip(entry["solutions"], tries, scores, strict=True):
                    self.assertEqual((solution["text"], solution["tokens"]), (each["content"], each["tokens_predicted"]))
                    self.assertAlmostEqual(solution["scores"][0], score, places=9)
                self.assertEqual(entry["chosen"], reference.best(entry["solutions"], lambda each: each["scores"][0]))
                # The same problem again: all but one row of the prompt comes from the cache.
                again = self.tried(chip, 2, "--method", "best-of-n", "--scorer", "logprob")
                (_, tries), = completions(again)
                self.assertEqual([each["timings"]["prompt_n"] for each in tries], [1] * N)

    def test_the_best_try_by_a_process_reward_model(self):
        """The same server plays it, so that its questions come between those of the tool."""
        for chip in self.served:
            with self.subTest(chip):
                asked = self.tried(chip, 3, "--method", "best-of-n", "--scorer", "plus-minus", "--reward-prompt",
                                   "{question}\n\n{steps} ?")
                entry, = self.lines()[1:]
                scores = [score for solution in entry["solutions"] for score in solution["scores"]]
                rewards = [each for each in asked if each.path == "/completion" and "n_cmpl" not in each.body]
                self.assertEqual(len(rewards), len(scores))
                self.assertGreater(len(set(scores)), 2)
                for each, score in (rewards[0], scores[0]), (rewards[-1], scores[-1]):
                    alone = self.served[chip][0].post("/completion", dict(each.body, cache_prompt=False))
                    place, = alone["completion_probabilities"]
                    plus, = (likely["prob"] for likely in place["top_probs"] if likely["token"] == "+")
                    self.assertAlmostEqual(math.log(score / (1 - score)), math.log(plus / (1 - plus)), delta=TIE)
                self.assertEqual(entry["chosen"], reference.best(entry["solutions"], lambda each: each["scores"][-1]))

    def test_beams_go_on_from_the_best_steps(self):
        for chip in self.served:
            with self.subTest(chip):
                asked = completions(self.tried(chip, 4, "--method", "beam", "--width", 2, "--max-steps", 2))
                noted = {(body["prompt"], body["seed"] + number, bool(body["stop"])): answer
                         for body, answers in asked for number, answer in enumerate(answers)}
                served = reference.Served([body for body, _ in asked],
                                          lambda prompt, seed, stop, noted=noted: noted[prompt, seed, bool(stop)])
                want = reference.beam_search(served, question(4), N, 2, 2, reference.AGGREGATES["last"])
                self.assertTrue(served.is_used_up())
                entry, = self.lines()[1:]
                self.assertEqual([solution["text"] for solution in entry["solutions"]], [text for text, _, _ in want])
                second = [(body, answers) for body, answers in asked if not body["stop"]]
                self.assertGreater(len(second), 0)
                # A beam that continues does so from the cache.
                known = [answers[0]["timings"]["cache_n"] for _, answers in second]
                self.assertGreater(max(known), asked[0][1][0]["tokens_evaluated"] // 2)
                self.assert_tries_of_single_requests(chip, second)


# The call at which a device is lost in a run of six problems, after the first ones are solved. The self-test has 157
# submissions.
LOST = {HEXAGON: "dsp:180=lost", SIMULATED: "rknn_matmul_run:1000+=-1"}


class Lost(ScaleCase):
    """With a server of the tool, and a small model of random numbers."""

    def test_a_device_that_is_lost_is_one_error_and_the_run_goes_on_later(self):
        plain = random_model.write(self.folder / "F32.gguf", 7, 256, 768, heads=4, context=1024)
        model = models.quantize(plain, self.folder / "small.gguf", "Q8_0")
        ids = [f"q{number}" for number in range(6)]
        write_lines(self.problems, [{"id": each, "question": f"{each}?", "answer": "1"} for each in ids])
        command = [TOOL, "scale", "run", self.problems, "-o", self.out, "-n", N, "--max-tokens", TOKENS, "--model", model,
                   "--server-bin", binary("llama-server"), "--", "-fit", "off", "-t", 1]
        for chip, fault in LOST.items():
            with self.subTest(chip):
                self.out.unlink(missing_ok=True)
                done = self.run_command("ggml-npu", command, device_env(chip, GGML_RUST_NPU_SIM_FAULTS=fault))
                loading, error = done.log.splitlines()
                self.assertEqual((done.code, loading), (1, f"loading {model}"), done.all)
                self.assertRegex(error, "answers with status 500: .*the same command goes on with it$")
                solved = [entry["id"] for entry in self.lines()[1:]]
                self.assertTrue(0 < len(solved) < len(ids), solved)
                self.assertEqual(self.run_command("ggml-npu", command, device_env(chip)).code, 0)
                again = [entry["id"] for entry in self.lines()[1:]]
                self.assertEqual((again[:len(solved)], sorted(again)), (solved, ids))


if __name__ == "__main__":
    unittest.main()
