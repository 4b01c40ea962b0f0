#!/usr/bin/env python3
"""Writes the tables that papers print, with this project's numbers, into docs/results/tables.

Usage: results.py [--check] [NAME ...]     all tables if none is named

RESULTS_CHUNKS: chunks of 512 tokens for perplexities, 8 if not given. RESULTS_MODELS: the names of models, with commas, to use
instead of all. RESULTS_PROBLEMS: the most problems to solve.

--check changes nothing, and fails if a page that is made from counts in the tree is out of date. The others run models for
minutes to hours; their measurements are kept in target/results, so that an interrupted run continues.
"""

import importlib
import sys

import build
from project import ROOT, Problem, main_with, say
from tables import page

# Pages of counts, which are quick to check. The page of speed needs the tool to be built first.
COUNTED = ["packets", "whole", "speed"]
MEASURED = ["batch", "quantizers", "scaling_awq", "groups", "rockchip", "answers"]


def text(name):
    return importlib.import_module(f"tables.{name}").write().markdown(name)


def check(names):
    wanted = {name: text(name) for name in names}
    stale = [name for name, want in wanted.items()
             if not page.path(name).exists() or page.path(name).read_text(encoding="utf-8") != want]
    if stale:
        raise Problem(f"{', '.join(stale)}: not what the counts say; run `make results TABLE=NAME`")


def main():
    arguments = sys.argv[1:]
    is_check = "--check" in arguments
    names = [argument for argument in arguments if argument != "--check"]
    unknown = [name for name in names if name not in COUNTED + MEASURED]
    if unknown:
        raise Problem(f"no table {', '.join(unknown)}; one of {', '.join(COUNTED + MEASURED)}")
    names = names or (COUNTED if is_check else COUNTED + MEASURED)
    if is_check:
        return check(names)
    build.release_tool()
    if set(names) & set(MEASURED):
        build.static()
    for name in names:
        want = text(name)
        page.FOLDER.mkdir(parents=True, exist_ok=True)
        page.path(name).write_text(want, encoding="utf-8")
        say(str(page.path(name).relative_to(ROOT)))
    return 0


if __name__ == "__main__":
    main_with(main)
