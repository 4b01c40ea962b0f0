#!/usr/bin/env python3
"""Loads the plugin into the newest programs with ggml that the registries have, and prints a row for each.

Usage: newest.py [node] [python] [debian]     all three without one

node    node-llama-cpp of npm and its prebuilt binary generate a text
python  the libraries in the wheel of llama-cpp-py-sync of PyPI load it
debian  llama.cpp of Debian sid generates a text

The tests of `make test` have pinned versions of the first and the last. A program that refuses the plugin is a failure, with
the plugin's line about the reason. Then `ggml_version.rs` needs the new version, or the plugin has to be adapted to ggml's
changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import build
import debian
import fetch
import stock
from project import HEXAGON, LOGS, TARGET, Problem, device_env, locked, main_with, run, say

FOLDER = TARGET / "newest"
PROMPT, TOKENS = "Once upon a time,", 8

# Loads a plugin and prints ggml's version. The libraries are in one folder, and name each other without a folder.
LOADER = """
import ctypes, sys
from pathlib import Path
folder = Path(sys.argv[1])
base = ctypes.CDLL(str(next(folder.glob("libggml-base.so*"))), mode=ctypes.RTLD_GLOBAL)
ggml = ctypes.CDLL(str(next(folder.glob("libggml.so*"))), mode=ctypes.RTLD_GLOBAL)
base.ggml_version.restype = ctypes.c_char_p
ggml.ggml_backend_load.restype = ctypes.c_void_p
print("ggml", base.ggml_version().decode(), "loaded" if ggml.ggml_backend_load(sys.argv[2].encode()) else "refused")
"""


def empty(name):
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def said(command, env, cwd=None):
    """Runs a program; returns its exit code, and all that it prints."""
    done = subprocess.run([str(word) for word in command], env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600)
    return done.returncode, done.stdout


def node(env):
    folder = empty("node")
    (folder / "package.json").write_text('{"private": true}\n', encoding="utf-8")
    run(["npm", "install", "--ignore-scripts", "--omit=optional", "--omit=peer", "--no-audit", "--no-fund", "node-llama-cpp",
         "@node-llama-cpp/linux-x64"], LOGS / "newest-npm.log", cwd=folder)
    shutil.copyfile(stock.SOURCES / "generate.mjs", folder / "generate.mjs")
    version = json.loads((folder / "node_modules" / "node-llama-cpp" / "package.json").read_text(encoding="utf-8"))["version"]
    return version, *said(["node", "generate.mjs", fetch.model(), PROMPT, TOKENS, 1], env, folder)


def python(env):
    folder = empty("python")
    fetch.environment()
    with locked(fetch.TOOLS):
        run([fetch.PIP, "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", folder, "llama-cpp-py-sync"],
            LOGS / "newest-pip.log")
    (info,) = folder.glob("llama_cpp_py_sync-*.dist-info")
    (library,) = folder.rglob("libggml-base.so*")
    code, text = said([sys.executable, "-c", LOADER, library.parent, env["GGML_BACKEND_PATH"]], env)
    older = re.search(r"version `GLIBC_([\d.]+)' not found", text)
    if older:
        raise debian.Missing(f"its libraries need glibc {older[1]}")
    return info.stem.split("-")[1], code or int("refused" in text), text


def debian_programs(env):
    folder = empty("debian")
    names = ["libggml0", "libllama0", "llama.cpp-tools", *stock.DEBIAN_OTHERS]
    program = stock.Debian(debian.unpacked(folder, stock.DEBIAN_SUITE, "amd64", {}, names))
    (package,) = (TARGET / "apt" / "amd64" / "files").glob("libggml0_*.deb")
    command = program.command("llama-completion", "-m", fetch.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "-ngl", 99,
                              "--temp", 0, "-no-cnv")
    return package.name.split("_")[1], *said(command, env, program.folder)


PROGRAMS = {"node": node, "python": python, "debian": debian_programs}


def main():
    names = sys.argv[1:] or list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        raise Problem(f"unknown program {unknown[0]}; one of {', '.join(PROGRAMS)}")
    env = device_env(HEXAGON, GGML_BACKEND_PATH=str(build.plugin()), PATH=os.environ["PATH"])
    failed = 0
    for name in names:
        say(f"fetching the newest for {name}")
        try:
            version, code, text = PROGRAMS[name](env)
        except debian.Missing as missing:
            print(f"   skipped {name}: {missing}", flush=True)
            continue
        (LOGS / f"newest-{name}.log").write_text(text, encoding="utf-8")
        lines = re.findall(r"ggml-rust-npu: (.*)|^(ggml .*)$", text, re.M)
        # A program that does not load the plugin computes on the CPU and exits without an error, so its log is checked.
        is_good = code == 0 and (name == "python" or "nodes of a token" in text)
        failed += not is_good
        print(f"   {name} {version}: {'works' if is_good else f'FAILED (code {code})'}; "
              f"{' | '.join(first or second for first, second in lines) or 'no line of the plugin'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    main_with(main)
