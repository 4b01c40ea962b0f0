#!/usr/bin/env python3
"""Fails if a comment of a Rust file is wider than 100 columns. Tables, drawings and blocks of code may be.

Usage: comments.py [--fix] [FILE...]     all Rust files that git knows without one; --fix wraps those that are wider
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from project import ROOT, Problem, main_with

COLUMNS = 100

COMMENT = re.compile(r"^( *)(//[/!]?)( *)(.*)$")
ITEM = re.compile(r"([-*]|\d+\.) +")
# Lines that cannot be wrapped, or that begin a paragraph: rows, headings, drawings, targets of links, tags.
FIXED = re.compile(r"[|#+]|.* {3,}|.*[─│┌└├═]|\[[^\]]+\]: ")
TAG = re.compile(r"[A-Z]{4,}(\([^)]*\))?: ")
FENCE = "```"
# Replaces a space at which the line must not break.
GLUE = "\x00"


def is_fixed(words):
    """Returns True for a line of a comment that is not running text."""
    return not words or bool(FIXED.match(words)) or words.startswith(FENCE)


def parts(line):
    """The indentation, the mark, the spaces and the words of a line that is a comment; else None."""
    found = COMMENT.match(line)
    return found.groups() if found else None


def wrapped(lines, start):
    """The lines of a paragraph from line `start` on, wrapped, and the number of the line after it."""
    indent, mark, space, words = parts(lines[start])
    item = ITEM.match(words)
    first = f"{indent}{mark}{space}"
    hanging = first + " " * (len(item[0]) if item else 0)
    texts, end = [words], start + 1
    while end < len(lines):
        found = parts(lines[end])
        if not found or found[:2] != (indent, mark) or "".join((*found[:3],)) != hanging:
            break
        if is_fixed(found[3]) or ITEM.match(found[3]) or TAG.match(found[3]):
            break
        texts.append(found[3])
        end += 1
    # A sign that would begin an item or a row at the start of a line is kept with the word before it.
    text = re.sub(r" (?=([-+*#|]|\d+[.)])( |$))", GLUE, " ".join(texts))
    new = textwrap.wrap(text, COLUMNS, initial_indent=first, subsequent_indent=hanging, break_long_words=False,
                        break_on_hyphens=False)
    return [line.replace(GLUE, " ") for line in new], end


def wide(lines):
    """The numbers of lines with a comment that is too wide."""
    fenced = False
    for number, line in enumerate(lines):
        found = parts(line)
        if not found:
            fenced = False
            continue
        if found[3].startswith(FENCE):
            fenced = not fenced
        # A single word, such as an address, cannot be made shorter.
        if len(line) > COLUMNS and not fenced and not is_fixed(found[3]) and " " in found[3]:
            yield number


def fixed(text):
    """A file's text with comments of at most 100 columns."""
    lines, at = text.split("\n"), 0
    while True:
        number = next((number for number in wide(lines) if number >= at), None)
        if number is None:
            return "\n".join(lines)
        new, end = wrapped(lines, number)
        lines[number:end] = new
        at = number + len(new)


def main():
    fix = "--fix" in sys.argv[1:]
    names = [name for name in sys.argv[1:] if name != "--fix"]
    if not names:
        listed = subprocess.run(["git", "ls-files", "-z", "*.rs"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        names = [ROOT / name for name in listed.decode().split("\0") if name]
    found = []
    for path in map(Path, names):
        text = path.read_text(encoding="utf-8")
        if fix and fixed(text) != text:
            text = fixed(text)
            path.write_text(text, encoding="utf-8")
        found += [f"{path.resolve().relative_to(ROOT)}, line {number + 1}" for number in wide(text.split("\n"))]
    for each in found:
        print(f"   {each}")
    if found:
        raise Problem(f"{len(found)} comments are wider than {COLUMNS} columns: scripts/comments.py --fix")
    return 0


if __name__ == "__main__":
    main_with(main)
