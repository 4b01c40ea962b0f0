"""`ggml-npu scale`: its choices are those of a second implementation, and a run survives its server and its own death."""

import json
import math
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import reference_scaling as reference
from harness import Case, cpu_env, server
from scripted_server import scripted_server, states, tokenize

import build
import models
from project import LOGS, ROOT, tool_env

TOOL = ROOT / "target" / "debug" / "ggml-npu"


def questions(count):
    return [{"id": f"q{i}", "question": f"What is question {i}?", "answer": str(i % 4)} for i in range(count)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class ScaleCase(Case):
    """Runs the tool on problems of a folder of one test's own."""

    @classmethod
    def setUpClass(cls):
        build.tool(LOGS / "tool-scale.log", tool_env(), "--workspace")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.problems, self.out = self.folder / "problems.jsonl", self.folder / "samples.jsonl"
        write_lines(self.problems, questions(20))

    def command(self, url, *args):
        command = [TOOL, "scale", "run", self.problems, "-o", self.out, "--url", url, *args]
        return [str(each) for each in command]

    def run_scale(self, url, *args, timeout=300):
        return self.run_command("ggml-npu", self.command(url, *args), cpu_env(), timeout)

    def report(self, *args):
        done = self.run_command("ggml-npu", [TOOL, "scale", "report", self.out, "--json", *args], cpu_env())
        self.assertEqual(done.code, 0, done.all)
        return json.loads(done.out)

    def lines(self):
        return [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]

    def assert_whole(self):
        """Every problem is there, and none twice."""
        self.assertEqual(sorted(entry["id"] for entry in self.lines()[1:]), sorted(row["id"] for row in questions(20)))


class Scale(ScaleCase):
    def test_choices_are_those_of_the_reference(self):
        for scorer in "none", "logprob", "certainty":
            with self.subTest(scorer), scripted_server() as running:
                self.out.unlink(missing_ok=True)
                done = self.run_scale(running.url, "-n", 10, "--scorer", scorer)
                self.assertEqual(done.code, 0, done.all)
                # One request for as many samples as there are slots. Each sample has a different seed.
                self.assertEqual(sorted({body["n_cmpl"] for body in running.requests}), [2, 4])
                seeds = [body["seed"] + i for body in running.requests for i in range(body["n_cmpl"])]
                self.assertEqual(len(set(seeds)), 200)
                entries = self.lines()[1:]
                self.assertEqual({len(entry["solutions"]) for entry in entries}, {10})
                self.assertTrue(any(solution["answer"] is None for entry in entries for solution in entry["solutions"]))
                rows = self.report()
                found = {(row["method"], row["n"]): row for row in rows}
                for n in 1, 2, 4, 8, 10:
                    for method, correct in reference.accuracy(entries, n).items():
                        row = found.pop((method, n))
                        self.assertEqual((row["correct"], row["problems"]), (correct, 20), f"{method} of {n}")
                        low, high = reference.interval(correct, 20)
                        self.assertAlmostEqual(row["low"], low, places=5)
                        self.assertAlmostEqual(row["high"], high, places=5)
                        self.assertIsNone(row["joules"])
                self.assertEqual(found, {})
                for entry in entries:
                    self.assertEqual(entry["chosen"], reference.vote(entry["solutions"], lambda _: 1.0))

    def test_joules_are_those_of_the_power_source(self):
        with scripted_server() as running:
            began = time.monotonic()
            done = self.run_scale(running.url, "-n", 4, "--power", "command:echo 5")
            elapsed = time.monotonic() - began
        self.assertEqual(done.code, 0, done.all)
        spent = sum(entry["joules"] for entry in self.lines()[1:])
        self.assertGreater(spent, 0)
        self.assertLess(spent, 5 * elapsed)
        for row in self.report():
            if row["n"] == 4:
                self.assertAlmostEqual(row["joules"], spent / 20, places=6)
            else:
                self.assertIsNone(row["joules"])

    def test_joules_that_nobody_measured_are_not_0(self):
        source = self.folder / "power"
        source.write_text("5000000", encoding="utf-8")
        with scripted_server() as running:
            running.delay = 0.3
            command = self.command(running.url, "-n", 4, "--power", source)
            process = subprocess.Popen(command, env=cpu_env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            while not self.out.exists() or self.out.read_bytes().count(b"\n") < 3:
                self.assertIsNone(process.poll())
                time.sleep(0.005)
            source.unlink()
            error = process.communicate(timeout=300)[1]
        self.assertEqual((process.returncode, f"{source}: No such file" in error), (1, True), error)
        self.assert_whole()
        measured = [entry.get("joules") for entry in self.lines()[1:]]
        self.assertGreater(measured[0], 0)
        self.assertIsNone(measured[-1])
        failed = measured.index(None)
        self.assertEqual(measured[failed:], [None] * (20 - failed))
        for row in self.report():
            self.assertIsNone(row["joules"])

    def test_half_a_line_is_not_followed_by_another(self):
        # Two problems at a time, with a limit on the blocks of a file. The signal for exceeding it is ignored, so that writes
        # fail as on a full disk.
        for blocks in 4, 5, 6, 7:
            with self.subTest(blocks), scripted_server(slots=8) as running:
                self.out.unlink(missing_ok=True)
                limit = f'trap "" XFSZ; ulimit -f {blocks}; exec "$0" "$@"'
                command = ["bash", "-c", limit, *self.command(running.url, "-n", 4)]
                done = self.run_command("ggml-npu", command, cpu_env())
                self.assertEqual((done.code, "File too large" in done.log), (1, True), done.all)
                self.assertTrue(self.out.read_bytes().endswith(b"}\n"))
                self.assertEqual(self.run_scale(running.url, "-n", 4).code, 0)
                self.assert_whole()

    def test_a_report_combines_scores_as_the_run_did(self):
        """Scores of one problem for which the last score and the lowest score give different best solutions."""
        solution = {"text": "", "tokens": 1, "logprob": -1.0}
        write_lines(self.out, [
            {"settings": {"model": "m", "method": "best-of-n", "n": 2, "aggregate": "min"}},
            {"id": "1", "expected": "1", "chosen": "1", "correct": True, "tokens": 2, "solutions": [
                {**solution, "answer": "1", "correct": True, "scores": [0.5, 0.5]},
                {**solution, "answer": "2", "correct": False, "scores": [0.1, 0.9]}]}])
        for args, correct in ((), 1), (("--aggregate", "last"), 0):
            found = {(row["method"], row["n"]): row["correct"] for row in self.report(*args)}
            self.assertEqual(found["best-of-n", 2], correct)

    def assert_searched(self, running, method, n, width, steps, aggregate, *args):
        """Every problem's solutions are those of the reference, from the same requests."""
        self.out.unlink(missing_ok=True)
        running.requests.clear()
        done = self.run_scale(running.url, "--method", method, "-n", n, "--width", width, "--max-steps", steps,
                              "--aggregate", aggregate, *args)
        self.assertEqual(done.code, 0, done.all)
        search = {"beam": reference.beam_search, "dvts": reference.tree_search}[method]
        combine = reference.AGGREGATES[aggregate]
        served = reference.Served(running.requests, running.completion)
        right = 0
        prompts = {f"q{i}": body["prompt"] for i, body in enumerate(self.first_prompts(running))}
        for entry in sorted(self.lines()[1:], key=lambda entry: int(entry["id"][1:])):
            want = search(served, prompts[entry["id"]], n, width, steps, combine)
            self.assertEqual([solution["text"] for solution in entry["solutions"]], [text for text, _, _ in want])
            for solution, (_, scores, _) in zip(entry["solutions"], want):
                self.assertEqual(len(solution["scores"]), len(scores))
                for score, other in zip(solution["scores"], scores):
                    self.assertAlmostEqual(score, other, places=12)
            best = max(range(len(want)), key=lambda i: combine(want[i][1]))
            self.assertEqual(entry["chosen"], entry["solutions"][best]["answer"])
            right += entry["chosen"] == entry["expected"]
        self.assertTrue(served.is_used_up())
        row, = self.report()
        self.assertEqual((row["method"], row["n"], row["correct"], row["problems"]), (method, n, right, 20))

    def first_prompts(self, running):
        """The requests with the shortest prompts, one for each problem in their order."""
        firsts = {}
        for body in running.requests:
            start = body["prompt"].index("<assistant>") + len("<assistant>")
            firsts.setdefault(body["prompt"][:start], {"prompt": body["prompt"][:start]})
        return [firsts[key] for key in sorted(firsts, key=lambda key: int(key.split("question ")[1].split("?")[0]))]

    def test_searches_by_steps_are_those_of_the_reference(self):
        for method in "beam", "dvts":
            for n, width, steps, aggregate in (8, 4, 6, "last"), (8, 2, 5, "mean"), (4, 4, 4, "min"), (6, 2, 3, "product"):
                with self.subTest(f"{method} {n} {width}"), scripted_server(slots=8) as running:
                    self.assert_searched(running, method, n, width, steps, aggregate)

    def test_steps_with_the_same_score(self):
        """Of beams that are as good as each other the later ones go on, and the first finished one is the answer."""
        for method in "beam", "dvts":
            with self.subTest(method), scripted_server(slots=8) as running:
                running.options = {"levels": 1}
                self.assert_searched(running, method, 8, 2, 5, "last")

    def test_texts_that_end_early_leave_fewer_beams_than_are_kept(self):
        for ends in 1, 2:
            with self.subTest(ends), scripted_server(slots=8) as running:
                running.options = {"ends": ends}
                self.assert_searched(running, "beam", 8, 1, 6, "last")

    def test_a_value_head_is_read_at_a_line_feed_that_is_a_token_by_itself(self):
        head = self.folder / "head.json"
        head.write_text('{"weight": [1.5, -0.5], "bias": 0.25}', encoding="utf-8")
        with scripted_server() as running:
            done = self.run_scale(running.url, "--method", "beam", "-n", 4, "--width", 2, "--max-steps", 3, "--scorer", "head",
                                  "--reward-url", running.url, "--head", head)
        self.assertEqual(done.code, 0, done.all)
        asked = {row["id"]: row["question"] for row in questions(20)}
        for entry in self.lines()[1:]:
            for solution in entry["solutions"]:
                tokens, want = [1, *tokenize(asked[entry["id"]] + "\n")], []
                for part in solution["text"].split("\n\n"):
                    tokens += tokenize(part) + tokenize("\n")
                    first, second = states(tokens)[-1]
                    want.append(1 / (1 + math.exp(-1.5 * first + 0.5 * second - 0.25)))
                self.assertEqual(len(solution["scores"]), len(want))
                for score, other in zip(solution["scores"], want):
                    self.assertAlmostEqual(score, other, places=12)

    def test_a_run_does_not_go_on_with_another_reward_model(self):
        head = self.folder / "head.json"
        scorers = {"head": ("--head", head), "plus-minus": ("--plus", "good", "--minus", "bad")}
        for scorer, options in scorers.items():
            with self.subTest(scorer), scripted_server() as running, scripted_server() as reward:
                self.out.unlink(missing_ok=True)
                head.write_text('{"weight": [1, 2], "bias": 0}', encoding="utf-8")
                args = ("-n", 2, "--limit", 0, "--scorer", scorer, "--reward-url", reward.url, *options)
                self.assertEqual(self.run_scale(running.url, *args).code, 0)
                reward.model = "other.gguf"
                done = self.run_scale(running.url, *args)
                words = 'with reward_model "scripted.gguf", not "other.gguf"'
                self.assertEqual((done.code, words in done.log), (1, True), done.all)
                if scorer == "head":
                    reward.model = "scripted.gguf"
                    self.assertEqual(self.run_scale(running.url, *args).code, 0)
                    head.write_text('{"weight": [2, 1], "bias": 0}', encoding="utf-8")
                    done = self.run_scale(running.url, *args)
                    self.assertEqual((done.code, "was begun with head" in done.log), (1, True), done.all)

    def test_a_killed_search_goes_on(self):
        with scripted_server() as running:
            running.fault, running.fault_after = (0, None), 50
            done = self.run_scale(running.url, "--method", "beam", "-n", 4)
            self.assertEqual((done.code, done.log.count("\n")), (1, 1), done.all)
            self.assertLess(len(self.lines()), 21)
            running.fault = None
            self.assertEqual(self.run_scale(running.url, "--method", "beam", "-n", 4).code, 0)
            self.assert_whole()

    def test_options_that_do_not_go_together_are_wrong_arguments(self):
        for args, words in ((("--method", "beam", "-n", 6, "--width", 4), "no multiple"),
                            (("--method", "best-of-n", "--scorer", "none"), "needs a --scorer"),
                            (("--temperature", "nan"), "not negative"), (("--temperature", "inf"), "not negative"),
                            (("--temperature", "-1"), "unexpected"), (("--temperature=-1",), "not negative"),
                            (("--top-p", "1.5"), "from 0 to 1"), (("--max-tokens", 2**64 - 1), "not in 1..="),
                            (("--timeout", 2**64 - 1), "not in 1..="), (("--timeout", 0), "not in 1..=")):
            done = self.run_scale("http://127.0.0.1:9", *args)
            self.assertEqual((done.code, words in done.log), (2, True), done.all)

    def test_a_killed_run_goes_on_without_losing_or_repeating_a_problem(self):
        with scripted_server() as running:
            self.assertEqual(self.run_scale(running.url, "-n", 4).code, 0)
            want = sorted(self.out.read_text(encoding="utf-8").splitlines()[1:])
            self.out.unlink()
            running.delay = 0.03
            for _ in range(3):
                process = subprocess.Popen(self.command(running.url, "-n", "4"), env=cpu_env(), stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL)
                finished = self.out.read_bytes().count(b"\n") if self.out.exists() else 0
                while not self.out.exists() or self.out.read_bytes().count(b"\n") < finished + 4:
                    self.assertIsNone(process.poll())
                    time.sleep(0.005)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                # The last line is incomplete.
                with open(self.out, "ab") as file:
                    file.write(b'{"id":"q19","expected":"3","chos')
            done = self.run_scale(running.url, "-n", 4)
            self.assertEqual(done.code, 0, done.all)
            self.assertIn("of 20 problems are in", done.log)
            self.assert_whole()
            self.assertEqual(sorted(self.out.read_text(encoding="utf-8").splitlines()[1:]), want)

    def test_an_interrupted_run_keeps_what_is_done(self):
        with scripted_server() as running:
            running.delay = 0.05
            # A shell starts background jobs with SIGINT ignored, and the tool keeps that. `env` restores the default.
            command = ["env", "--default-signal=INT", *self.command(running.url, "-n", "4")]
            process = subprocess.Popen(command, env=cpu_env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            while not self.out.exists() or self.out.read_bytes().count(b"\n") < 3:
                self.assertIsNone(process.poll())
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            self.assertEqual((process.wait(30), b"interrupted" in process.stderr.read()), (130, True))
            process.stderr.close()
            self.assertGreaterEqual(len(self.lines()), 3)
            running.delay = 0
            self.assertEqual(self.run_scale(running.url, "-n", 4).code, 0)
            self.assert_whole()

    def test_a_faulty_server_gives_one_error_and_the_run_goes_on_later(self):
        faults = {
            "dies": ((0, None), "no answer from the server at"),
            "garbage": ((200, b"<html>"), "is not llama-server's"),
            "another object": ((200, {"choices": []}), "is not llama-server's"),
            "too few": ((200, [{"content": "x", "tokens_predicted": 1, "stop_type": "eos"}] * 3),
                        "3 completions instead of 4"),
            "no slot": ((503, {"error": {"message": "no slot available"}}), "status 503: no slot available"),
        }
        for name, (fault, words) in faults.items():
            with self.subTest(name), scripted_server() as running:
                self.out.unlink(missing_ok=True)
                running.fault, running.fault_after = fault, 7
                done = self.run_scale(running.url, "-n", 4)
                self.assertEqual(done.code, 1, done.all)
                self.assertEqual(done.log.count("\n"), 1, done.log)
                self.assertIn(words, done.log)
                self.assertEqual(len(self.lines()), 8)
                running.fault = None
                self.assertEqual(self.run_scale(running.url, "-n", 4).code, 0)
                self.assert_whole()

    def test_a_slow_server_and_none_at_all(self):
        with scripted_server() as running:
            running.delay = 3
            done = self.run_scale(running.url, "--timeout", 1)
            self.assertEqual((done.code, "in 1 s" in done.log), (1, True), done.all)
        done = self.run_scale(running.url)
        self.assertEqual((done.code, "no answer from the server" in done.log), (1, True), done.all)
        self.assertEqual(done.log.count("\n"), 1, done.log)

    def test_files_that_do_not_fit_are_refused_and_left_as_they_are(self):
        with scripted_server() as running:
            self.assertEqual(self.run_scale(running.url, "-n", 2).code, 0)
            before = self.out.read_bytes()
            done = self.run_scale(running.url, "-n", 3)
            self.assertEqual((done.code, "was begun with n 2, not 3" in done.log), (1, True), done.all)
            self.assertEqual(self.out.read_bytes(), before)
            for text, words in (("notes of mine", "line 1"), ('{"a": 1}\n', "line 1"),
                                (before.decode() + "{}\n", "line 22"),
                                (before.decode() + before.decode().splitlines()[1] + "\n", "for the second time")):
                self.out.write_text(text, encoding="utf-8")
                done = self.run_scale(running.url, "-n", 2)
                self.assertEqual((done.code, words in done.log), (1, True), done.all)
                self.assertEqual(self.out.read_text(encoding="utf-8"), text)
            self.out.unlink()
            write_lines(self.problems, [*questions(2), questions(1)[0]])
            done = self.run_scale(running.url)
            self.assertEqual((done.code, "line 3" in done.log), (1, True), done.all)
            self.assertFalse(self.out.exists())

    def test_samples_of_llama_server(self):
        write_lines(self.problems, [{"question": "Tell a long story about the sea.", "answer": "5"},
                                    {"Body": "Tom has 3 pears", "Question": "What does he tell of them?", "Answer": 3.0}])
        with server(models.variant("Q8_0"), cpu_env(), "-c", 2048, "-np", 4, "-kvu", name="scale") as running:
            done = self.run_scale(f"http://127.0.0.1:{running.port}", "-n", 6, "--max-tokens", 24, "--scorer", "certainty")
        self.assertEqual(done.code, 0, done.all)
        settings, *entries = self.lines()
        self.assertEqual(settings["settings"]["model"], models.variant("Q8_0").name)
        self.assertEqual([entry["expected"] for entry in entries], ["5", "3"])
        for entry in entries:
            self.assertEqual(len(entry["solutions"]), 6)
            # Two requests give six samples of a text.
            self.assertGreater(len({solution["text"] for solution in entry["solutions"]}), 3)
            for solution in entry["solutions"]:
                self.assertLessEqual(solution["tokens"], 24)
                self.assertLess(solution["logprob"], 0)
                self.assertGreater(solution["scores"][0], 0)
        self.assertEqual([row["n"] for row in self.report() if row["method"] == "best-of-n"], [1, 2, 4, 6])


if __name__ == "__main__":
    unittest.main()
