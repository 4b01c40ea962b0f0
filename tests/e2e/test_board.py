"""The files for boards and phones: the unit and the rules are well-formed, and phone.sh calls adb as described in the guide."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import Case, cpu_env

from project import ROOT

BOARD = ROOT / "dist" / "board"

# A stand-in for adb: it records its arguments and runs the phone's shell commands here. As adb, it copies several files only
# into a folder that exists.
ADB = """#!/bin/sh
printf '%s\\n' "$*" >>"$ADB_LOG"
command=$1 && shift
case $command in
  push) cp "$@" ;;
  shell) sh -c "$*" ;;
esac
"""
TOOL = """#!/bin/sh
echo "DSP_LIBRARY_PATH=$DSP_LIBRARY_PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH-unset}"
for argument; do echo "[$argument]"; done
"""


# The service of Debian's package llama.cpp-services 0.7.0, changed to run a program that every machine has.
DEBIANS = """[Service]
User=_llama-server
Group=_llama-server
ExecStart=/bin/true
Environment=LLAMA_CACHE=/var/cache/llama-server
EnvironmentFile=/etc/default/llama-server
"""


def settings(text):
    """The assignments of a unit as pairs."""
    return [tuple(line.split("=", 1)) for line in text.splitlines() if re.match(r"\w+=", line)]


class Board(Case):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)

    def verified(self, unit):
        """systemd's messages about a unit with its drop-ins."""
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        # Lines about other units of this machine do not name this file.
        return [line for line in done.stderr.splitlines() if "llama-server" in line or "npu.conf" in line]

    def test_unit_is_one_that_systemd_accepts(self):
        self.assertEqual(self.verified(BOARD / "llama-server-npu.service"), [])

    def test_drop_in_is_one_that_systemd_accepts(self):
        (self.root / "llama-server.service").write_text(DEBIANS, encoding="utf-8")
        shutil.copytree(BOARD / "llama-server.service.d", self.root / "llama-server.service.d")
        self.assertEqual(self.verified(self.root / "llama-server.service"), [])
        # A key that systemd does not know must cause a warning, which proves that systemd reads the drop-in.
        with open(self.root / "llama-server.service.d" / "npu.conf", "a", encoding="utf-8") as file:
            file.write("LimitNOFILES=1\n")
        self.assertIn("LimitNOFILES", "".join(self.verified(self.root / "llama-server.service")))

    def test_drop_in_leaves_debians_service_its_user_program_and_variables(self):
        """A unit of the same name in /etc/systemd/system would hide the package's own."""
        self.assertFalse((BOARD / "llama-server.service").exists())
        ours = settings((BOARD / "llama-server.service.d" / "npu.conf").read_text(encoding="utf-8"))
        self.assertEqual({key for key, _ in ours}, {"Environment", "SupplementaryGroups", "LimitNOFILE"})

    def test_unit_and_drop_in_give_the_same_files_groups_and_limits(self):
        unit, drop_in = (dict(settings((BOARD / name).read_text(encoding="utf-8")))
                         for name in ("llama-server-npu.service", "llama-server.service.d/npu.conf"))
        for key in ("SupplementaryGroups", "LimitNOFILE"):
            self.assertEqual(unit[key], drop_in[key])

    def test_rules_have_matches_and_assignments_only(self):
        rules = [line for line in (BOARD / "70-ggml-rust-npu.rules").read_text(encoding="utf-8").splitlines()
                 if line and not line.startswith("#")]
        self.assertGreaterEqual(len(rules), 3)
        for rule in rules:
            self.assertRegex(rule, r'^((KERNEL|SUBSYSTEM)=="[\w*-]+", )+GROUP="render", MODE="0660"$')

    def test_units_name_the_files_that_install_sh_writes_for_root(self):
        script = (ROOT / "dist" / "install.sh").read_text(encoding="utf-8")
        self.assertIn("prefix=/usr/local", script)
        self.assertIn("lib=$prefix/lib/ggml-rust-npu", script)
        for name in ("llama-server-npu.service", "llama-server.service.d/npu.conf"):
            unit = (BOARD / name).read_text(encoding="utf-8")
            self.assertEqual(re.findall(r"/usr/local\S+", unit),
                             ["/usr/local/lib/ggml-rust-npu/libggml-rust_npu.so", "/usr/local/lib/ggml-rust-npu"])


class Phone(Case):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        for name, text in [("bin/adb", ADB), ("tool", TOOL), ("skel/v75/libggml_rust_npu_skel_v75.so", "75"),
                           ("skel/v79/libggml_rust_npu_skel_v79.so", "79")]:
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            file.chmod(0o755)

    def env(self):
        return cpu_env(PATH=f"{self.root / 'bin'}:{os.environ['PATH']}", ADB_LOG=str(self.root / "log"))

    def phone(self, *args, **settings):
        env = dict(self.env(), TOOL=str(self.root / "tool"), SKEL=str(self.root / "skel"), FOLDER=str(self.root / "phone"))
        return self.run_command("phone.sh", ["sh", ROOT / "scripts" / "phone.sh", *args],
                                dict(env, LD_LIBRARY_PATH="/vendor/lib64", **settings))

    def test_tool_and_libraries_are_pushed_and_the_tool_finds_them(self):
        done = self.phone("inspect", "it's a model")
        self.assertEqual(done.code, 0, done.all)
        folder = self.root / "phone"
        self.assertEqual({path.name for path in folder.iterdir()},
                         {"ggml-npu", "libggml_rust_npu_skel_v75.so", "libggml_rust_npu_skel_v79.so"})
        self.assertEqual(done.out.splitlines(),
                         [f"DSP_LIBRARY_PATH={folder} LD_LIBRARY_PATH=unset", "[inspect]", "[it's a model]"])

    def test_commands_of_the_guide_put_the_same_files_on_the_phone(self):
        guide = (ROOT / "docs" / "guide" / "phone.md").read_text(encoding="utf-8").replace("/data/local/tmp", "phone")
        commands = re.findall(r"^adb (?:push|shell) .*$", guide, re.M)
        self.assertIn("adb push", "".join(commands))
        (self.root / "phone").mkdir()
        for name in ("aarch64-linux-android/release/ggml-npu", "skel/v75/libggml_rust_npu_skel_v75.so",
                     "skel/v79/libggml_rust_npu_skel_v79.so"):
            file = self.root / "target" / name
            file.parent.mkdir(parents=True)
            file.touch()
        done = self.run_command("guide", ["sh", "-ec", "\n".join(commands)], self.env(), cwd=self.root)
        self.assertEqual(done.code, 0, done.all)
        self.assertEqual({path.name for path in (self.root / "phone" / "npu").iterdir()},
                         {"ggml-npu", "libggml_rust_npu_skel_v75.so", "libggml_rust_npu_skel_v79.so"})

    def test_without_arguments_it_probes(self):
        self.assertEqual(self.phone().out.splitlines()[1:], ["[devices]", "[--probe]"])

    def test_what_is_missing_is_said(self):
        done = self.phone(TOOL="/no/such/tool")
        self.assertEqual(done.code, 1)
        self.assertIn("no /no/such/tool", done.log)
        done = self.phone(SKEL="/no/such/folder")
        self.assertIn("no library for the DSP in /no/such/folder", done.log)
