#!/usr/bin/env python3
"""Builds llama.cpp with this backend in it.

static  the programs, in target/llama-<version>/bin, or of LLAMA_CPP_DIR in a folder for its path; the backend is linked in
shared  ggml alone, as shared libraries and with make instead of ninja, and a program that lists its devices
second  libllama of llama.cpp 0.6.0, which has version 3 of the backend API, and a program that generates text
rust    examples/generate, a Rust program with llama-cpp-2, which compiles the same llama.cpp again
plugin  the library that programs of others load, target/plugin/libggml-rust_npu.so

cargo runs inside of both builds, through ggml-glue/CMakeLists.txt. GGML_RUST_NPU_LIB names a prebuilt archive instead.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import fetch
import project
from project import JOBS, LOGS, ROOT, TARGET, Problem, main_with, need, run, say, tool_env

PROGRAMS = ["llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity", "llama-batched-bench",
            "llama-quantize", "llama-imatrix", "llama-fit-params"]
TESTS = ["test-backend-ops", "test-llama-archs", "test-thread-safety", "test-save-load-state",
         "test-state-restore-fragmented"]

# Without network and web interface, which are not needed here.
STATIC_OPTIONS = {
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    # -O1 needs half of the time of -O3 to compile. ggml, which computes, is still compiled with -O3.
    "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
    "CMAKE_PROJECT_ggml_INCLUDE": str(ROOT / "scripts" / "ggml_flags.cmake"),
}


def backend_options():
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_RUST_NPU": "ON",
        "GGML_RUST_NPU_DIR": str(ROOT),
        # All builds share this folder, also with `cargo build --release` by hand.
        "GGML_RUST_NPU_CARGO_TARGET_DIR": str(TARGET),
        "GGML_RUST_NPU_LIB": os.environ.get("GGML_RUST_NPU_LIB", ""),
    }
    if platform.machine() == "x86_64":
        # Tests compare devices with the CPU backend, whose AMX code crashes in a virtual machine that reports AMX.
        options["CMAKE_CXX_FLAGS"] = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return options


def configure(source, build, generator, options, name):
    """Runs cmake if the build directory is new or was configured with other options."""
    args = ["-S", source, "-B", build, "-G", generator] + [f"-D{key}={value}" for key, value in options.items()]
    line = " ".join(map(str, args))
    stamp = build / ".configured"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == line:
        return
    say(f"configuring {build.relative_to(ROOT)}")
    # CMake keeps options in its cache even if they made it fail.
    stamp.unlink(missing_ok=True)
    run([cmake(), *args], LOGS / f"{name}-configure.log")
    stamp.write_text(line, encoding="utf-8")


def cmake():
    return shutil.which("cmake", path=tool_env()["PATH"])


def check_compilers():
    need("cargo", "install a stable Rust toolchain")
    need(os.environ.get("CC", "gcc"), "install gcc")
    need(os.environ.get("CXX", "g++"), "install g++")
    need("make", "install make")


def static():
    """The programs with the backend linked in; returns their folder."""
    check_compilers()
    fetch.tools()
    source, build = fetch.llama(), project.llama_build()
    configure(source, build, "Ninja", {**STATIC_OPTIONS, **backend_options()}, "llama")
    say(f"building {build.relative_to(ROOT)} (a few minutes when it is new)")
    run([cmake(), "--build", build, "--parallel", JOBS, "--target", *PROGRAMS, *TESTS], LOGS / "llama-build.log")
    return build / "bin"


def shared():
    """ggml with the backend as shared libraries; returns the program that lists the devices."""
    check_compilers()
    fetch.tools()
    source, build = fetch.llama(), TARGET / "ggml-shared"
    # Only linking and loading are checked: nothing is computed here.
    options = {"LLAMA_CPP_DIR": source, "BUILD_SHARED_LIBS": "ON", "CMAKE_C_FLAGS_RELEASE": "-O1 -DNDEBUG",
               "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG", **backend_options()}
    configure(ROOT / "tests" / "e2e" / "link", build, "Unix Makefiles", options, "ggml-shared")
    say(f"building {build.relative_to(ROOT)}")
    run([cmake(), "--build", build, "--parallel", JOBS], LOGS / "ggml-shared-build.log")
    return build / "list_devices"


def plugin():
    """The plugin; returns its path."""
    check_compilers()
    for version in fetch.LLAMA_SOURCES:
        fetch.llama(version)
    say("building the plugin")
    run(["cargo", "build", "--release", "--locked", "--package", "ggml-rust-npu-plugin", "--target-dir", TARGET],
        LOGS / "plugin-build.log", cwd=ROOT)
    # cargo allows no dash in a library's name, but ggml's backends have one.
    path = TARGET / "plugin" / "libggml-rust_npu.so"
    path.parent.mkdir(exist_ok=True)
    # A unique name, because another build may run at the same time.
    part = path.with_suffix(f".{os.getpid()}.part")
    shutil.copyfile(TARGET / "release" / "libggml_rust_npu_plugin.so", part)
    os.replace(part, path)
    return path


def release_tool():
    """ggml-npu as users have it; returns its path."""
    say("building the tool")
    run(["cargo", "build", "--release", "--locked", "--bin", "ggml-npu", "--target-dir", TARGET], LOGS / "tool-build.log",
        cwd=ROOT)
    return TARGET / "release" / "ggml-npu"


def tool(log, env, *selection):
    """ggml-npu, as the Rust tests of the packages in `selection` have it.

    It is built for one of its tests: for itself alone, cargo would choose other features of a few crates, and compile
    everything that depends on them again.
    """
    run(["cargo", "test", "--locked", "--quiet", "--no-run", *selection, "--test", "repack", "--target-dir", TARGET], log, env,
        ROOT)


def second():
    """The other version of llama.cpp with the backend linked in; returns the program that generates text."""
    check_compilers()
    fetch.tools()
    version = "0.6.0"
    source, build = fetch.llama(version), project.llama_build(version)
    # The package has no programs and no tests. Optimizing libllama would take most of the time, so it is compiled without.
    options = {**STATIC_OPTIONS, **backend_options(), "LLAMA_CPP_DIR": source, "LLAMA_BUILD_COMMON": "OFF",
               "LLAMA_BUILD_TOOLS": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_SERVER": "OFF",
               "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG"}
    configure(ROOT / "tests" / "e2e" / "generate", build, "Ninja", options, f"llama-{version}")
    say(f"building {build.relative_to(ROOT)}")
    run([cmake(), "--build", build, "--parallel", JOBS, "--target", "generate"], LOGS / f"llama-{version}-build.log")
    return build / "generate"


class Missing(Exception):
    """A build needs something that this machine lacks; the text names it."""


def rust_program():
    """examples/generate; returns its path."""
    check_compilers()
    fetch.tools()
    fetch.llama("0.6.0")
    if not fetch.works("llvm-config", "--version") and not any(Path("/usr/lib").glob("**/libclang*.so*")):
        raise Missing("libclang, which llama-cpp-sys-2 needs, is not installed; on Debian: apt-get install libclang-dev")
    folder, target = ROOT / "examples" / "generate", TARGET / "rust-program"
    # Compiled with the same options as `second`, including the stand-in's kernels.
    env = dict(tool_env(), CMAKE_BUILD_PARALLEL_LEVEL=str(JOBS), CMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG",
               CMAKE_PROJECT_ggml_INCLUDE=STATIC_OPTIONS["CMAKE_PROJECT_ggml_INCLUDE"])
    say(f"building {folder.relative_to(ROOT)} (minutes when it is new)")
    run(["cargo", "build", "--release", "--locked", "--target-dir", target,
         "--config", "profile.release.package.hexagon-ops.opt-level=1"], LOGS / "rust-program.log", env, folder)
    return target / "release" / "generate"


def bindings(headers, file, *arguments):
    """Writes bindgen's output for C headers to `file`, and returns it; `arguments` are Clang's."""
    if platform.machine() != "x86_64":
        raise Missing(f"the libclang that is fetched is for x86_64, this machine is {platform.machine()}")
    folder, target = ROOT / "test-kit" / "bindings", TARGET / "bindings"
    run(["cargo", "build", "--locked", "--target-dir", target], LOGS / "bindings-build.log", tool_env(), folder)
    # The libclang package comes without a compiler's headers, so gcc's are used.
    own = subprocess.run(["gcc", "-print-file-name=include"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    env = dict(tool_env(), LIBCLANG_PATH=str(fetch.libclang().parent))
    made = subprocess.run([target / "debug" / "bindings", *headers, "--", *arguments, f"-I{own}"], env=env,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if made.returncode != 0:
        raise Problem(f"bindgen: {(made.stderr.strip().splitlines() or ['no output'])[-1]}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(made.stdout, encoding="utf-8")
    return file


BUILDS = {"static": static, "shared": shared, "second": second, "rust": rust_program, "plugin": plugin}


def main():
    for name in sys.argv[1:] or ["static"]:
        if name not in BUILDS:
            raise Problem(f"unknown build {name}; one of {', '.join(BUILDS)}")
        BUILDS[name]()
    return 0


if __name__ == "__main__":
    main_with(main)
