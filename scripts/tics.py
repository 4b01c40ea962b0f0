#!/usr/bin/env python3
"""Fails if a turn of speech is more frequent in comments than twice its rate in rten, a Rust project of native speakers.

Usage: tics.py [--list NAME]     --list prints every sentence with one of them

Rates are per 1,000 lines of comments. Each of these words is correct now and then; used often, it makes a text that has to be
read twice. Words in backticks do not count.
"""

import io
import re
import subprocess
import sys
import tokenize

from project import ROOT, Problem, main_with

# The pattern, its rate in rten's Rust files (commit c7f7bad9), and words to use instead.
TICS = {
    "takes": (r"takes?|took|taken|taking", 4.0, "uses, needs, reads, accepts, lasts"),
    "says": (r"says?|said|saying", 0.7, "shows, reports, specifies, a noun"),
    "lies": (r"lies?|lying|lay", 0.9, "is, is stored"),
    "beside": (r"besides?", 0.0, "next to, in addition to, at the same time as"),
    "is no": (r"(is|are|was|were) no", 1.5, "is not a, without"),
    "behind": (r"behind", 0.0, "after, of"),
    "of its own": (r"of (its|their) own", 0.1, "separate, dedicated"),
    "what": (r"what", 0.7, "the noun that is meant"),
}
# How much more frequent than in rten a word may be.
MARGIN = 2

COMMENT = re.compile(r"//[/!]?(.*)")


def rust_comments(text):
    """The comments of a Rust or C file that begin their line, a line each."""
    return [found[1] for line in text.splitlines() if (found := COMMENT.match(line.strip()))]


def python_comments(text):
    """The comments of a Python file, and its strings of several lines or at the start of a block: a line each."""
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            lines += token.string.strip('"').splitlines()
    return lines


KINDS = {"*.rs": rust_comments, "*.[ch]": rust_comments, "*.py": python_comments}


def files(pattern):
    """The files that git knows by a pattern, without generated ones."""
    listed = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and name != "include/npu.h"]


def uses(name, lines):
    """The lines with a tic, once for each use."""
    pattern = re.compile(rf"\b({TICS[name][0]})\b")
    return [line for line in lines for _ in pattern.finditer(re.sub(r"`[^`]*`", "`", line))]


def findings(lines):
    """Tics that are too frequent in these lines: (name, rate, limit)."""
    for name, (_, rate, _) in TICS.items():
        found = 1000 * len(uses(name, lines)) / max(len(lines), 1)
        if found > MARGIN * rate:
            yield name, found, MARGIN * rate


def main():
    comments = {path: read(path.read_text(encoding="utf-8")) for pattern, read in KINDS.items() for path in files(pattern)}
    if sys.argv[1:2] == ["--list"]:
        for path, lines in comments.items():
            for line in uses(sys.argv[2], lines):
                print(f"{path.relative_to(ROOT)}: {line.strip()}")
        return 0
    lines = [line for each in comments.values() for line in each]
    rates = {name: 1000 * len(uses(name, lines)) / len(lines) for name in TICS}
    print(f"{len(lines)} lines of comments; per 1,000: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    found = list(findings(lines))
    for name, rate, limit in found:
        print(f"   {name}: {rate:.1f} for each 1,000 lines, at most {limit:.1f}; write {TICS[name][2]}")
    if found:
        raise Problem(f"{len(found)} words are too frequent in comments: scripts/tics.py --list {found[0][0]}")
    return 0


if __name__ == "__main__":
    main_with(main)
