"""Programs whose ggml is newer than the plugin knows: Debian's 0.27.0 with another version in it, and with changes that a
newer one may have."""

import csv
import io
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import HEXAGON, HEXAGON_DEVICE, PLAIN_LOG, device_env, our_lines
from stocked import PROMPT, TOKENS, DebianStock

LIBRARY = "libggml-base.so.0"


class Newer(DebianStock):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        shutil.copyfile(self.program.libraries / LIBRARY, self.folder / LIBRARY)

    def edit(self, old, new, start=0, end=None):
        """Replaces bytes of the library, which must be there once between two places."""
        file = self.folder / LIBRARY
        data = file.read_bytes()
        end = len(data) if end is None else end
        self.assertEqual((data.count(old, start, end), len(new)), (1, len(old)), old)
        place = data.index(old, start, end)
        file.write_bytes(data[:place] + new + data[place + len(old):])

    def edit_function(self, name, old, new):
        """As `edit`, in the code of a function."""
        shown = subprocess.run(["readelf", "--wide", "--dyn-syms", self.folder / LIBRARY], capture_output=True, text=True,
                               check=True).stdout
        (row,) = [row.split() for row in shown.splitlines() if re.search(rf" {name}(@|$)", row)]
        # In this library the code has the same offset in the file as in memory.
        start = int(row[1], 16)
        self.edit(old, new, start, start + int(row[2], 0))

    def claim(self, version):
        """Makes the library report another version."""
        self.edit(b"\x000.27.0\x00", b"\x00" + version.encode().ljust(6, b"\x00") + b"\x00")

    def run_newer(self, name, *args, **settings):
        command = self.program.command(name, *args)
        path = command.index("--library-path") + 1
        command[path] = f"{self.folder}:{command[path]}"
        done = self.run_command(name, command, self.with_plugin(device_env(HEXAGON, **settings)), cwd=self.program.folder)
        self.assertEqual(done.code, 0, done.all[-2000:])
        return done

    def devices(self, **settings):
        return self.run_newer("llama-bench", "--list-devices", **settings).all

    def refused(self, *words, **settings):
        """Checks that there is no device, and one line with `words`."""
        shown = self.devices(**settings)
        lines = our_lines(shown)
        self.assertEqual(len(lines), 1, shown)
        for word in words:
            self.assertIn(word, lines[0])
        self.assertIn("(none)", shown)

    def claimed(self, operation):
        """Upstream's cases of an operation that the device claims."""
        done = self.run_newer("test-backend-ops", "support", "-b", HEXAGON_DEVICE, "-o", operation, "--output", "csv")
        rows = csv.DictReader(io.StringIO(done.out[done.out.find('"'):]))
        return [row["op_params"] for row in rows if row["supported"] in ("yes", "true", "1")]

    def test_a_newer_one_is_used_after_one_warning(self):
        expected = self.text_of_static_build(HEXAGON)
        for version in ("0.28.0", "1.0.0"):
            with self.subTest(version):
                shutil.copyfile(self.program.libraries / LIBRARY, self.folder / LIBRARY)
                self.claim(version)
                done = self.with_end(lambda: self.run_newer(
                    "llama-completion", "-m", self.model(), "-p", PROMPT, "-n", TOKENS, "-c", 512, "--temp", 0, "--seed", 1,
                    "-no-cnv", "--no-display-prompt", "--ignore-eos", "-fit", "off", *PLAIN_LOG, "-v"))
                self.assertEqual(done.out.rstrip("\n"), expected)
                # This log has a letter for the level in front of each line.
                warnings = [line for line in done.log.splitlines() if "ggml-rust-npu: this program has ggml" in line]
                self.assertEqual(len(warnings), 1, done.log[-2000:])
                self.assertRegex(warnings[0], rf"ggml {re.escape(version)}, .*ggml-rust-npu \d.*0\.21 to 0\.27")

    def test_the_user_may_refuse_it(self):
        self.claim("0.28.0")
        self.refused("0.28.0", "install a newer ggml-rust-npu", GGML_RUST_NPU_GGML="strict")
        self.refused("GGML_RUST_NPU_GGML", "never", "probe", "strict", GGML_RUST_NPU_GGML="never")

    def test_an_operation_with_another_number_is_refused(self):
        self.claim("0.28.0")
        self.edit(b"\x00RESHAPE\x00", b"\x00RESHOPE\x00")
        self.refused("0.28.0", "another RESHAPE")

    def test_another_struct_is_refused(self):
        self.claim("0.28.0")
        # Moves the device of a buffer type by 8 bytes: mov 0x40(%rdi),%rax.
        self.edit_function("ggml_backend_buft_get_device", b"\x48\x8b\x47\x40", b"\x48\x8b\x47\x48")
        self.refused("0.28.0", "another ggml_backend_buffer_type")

    def test_an_operation_whose_parameters_moved_is_left_to_the_cpu(self):
        self.claim("0.28.0")
        proven = self.claimed("CONCAT")
        self.assertTrue(any("dim=1" in case for case in proven), proven)
        # Moves the dimension to the next word of the parameters: mov %r12d,0x54(%rax).
        self.edit_function("ggml_concat", b"\x44\x89\x60\x54", b"\x44\x89\x60\x58")
        moved = self.claimed("CONCAT")
        self.assertFalse(any(re.search(r"dim=[1-3]", case) for case in moved), moved)

    def test_an_operation_that_no_proof_covers_is_left_to_the_cpu(self):
        known = self.claimed("PAD")
        self.claim("0.28.0")
        self.assertTrue(known)
        self.assertEqual(self.claimed("PAD"), [])

    def test_the_same_library_needs_no_warning(self):
        lines = our_lines(self.devices())
        self.assertEqual([line for line in lines if "newer" in line], [], lines)
