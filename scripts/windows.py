#!/usr/bin/env python3
"""Runs the tool for Windows, with the stand-ins for both NPUs, under Wine.

Usage: windows.py [record]    record: also writes docs/results/windows.txt

Needs Debian's wine64 and gcc-mingw-w64-x86-64, and Rust's x86_64-pc-windows-gnu. The programs of llama.cpp are not built.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys

from lint import WINDOWS
from project import LOGS, ROOT, TARGET, Problem, cpu_env, main_with, need, run, say, tool_env

RESULTS = ROOT / "docs" / "results" / "windows.txt"
FOLDER = TARGET / "windows"

COMPILER = "x86_64-w64-mingw32-gcc"
# Debian's package has the second one alone.
WINES = ["wine64", "/usr/lib/wine/wine64"]

# One chip of each kind of layout and arithmetic.
CHIPS = ["hexagon-v75", "hexagon-v79", "hexagon-v68", "hexagon-v68-hvx", "rk3588", "rk3566"]
PASSED = re.compile(r"self-test +passed")
TIMEOUT_S = 1800

HEAD = """\
The tool for Windows ({target}), with the stand-ins for NPUs, under {wine}.
Written by make windows, {date}. No NPU is reached from Windows.
"""


def wine():
    """The program that runs those of Windows."""
    found = next((path for name in WINES if (path := shutil.which(name))), None)
    if found is None:
        raise Problem("wine64 is needed; on Debian: apt-get install wine64")
    return found


def program():
    """Builds the tool; returns its path."""
    need(COMPILER, "on Debian: apt-get install gcc-mingw-w64-x86-64")
    say("building ggml-npu.exe")
    run(["cargo", "build", "--locked", "-p", "ggml-npu", "--target", WINDOWS[0], "--target-dir", FOLDER],
        LOGS / "windows-build.log", dict(tool_env(), GGML_INCLUDE=""), cwd=ROOT)
    return FOLDER / WINDOWS[0] / "debug" / "ggml-npu.exe"


def beside(tool):
    """Builds the library of Windows that Wine may lack, into the tool's folder."""
    run([COMPILER, "-shared", "-O1", ROOT / "tests" / "windows" / "bcryptprimitives.c", "-o",
         tool.parent / "bcryptprimitives.dll", "-ladvapi32"], LOGS / "windows-library.log")


def ended(runner, *args, **settings):
    """Runs a program of Windows; returns its output, or raises a Problem if it fails."""
    # A prefix of this test alone, and no window.
    env = cpu_env(WINEPREFIX=str(FOLDER / "wine"), WINEDEBUG="-all", DISPLAY="", **settings)
    done = subprocess.run([runner, *map(str, args)], cwd=FOLDER, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
    text = done.stdout.decode(errors="replace").replace("\r", "")
    if done.returncode:
        raise Problem(f"{' '.join(map(str, args[1:]))} of {settings} ended with code {done.returncode}:\n{text}")
    return text


def main():
    runner, tool = wine(), program()
    beside(tool)
    version = subprocess.run([runner, "--version"], capture_output=True, text=True, env=dict(os.environ)).stdout.strip()
    parts = [HEAD.format(target=WINDOWS[0], wine=version, date=datetime.date.today())]
    for chip in CHIPS:
        say(f"the self-test of {chip}")
        text = ended(runner, tool, "devices", "--self-test", GGML_RUST_NPU_SIM=chip)
        print(text, end="", flush=True)
        if not PASSED.search(text):
            raise Problem(f"the self-test of {chip} has not passed")
        # Wine tells the Linux below it.
        text = re.sub(r"^(system .*), kernel .*$", r"\1", text, flags=re.M)
        parts.append(f"GGML_RUST_NPU_SIM={chip} ggml-npu.exe devices --self-test\n\n{text}")
    if "record" in sys.argv[1:]:
        RESULTS.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    main_with(main)
