#!/usr/bin/env python3
"""Runs the quick part of `make test` where others would: in other folders, as another user, with their variables, in a bare
Debian.

Usage: anywhere.py [--e2e NAME,NAME...] [ROW...]     all rows if none is named

The quick part is `test.py quick`: all Rust tests, and the files of tests/e2e that took less than a minute when they last ran
here (target/logs/e2e-seconds.json), or the files and tests that --e2e names. If this machine cannot run a row, a line at the
start says so.

The rows folder, path, user and bare run in a clone, with uncommitted changes. A clone links fetched files: downloads, models,
stock programs and cargo's registry. All of this project's crates are compiled in it, because the names of its folders are in
them. The programs of llama.cpp are linked from here, except in bare, which builds them: they have no folder's name in them. The
rows home and variables run in this checkout.

ANYWHERE_DIR: where the clones are, target/anywhere if not given. They stay, so that cargo compiles less the next time.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import build
import debian
import graphs
import project
from debian import Missing
from project import LOGS, ROOT, TARGET, Problem, main_with, made_once, need, run, say

CLONES = Path(os.environ.get("ANYWHERE_DIR", TARGET / "anywhere"))
NAME = "ggml-rust-npu"
# Folders of this checkout's target/ to which a clone links.
SHARED = ["downloads", "models", "stock"]
# The clone may belong to another user, which git refuses by default.
GIT = ["git", "-c", "safe.directory=*"]
# The packages that README names, and the one that apt-get needs for https.
PACKAGES = ["git", "gcc", "g++", "libc6-dev", "make", "python3", "python3-venv", "ca-certificates"]
SUITE = "bookworm"
# A user id that exists neither on this machine nor in the bare system.
STRANGER = 34567

NONSENSE = {"GGML_RUST_NPU_SIM": "abacus", "GGML_RUST_NPU_SIM_FAULTS": "abacus:1=-1", "GGML_RUST_NPU_LOG": "loud",
            "GGML_RUST_NPU_CONFIG": "/nonexistent/settings.conf", "GGML_BACKEND_PATH": "/nonexistent/plugin.so",
            "LLAMA_ARG_NGL": "many", "LLAMA_ARG_N_GPU_LAYERS": "many", "LLAMA_ARG_DEVICE": "abacus",
            "LLAMA_LOG_VERBOSITY": "many", "OMP_NUM_THREADS": "many", "OMP_WAIT_POLICY": "active"}


class Start(NamedTuple):
    """How to run the quick part: a command line, its folder, its environment, and more arguments for subprocess."""

    command: list
    folder: Path
    env: dict
    more: dict = MappingProxyType({})


def link(source, target):
    """Links a file; copies it if the target is on another file system, or if others than its owner may not read it, as some
    files of crates."""
    if os.lstat(source).st_mode & stat.S_IROTH:
        try:
            return os.link(source, target, follow_symlinks=False)
        except OSError:
            pass
    return shutil.copy2(source, target, follow_symlinks=False)


def linked(source, target):
    """Copies a folder as links to its files, without locks and unfinished files; leaves an existing folder unchanged."""
    if source.exists() and not target.exists():
        shutil.copytree(source, target, symlinks=True, copy_function=link, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns(".*.lock", ".*.part"))


def clone(folder):
    """Makes a clone of this checkout as it is now, without files that git does not know; or updates an existing clone, where
    unchanged files keep their times."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    commands = [["clone", "--quiet", "--no-hardlinks", ROOT, folder]] if not (folder / ".git").exists() else [
        ["-C", folder, "fetch", "--quiet", ROOT, "HEAD"], ["-C", folder, "reset", "--quiet", "--hard", "FETCH_HEAD"],
        ["-C", folder, "clean", "--quiet", "--force", "-d"]]
    for command in commands:
        run([*GIT, *command], LOGS / "anywhere-clone.log")
    changes = subprocess.run(["git", "-C", ROOT, "diff", "--binary", "HEAD"], check=True, stdout=subprocess.PIPE).stdout
    if changes:
        subprocess.run([*GIT, "-C", folder, "apply", "--whitespace=nowarn"], check=True, input=changes)
    for name in SHARED:
        linked(TARGET / name, folder / "target" / name)
    (folder / "target" / "logs").mkdir(parents=True, exist_ok=True)
    seconds = LOGS / "e2e-seconds.json"
    if seconds.exists():
        shutil.copyfile(seconds, folder / "target" / "logs" / seconds.name)
    return folder


def with_programs(folder):
    """Links the programs of llama.cpp into a clone."""
    programs = project.llama_build()
    shutil.rmtree(folder / "target" / programs.name, ignore_errors=True)
    linked(programs / "bin", folder / "target" / programs.name / "bin")
    own = folder / graphs.program().relative_to(ROOT)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.unlink(missing_ok=True)
    link(graphs.PROGRAM, own)
    return folder


def quick(*steps):
    return [sys.executable, "scripts/test.py", *(steps or ["quick"])]


def own_env(**settings):
    return {**os.environ, **settings}


def in_folder():
    folder = with_programs(clone(CLONES / "folder" / NAME))
    return Start(quick(), folder, own_env())


def in_path():
    folder = with_programs(clone(CLONES / "mit Leerzeichen" / "Ärger"))
    return Start(quick(), folder, own_env())


def as_another_user():
    """For root, a user whom the machine does not know, in a folder of root's. Others run it in /tmp, which is root's."""
    if os.getuid() != 0:
        if Path("/tmp").stat().st_uid == os.getuid():
            raise Missing("/tmp belongs to this user, and only root starts processes of others")
        return Start(quick(), with_programs(clone(Path("/tmp") / f"{NAME}-{os.getuid()}")), own_env())
    # Other users may be unable to read this checkout's folders, so the clone is elsewhere.
    scratch = Path("/var/tmp") / f"{NAME}-anywhere"
    scratch.mkdir(mode=0o755, exist_ok=True)
    if scratch.is_symlink() or scratch.stat().st_uid != 0:
        raise Missing(f"{scratch} is not root's")
    folder, env = with_programs(clone(scratch / NAME)), stranger(scratch, scratch)
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    return Start([python, *quick()[1:]], folder, env, {"user": STRANGER, "group": STRANGER, "extra_groups": []})


def stranger(scratch, seen):
    """Gives everything in `scratch` but itself to the stranger, whose programs see it as `seen`; returns their environment."""
    home = scratch / "home"
    toolchain(scratch / "rust")
    for path in (home / "tmp", home / ".cargo"):
        path.mkdir(parents=True, exist_ok=True)
    cargo = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    linked(cargo / "registry", home / ".cargo" / "registry")
    if (cargo / "config.toml").exists():
        shutil.copyfile(cargo / "config.toml", home / ".cargo" / "config.toml")
    for folder in (home, scratch / NAME):
        for place, _, files in os.walk(folder):
            os.chown(place, STRANGER, STRANGER)
            # A linked file belongs to this checkout, but programs only read such files.
            for file in (Path(place) / name for name in files):
                if file.is_symlink() or file.stat().st_nlink == 1:
                    os.chown(file, STRANGER, STRANGER, follow_symlinks=False)
    index = {name: value for name, value in os.environ.items()
             if name.startswith("PIP_") or name.lower().endswith("_proxy") or name == "QUICK_E2E"}
    return {**index, "PATH": f"{seen / 'rust' / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(seen / "home"),
            "TMPDIR": str(seen / "home" / "tmp"), "CARGO_HOME": str(seen / "home" / ".cargo")}


def toolchain(folder):
    """The Rust that this checkout uses, readable for everyone."""
    if not folder.exists():
        shown = subprocess.run(["rustc", "--print", "sysroot"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        shutil.copytree(shown.stdout.strip(), folder, symlinks=True, copy_function=link)


def without_home():
    env = own_env(LANG="tr_TR.UTF-8", LC_MESSAGES="tr_TR.UTF-8", TZ="Pacific/Kiritimati")
    for name in ("HOME", "LC_ALL", "LANGUAGE", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        env.pop(name, None)
    return Start(quick(), ROOT, env, {"umask": 0o077})


def with_nonsense():
    return Start(quick(), ROOT, own_env(**NONSENSE))


def in_bare_debian():
    """Debian with the packages that README names, a user that the system does not know by name, and everything built from
    nothing."""
    system = made_once(CLONES / f"bare-{SUITE}", lambda folder: debian.bootstrap(folder, SUITE, PACKAGES))
    debian.connect(system)
    scratch = system / "srv"
    clone(scratch / NAME)
    env = stranger(scratch, Path("/srv"))
    words = [f"{name}={value}" for name, value in env.items()]
    command = ["chroot", f"--userspec={STRANGER}:{STRANGER}", system, "/usr/bin/env", "-i", *words, "sh", "-c",
               f"cd /srv/{NAME} && exec python3 scripts/test.py build quick"]
    mounts = 'mount --make-rprivate / && mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec "$@"'
    return Start(["unshare", "--mount", "sh", "-c", mounts, system, *command], ROOT, own_env())


class Row(NamedTuple):
    about: str
    start: Callable


ROWS = {
    "folder": Row(f"a clone in a folder named {NAME}", in_folder),
    "path": Row("a clone in a path with a space and an umlaut", in_path),
    "user": Row("another user than the owner of the checkout's parent", as_another_user),
    "home": Row("without HOME, in Turkish, 14 hours ahead, with files for their owner only", without_home),
    "variables": Row(f"with nonsense in {', '.join(NONSENSE)}", with_nonsense),
    "bare": Row(f"a bare Debian ({SUITE}) with what README names", in_bare_debian),
}

LAST = re.compile(r"\d+ passed, (\d+) failed, \d+ skipped")


def result(text, code):
    """The last line of a run of test.py, and True if nothing failed."""
    last = LAST.fullmatch((text.splitlines() or [""])[-1].strip())
    if last is None:
        return f"ended with code {code} and no count", False
    return last[0], code == 0 and last[1] == "0"


def run_row(name, start):
    """Runs the quick part; prints the row, and the failures. Returns True if there were none."""
    log, began = LOGS / f"anywhere-{name}.log", time.monotonic()
    with open(log, "wb") as out:
        code = subprocess.run([str(word) for word in start.command], cwd=start.folder, env=start.env, stdin=subprocess.DEVNULL,
                              stdout=out, stderr=subprocess.STDOUT, **start.more).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    counts, is_good = result(text, code)
    for line in text.splitlines():
        if line.startswith(("   FAILED", "error: ")):
            print(f"   {line.strip()}")
    print(f"   {name}: {counts} in {time.monotonic() - began:.0f} s: {ROWS[name].about}; target/logs/{log.name}", flush=True)
    return is_good


def main():
    names = sys.argv[1:]
    if names[:1] == ["--e2e"] and len(names) > 1:
        # scripts/test.py reads this variable.
        os.environ["QUICK_E2E"] = names[1]
        names = names[2:]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise Problem(f"no row {', '.join(unknown)}; one of {', '.join(ROWS)}")
    need("git", "install git")
    build.static()
    starts = {}
    for name in names or ROWS:
        say(f"{name}: {ROWS[name].about}")
        try:
            starts[name] = ROWS[name].start()
        except Missing as missing:
            print(f"   skipped {name}: {missing}", flush=True)
    failed = [name for name, start in starts.items() if not run_row(name, start)]
    print(f"{len(starts) - len(failed)} rows passed, {len(failed)} failed, {len(names or ROWS) - len(starts)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    main_with(main)
