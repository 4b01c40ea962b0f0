"""Stock programs: binaries that others built and shipped, fetched into target/stock and unpacked, never installed.

debian         llama.cpp 0.7.0 and whisper.cpp 1.9.5 of Debian sid, with ggml 0.27.0 (backend API 3) and their own libc
debian arm64   its llama.cpp for the boards' processor, run under qemu-aarch64 debian system  a whole Debian sid with its
llama.cpp, for tests that install packages
node           node-llama-cpp 3.22.1 of npm with its prebuilt llama.cpp 0.5.0, ggml 0.25.1 (backend API 2)
llama-cpp-python  0.3.36 of PyPI, compiled from its source: llama.cpp 0.5.0, ggml 0.25.3 (backend API 2)
pywhispercpp   1.5.1 of PyPI, whose ggml 0.13.1 is too old for the plugin

A program that this machine cannot have raises Missing, with the reason.
"""

import platform
import shutil
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import aarch64
import debian
import fetch
from debian import Missing
from project import LOGS, ROOT, TARGET, Problem, made_once, run, say, tool_env

STOCK = TARGET / "stock"
SOURCES = ROOT / "tests" / "e2e" / "stock"

DEBIAN_SUITE = "sid"
DEBIAN_PINNED = {
    "libggml0": ("0.27.0-1", "f621153d6615a8dd1ac4b14e110cbafca34cc66f551367c5f6326f71fb141b0d"),
    "libllama0": ("1:0.7.0+dfsg-2", "7d49cde5582ccdc8c454b379ba627eea8c95813b6a9c70628653101f629204d6"),
    "llama.cpp-tools": ("1:0.7.0+dfsg-2", "3007c170f116891974bd37d5ba802f094c7d020412f2100cc71582fc8530895c"),
    "llama.cpp-examples": ("1:0.7.0+dfsg-2", "d299ba15b7bfb2b31a7f8a7276cd0eb7ba9110575a8a0e6c61994a8b218e6006"),
    "llama.cpp-tests": ("1:0.7.0+dfsg-2", "c512d0401e66aab3bf94296f24816e5ac8cdaee88d06f7493212ff307b33d9fc"),
    "libwhisper1": ("1.9.5+dfsg-1", "9d44352baa73b79d34d0fe56ad21ab7c4cc45b60b11cf7e37067965ce5e02ea7"),
    "libggml0-backend-rpc": ("0.27.0-1", "6f7e54b79cd25d59f6d0b2a3a7542ae1aee1b66ad39f626a594a61f8c4ba960e"),
    "llama.cpp-tools-extra": ("1:0.7.0+dfsg-2", "4598b97ab2d2222dd484aad51946f96e6c77c448b2732565cebe753be782022a"),
    "whisper.cpp-tools": ("1.9.5+dfsg-1", "6213928ef1469e9efe92c8c7d14f9e879a52cfb397bc7bb9ba5f7c5074ffa7bf"),
}
DEBIAN_ARM64_PINNED = {
    "libggml0": ("0.27.0-1", "7669ddc799f16907161cd334b88fa2c2ed870cb9fba01ca0f1d385c35264436a"),
    "libllama0": ("1:0.7.0+dfsg-2", "dc6690bd23cce06eac0ca767002e6f4655a55f84d0a45477ad0fa9c1b9eec663"),
    "llama.cpp-tools": ("1:0.7.0+dfsg-2", "4635367e4bea259dea3939dec12369b936c802c959d1d05462ee80d90014bfaa"),
}
DEBIAN_OTHERS = ["libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libssl3t64", "libzstd1", "zlib1g"]

PYWHISPERCPP = fetch.Package("pywhispercpp==1.5.1",
                             "pywhispercpp-1.5.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
                             "a70839d9a1f569e1e5424f27ed01a32133d658beae4cd1459eb39de1e0483bba")


class Debian(NamedTuple):
    """Debian's programs, run by their own loader on their own libraries."""

    root: Path
    triplet: str = "x86_64-linux-gnu"
    # The emulator's command line, if the programs are for another processor.
    emulator: tuple = ()

    @property
    def libraries(self):
        return self.root / "usr" / "lib" / self.triplet

    @property
    def folder(self):
        """Where to start the programs: they look for the CPU's libraries in the current folder."""
        return self.libraries / "ggml" / "backends0"

    def command(self, name, *args):
        """The command line of a program of Debian's, or of this machine's if `name` is its path."""
        internal = self.root / "usr" / "libexec" / self.triplet
        places = [self.root / "usr" / "bin", internal / "llama.cpp-tests", internal / "llama" / "bin"]
        program = next((place / name for place in places if (place / name).exists()), name)
        path = f"{self.libraries}:{self.libraries / 'llama'}"
        (loader,) = self.libraries.glob("ld-linux-*.so.*")
        return [*self.emulator, loader, "--library-path", path, program, *args]


def need_x86_64():
    if platform.machine() != "x86_64":
        raise Missing(f"the stock programs are for x86_64, this machine is {platform.machine()}")


def debian_programs():
    need_x86_64()
    return Debian(debian.unpacked(STOCK, DEBIAN_SUITE, "amd64", DEBIAN_PINNED, DEBIAN_OTHERS))


def debian_arm64_programs():
    """Those for aarch64, under qemu-aarch64."""
    if aarch64.qemu() is None:
        raise Missing("qemu-aarch64 is not installed; on Debian: apt-get install qemu-user")
    root = debian.unpacked(STOCK, DEBIAN_SUITE, "arm64", DEBIAN_ARM64_PINNED, DEBIAN_OTHERS)
    return Debian(root, "aarch64-linux-gnu", (aarch64.qemu(), "-L", str(root)))


def debian_system():
    """The folder of a bare Debian with llama.cpp: programs change a copy of it."""
    need_x86_64()
    system = made_once(STOCK / f"system-{DEBIAN_SUITE}",
                       lambda folder: debian.bootstrap(folder, DEBIAN_SUITE, ["llama.cpp-tools", "ca-certificates"]))
    debian.connect(system)
    return system


def llama_cpp_python():
    """The wheel of llama-cpp-python, compiled as pip does; a quarter of an hour."""
    folder = made_once(STOCK / "llama-cpp-python-0.3.36", compile_llama_cpp_python)
    (wheel,) = folder.glob("*.whl")
    return wheel


def compile_llama_cpp_python(folder):
    say("compiling llama-cpp-python (a quarter of an hour)")
    # Images and sounds are not needed, and OpenMP's threads spin while they wait.
    env = dict(tool_env(), CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, fetch.download(fetch.LLAMA)],
        LOGS / "stock-llama-cpp-python.log", env)


def node_program():
    """The folder with node-llama-cpp, and `generate.mjs`, which generates text in it."""
    need_x86_64()
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not installed")
    folder = made_once(STOCK / "node-llama-cpp-3.22.1", install_node_llama)
    # The file may be a link into another checkout, which may belong to another user.
    (folder / "generate.mjs").unlink(missing_ok=True)
    shutil.copyfile(SOURCES / "generate.mjs", folder / "generate.mjs")
    return folder


def install_node_llama(folder):
    say("fetching node-llama-cpp 3.22.1 and what it needs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(SOURCES / name, folder / name)
    # Checks every file against the lock file, and runs nothing of a package. `npm ci` would also require the binaries for other
    # systems.
    try:
        run(["npm", "install", "--ignore-scripts", "--omit=optional", "--omit=peer", "--no-audit", "--no-fund"],
            LOGS / "stock-npm.log", cwd=folder)
    except Problem as problem:
        raise Missing(f"no node-llama-cpp: {problem}") from problem


def pywhispercpp():
    """The folder with the libraries of the wheel."""
    need_x86_64()
    return made_once(STOCK / "pywhispercpp-1.5.1", unpack_pywhispercpp) / "pywhispercpp.libs"


def unpack_pywhispercpp(folder):
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(fetch.download(PYWHISPERCPP)) as wheel:
        wheel.extractall(folder)
