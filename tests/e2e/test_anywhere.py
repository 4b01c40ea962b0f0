"""No test depends on who runs it, where, or with which variables; and scripts/anywhere.py notices one that does."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import harness

import anywhere
import debian
import project
import test as script
from project import ROOT

E2E = ROOT / "tests" / "e2e"
# Programs that tests start: those that README names, and those that each Linux system has. If another program is missing, its
# test says so.
NAMED = {"git", "cargo", "rustc", "rustup", "gcc", "g++", "cc", "make", "python3"}
BASIC = {"sh", "env", "true"}
SKIPPED_WITHOUT = {"unshare", "systemd-analyze", "node", "npm", "apt-get", "dpkg-deb", "clang", "/bin/true"}
# gcc needs it.
WITH_GCC = {"readelf", "nm"}


def python(code, **settings):
    """The output of Python in tests/e2e with more variables."""
    done = subprocess.run([sys.executable, "-c", code], cwd=E2E, env={**os.environ, **settings}, stdout=subprocess.PIPE,
                          text=True, check=True)
    return done.stdout.split()


class Surroundings(unittest.TestCase):
    def test_tests_see_no_variable_that_changes_a_program(self):
        code = "import harness, os; print(*harness.cpu_env(), 'and', *os.environ, os.environ['LC_ALL'], oct(os.umask(0)))"
        shown = python(code, **anywhere.NONSENSE, GGML_CUDA_ENABLE="1", LANGUAGE="tr", LC_ALL="tr_TR.UTF-8", TZ="Mars")
        runs, own = " ".join(shown).split(" and ")
        for name in [*anywhere.NONSENSE, "GGML_CUDA_ENABLE", "LANGUAGE"]:
            self.assertNotIn(name, own.split())
            if name != "OMP_WAIT_POLICY":
                self.assertNotIn(name, runs.split())
        self.assertEqual(own.split()[-2:], ["C.UTF-8", "0o22"])

    def test_settings_of_the_scripts_stay(self):
        for name in ("LLAMA_CPP_DIR", "GGML_RUST_NPU_LIB"):
            self.assertFalse(project.is_foreign(name))

    def test_a_run_sees_no_file_of_settings(self):
        with tempfile.TemporaryDirectory() as home:
            (Path(home) / ".config").mkdir()
            (Path(home) / ".config" / "ggml-rust-npu.conf").write_text("nonsense\n", encoding="utf-8")
            with mock.patch.dict("os.environ", HOME=home, XDG_CONFIG_HOME=str(Path(home) / ".config")):
                env = project.cpu_env()
        self.assertFalse((Path(env["XDG_CONFIG_HOME"]) / "ggml-rust-npu.conf").exists())

    def test_a_path_is_no_device_and_no_line_of_ours(self):
        folder = "/srv/ggml-rust-npu/HEX0/RKNPU0: simulated"
        text = (f"load_backend: loaded RUST_NPU backend from {folder}/libggml-rust_npu.so\n"
                f"W ggml-rust-npu: no line of the plain log\nAvailable devices:\n  (none)\n{folder}: ggml-rust-npu: gone\n")
        self.assertEqual((harness.listed_devices(text), harness.our_lines(text)), ([], []))
        text += "  HEX0: Hexagon V75 (1 MiB, 1 MiB free)\nRKNPU0: RK3588\nggml-rust-npu: a line\n"
        self.assertEqual((harness.listed_devices(text), harness.our_lines(text)),
                         (["HEX0", "RKNPU0"], ["ggml-rust-npu: a line"]))

    def test_tests_start_no_program_that_readme_does_not_name(self):
        allowed = NAMED | BASIC | SKIPPED_WITHOUT | WITH_GCC
        folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("target", ".git")]
        rust = [file for folder in folders for file in folder.glob("**/*.rs") if "target" not in file.parts[len(ROOT.parts):]]
        started = {}
        for file in rust:
            text = file.read_text(encoding="utf-8")
            for name in re.findall(r'(?:Command::new|test_kit::command)\(\s*"([^"]+)"', text):
                started.setdefault(name, file.name)
        for file in E2E.glob("test_*.py"):
            for name in re.findall(r'(?:run|Popen)\(\["([^"]+)"', file.read_text(encoding="utf-8")):
                started.setdefault(name, file.name)
        self.assertGreater(len(started), 5)
        self.assertEqual({name: file for name, file in started.items() if name not in allowed}, {})

    def test_each_start_of_the_tool_is_clean(self):
        for file in (ROOT / "tool" / "tests").glob("**/*.rs"):
            self.assertNotIn('Command::new(env!("CARGO_BIN_EXE', file.read_text(encoding="utf-8"), file)


class Expired(unittest.TestCase):
    def test_a_list_that_a_mirror_has_not_refreshed_is_taken(self):
        """The sums of the packages are pinned."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(debian, "TARGET", Path(folder)), \
                mock.patch.object(debian, "mirrors", return_value=["http://debian.invalid/debian"]):
            env, _ = debian.environment("sid", "amd64")
            settings = Path(env["APT_CONFIG"]).read_text(encoding="utf-8")
        self.assertIn('Acquire::Check-Valid-Until "false";', settings)


# Programs in place of llama-server: one that ends, one whose signal handler does not return, and one that goes on after the
# signal.
ENDS = "import time; time.sleep(600)"
HANGS_IN_HANDLER = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); time.sleep(600)"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: time.sleep(600)); time.sleep(600)"
BUSY = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint('idle', flush=True)\ntime.sleep(600)"


class Ending(unittest.TestCase):
    def started(self, code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

        def end():
            process.kill()
            process.wait()
            process.stdout.close()

        self.addCleanup(end)
        return process

    def test_server_that_ends_is_waited_for(self):
        self.assertEqual(harness.terminate(self.started(ENDS)), -15)

    def test_server_that_hangs_in_its_own_handler_is_killed_and_no_failure(self):
        process = self.started(HANGS_IN_HANDLER)
        with mock.patch.object(harness, "END_S", 1), mock.patch("builtins.print") as said:
            self.assertEqual(harness.terminate(process), -15)
        self.assertIn("a fault of llama.cpp", said.call_args.args[0])
        self.assertEqual(process.returncode, -9)

    def test_server_that_hangs_elsewhere_is_a_failure(self):
        with mock.patch.object(harness, "END_S", 1), self.assertRaises(subprocess.TimeoutExpired):
            harness.terminate(self.started(HANGS))

    def test_server_is_told_to_end_when_its_main_thread_sleeps(self):
        process = self.started(BUSY)
        harness.wait_until_asleep(process)
        os.set_blocking(process.stdout.fileno(), False)
        self.assertEqual(process.stdout.read(), "idle\n")


class Rows(unittest.TestCase):
    def test_a_row_passes_only_if_its_last_line_counts_no_failure(self):
        for text, code, good in [("== cargo\n12 passed, 0 failed, 3 skipped\n", 0, True),
                                 ("12 passed, 1 failed, 3 skipped\n", 1, False), ("12 passed, 0 failed, 3 skipped\n", 1, False),
                                 ("error: no\n", 1, False), ("", 0, False)]:
            self.assertEqual(anywhere.result(text, code)[1], good, text)

    def test_a_file_that_only_its_owner_reads_is_copied_for_another_user(self):
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source", Path(folder) / "target"
            source.mkdir()
            for name, mode in (("private", 0o600), ("public", 0o644)):
                (source / name).write_text(name, encoding="utf-8")
                (source / name).chmod(mode)
            anywhere.linked(source, target)
            self.assertEqual({path.name: path.stat().st_nlink for path in target.iterdir()}, {"private": 1, "public": 2})

    def test_unknown_row_is_said(self):
        with mock.patch.object(sys, "argv", ["anywhere.py", "moon"]), self.assertRaises(project.Problem) as problem:
            anywhere.main()
        self.assertIn("no row moon; one of folder, path", str(problem.exception))

    def test_quick_tests_are_those_that_took_less_than_a_minute_and_the_ones_about_places(self):
        seconds = {"test_a": 3, "test_stock": 200, "test_long": 61}
        self.assertEqual(script.quick_tests(seconds, ["test_a", "test_new", "test_stock", "test_long"]),
                         ["test_a", "test_new", *script.ALWAYS])
        self.assertEqual(script.quick_tests({}, ["test_stock"]), ["test_stock"])

    def test_tests_that_always_run_are_there(self):
        for name in script.ALWAYS:
            self.assertGreater(unittest.defaultTestLoader.loadTestsFromName(name).countTestCases(), 0)
        self.assertEqual(unittest.defaultTestLoader.errors, [])
