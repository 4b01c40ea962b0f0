#!/usr/bin/env python3
"""Prints how fast MODEL, or the fetched model in Q4_0, would be on a Hexagon NPU, as `ggml-npu model` reckons it.

Usage: reckon.py [ARGUMENT...]     arguments of `ggml-npu model`, such as --chip hexagon-v79
"""

import os
import subprocess
import sys

import build
import models
from project import cpu_env, main_with


def main():
    own = os.environ.get("MODEL")
    tool = build.release_tool()
    return subprocess.run([tool, "model", own or models.variant("Q4_0"), *sys.argv[1:]], env=cpu_env()).returncode


if __name__ == "__main__":
    main_with(main)
