#!/usr/bin/env python3
"""Counts names that mean several things: type names and file names outside tests, and docs that begin with a question word.
Fails if a name is back that had several meanings.

A name that is defined twice sends a reader to the wrong file. The two device families have the same file names on purpose,
so src/hexagon and src/rockchip count once.
"""

import re
from collections import defaultdict

from project import ROOT, TARGET, Problem, main_with

# Folders with code that ships, in which a name should mean one thing.
FOLDERS = ["src", "tool", "hexagon-ops/src", "hexagon-ops/skel/src", "rknpu-ops/src", "scale/src", "sim-common/src",
           "task-pool/src"]
FAMILIES = {"src/hexagon", "src/rockchip"}
NOT_CODE = {"tests", "benches", "examples"}

TYPE = re.compile(r"^ *(?:pub(?:\([^)]*\))? )?(?:unsafe )?(?:struct|enum|union|trait|type) ([A-Z]\w*)", re.M)
QUESTION = re.compile(r"^ *//[/!] (What|Whether|How|Where)\b", re.M)

# File names that are vague by themselves.
VAGUE = ["memory.rs", "tensor.rs", "pack.rs"]

# Names that once had several meanings: the names to use instead, and the files in which the name keeps its one meaning.
RETIRED = {
    "home": ("buffer, handle", ["src/config", "tool/src/probe"]),
    "Home": ("OperandBuffer", []),
    "plain": ("rows_f32, unpacked, ggml_bytes, unrotated, escaped", ["tool/src/quantize"]),
    "is_plain": ("what is true of it: is_dense_f32, only_hides, is_left_unpacked", []),
    "Plain": ("RowsF32, Unpacked, RoundOnly", []),
    "PLAIN": ("AS_IS, UNQUANTIZED", []),
    "PlainMatMul": ("UnpackedMatMul", []),
    "Int8Plain": ("Int8Unrotated", []),
    "told": ("logged", []),
    "let_go": ("drop_caches", []),
    "recall": ("rebind", []),
    "remember": ("cache, record, to_checked", []),
    "simulator": ("stand-in", []),
}
# Names that only one place may define: `divides` is arithmetic, `Refusal` is a text.
ONCE = ["divides", "Refusal"]
# `rest` is a remainder and not a function: `release_idle` is the function that ends the use of an idle NPU.
NO_FUNCTION = ["rest"]


def sources():
    """Each Rust file of the folders, as its path and its text without the unit tests."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.rs")):
            parts = path.relative_to(ROOT).parts
            if TARGET not in path.parents and not NOT_CODE & set(parts):
                yield path.relative_to(ROOT), without_tests(path.read_text(encoding="utf-8"))


def without_tests(text):
    """A file's text up to its tests, which end it. Types inside of functions and impls are not counted."""
    text = text.split("#[cfg(test)]")[0]
    return re.sub(r"^ +type \w+.*$", "", text, flags=re.M)


def family(path):
    """The family's folder that contains a file, or None."""
    folder = "/".join(path.parts[:2])
    return folder if folder in FAMILIES else None


def distinct(paths):
    """The places of a name, a file of the same name in both families counting once."""
    return {path.relative_to(family(path)) if family(path) else path for path in paths}


def code(text):
    """A file's text without comments and without quoted text."""
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', re.sub(r"//.*", "", text))


def retired(files):
    """Yields each use of a name that had several meanings."""
    defined = defaultdict(list)
    for path, text in files:
        words = set(re.findall(r"\w+", code(text)))
        for name, (better, kept) in RETIRED.items():
            if name in words and not str(path).startswith(tuple(kept)):
                yield f"{path}: {name}; write {better}"
        for name in re.findall(r"\b(?:fn|struct|enum|type|trait) (\w+)", code(text)):
            defined[name].append(path)
    for name in ONCE:
        if len(defined[name]) > 1:
            yield f"{name} is defined in {', '.join(map(str, defined[name]))}"
    for name in NO_FUNCTION:
        if defined[name]:
            yield f"{', '.join(map(str, defined[name]))}: no function is called {name}"


def main():
    types, files, questions = defaultdict(set), defaultdict(set), []
    for path, text in sources():
        files[path.name].add(path)
        for name in TYPE.findall(text):
            types[name].add(path)
        questions += QUESTION.findall(text)
    several = {name: paths for name, paths in types.items() if len(paths) > 1}
    for name, paths in sorted(several.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"{name:16} {', '.join(sorted(map(str, paths)))}")
    apart = sum(len(distinct(paths)) > 1 for paths in several.values())
    print(f"{len(several)} of {len(types)} type names are defined in several files; {apart} of them not only in both families")
    for name in VAGUE:
        print(f"{name}: {len(distinct(files[name]))} ({', '.join(sorted(map(str, files[name])))})")
    print(f"{len(questions)} comments of items begin with What, Whether, How or Where")
    found = list(retired(sources()))
    for each in found:
        print(f"   {each}")
    if found:
        raise Problem(f"{len(found)} names with several meanings are back")
    return 0


if __name__ == "__main__":
    main_with(main)
