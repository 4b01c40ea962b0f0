"""A walk through docs/guide: every shell command of every page is run, on simulated devices, in a folder with only the files
that the page presupposes. A command that cannot run here is in one of the tables below, with the reason or with the test that
runs it."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import minilm
from harness import HEXAGON, LOGS, SIMULATED, Case, cpu_env, device_env, free_port
from test_vision import picture, vision_model

import build
import fetch
import models
import project
import stock
from project import ROOT, TARGET

GUIDE = ROOT / "docs" / "guide"

# The device that a page describes; for other pages it is `HEXAGON`.
CHIPS = {"rockchip.md": SIMULATED, "phone.md": HEXAGON, "snapdragon-linux.md": "hexagon-v73"}

# Commands that need something that no test machine has.
NEED = {
    r"^sudo |udevadm": "root; tests/e2e/test_board.py checks the rules",
    r"^adb |/data/local/tmp|^\./ggml-npu ": "a phone; tests/e2e/test_board.py runs scripts/phone.sh with a stand-in for adb",
    r"LINUX_ANDROID_LINKER|--target aarch64-linux-android": "Android's NDK; scripts/aarch64.py builds the archive without it",
    r"10\.0\.0\.[23]": "other machines; tests/e2e/test_rpc.py runs two servers on this one",
    r"^make windows": "Wine and a compiler for Windows; make windows runs it",
    r"^whisper-cli ": "FFmpeg's libraries; tests/e2e/test_stock.py runs libwhisper",
}

# Commands that `make test` or `make test-all` has already run. The walk starts with their results.
MADE_BEFORE = {
    r"^make (nightly )?dsp$": "target/skel",
    r"^make plugin$": "target/plugin",
    r"^make (build|fetch|build fetch)$": "target/llama-0.5.0, target/models",
    r"^cargo build --release --locked --bin ggml-npu$": "target/release/ggml-npu",
    r"^cargo build --release --manifest-path examples/generate": "examples/generate/target",
    r"^rustup target add": "rustup's standard library for Android",
    # tests/e2e/dist_packages.py runs these commands in empty folders and systems.
    r"ggml.rust.npu[-_]0\.1\.0|python text\.py|node text\.mjs|^(pip|npm) uninstall|-p \"Once upon a time,\"": "a release",
    # scripts/fetch.py applies this patch, and scripts/build.py runs cmake with these options.
    r"^cd llama\.cpp|^patch -p1|^cmake ": "llama.cpp/build",
}

# Replacements in commands that would take minutes, or that name CPUs or ports which a machine may lack.
SHORTER = {
    r"…": "-p Hello",
    r"\bllama-cli .*": r"\g<0> -n 4 -c 512 -st",
    r"\btaskset -c 4-7 (.*)": r"taskset -c 0 \1 -p 16 -n 4 -r 1",
    r"^ggml-npu bench.*": r"\g<0> --shapes 256x256 --types q8_0 --rows 1,16",
    r"^test-backend-ops perf .*": r"\g<0> -p 'type_a=q8_0,type_b=f32,m=4096,n=(1|8),'",
    r"^llama-mtmd-cli .*": r"\g<0> -n 4 -t 1 --chat-template chatml",
    r"^llama-embedding .*": r"\g<0> -t 1",
    r"^llama-server .*": r"\g<0> -c 2048 -np 2 --port $PORT",
    r"samples\.jsonl -n 16 --url http://127\.0\.0\.1:8080": "served.jsonl -n 2 --max-tokens 16 --url http://127.0.0.1:$PORT",
    r"(samples\.jsonl) -n 16": r"\1 -n 2 --max-tokens 16",
}

# A variable setting in a page is a choice to be put in front of the command above it, not a command.
SETTING = re.compile(r"^(GGML_RUST_NPU_\w+=('[^']*'|\"[^\"]*\"|\S+)\s*)$")


# Pages that use Debian's programs, and which ones.
OF_DEBIAN = {"programs.md": ["llama-cli", "llama-bench"],
             "encoders.md": ["llama-mtmd-cli", "llama-server", "llama-embedding"]}

# Two chunks of 512 tokens, the least that llama-imatrix accepts.
TEXT_CHARACTERS = 8000
PROBLEM = {"id": "1", "question": "What is 2 + 2?", "answer": "4"}


class Command(NamedTuple):
    page: str
    text: str


def commands(page):
    """The shell commands of a page, without comments, each on one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (GUIDE / page).read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    return [Command(page, re.sub(r"(^|\s+)# .*$", "", line).strip()) for line in lines if line.strip()]


def rule(table, text):
    return next((pattern for pattern in table if re.search(pattern, text)), None)


def pages():
    return sorted(path.name for path in GUIDE.glob("*.md"))


class Walk(Case):
    @classmethod
    def setUpClass(cls):
        cls.plugin = build.plugin()
        cls.tool = build.release_tool()
        cls.model_file = models.variant("Q8_0")
        # docs/guide/quantizing.md and programs.md say how to make these files, and other pages use them.
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.given = Path(scratch.name)
        text = fetch.text().read_text(encoding="utf-8", errors="replace")
        (cls.given / "text.txt").write_text(text[:TEXT_CHARACTERS], encoding="utf-8")
        (cls.given / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n", encoding="utf-8")
        for program, args, env in [
                ("llama-imatrix", ["-m", models.variant("F16"), "-f", "text.txt", "-o", "imatrix.gguf"], cpu_env()),
                ("llama-bench", ["-m", cls.model_file, "-p", "4", "-n", "1", "-r", "1"],
                 device_env(HEXAGON, GGML_RUST_NPU_TRACE="trace.json"))]:
            project.run([project.binary(program), *args], LOGS / f"guide-{program}.log", env, cls.given)

    def prepare(self, folder):
        """The files that the pages presuppose: a checkout in which everything is built, a model, and the programs in PATH."""
        for name in ("dist", "docs", "scripts"):
            (folder / name).symlink_to(ROOT / name)
        target = folder / "target"
        (target / "release").mkdir(parents=True)
        (target / "plugin").mkdir()
        (target / "plugin" / self.plugin.name).symlink_to(self.plugin)
        (target / "release" / "ggml-npu").symlink_to(self.tool)
        for name in ("models", f"llama-{project.LLAMA_VERSION}"):
            (target / name).symlink_to(TARGET / name)
        for library in ("v73", "v75"):
            place = target / "skel" / library / f"libggml_rust_npu_skel_{library}.so"
            place.parent.mkdir(parents=True)
            place.write_bytes(b"a library for the DSP, which a simulated one does not read")
        (folder / "build" / "bin").parent.mkdir()
        (folder / "build" / "bin").symlink_to(project.llama_build() / "bin")
        for name in ("model-F16.gguf", "model-f16.gguf"):
            (folder / name).symlink_to(models.variant("F16"))
        shutil.copyfile(self.model_file, folder / "model.gguf")
        for path in self.given.iterdir():
            shutil.copyfile(path, folder / path.name)
        vision_model(folder / "mmproj.gguf")
        (folder / "photo.png").write_bytes(picture())
        (folder / "embed.gguf").symlink_to(models.variant("F16", minilm.model()))
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "ggml-npu").symlink_to(self.tool)
        for program in (project.llama_build() / "bin").iterdir():
            (bin_folder / program.name).symlink_to(program)
        return bin_folder

    def others(self, page, folder, bin_folder):
        """For a page about programs of others: Debian's in the place of those built here, and the Rust program."""
        try:
            program = stock.debian_programs()
            example = build.rust_program() if page == "programs.md" else None
        except (stock.Missing, build.Missing) as missing:
            self.skipTest(str(missing))
        if example:
            release = folder / "examples" / "generate" / "target" / "release"
            release.mkdir(parents=True)
            (release / "generate").symlink_to(example)
        # These programs look for the CPU backend in the current folder.
        for library in program.folder.glob("*.so"):
            (folder / library.name).symlink_to(library)
        for name in OF_DEBIAN[page]:
            (bin_folder / name).unlink(missing_ok=True)
            line = " ".join(f"'{word}'" for word in program.command(name))
            (bin_folder / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
            (bin_folder / name).chmod(0o755)

    def walk(self, page):
        """Runs a page's commands one after another, in one shell; each must end with code 0."""
        lines, run = ["cd \"$FOLDER\""], []
        for number, command in enumerate(commands(page)):
            text = command.text
            if rule(NEED, text) or rule(MADE_BEFORE, text) or SETTING.match(text):
                continue
            run.append(text)
            for pattern, shorter in SHORTER.items():
                text = re.sub(pattern, shorter, text)
            if text.startswith("llama-server "):
                # The server answers the commands that come after it.
                lines += ["[ -z \"$SERVER\" ] || { kill $SERVER; wait $SERVER; }", f"{text} >server.txt 2>&1 & SERVER=$!",
                          "until curl -sf http://127.0.0.1:$PORT/health >/dev/null; do kill -0 $SERVER || exit; sleep 1; done"]
                continue
            lines.append(f"{text} || {{ echo \"@@ {number} failed\" >&2; kill $SERVER 2>/dev/null; exit 1; }}")
        if not run:
            return []
        lines.append("[ -z \"$SERVER\" ] || kill $SERVER")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "walk"
            folder.mkdir()
            bin_folder = self.prepare(folder)
            if page in OF_DEBIAN:
                self.others(page, folder, bin_folder)
            env = device_env(CHIPS.get(page, HEXAGON), FOLDER=str(folder), HOME=str(folder), PORT=str(free_port()), SERVER="",
                             PATH=f"{bin_folder}:{os.environ['PATH']}")
            env.pop("XDG_CONFIG_HOME", None)
            (Path(scratch) / "walk.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
            done = self.run_command(page, ["bash", Path(scratch) / "walk.sh"], env, timeout=1800)
        failed = re.search(r"@@ (\d+) failed", done.log)
        which = commands(page)[int(failed.group(1))].text if failed else "the walk"
        self.assertEqual(done.code, 0, f"{page}: {which}: {done.all[-3000:]}")
        return run

    def test_every_command_of_every_page_runs_or_says_why_not(self):
        for page in pages():
            with self.subTest(page):
                run = self.walk(page)
                print(f"   {page}: {len(run)} of {len(commands(page))} commands ran", flush=True)


class Tables(Case):
    def test_every_row_is_about_a_command_of_a_page(self):
        texts = [command.text for page in pages() for command in commands(page)]
        for table in (NEED, MADE_BEFORE, SHORTER):
            for pattern in table:
                self.assertTrue(any(re.search(pattern, text) for text in texts), pattern)

    def test_commands_of_one_kind_do_not_hide_others(self):
        """Of all commands, most run."""
        texts = [command.text for page in pages() for command in commands(page)]
        left = [text for text in texts if rule(NEED, text)]
        self.assertLessEqual(len(left), len(texts) // 4)

    def test_blocks_name_their_language(self):
        for page in pages():
            fences = re.findall(r"^```(.*)$", (GUIDE / page).read_text(encoding="utf-8"), re.M)
            self.assertLessEqual(set(fences[::2]), {"sh", "js", "python", "rust", "toml", "text"}, page)
