"""The parts of the Hexagon vendor loop, fetched or built under target/vendor; docs/internals/vendor-loop.md has the picture.

libcdsprpc   as Debian built it for arm64 (package libfastrpc1), fetched by apt's own client and run under qemu-aarch64
programs     our tool, and Debian's llama.cpp for arm64 with our plugin
fake kernel  tests/vendor/hexagon/kernel: the device nodes under it
DSP process  tests/vendor/hexagon/dsp: the shell and the chip's units around our library
emulator     HEXAGON_QEMU: a qemu-hexagon with HVX floating point; hexagon-ops/tools/qemu/build.sh makes one
DSP library  hexagon-ops/tools/skel.sh
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import aarch64
import build
import debian
import fetch
import stock
from debian import Missing
from project import LOGS, ROOT, TARGET, Problem, cpu_env, locked, run, say

VENDOR = TARGET / "vendor"
SOURCE = ROOT / "tests" / "vendor" / "hexagon"

# Debian's packages of qualcomm/fastrpc, and the libraries that they need. apt checks their signatures; the bytes of these
# packages are pinned as well, because the loop tests them.
FASTRPC_PINNED = {
    "libfastrpc1": ("1.0.8-1", "6278e21ec7b4f4358bfba16a61512ff0bb06e95b4ef900acb9f2e96e03772a40"),
    "libfastrpc-dev": ("1.0.8-1", "28b16f1eba46c4f0fd01ff70976c4b5242d82275cb337c2ac2480a6d6f059403"),
}
# Debian's llama.cpp package, with upstream's tests.
PROGRAMS_PINNED = {
    **stock.DEBIAN_ARM64_PINNED,
    "llama.cpp-tests": ("1:0.7.0+dfsg-2", "f1aa89f270739f50adb152203237fda22a42bff4feae0d43b34ce7c73487dd38"),
}
OTHER_PACKAGES = ["libc6", "libgcc-s1", "libbsd0", "libmd0", "libyaml-0-2"]
SUITE = "sid"
TRIPLET = "aarch64-linux-gnu"

WARNINGS = ["-Wall", "-Wextra", "-Werror"]


class Host(NamedTuple):
    """The side of libcdsprpc: an arm64 system of Debian's packages under qemu-aarch64, with our files in it."""

    root: Path
    # The library that is preloaded into each program.
    kernel: Path
    tool: Path
    # None if no program of Debian's is run.
    plugin: Path = None

    @property
    def library(self):
        return self.root / "usr" / "lib" / TRIPLET / "libcdsprpc.so.1"

    @property
    def runner(self):
        """Emulator and options before a program."""
        # A processor without SVE: with SVE, the CPU backend of Debian's ggml 0.27.0, with which upstream's cases compare,
        # computes attention with heads of 40 wrong (error of 0.015, limit 0.0005). Measured under QEMU, 2026-11-28.
        cpu = ["-cpu", aarch64.COUNT_CPU]
        # Set for the emulated program only, because this machine's loader must not see libraries of the other processor.
        return [aarch64.qemu(), *cpu, "-L", self.root, "-E", f"LD_PRELOAD={self.kernel}"]

    @property
    def programs(self):
        return stock.Debian(self.root, TRIPLET, tuple(self.runner))


def compiler(name):
    path = shutil.which(name)
    if path is None:
        raise Missing(f"{name} is not installed")
    return path


def newer(output, sources):
    """Returns True if `output` exists and is newer than all of `sources`."""
    return output.exists() and all(output.stat().st_mtime > source.stat().st_mtime for source in sources)


def sources(folder):
    return [SOURCE / "protocol.h", *sorted((SOURCE / folder).iterdir())]


def fake_kernel(cc):
    library = VENDOR / "libfake_kernel.so"
    if not newer(library, sources("kernel")):
        library.parent.mkdir(parents=True, exist_ok=True)
        run([compiler(cc), "-std=gnu11", "-O2", "-g", *WARNINGS, "-shared", "-fPIC", *(SOURCE / "kernel").glob("*.c"),
             "-o", library, "-lpthread"], LOGS / "vendor-kernel.log")
    return library


def dsp_process():
    """The DSP process; freestanding, so any clang and lld with the Hexagon target build it."""
    program = VENDOR / "dsp_process"
    if newer(program, sources("dsp")):
        return program
    clang, lld = compiler("clang-22"), compiler("ld.lld-22")
    objects = VENDOR / "dsp"
    objects.mkdir(parents=True, exist_ok=True)
    flags = ["--target=hexagon-unknown-none-elf", "-mcpu=hexagonv73", "-mhvx", "-mhvx-length=128b", "-mhvx-ieee-fp",
             "-O2", "-G0", "-std=c11", "-ffreestanding", "-fno-builtin", *WARNINGS]
    built = []
    for source in sources("dsp"):
        if source.suffix in (".c", ".S"):
            built.append(objects / f"{source.stem}.o")
            run([clang, *flags, "-c", source, "-o", built[-1]], LOGS / "vendor-dsp.log")
    run([lld, "-m", "hexagonelf", "-static", *built, "-o", program], LOGS / "vendor-dsp.log")
    return program


def emulator():
    own = os.environ.get("HEXAGON_QEMU")
    if own:
        if not os.access(own, os.X_OK):
            raise Problem(f"HEXAGON_QEMU names no program: {own}")
        return Path(own)
    script, folder = ROOT / "hexagon-ops" / "tools" / "qemu" / "build.sh", VENDOR / "qemu"
    program = folder / "qemu-hexagon"
    if not script.exists():
        raise Missing("HEXAGON_QEMU names no qemu-hexagon with HVX floating point")
    say("building qemu-hexagon with HVX floating point (minutes when it is new)")
    try:
        # A program that was already built from the same files is kept.
        with locked(program):
            run([script, folder], LOGS / "vendor-qemu.log")
    except Problem as problem:
        raise Missing(f"no qemu-hexagon with HVX floating point: {problem}") from problem
    return program


def dsp_library(arch):
    """The folder with our library for the DSP."""
    done = subprocess.run([ROOT / "hexagon-ops" / "tools" / "skel.sh", arch], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cpu_env())
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        # SOURCE: hexagon-ops/tools/library.sh, need_toolchain.
        kind = Missing if done.returncode == 3 else Problem
        raise kind(f"the DSP library for {arch} was not built: {lines[-1]}")
    return Path(done.stdout.strip()).parent


def fastrpc_root():
    """A folder with libcdsprpc and its headers, for arm64."""
    return debian.unpacked(VENDOR, SUITE, "arm64", FASTRPC_PINNED, OTHER_PACKAGES)


def fastrpc_headers():
    """The folder with remote.h, rpcmem.h and AEEStdErr.h."""
    return fastrpc_root() / "usr" / "include" / "fastrpc"


def whole_root():
    """A folder with libcdsprpc and Debian's llama.cpp, for arm64."""
    others = list(dict.fromkeys([*OTHER_PACKAGES, *stock.DEBIAN_OTHERS]))
    return debian.unpacked(VENDOR, SUITE, "arm64", FASTRPC_PINNED | PROGRAMS_PINNED, others)


def need_arm64():
    try:
        aarch64.need_all()
    except aarch64.Missing as missing:
        raise Missing(str(missing)) from missing


def built(name):
    """A file that cargo built for arm64."""
    return Path(os.environ.get("CARGO_TARGET_DIR", TARGET)) / aarch64.RUST_TARGET / "debug" / name


def arm64_tool():
    say(f"building ggml-npu for {aarch64.RUST_TARGET}")
    build.tool(LOGS / "vendor-tool-arm64.log", aarch64.cargo_env(), *aarch64.TOOL_PACKAGES, "--target", aarch64.RUST_TARGET)
    return built("ggml-npu")


def arm64_tool_and_plugin():
    for version in fetch.LLAMA_SOURCES:
        fetch.llama(version)
    say(f"building ggml-npu and the plugin for {aarch64.RUST_TARGET}")
    run(["cargo", "build", "--locked", "--target", aarch64.RUST_TARGET, "--package", "ggml-npu", "--package",
         "ggml-rust-npu-plugin", *aarch64.QUICK], LOGS / "vendor-plugin-arm64.log", aarch64.cargo_env(), ROOT)
    return built("ggml-npu"), built("libggml_rust_npu_plugin.so")


def tool_host():
    """Debian's libcdsprpc and our tool, as the tests for arm64 have it."""
    need_arm64()
    root = fastrpc_root()
    return Host(root, fake_kernel(f"{TRIPLET}-gcc"), arm64_tool())


def whole_host():
    """As `tool_host`, with Debian's llama.cpp and our plugin."""
    need_arm64()
    root = whole_root()
    return Host(root, fake_kernel(f"{TRIPLET}-gcc"), *arm64_tool_and_plugin())
