"""The parts of the Hexagon vendor loop are made again when their sources are others, with stand-ins for what makes them."""

import os
import re
import tempfile
from pathlib import Path
from unittest import mock

from harness import Case, cpu_env

import vendor_parts
from project import ROOT

QEMU = ROOT / "hexagon-ops" / "tools" / "qemu"

# In place of what build.sh runs: a source whose configure does nothing, and a program of two words.
STAND_INS = {
    **dict.fromkeys(["llvm-mc-22", "xz", "flex", "bison", "cc", "curl", "strip"], ""),
    "find": 'if [ "$1" = /etc/apt ]; then echo "$STAND_INS/mirror.list"; else exec /usr/bin/find "$@"; fi',
    "sha256sum": 'if [ "${1:-}" != --check ]; then exec /usr/bin/sha256sum; fi; cat >/dev/null',
    "tar": r'printf "#!/bin/sh\n" >src/configure && chmod +x src/configure',
    "python3": 'mkdir -p venv/bin && cp "$STAND_INS/pip" venv/bin/',
    "pip": 'echo "$*" >"$STAND_INS/pip.log"',
    "ninja": 'printf "new program" >qemu-hexagon; chmod +x qemu-hexagon',
    "mirror.list": "",
}
# Ends in the middle of a copy of the program.
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
        command = (self.stand_ins / "pip.log").read_text(encoding="utf-8").split()
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


class Library(Case):
    """libcdsprpc of FASTRPC_DIR, by a compiler that writes its sources one after the other."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.compiler = mock.Mock(side_effect=self.compile)
        for name, value in {"VENDOR": self.root / "vendor", "compiler": mock.Mock(return_value="gcc"),
                            "run": self.compiler}.items():
            patch = mock.patch.object(vendor_parts, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    @staticmethod
    def compile(args, log, cwd):
        text = "".join((cwd / name).read_text(encoding="utf-8") for name in args if str(name).endswith(".c"))
        args[args.index("-o") + 1].write_text(text, encoding="utf-8")

    def checkout(self, name):
        folder = self.root / name
        for file, text in {"src/Makefile.am": "LIBDSPRPC_SOURCES = a.c\n", "src/a.c": name,
                           "src/fastrpc_config_parser.c": " parser", "inc/a.h": ""}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
            os.utime(folder / file, (1, 1))
        return folder

    def built(self, checkout):
        return vendor_parts.native_library(checkout).read_text(encoding="utf-8")

    def test_another_checkout_gives_another_library(self):
        one, two = self.checkout("one"), self.checkout("two")
        self.assertEqual([self.built(each) for each in (one, two, one)], ["one parser", "two parser", "one parser"])

    def test_edited_source_gives_another_library_and_the_same_one_no_build(self):
        folder = self.checkout("one")
        self.built(folder)
        self.built(folder)
        self.assertEqual(self.compiler.call_count, 1)
        (folder / "src" / "a.c").write_text("edited", encoding="utf-8")
        # As an archive unpacks it.
        os.utime(folder / "src" / "a.c", (1, 1))
        self.assertEqual(self.built(folder), "edited parser")
        (folder / "inc" / "a.h").write_text("edited", encoding="utf-8")
        self.built(folder)
        self.assertEqual(self.compiler.call_count, 3)
