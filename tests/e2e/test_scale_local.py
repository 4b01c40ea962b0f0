"""`ggml-npu scale --model`: the server that it starts is ready before the first request, and ends with the run."""

import json
import operator
import os
import signal
import subprocess
import time
import unittest
from pathlib import Path

from harness import cpu_env
from scripted_server import scripted_server
from test_scale import TOOL, ScaleCase, questions, write_lines

import models
from project import binary

SCRIPTED = Path(__file__).resolve().with_name("scripted_server.py")


def runs(pid):
    """Returns True if a process with this number runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class ScaleLocal(ScaleCase):
    def setUp(self):
        super().setUp()
        self.program = self.folder / "llama-server"
        self.script(f'exec python3 "{SCRIPTED}" "$@"\n')
        self.model = self.folder / "scripted.gguf"
        self.model.write_bytes(bytes(10_000_000))
        self.started = self.folder / "started"
        self.env = dict(cpu_env(), SCRIPTED_LOG=str(self.started))

    def script(self, text):
        self.program.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        self.program.chmod(0o755)

    def local(self, *args):
        command = [TOOL, "scale", "run", self.problems, "-o", self.out, "-n", 4, "--model", self.model, "--server-bin",
                   self.program, *args]
        return [str(each) for each in command]

    def run_local(self, *args, **env):
        return self.run_command("ggml-npu", self.local(*args), dict(self.env, **env))

    def servers(self):
        """Process id and arguments of each server that was started."""
        return [json.loads(line) for line in self.started.read_text(encoding="utf-8").splitlines()]

    def assert_ended(self):
        for pid, *_ in self.servers():
            self.assertFalse(runs(pid), f"the server {pid} still runs")

    def test_its_answers_are_those_of_a_server_that_runs_already(self):
        done = self.run_local("--", "-ngl", "99", "-c", "4096")
        self.assertEqual(done.code, 0, done.all)
        (_, *arguments), = self.servers()
        self.assertEqual(arguments[arguments.index("-m") + 1], str(self.model))
        self.assertEqual(arguments[arguments.index("-np") + 1], "4")
        # The user's arguments come last, so that they override others.
        self.assertEqual(arguments[-4:], ["-ngl", "99", "-c", "4096"])
        self.assert_ended()
        (settings, *own) = self.lines()
        self.assertEqual(settings["settings"].pop("server_args"), ["-ngl", "99", "-c", "4096"])
        del settings["settings"]["model_hash"]
        self.out.unlink()
        with scripted_server() as running:
            self.assertEqual(self.run_scale(running.url, "-n", 4).code, 0)
        (same_settings, *same) = self.lines()
        by_name = operator.itemgetter("id")
        self.assertEqual((same_settings, sorted(same, key=by_name)), (settings, sorted(own, key=by_name)))

    def test_a_run_does_not_go_on_with_another_model_of_the_same_name(self):
        self.assertEqual(self.run_local("--limit", 2).code, 0)
        content = self.model.read_bytes()
        part = b"x" * 20_000
        for changed in part + content[20_000:], content[:5_000_000] + part + content[5_020_000:], content[:-1]:
            with self.subTest(changed.find(b"x")):
                self.model.write_bytes(changed)
                done = self.run_local()
                self.assertEqual((done.code, "was begun with model_hash" in done.log), (1, True), done.all)
        self.model.write_bytes(content)
        done = self.run_local("--", "--lora", "x.gguf")
        self.assertEqual((done.code, "was begun with server_args" in done.log), (1, True), done.all)
        self.assertEqual(self.run_local().code, 0)
        self.assert_whole()
        self.model.unlink()
        done = self.run_local()
        self.assertEqual((done.code, f"{self.model}: No such file" in done.log), (1, True), done.all)

    def test_a_program_of_path_is_found(self):
        command = self.local()
        command.remove("--server-bin")
        command.remove(str(self.program))
        done = self.run_command("ggml-npu", command, dict(self.env, PATH=f"{self.folder}:{os.environ['PATH']}"))
        self.assertEqual(done.code, 0, done.all)
        self.assert_ended()

    def test_a_server_that_ends_in_the_middle_is_one_error_and_the_run_goes_on(self):
        done = self.run_local(SCRIPTED_ENDS="7")
        self.assertEqual(done.code, 1, done.all)
        error = done.log.splitlines()[-1]
        for words in (f"{self.program} ended with exit status: 3", "out of memory | this is the end", "goes on with it"):
            self.assertIn(words, error)
        self.assertEqual(len(self.lines()), 8)
        self.assertEqual(self.run_local().code, 0)
        self.assert_whole()
        self.assert_ended()

    def test_a_server_that_does_not_start_is_one_error(self):
        for text, args, words in (
                ("echo cannot read scripted.gguf >&2\nexit 1\n", (), "ended with exit status: 1: cannot read scripted.gguf"),
                ("kill -9 $$\n", (), "ended with signal: 9 (SIGKILL): it wrote nothing"),
                ("echo loading >&2\nexec sleep 60\n", ("--timeout", 5), "was not ready after 5 s: loading")):
            with self.subTest(words):
                self.script(text)
                done = self.run_local(*args)
                self.assertEqual((done.code, words in done.log), (1, True), done.all)
                self.assertFalse(self.out.exists())
        self.program.unlink()
        done = self.run_local()
        self.assertEqual((done.code, f"{self.program} cannot be started: No such file" in done.log), (1, True), done.all)
        done = self.run_local("--server-bin", "no-such-server")
        self.assertEqual(done.code, 2, done.all)
        self.program = Path("no-such-server")
        done = self.run_local()
        self.assertEqual((done.code, "no-such-server cannot be started: no such program in PATH" in done.log), (1, True),
                         done.all)

    def test_a_signal_ends_the_server(self):
        for number in signal.SIGINT, signal.SIGTERM:
            with self.subTest(number.name):
                self.out.unlink(missing_ok=True)
                # A shell starts background jobs with SIGINT ignored, and the tool keeps that; `env` restores the default. The
                # server gets no signal from the terminal.
                command = ["env", "--default-signal=INT", *self.local()]
                # The delay makes the signal come long before the last answer.
                env = dict(self.env, SCRIPTED_DELAY="0.5")
                process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                while not self.out.exists() or self.out.read_bytes().count(b"\n") < 3:
                    self.assertIsNone(process.poll())
                    time.sleep(0.005)
                pid = self.servers()[-1][0]
                self.assertTrue(runs(pid))
                process.send_signal(number)
                self.assertEqual(process.wait(30), 130)
                self.assert_ended()
        self.assertEqual(self.run_local().code, 0)
        self.assert_whole()

    def test_options_of_a_server_need_a_model(self):
        for args in (("--server-bin", "x"), ("--", "-ngl", "99")):
            for url in (), ("--url", "http://127.0.0.1:9"):
                command = [TOOL, "scale", "run", self.problems, "-o", self.out, *url, *args]
                done = self.run_command("ggml-npu", command, cpu_env())
                self.assertEqual(done.code, 2, done.all)
        done = self.run_local("--url", "http://127.0.0.1:9")
        self.assertEqual(done.code, 2, done.all)

    def test_llama_server_is_started(self):
        write_lines(self.problems, questions(2))
        model = models.variant("Q8_0")
        command = [TOOL, "scale", "run", self.problems, "-o", self.out, "-n", 4, "--max-tokens", 16, "--model", model,
                   "--server-bin", binary("llama-server"), "--", "-fit", "off", "-t", 2]
        done = self.run_command("ggml-npu", command, cpu_env())
        self.assertEqual(done.code, 0, done.all)
        settings, *entries = self.lines()
        self.assertEqual(settings["settings"]["model"], model.name)
        self.assertEqual([len(entry["solutions"]) for entry in entries], [4, 4])
        command[command.index(model)] = self.problems
        done = self.run_command("ggml-npu", command, cpu_env())
        self.assertEqual((done.code, "llama-server ended with exit status: 1" in done.log), (1, True), done.all)


if __name__ == "__main__":
    unittest.main()
