"""Paths, versions and small helpers that the scripts and the end-to-end tests share."""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

# Debian 11 and Ubuntu 22.04 have an older Python, which would fail with a traceback.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: Python 3.11 or later is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "target"
DOWNLOADS = TARGET / "downloads"
MODELS = TARGET / "models"
LOGS = TARGET / "logs"
TOOLS = TARGET / "tools"

LLAMA_VERSION = "0.5.0"
PATCH = ROOT / "patches" / f"llama.cpp-{LLAMA_VERSION}.patch"

# The device that most checks use, and its name in GGML_RUST_NPU_SIM; then the same for the other family.
DEVICE = "RKNPU0"
SIMULATED = "rk3588"
HEXAGON_DEVICE = "HEX0"
HEXAGON = "hexagon-v75"

JOBS = os.cpu_count() or 1


def device_of(chip):
    """Returns ggml's name of a chip's device."""
    return HEXAGON_DEVICE if chip.startswith("hexagon") else DEVICE


class Problem(Exception):
    """Something the user can act on; the text is one line."""


def main_with(function):
    """Runs a script's main function; a Problem, and an error of the system (a missing program, a full disk, a file of another
    user), become one line on stderr and exit code 1."""
    # On SIGTERM the program exits normally, so that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        sys.exit(function())
    except (Problem, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def say(text):
    print(f"== {text}", flush=True)


@contextmanager
def locked(path):
    """Lets one process at a time make or change `path`. The system releases the lock of a process that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(path, make):
    """Returns `path`. If nothing is there, one process calls `make` with the name to write to, and others wait for it."""
    if path.exists():
        return path
    with locked(path):
        if not path.exists():
            part = path.with_name(f".{path.name}.part")
            make(part)
            os.replace(part, path)
    return path


def is_users_llama(version):
    """Returns True if the user's LLAMA_CPP_DIR replaces a version: the main one."""
    return version == LLAMA_VERSION and bool(os.environ.get("LLAMA_CPP_DIR"))


def llama_source(version=LLAMA_VERSION):
    """The llama.cpp tree that is built: the user's LLAMA_CPP_DIR or the fetched one."""
    if is_users_llama(version):
        return Path(os.environ["LLAMA_CPP_DIR"]).resolve()
    return TARGET / "src" / f"llama.cpp-{version}"


def llama_build(version=LLAMA_VERSION):
    """The build directory that belongs to `llama_source`. CMake builds in a directory only the source that it was configured
    for."""
    if not is_users_llama(version):
        return TARGET / f"llama-{version}"
    return TARGET / f"llama-custom-{hashlib.sha256(str(llama_source(version)).encode()).hexdigest()[:8]}"


def binary(name, version=LLAMA_VERSION):
    return llama_build(version) / "bin" / name


def toml(path):
    """Returns the tables of a TOML file."""
    # Imported here, because an older Python, which is refused above, does not have this module.
    import tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def need(tool, hint):
    """Returns the path of `tool`; raises a Problem that tells how to get it."""
    path = shutil.which(tool)
    if path is None:
        raise Problem(f"{tool} not found; {hint}")
    return path


def tool_env():
    """Returns the environment for build tools: those of the venv come after the user's."""
    env = dict(os.environ)
    env["PATH"] = env.get("PATH", "") + os.pathsep + str(TOOLS / "bin")
    # ggml records the commit of the repository around it in its objects. That would be this repository, and every commit here
    # would rebuild llama.cpp.
    env["GIT_CEILING_DIRECTORIES"] = str(TARGET / "src")
    # If make called this script, its job server must not be passed to the builds.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        env.pop(name, None)
    return env


# Variables that change how llama.cpp's programs, ggml, OpenMP or this backend behave. Two of them are settings of these
# scripts, and are kept.
FOREIGN = re.compile(r"(?!LLAMA_CPP_DIR$|GGML_RUST_NPU_LIB$)(GGML|LLAMA|OMP|GOMP|KMP)_.*")


def is_foreign(name):
    """Returns True if a variable of whoever starts a test would change its result."""
    return bool(FOREIGN.fullmatch(name))


def settle():
    """Makes this process, and the processes that it starts, independent of the environment: of variables that are set, of the
    language of messages, of the time zone, and of the permissions that new files have."""
    for name in filter(is_foreign, list(os.environ)):
        del os.environ[name]
    os.environ.pop("LANGUAGE", None)
    os.environ.update(LC_ALL="C.UTF-8", TZ="UTC0")
    os.umask(0o022)


def cpu_env(**settings):
    """The environment for a run without NPU: `settings`, and no other variable or file of settings that changes the run."""
    env = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    # Idle threads of the CPU backend sleep. By default they spin, which takes time from working threads on a busy machine, and
    # on one that simulates the NPU on the same cores.
    env["OMP_WAIT_POLICY"] = "passive"
    # The user's settings file must not be read.
    env["XDG_CONFIG_HOME"] = str(TARGET / "no-settings")
    env.update(settings)
    return env


def may_install():
    """Returns True if tools may be installed on the machine itself: only if the user requests it, or in CI."""
    return os.environ.get("INSTALL") == "1" or os.environ.get("CI") == "true"


def device_env(chip=SIMULATED, **settings):
    """The environment for a run on a simulated device."""
    return cpu_env(GGML_RUST_NPU_SIM=chip, **settings)


def run(args, log, env=None, cwd=None):
    """Runs a command with its output in `log`; on failure prints the end of it and raises a Problem."""
    args = [str(arg) for arg in args]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:
        out.write("$ " + " ".join(args) + "\n")
        out.flush()
        code = subprocess.run(args, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              env=env or tool_env(), cwd=cwd).returncode
    if code != 0:
        print_tail(log)
        raise Problem(f"{Path(args[0]).name} failed with code {code}; full output in {log.relative_to(ROOT)}")


def print_tail(log, lines=30):
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in text[-lines:]:
        print(f"   | {line}")
    sys.stdout.flush()
