"""The parts of the Hexagon vendor loop are built again when their sources change. Stand-ins replace the build tools."""

import os
import re
import tempfile
from pathlib import Path
from unittest import mock

from harness import Case, cpu_env

import debian
import vendor_parts
from project import ROOT, Problem

QEMU = ROOT / "hexagon-ops" / "tools" / "qemu"

# Stand-ins for the parts that build.sh builds: a source whose configure does nothing, and a program of two words.
STAND_INS = {
    **dict.fromkeys(["llvm-mc-22", "xz", "flex", "bison", "cc", "curl", "strip"], ""),
    "find": 'if [ "$1" = /etc/apt ]; then echo "$STAND_INS/mirror.list"; else exec /usr/bin/find "$@"; fi',
    "sha256sum": 'if [ "${1:-}" != --check ]; then exec /usr/bin/sha256sum; fi; cat >/dev/null',
    "tar": r'printf "#!/bin/sh\n" >src/configure && chmod +x src/configure',
    "python3": 'mkdir -p venv/bin && cp "$STAND_INS/pip" venv/bin/',
    "pip": r'printf "%s\n" "$@" >"$STAND_INS/pip.log"',
    "ninja": 'printf "new program" >qemu-hexagon; chmod +x qemu-hexagon',
    "mirror.list": "",
}
# Ends half-way through a copy of the program.
HALF_A_COPY = 'case "$1" in qemu-hexagon) printf half >"$2/qemu-hexagon" 2>/dev/null || printf half >"$2"; exit 1 ;; esac'


class Emulator(Case):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.stand_ins, self.out = Path(scratch.name) / "stand-ins", Path(scratch.name) / "out"
        self.stand_ins.mkdir()
        for name, script in STAND_INS.items():
            self.stand_in(name, script)
        (self.stand_ins / "mirror.list").write_text("deb http://mirror/ sid main\n", encoding="utf-8")
        self.program = self.out / "qemu-hexagon"

    def stand_in(self, name, script):
        file = self.stand_ins / name
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)

    def build(self):
        env = cpu_env(PATH=f"{self.stand_ins}:/usr/bin:/bin", STAND_INS=str(self.stand_ins), TMPDIR=str(self.stand_ins))
        return self.run_command("build.sh", ["bash", QEMU / "build.sh", self.out], env)

    def test_copy_that_was_interrupted_is_not_taken_for_the_program(self):
        self.assertEqual(self.build().code, 0)
        (self.out / "qemu-hexagon.stamp").write_text("older", encoding="utf-8")
        self.program.write_text("old program", encoding="utf-8")
        self.stand_in("cp", f'{HALF_A_COPY}\nexec /usr/bin/cp "$@"')
        self.assertEqual(self.build().code, 1)
        self.assertEqual(self.program.read_text(encoding="utf-8"), "old program")
        (self.stand_ins / "cp").unlink()
        self.assertEqual(self.build().code, 0)
        self.assertEqual(self.program.read_text(encoding="utf-8"), "new program")
        self.assertEqual(sorted(path.name for path in self.out.iterdir()), ["qemu-hexagon", "qemu-hexagon.stamp"])
        self.assertTrue(os.access(self.program, os.X_OK))

    def test_build_tools_of_the_emulator_are_installed_with_their_sums(self):
        done = self.build()
        self.assertEqual(done.code, 0, done.all)
        command = (self.stand_ins / "pip.log").read_text(encoding="utf-8").splitlines()
        self.assertLessEqual({"--require-hashes", "--no-deps", "--only-binary"}, set(command))
        requirements = Path(command[command.index("--requirement") + 1])
        lines = re.sub(r"^#.*\n", "", requirements.read_text(encoding="utf-8")).replace("\\\n", " ").splitlines()
        self.assertEqual(len(lines), 3)
        for line in lines:
            self.assertRegex(line, r"^(meson|ninja|pycotap)==[\d.]+( +--hash=sha256:[0-9a-f]{64})+$")

    def test_script_decides_about_a_program_that_is_there(self):
        run = mock.Mock()
        with mock.patch.dict(os.environ, HEXAGON_QEMU=""), mock.patch.object(vendor_parts, "run", run), \
                mock.patch.object(vendor_parts, "VENDOR", self.out.parent / "vendor"):
            program = vendor_parts.emulator()
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text("half", encoding="utf-8")
            self.assertEqual(vendor_parts.emulator(), program)
        self.assertEqual([call.args[0] for call in run.call_args_list], [[QEMU / "build.sh", program.parent]] * 2)


class Packages(Case):
    """Debian's packages, by stand-ins for apt's client that leave empty files."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.commands = []
        for module, name, value in [(debian, "TARGET", self.root), (debian, "run", self.command),
                                    (debian, "mirrors", lambda: ["http://debian.invalid/debian"]),
                                    (debian.shutil, "which", lambda tool: tool), (vendor_parts, "VENDOR", self.root)]:
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def command(self, args, log, env=None, cwd=None):
        self.commands.append(args)
        if "download" in args:
            for name in args[args.index("download") + 1:]:
                (cwd / f"{name.replace('=', '_')}_arm64.deb").write_bytes(b"")

    def downloaded(self):
        return [args[args.index("download") + 1:] for args in self.commands if "download" in args]

    def test_headers_are_of_the_version_of_the_library(self):
        with mock.patch.object(debian.fetch, "sha256", self.right_sums), \
                mock.patch.object(debian, "environment", self.environment):
            headers = vendor_parts.fastrpc_headers()
        self.assertEqual(headers.parts[-3:], ("usr", "include", "fastrpc"))
        (names,) = self.downloaded()
        versions = {name.partition("=")[2] for name in names if name.startswith("libfastrpc")}
        self.assertEqual(len([name for name in names if name.startswith("libfastrpc")]), 2)
        self.assertEqual(len(versions), 1)

    def test_package_with_other_bytes_is_refused(self):
        with mock.patch.object(debian, "environment", self.environment), \
                self.assertRaisesRegex(Problem, "libfastrpc.* has sha256 [0-9a-f]{64}, not [0-9a-f]{64}"):
            vendor_parts.fastrpc_headers()

    def test_list_of_packages_that_has_expired_is_used(self):
        env, _ = debian.environment("sid", "arm64")
        settings = Path(env["APT_CONFIG"]).read_text(encoding="utf-8")
        self.assertIn('Acquire::Check-Valid-Until "false";', settings)

    def test_whole_loop_has_the_short_ones_packages_and_no_program_without_a_sum(self):
        with mock.patch.object(debian.fetch, "sha256", self.right_sums), \
                mock.patch.object(debian, "environment", self.environment):
            roots = [vendor_parts.fastrpc_root(), vendor_parts.whole_root()]
        self.assertNotEqual(*roots)
        short, whole = map(set, self.downloaded())
        self.assertLess(short, whole)
        free = {name for name in whole if "=" not in name}
        self.assertFalse([name for name in free if re.search("llama|ggml|fastrpc", name)], free)

    def environment(self, suite, architecture):
        folder = self.root / f"files{len(self.commands)}"
        folder.mkdir()
        return {}, folder

    @staticmethod
    def right_sums(file):
        pinned = vendor_parts.FASTRPC_PINNED | vendor_parts.PROGRAMS_PINNED
        return pinned[file.name.partition("_")[0]][1]
