"""The commands of docs/guide/installing.md, in empty folders and in an empty Debian: each package gives a text on a simulated
device in a stock program after at most three commands, and no file is left after those that remove it."""

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import HEXAGON, Case, cpu_env, device_env

import dist
import stock
from project import ROOT

TARGET = f"{platform.machine()}-unknown-linux-gnu"
PAGE = ROOT / "docs" / "guide" / "installing.md"
DOCKERFILE = ROOT / "dist" / "board" / "Dockerfile"

PROMPT = "Once upon a time,"
TOKENS = 16

# What the package manager keeps: its database, caches, logs and lock files.
KEPT = re.compile(r"var/(lib/(dpkg|apt)|cache|log)/|run/|tmp/|root/|package(-lock)?\.json$|\.package-lock\.json$|__pycache__/")

# Runs a command in an empty Debian, with the folder of packages and a separate folder for all changes.
CHROOT = """
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged"
mount -t proc proc "$2/merged/proc" && mount --rbind /dev "$2/merged/dev" && mount --bind "$3" "$2/merged/srv"
exec chroot "$2/merged" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    OMP_WAIT_POLICY=passive sh -e -c "cd /srv; $4"
"""


def section(heading):
    """The blocks of a section of the page, by language, and the commands of its two shell blocks."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    install, remove = ([line for line in block.splitlines() if line] for language, block in blocks if language == "sh")
    return {language: block for language, block in blocks if language != "sh"}, install, remove


class Packages(Case):
    @classmethod
    def setUpClass(cls):
        cls.made = dist.make(TARGET)

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name)
        self.folder = self.scratch / "app"
        self.folder.mkdir()
        (self.folder / "model.gguf").symlink_to(self.model())

    def expected(self):
        return self.complete(PROMPT, TOKENS, device_env(HEXAGON)).out.rstrip("\n")

    def put_packages(self):
        for path in self.made:
            shutil.copyfile(path, self.folder / path.name)

    def files(self):
        return {path.relative_to(self.scratch).as_posix() for path in self.scratch.rglob("*") if not path.is_dir()}

    def shell(self, commands, env):
        """Runs commands of the page in the folder; returns the output of the last one."""
        for line in commands:
            done = self.run_command(line, ["sh", "-c", line], env, timeout=1800, cwd=self.folder)
            self.assertEqual(done.code, 0, f"{line}: {done.all[-3000:]}")
        return done

    def check_text(self, out):
        self.assertIn(self.expected().strip(), out)

    def check_nothing_is_left(self, before, after):
        left = sorted(path for path in after - before if not KEPT.search(path))
        self.assertEqual(left, [])


class Python(Packages):
    def test_wheel_works_in_llama_cpp_python_and_is_removed(self):
        blocks, install, remove = section("Python")
        self.assertLessEqual(len(install), 3)
        subprocess.run([sys.executable, "-m", "venv", self.scratch / "venv"], check=True)
        env = cpu_env(PATH=f"{self.scratch / 'venv' / 'bin'}:/usr/bin:/bin", PIP_NO_COMPILE="1", PYTHONDONTWRITEBYTECODE="1")
        # Uses a wheel that was compiled once, because pip would compile it for a quarter of an hour.
        built = stock.llama_cpp_python()
        self.shell([f"pip install --quiet '{built}'"], env)
        before = self.files()
        self.put_packages()
        (self.folder / "text.py").write_text(blocks["python"], encoding="utf-8")
        done = self.shell([line.replace("llama-cpp-python", f"'{built}'") for line in install], env)
        self.assertIn("['HEX0']", done.out)
        self.assertIn("HEX0: 575 of 575 nodes of a token, in 1 split", done.log)
        self.check_text(done.out)

        plugin = self.shell(["python -m ggml_rust_npu --path"], env).out.strip()
        self.assertTrue(Path(plugin).is_file(), plugin)
        self.assertEqual(self.shell(['eval "$(python -m ggml_rust_npu)"; echo "$GGML_BACKEND_PATH"'], env).out.strip(), plugin)
        self.assertIn("HEX0: Qualcomm Hexagon V75", self.shell(["GGML_RUST_NPU_SIM=hexagon-v75 ggml-npu devices"], env).out)
        for path in [*self.made, "text.py"]:
            (self.folder / Path(path).name).unlink()
        self.shell(remove, env)
        self.check_nothing_is_left(before, self.files())


class Node(Packages):
    def test_packages_work_in_node_llama_cpp_and_are_removed(self):
        try:
            modules = stock.node_program() / "node_modules"
        except stock.Missing as missing:
            self.skipTest(str(missing))
        blocks, install, remove = section("Node.js")
        self.assertLessEqual(len(install), 3)
        # Node finds node-llama-cpp in the parent folder, so npm needs no network.
        (self.scratch / "node_modules").symlink_to(modules)
        (self.folder / "package.json").write_text('{"private": true}\n', encoding="utf-8")
        before = self.files()
        self.put_packages()
        (self.folder / "text.mjs").write_text(blocks["js"], encoding="utf-8")
        env = dict(cpu_env(), npm_config_offline="true", npm_config_audit="false", npm_config_fund="false",
                   npm_config_cache=str(self.scratch / "tmp" / "npm"))
        done = self.shell([line.replace(" node-llama-cpp", "") for line in install], env)
        self.assertIn("HEX0: 575 of 575 nodes of a token, in 1 split", done.all)
        self.check_text(done.out)

        shown = self.shell(['eval "$(npx ggml-rust-npu)"; echo "$GGML_BACKEND_PATH"'], env).out.strip()
        self.assertTrue(Path(shown).is_file(), shown)
        self.assertIn("HEX0: Qualcomm Hexagon V75", self.shell(["GGML_RUST_NPU_SIM=hexagon-v75 npx ggml-npu devices"], env).out)
        for path in [*self.made, "text.mjs"]:
            (self.folder / Path(path).name).unlink()
        self.shell(remove, env)
        self.check_nothing_is_left(before, self.files())


class EmptyDebian(Packages):
    """A Debian with only llama.cpp; each test changes a copy of it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        try:
            cls.system = stock.debian_system()
        except stock.Missing as missing:
            cls.skipTest(cls, str(missing))

    def setUp(self):
        super().setUp()
        for name in ("upper", "work", "merged"):
            (self.scratch / "changes" / name).mkdir(parents=True)
        (self.folder / "model.gguf").unlink()
        shutil.copyfile(self.model(), self.folder / "model.gguf")
        self.put_packages()

    def chroot(self, *commands):
        """Runs commands in the system, as root."""
        script = "\n".join(re.sub(r"^sudo ", "", line) for line in commands)
        done = self.run_command(script, ["unshare", "--mount", "sh", "-e", "-c", CHROOT, "sh", self.system,
                                         self.scratch / "changes", self.folder, script], cpu_env(), timeout=1800)
        self.assertEqual(done.code, 0, f"{script}: {done.all[-3000:]}")
        return done

    def changed(self):
        upper = self.scratch / "changes" / "upper"
        return {path.relative_to(upper).as_posix() for path in upper.rglob("*") if not path.is_dir()}

    def check_section(self, heading):
        _, install, remove = section(heading)
        self.assertLessEqual(len(install), 3)
        done = self.chroot(*install)
        self.check_text(done.out)
        self.assertIn("HEX0: 575 of 575 nodes of a token, in 1 split", done.log)
        self.assertIn("HEX0: Qualcomm Hexagon V75", self.chroot("GGML_RUST_NPU_SIM=hexagon-v75 ggml-npu devices").out)
        self.assertTrue(any("ggml" in path for path in self.changed() if not KEPT.search(path)))
        return remove

    def test_debian_package_needs_no_variable_and_is_removed(self):
        remove = self.check_section("Debian")
        self.assertEqual(self.chroot("dpkg --verify ggml-rust-npu").out, "")
        self.chroot(*remove)
        self.check_nothing_is_left(set(), self.changed())

    def test_tarball_needs_no_variable_and_is_removed(self):
        self.chroot(*self.check_section("A tarball"))
        self.check_nothing_is_left(set(), self.changed())

    def test_instructions_of_the_dockerfile_give_a_server_with_the_plugin(self):
        text = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8"))
        lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
        commands = []
        for word, rest in lines:
            match word:
                case "FROM":
                    self.assertEqual(rest, f"debian:{stock.DEBIAN_SUITE}-slim")
                case "COPY":
                    commands.append(f"cp {rest}")
                case "RUN":
                    commands.append(rest)
                case "ENV":
                    commands.append(f"export {rest}")
                case "ENTRYPOINT":
                    program = " ".join(re.findall(r'"([^"]*)"', rest))
                    server = f"GGML_RUST_NPU_SIM=hexagon-v75 timeout 20 {program}"
                    commands.append(f"{server} -m model.gguf --port 8099 || [ $? = 124 ]")
                case _:
                    self.fail(f"the test does not know {word}")
        shown = self.chroot(*commands).all
        self.assertIn("HEX0: 575 of 575 nodes of a graph of 2 rows, in 1 split", shown)
        self.assertRegex(shown, r"listening on http://0\.0\.0\.0:8099")


