#!/usr/bin/env python3
"""Makes the release in target/dist/: a tarball for each target, and for those with glibc a Python wheel, packages for npm and
one for Debian. The bytes are the same each time.

Usage: dist.py [TARGET...]   of x86_64-unknown-linux-gnu, aarch64-unknown-linux-gnu and aarch64-linux-android; all without one
       dist.py check [TARGET] builds again from a copy of the tree in another folder and compares (this machine's target)
       dist.py notes TAG      prints CHANGELOG.md's text about the version, which has to be that of the tag

The tarball for Android has plugin and tool only if ANDROID_NDK_HOME names an NDK, whose C library and unwinder are in no
package that we found. The static library for an app's own llama.cpp needs nothing but rustup's standard library for the target.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import fetch
import packages
import sbom
from aarch64 import LINKER
from project import LOGS, ROOT, TARGET, Problem, main_with, need, run, say, toml, tool_env

DIST = TARGET / "dist"

ANDROID = "aarch64-linux-android"
# The first version of Android on a phone with V73.
ANDROID_API = 33
TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", ANDROID]
NATIVE = f"{platform.machine()}-unknown-linux-gnu"

# SOURCE: hexagon-ops/tools/library.sh; v73q is for chips with V73 whose vector unit lacks IEEE arithmetic.
DSP_LIBRARIES = ["v68", "v69", "v73", "v73q", "v75", "v79", "v81"]

PACKAGES = ["ggml-rust-npu", "ggml-rust-npu-plugin", "ggml-npu"]
# librknpu_matmul.so, for the boards with an RK3588 alone.
BOARD_TARGET, BOARD_PACKAGE = "aarch64-unknown-linux-gnu", "rknpu-matmul"

# The version in Ubuntu 22.04 and Debian 12, which boards have.
NEWEST_GLIBC = (2, 34)

# The folder of the sources that programs show in messages, whatever folder they were built in.
SHOWN_ROOT = "/ggml-rust-npu"

# Files of the tree that are copied unchanged.
COPIED = ["ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "docs/figures", "docs/guide", "docs/internals", "docs/results",
          "examples", "fuzz/README.md", "ggml-glue", "include", "patches", "scripts/phone.sh", "scripts/shell_imports.py"]


def version():
    return toml(ROOT / "Cargo.toml")["workspace"]["package"]["version"]


def epoch():
    """The time of everything in a release: SOURCE_DATE_EPOCH, or that of the last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        given = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    if not given.strip().isdigit():
        raise Problem("this is no checkout with a commit; set SOURCE_DATE_EPOCH to the release's time in seconds")
    return int(given)


def shown_paths():
    """The text that compilers show in place of this machine's folders: (folder, shown)."""
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    return [(ROOT, SHOWN_ROOT), *((folder, "/registry") for folder in sorted((home / "registry" / "src").glob("*")))]


def remapped(shown):
    return [f"--remap-path-prefix={folder}={name}" for folder, name in shown]


def bare_environment():
    """The environment without the user's settings for other builds."""
    env = dict(tool_env(), CARGO_INCREMENTAL="0", SOURCE_DATE_EPOCH=str(epoch()))
    for name in ("RUSTFLAGS", "CFLAGS", "CARGO_TARGET_DIR", "CARGO_ENCODED_RUSTFLAGS"):
        env.pop(name, None)
    return env


def environment(target):
    """The environment of cargo for a target."""
    env, name = bare_environment(), target.replace("-", "_")
    env["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join([*remapped(shown_paths()), "-Clink-arg=-Wl,--build-id=none"])
    env[f"CFLAGS_{name}"] = " ".join(f"-ffile-prefix-map={folder}={shown}" for folder, shown in shown_paths())
    linker = f"CARGO_TARGET_{name.upper()}_LINKER"
    if target == "aarch64-unknown-linux-gnu" and platform.machine() != "aarch64":
        env[linker] = need(LINKER, "on Debian: apt-get install gcc-aarch64-linux-gnu")
    ndk = os.environ.get("ANDROID_NDK_HOME")
    if target == ANDROID and ndk:
        tools = Path(ndk) / "toolchains" / "llvm" / "prebuilt" / "linux-x86_64" / "bin"
        env[linker] = env[f"CC_{name}"] = str(tools / f"{ANDROID}{ANDROID_API}-clang")
        env[f"AR_{name}"] = str(tools / "llvm-ar")
    return env


def has_linker(target):
    """Returns True if plugin and tool can be linked for a target."""
    return target != ANDROID or bool(os.environ.get("ANDROID_NDK_HOME"))


def packages_of(target):
    if target == BOARD_TARGET:
        return [*PACKAGES, BOARD_PACKAGE]
    return PACKAGES if has_linker(target) else PACKAGES[:1]


def built(target, env):
    """Builds archive, plugin and tool for a target, those that can be linked; returns their folder."""
    for each in fetch.LLAMA_SOURCES:
        fetch.llama(each)
    say(f"building for {target} (minutes when it is new)")
    selected = [word for package in packages_of(target) for word in ("--package", package)]
    if not has_linker(target):
        selected.append("--lib")
    run(["cargo", "build", "--release", "--locked", "--target", target, "--target-dir", DIST / "build", *selected],
        LOGS / f"dist-{target}.log", env, ROOT)
    return DIST / "build" / target / "release"


def dsp_libraries():
    """Builds the libraries for the DSP; returns their paths."""
    # The DSP libraries build Rust's core from the toolchain's sources.
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout
    shown = [*shown_paths(), (Path(sysroot.strip()).parent, "/toolchains")]
    folder = DIST / "build" / "skel"
    env = dict(bare_environment(), TARGET_DIR=str(folder), SKEL_RUSTFLAGS=" ".join(remapped(shown)),
               RUSTC_WRAPPER=str(ROOT / "scripts" / "stable_rustc.sh"))
    paths = []
    for library in DSP_LIBRARIES:
        say(f"building the DSP library {library}")
        run([ROOT / "hexagon-ops" / "tools" / "skel.sh", library], LOGS / f"dist-dsp-{library}.log", env, ROOT)
        paths.append(folder / library / f"libggml_rust_npu_skel_{library}.so")
    return paths


def put(source, place):
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)


def copy_tree(path, folder):
    """Copies a file of the tree, or those that git knows in a folder of it."""
    listed = subprocess.run(["git", "ls-files", "-z", path], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    files = [name for name in listed.decode().split("\0") if name]
    if not files:
        raise Problem(f"git knows no file {path}")
    for name in files:
        put(ROOT / name, folder / name)


def newest_glibc(file):
    """The newest version of glibc's symbols that a program or a library needs."""
    text = subprocess.run(["readelf", "--wide", "--version-info", file], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def check_binary(file):
    """Refuses a file that is too new for the boards, or that has paths of this machine."""
    newest = newest_glibc(file)
    if newest > NEWEST_GLIBC:
        raise Problem(f"{file.name} needs glibc {newest[0]}.{newest[1]}, boards have {NEWEST_GLIBC[0]}.{NEWEST_GLIBC[1]}")
    check_paths(file)


def check_paths(file):
    content = file.read_bytes()
    for folder in (str(ROOT), str(Path.home() / ".cargo"), str(Path.home() / ".rustup")):
        place = content.find(folder.encode() + b"/")
        if place >= 0:
            shown = content[max(0, place - 40):place + 120].decode(errors="replace")
            raise Problem(f"{file.name} holds a path of this machine: {shown!r}")


def binutils(target, name):
    """A program of binutils for a target's object files."""
    native = target.startswith(f"{platform.machine()}-")
    machine = target.split("-")[0]
    package = "binutils" if native else f"binutils-{machine}-linux-gnu"
    return need(name if native else f"{machine}-linux-gnu-{name}", f"on Debian: apt-get install {package}")


def without_bitcode(archive, target):
    """Leaves nothing of the compiler's bitcode in an archive: that differs now and then although the machine code does not.

    Names of the functions that ThinLTO made visible end in a hash of their module's bitcode. It is replaced by a hash of the
    module's names.
    """
    objcopy = [binutils(target, "objcopy"), "--enable-deterministic-archives"]
    run([*objcopy, "--remove-section=.llvmbc", "--remove-section=.llvmcmd", archive], LOGS / "dist-names.log")
    def listed(*command):
        done = subprocess.run([*command, archive], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        return {word: match for word in done.stdout.split() if (match := re.fullmatch(r"(.+\.llvm\.)(\d+)(.*)", word))}

    symbols = listed(binutils(target, "nm"), "--format=just-symbols")
    modules = {}
    for match in symbols.values():
        modules.setdefault(match[2], set()).add(match[1] + match[3])
    stable = {number: hashlib.sha256("\n".join(sorted(module)).encode()).hexdigest()[:16] for number, module in modules.items()}
    if len(set(stable.values())) != len(stable):
        raise Problem(f"two modules of {archive.name} have the same names")

    def options(option, names):
        return [f"{option} {name}={match[1]}{stable[match[2]]}{match[3]}\n" for name, match in sorted(names.items())]

    # A section is named after its function, and a relocation section after its section.
    sections = listed(binutils(target, "readelf"), "--wide", "--section-headers")
    sections = {name: match for name, match in sections.items() if not name.startswith(".rela.")}
    renamed = archive.with_suffix(".names")
    renamed.write_text("".join([*options("--redefine-sym", symbols), *options("--rename-section", sections)]), encoding="utf-8")
    run([*objcopy, f"@{renamed}", archive], LOGS / "dist-names.log")
    renamed.unlink()


def fill(folder, target):
    """Puts the files of a release into a folder."""
    release = built(target, environment(target))
    archive = release / "libggml_rust_npu.a"
    put(archive, folder / "lib" / archive.name)
    without_bitcode(folder / "lib" / archive.name, target)
    for library in dsp_libraries():
        check_paths(library)
        put(library, folder / "lib" / library.name)
    check_paths(archive)
    if has_linker(target):
        places = {"libggml_rust_npu_plugin.so": "lib/libggml-rust_npu.so", "ggml-npu": "bin/ggml-npu"}
        if target == BOARD_TARGET:
            # Not in the plugin's folder: packages and install.sh take all files of that folder.
            places["librknpu_matmul.so"] = "rockchip/librknpu_matmul.so"
        for name, place in places.items():
            check_binary(release / name)
            put(release / name, folder / place)
            # The names of modules are only in the symbol table, which this removes.
            run([binutils(target, "strip"), "--strip-all", "--enable-deterministic-archives", folder / place],
                LOGS / "dist-names.log")
            (folder / place).chmod(0o755 if place.startswith("bin") else 0o644)
        # The tool writes the same texts on every processor, so this machine's build of it is used.
        native = release if is_native(target) else built(NATIVE, environment(NATIVE))
        write_shared(folder / "share", native / "ggml-npu")
    for path in COPIED:
        copy_tree(path, folder)
    put(ROOT / "dist" / "README.md", folder / "README.md")
    put(ROOT / "dist" / "install.sh", folder / "install.sh")
    board = ROOT / "dist" / "board"
    for file in sorted(path for path in board.rglob("*") if path.is_file()):
        put(file, folder / "board" / file.relative_to(board))
    sbom.write(folder, target, packages_of(target), version(), epoch())
    (folder / "install.sh").chmod(0o755)
    write_sums(folder / "SHA256SUMS", sorted(path for path in folder.rglob("*") if path.is_file()), folder)


def is_native(target):
    return target == NATIVE


# For each shell, the folder in which it looks for completions.
COMPLETIONS = {"bash": "bash-completion/completions", "zsh": "zsh/site-functions", "fish": "fish/vendor_completions.d"}


def write_shared(folder, tool):
    """Has the tool write its manual pages and its completions for shells."""
    for kind, place in {"man": "man/man1", **COMPLETIONS}.items():
        run([tool, "generate", kind, "--dir", folder / place], LOGS / "dist-generate.log")
    # bash expects the program's name without a suffix.
    bash = folder / COMPLETIONS["bash"]
    (bash / "ggml-npu.bash").rename(bash / "ggml-npu")


def write_sums(file, paths, relative_to):
    lines = [f"{fetch.sha256(path)}  {path.relative_to(relative_to)}\n" for path in paths]
    file.write_text("".join(lines), encoding="utf-8")


def is_installed(target):
    """Returns True if rustc has the standard library for a target; otherwise prints how to get it."""
    root = subprocess.run(["rustc", "--print", "sysroot"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout
    found = (Path(root.strip()) / "lib" / "rustlib" / target).exists()
    if not found:
        print(f"   skipped {target}: rustup target add {target}")
    return found


def make(target):
    """Makes the tarball and the packages of a target; returns their paths, the tarball's first."""
    name = f"ggml-rust-npu-{version()}-{target}"
    folder = DIST / "content" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fill(folder, target)
    out = DIST / f"{name}.tar.gz"
    packages.tarball(folder, out, epoch())
    made = [out, *packages.make(packages.Release(folder, target, version(), epoch(), NEWEST_GLIBC), DIST)]
    for path in made:
        say(packages.describe(path))
    return made


def check(target):
    """Fails unless a copy of the tree in another folder gives the same tarball and the same packages."""
    made = make(target)
    copy = DIST / "again" / "another-folder"
    shutil.rmtree(copy.parent, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        put(ROOT / name, copy / name)
        (copy / name).chmod((ROOT / name).stat().st_mode)
    # The copy links to the fetched sources and to the tree's repository.
    (copy / "target").mkdir()
    (copy / "target" / "src").symlink_to(TARGET / "src")
    (copy / ".git").write_text(f"gitdir: {git_folder()}\n", encoding="utf-8")
    say("building again in another folder")
    run([sys.executable, copy / "scripts" / "dist.py", target], LOGS / "dist-again.log", dict(os.environ), copy)
    seconds = [copy / "target" / "dist" / path.name for path in made]
    differing = [path.name for path, second in zip(made, seconds, strict=True) if fetch.sha256(path) != fetch.sha256(second)]
    if differing:
        raise Problem(f"two builds differ: {', '.join(differing)}; of the tarball, "
                      f"{', '.join(different(made[0], seconds[0])) or 'no file'}")
    say(f"two builds in two folders give the same {', '.join(path.name for path in made)}")
    shutil.rmtree(copy.parent)


def git_folder():
    return subprocess.run(["git", "rev-parse", "--absolute-git-dir"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          check=True).stdout.strip()


def different(first, second):
    """The names of the files that differ between two tarballs."""
    sums = []
    for path in (first, second):
        with tarfile.open(path) as archive:
            sums.append({entry.name: hashlib.sha256(archive.extractfile(entry).read()).hexdigest()
                         for entry in archive if entry.isfile()})
    return sorted(name for name in sums[0].keys() | sums[1].keys() if sums[0].get(name) != sums[1].get(name))


def notes(tag):
    """CHANGELOG.md's text about the version in Cargo.toml, which is that of the tag."""
    if tag != f"v{version()}":
        raise Problem(f"the tag is {tag}, the version in Cargo.toml {version()}")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version())}\b.*\n((?:(?!## ).*\n)*)", text, re.M)
    if found is None:
        raise Problem(f"CHANGELOG.md has no heading for {version()}")
    return found[1].strip()


def main():
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0] == "notes":
        print(notes(arguments[1]))
        return 0
    checking = arguments[:1] == ["check"]
    targets = arguments[1:] if checking else arguments
    for target in targets:
        if target not in TARGETS:
            raise Problem(f"unknown target {target}; one of {', '.join(TARGETS)}")
    if checking:
        check(targets[0] if targets else NATIVE)
        return 0
    # The npm package is made from both glibc targets.
    made = sorted({path for target in targets or TARGETS if targets or is_installed(target) for path in make(target)})
    if not has_linker(ANDROID):
        print(f"   {ANDROID}: without plugin and tool, because ANDROID_NDK_HOME is not set")
    write_sums(DIST / "SHA256SUMS", made, DIST)
    return 0


if __name__ == "__main__":
    main_with(main)
