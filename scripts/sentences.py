#!/usr/bin/env python3
"""Fails if a page for users or contributors has a sentence of more than 30 words, or a word that this project avoids.

Usage: sentences.py [PAGE...]    the pages of PAGES without one

Code, links' targets, headings, sources and names in capitals (of types and operations) count as no words; text between
semicolons in a table's cell is a paragraph.
"""

import re
import sys
from pathlib import Path

from project import ROOT, Problem, main_with

PAGES = ["*.md", "docs/**/*.md", "dist/**/*.md", "patches/*.md", "fuzz/*.md", "examples/*.md"]
MOST_WORDS = 30

# Words that read like a riddle, and their replacements.
AVOIDED = {r"anew": "again", r"(any|some|no)body": "a user, a program", r"of (its|their) own": "separate, dedicated",
           r"shall": "must, will", r"(is|are) what": "name it", r"for want of": "without", r"once more": "again"}


def paragraphs(text):
    """The paragraphs, items of lists and cells of tables of a page: (line, text)."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    start, words = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.strip().removeprefix("> ")
        item = re.match(r"([-*]|\d+\.) ", line)
        is_apart = not line or line.startswith(("#", "|", "!", "<"))
        if words and (is_apart or item):
            yield start, " ".join(words)
            words = []
        if line.startswith("|"):
            # A cell may contain a list.
            yield from ((number, part) for cell in line.strip("|").split("|") for part in cell.split(";"))
        elif not is_apart:
            start = start if words else number
            words.append(line.removeprefix(item[0]) if item else line)


def sentences(text):
    """The sentences of a page: (line, text)."""
    for line, paragraph in paragraphs(text):
        if paragraph.startswith("SOURCE:"):
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "`", paragraph))
        yield from ((line, sentence) for sentence in re.split(r"(?<=[.!?])[\"”)*]*\s+", plain))


def findings(text):
    """The faults of a page: (line, reason)."""
    for line, sentence in sentences(text):
        words = [word for word in re.findall(r"\w[\w'’.,/-]*", sentence) if not re.fullmatch(r"[A-Z0-9_.,/-]+", word)]
        if len(words) > MOST_WORDS:
            yield line, f"{len(words)} words: {' '.join(words[:8])} …"
        for pattern, better in AVOIDED.items():
            found = re.search(rf"\b{pattern}\b", sentence, re.I)
            if found:
                yield line, f'"{found[0]}": {better}'


def main():
    pages = [Path(name).resolve() for name in sys.argv[1:]] or sorted({page for each in PAGES for page in ROOT.glob(each)})
    found = [f"{page.relative_to(ROOT)}, line {line}: {reason}" for page in pages
             for line, reason in findings(page.read_text(encoding="utf-8"))]
    for each in found:
        print(f"   {each}")
    if found:
        raise Problem(f"{len(found)} sentences to mend")
    return 0


if __name__ == "__main__":
    main_with(main)
