"""The parts of the Hexagon vendor loop, fetched or built under target/vendor; docs/internals/vendor-loop.md has the picture.

libcdsprpc   as Debian built it for arm64 (package libfastrpc1), fetched by apt's own client and run under qemu-aarch64;
             or built for this machine from a checkout of qualcomm/fastrpc that FASTRPC_DIR names
fake kernel  tests/vendor/hexagon/kernel: the device nodes under it
DSP process  tests/vendor/hexagon/dsp: the shell and the chip's units around our library
emulator     HEXAGON_QEMU: a qemu-hexagon with HVX floating point; hexagon-ops/tools/qemu/build.sh makes one
DSP library  hexagon-ops/tools/skel.sh
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import aarch64
import build
import debian
import fetch
from debian import Missing
from project import LOGS, ROOT, TARGET, Problem, cpu_env, locked, run, say

VENDOR = TARGET / "vendor"
SOURCE = ROOT / "tests" / "vendor" / "hexagon"

# Debian's package of qualcomm/fastrpc, and the libraries that it needs. apt checks the files against the archive's
# signature; the bytes of this one are pinned, too, because the loop tests it.
FASTRPC_PACKAGE = "libfastrpc1"
FASTRPC_VERSION = "1.0.8-1"
FASTRPC_SHA256 = "6278e21ec7b4f4358bfba16a61512ff0bb06e95b4ef900acb9f2e96e03772a40"
OTHER_PACKAGES = ["libc6", "libgcc-s1", "libbsd0", "libmd0", "libyaml-0-2"]
SUITE = "sid"

WARNINGS = ["-Wall", "-Wextra", "-Werror"]


class Host(NamedTuple):
    """The processor on whose side libcdsprpc and the programs run."""

    name: str
    library: Path
    # Emulator and options before a program.
    runner: list
    kernel: Path
    tool: Path

    def command(self, args, variables):
        """The command and the environment that run a program above the fake kernel."""
        if not self.runner:
            return args, dict(variables, LD_PRELOAD=str(self.kernel))
        # Set for the program alone: this machine's loader must not see the other processor's libraries.
        return [*self.runner, "-E", f"LD_PRELOAD={self.kernel}", *args], variables


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


def fake_kernel(host, cc):
    library = VENDOR / host / "libfake_kernel.so"
    if not newer(library, sources("kernel")):
        library.parent.mkdir(parents=True, exist_ok=True)
        run([compiler(cc), "-std=gnu11", "-O2", "-g", *WARNINGS, "-shared", "-fPIC", *(SOURCE / "kernel").glob("*.c"),
             "-o", library, "-lpthread"], LOGS / f"vendor-kernel-{host}.log")
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
        # It leaves a program alone that was built from the same files.
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


def library_files(makefile):
    """The files that libcdsprpc is compiled from, in the checkout's folder src."""
    text = makefile.read_text(encoding="utf-8").replace("\\\n", " ")
    names = re.search(r"^LIBDSPRPC_SOURCES\s*=(.*)$", text, re.M)
    if names is None:
        raise Problem("src/Makefile.am of FASTRPC_DIR has no LIBDSPRPC_SOURCES")
    return list(dict.fromkeys([*names[1].split(), "fastrpc_config_parser.c"]))


def native_library(checkout):
    """libcdsprpc built from a checkout of qualcomm/fastrpc, which is not changed; again if the checkout is another one."""
    makefile = checkout / "src" / "Makefile.am"
    if not makefile.is_file():
        raise Problem(f"FASTRPC_DIR is no checkout of qualcomm/fastrpc: {checkout}")
    library = VENDOR / "native" / "libcdsprpc.so"
    # The definitions that configure would make for a machine with the mainline driver.
    defines = ["ARM_ARCH_7A", "LE_ENABLE", "ENABLE_UPSTREAM_DRIVER_INTERFACE", "USE_SYSLOG", "PARSE_YAML", "LIBBSD_OVERLAY",
               "DEFAULT_DOMAIN_ID=3", 'CONFIG_BASE_DIR="/usr/share/qcom"',
               'MACHINE_NAME_PATH="/sys/firmware/devicetree/base/model"',
               'DEFAULT_DSP_SEARCH_PATHS=";/usr/lib/rfsa/adsp;/usr/lib/dsp;"']
    args = [compiler("gcc"), "-O2", "-g", "-w", "-shared", "-fPIC", "-fno-short-enums",
            *(f"-D{define}" for define in defines), "-I../inc", "-I/usr/include/bsd", *library_files(makefile), "-o",
            library, "-lyaml", "-lbsd", "-ldl", "-lm", "-lpthread"]
    sources = [makefile, *sorted(file for folder in ("inc", "src") for file in (checkout / folder).rglob("*.[ch]"))]
    sums = [f"{fetch.sha256(file)}  {file}" for file in sources]
    stamp, text = library.with_suffix(".stamp"), "\n".join([*map(str, args), *sums])
    if not library.exists() or not stamp.exists() or stamp.read_text(encoding="utf-8") != text:
        library.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        run(args, LOGS / "vendor-fastrpc.log", cwd=makefile.parent)
        stamp.write_text(text, encoding="utf-8")
    return library


def native_host():
    """libcdsprpc built from FASTRPC_DIR."""
    library = native_library(Path(os.environ["FASTRPC_DIR"]).resolve())
    say("building ggml-npu")
    build.tool(LOGS / "vendor-tool.log", cpu_env(), "--workspace")
    folder = Path(os.environ.get("CARGO_TARGET_DIR", TARGET))
    return Host("native", library, [], fake_kernel("native", "gcc"), folder / "debug" / "ggml-npu")


def debian_host():
    """libcdsprpc as Debian built it for arm64, and our tool for that processor."""
    try:
        aarch64.need_all()
    except aarch64.Missing as missing:
        raise Missing(str(missing)) from missing
    root = debian_root()
    say(f"building ggml-npu for {aarch64.RUST_TARGET}")
    build.tool(LOGS / "vendor-tool-arm64.log", aarch64.cargo_env(), *aarch64.TOOL_PACKAGES, "--target", aarch64.RUST_TARGET)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", TARGET))
    return Host("debian", root / "usr" / "lib" / "aarch64-linux-gnu" / "libcdsprpc.so.1",
                [aarch64.qemu(), "-L", str(root)], fake_kernel("debian", "aarch64-linux-gnu-gcc"),
                folder / aarch64.RUST_TARGET / "debug" / "ggml-npu")


def debian_root():
    """A folder with the packages unpacked."""
    return debian.unpacked(VENDOR / "debian" / FASTRPC_VERSION, SUITE, "arm64",
                           {FASTRPC_PACKAGE: (FASTRPC_VERSION, FASTRPC_SHA256)}, OTHER_PACKAGES)


def host():
    """The side of libcdsprpc: native if FASTRPC_DIR is set."""
    return native_host() if os.environ.get("FASTRPC_DIR") else debian_host()
