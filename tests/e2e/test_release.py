"""The parts of a release that need no build: its packing, its list of contents, and install.sh with stand-ins for the files."""

import json
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

from harness import Case, cpu_env

import cyclonedx
import dist
import fetch
import packages
import sbom
from project import ROOT, toml

PLUGIN = "libggml-rust_npu.so"
LINK = "libggml-hexagon.so"


class Pack(Case):
    def tarball(self, folder, mtime):
        """A tarball of a folder whose files were made in another order, at another time, by another umask."""
        content = folder / "content" / "release"
        (content / "lib").mkdir(parents=True)
        names = ["lib/b", "lib/a", "z"]
        for name in names if mtime % 2 else reversed(names):
            (content / name).write_text(f"text of {name}", encoding="utf-8")
            (content / name).chmod(0o600 if mtime % 2 else 0o664)
            os.utime(content / name, (mtime, mtime))
        packages.tarball(content, folder / "out.tar.gz", 1_000_000_000)
        return fetch.sha256(folder / "out.tar.gz")

    def test_same_content_gives_the_same_bytes(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            self.assertEqual(self.tarball(Path(one), 1_000_001), self.tarball(Path(two), 2_000_000))

    def test_differing_files_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, text in [("one", "1"), ("two", "2")]:
                content = Path(folder) / name / "release"
                content.mkdir(parents=True)
                (content / "same").touch()
                (content / "file").write_text(text, encoding="utf-8")
                paths.append(Path(folder) / f"{name}.tar.gz")
                packages.tarball(content, paths[-1], 1_000_000_000)
            self.assertEqual(dist.different(*paths), ["release/file"])

    def test_a_path_of_this_machine_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plugin.so"
            file.write_bytes(b"\0panicked at " + str(ROOT / "src" / "lib.rs").encode() + b"\0")
            with self.assertRaisesRegex(dist.Problem, r"plugin\.so holds a path of this machine"):
                dist.check_paths(file)
            file.write_bytes(b"\0panicked at /ggml-rust-npu/src/lib.rs\0")
            dist.check_paths(file)


class Notes(Case):
    def test_notes_are_those_of_the_version_of_the_tag(self):
        notes = dist.notes(f"v{dist.version()}")
        self.assertGreater(len(notes.splitlines()), 20)
        self.assertNotIn("\n## ", notes)
        with self.assertRaisesRegex(dist.Problem, r"the tag is v9\.9\.9, the version in Cargo\.toml "):
            dist.notes("v9.9.9")


class Ndk(Case):
    def test_plugin_and_tool_are_linked_only_with_an_ndk(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("ANDROID_NDK_HOME", None)
            self.assertFalse(dist.has_linker(dist.ANDROID))
            self.assertTrue(dist.has_linker(dist.TARGETS[0]))
            self.assertEqual(dist.packages_of(dist.BOARD_TARGET), [*dist.PACKAGES, "rknpu-matmul"])
            self.assertEqual(dist.packages_of(dist.ANDROID), ["ggml-rust-npu"])
            os.environ["ANDROID_NDK_HOME"] = "/ndk"
            self.assertEqual(dist.packages_of(dist.ANDROID), dist.PACKAGES)
            env = dist.environment(dist.ANDROID)
        clang = "/ndk/toolchains/llvm/prebuilt/linux-x86_64/bin/aarch64-linux-android33-clang"
        self.assertEqual((env["CARGO_TARGET_AARCH64_LINUX_ANDROID_LINKER"], env["CC_aarch64_linux_android"]), (clang, clang))


class StableSymbols(Case):
    def arguments(self, name):
        """The arguments that rustc gets from the wrapper."""
        args = ["--crate-name", name, "a b.rs", "-C", "metadata=60a73862043da43f", "-C", "extra-filename=-60a7"]
        command = ["sh", ROOT / "scripts" / "stable_rustc.sh", "printf", "%s\\n", *args]
        return self.run_command("stable_rustc.sh", command, cpu_env()).out.splitlines(), args

    def test_crates_outside_of_the_dsps_workspace_get_a_hash_without_a_folder(self):
        got, args = self.arguments("hexagon_ops")
        self.assertEqual(got, [arg.replace("60a73862043da43f", "hexagon_ops") for arg in args])

    def test_other_crates_keep_theirs(self):
        got, args = self.arguments("core")
        self.assertEqual(got, args)


class Contents(Case):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        sbom.write(Path(cls.folder.name), dist.TARGETS[0], dist.PACKAGES, "1.2.3", 1_000_000_000)
        cls.document = json.loads((Path(cls.folder.name) / "sbom.cdx.json").read_text(encoding="utf-8"))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_components_have_what_cyclonedx_wants(self):
        self.assertEqual((self.document["bomFormat"], self.document["specVersion"]), ("CycloneDX", "1.5"))
        self.assertRegex(self.document["serialNumber"], r"^urn:uuid:[0-9a-f-]{36}$")
        self.assertEqual(self.document["metadata"]["timestamp"], "2001-09-09T01:46:40Z")
        references = [each["bom-ref"] for each in self.document["components"]]
        self.assertEqual(len(references), len(set(references)))
        known = {*references, self.document["metadata"]["component"]["bom-ref"]}
        for edge in self.document["dependencies"]:
            self.assertIn(edge["ref"], known)
            self.assertLessEqual(set(edge.get("dependsOn", [])), known)
        for each in self.document["components"]:
            self.assertNotIn("/", each["licenses"][0]["expression"], each)

    def test_it_is_valid_by_the_schema_of_cyclonedx(self):
        self.assertIsNone(cyclonedx.fault(self.document))

    def test_the_schema_finds_what_is_wrong(self):
        for name, value in [("serialNumber", "4711"), ("components", [{"type": "library"}]), ("unknown", 1),
                            ("components", [{"type": "library", "name": "a", "licenses": [{"license": {"id": "No-1.0"}}]}])]:
            with self.subTest(name):
                self.assertIsNotNone(cyclonedx.fault(dict(self.document, **{name: value})))

    def test_it_lists_what_is_linked_and_no_tools_of_the_build(self):
        names = {each["name"] for each in self.document["components"]}
        self.assertLessEqual({"ggml-rust-npu", "hexagon-ops", "libloading", "clap", "rust-std", "ggml-rust-npu-skel"}, names)
        # A compiler driver, a macro, and libraries that only tests use.
        self.assertEqual(names & {"cc", "serde_derive", "proptest", "criterion"}, set())

    def test_sums_are_those_of_the_lock_file(self):
        lock = toml(ROOT / "Cargo.lock")["package"]
        sums = {(each["name"], each["version"]): each.get("checksum") for each in lock}
        hashed = [each for each in self.document["components"] if "hashes" in each]
        self.assertGreater(len(hashed), 40)
        for each in hashed:
            self.assertEqual(each["hashes"][0]["content"], sums[each["name"], each["version"]], each["name"])

    def test_each_package_of_others_has_its_licence(self):
        licences = Path(self.folder.name) / "licences"
        for each in self.document["components"]:
            if "hashes" in each:
                self.assertTrue(any((licences / f"{each['name']}-{each['version']}").iterdir()), each["name"])
        self.assertTrue((licences / "rust-std" / "COPYRIGHT-library.html").is_file())


class Pages(Case):
    def test_links_of_pages_lead_to_files_of_the_tarball(self):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for path in dist.COPIED:
                dist.copy_tree(path, folder)
            pages = sorted(folder.rglob("*.md"))
            self.assertGreater(len(pages), 20)
            for page in pages:
                for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
                    self.assertTrue((page.parent / link).exists(), f"{page.relative_to(folder)}: {link}")


class Install(Case):
    """install.sh, with small files in place of the real ones."""

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.root = Path(self.scratch.name)
        self.release = self.root / "release"
        for name in (f"lib/{PLUGIN}", "lib/libggml_rust_npu_skel_v75.so", "lib/libggml_rust_npu.a", "bin/ggml-npu",
                     "share/man/man1/ggml-npu.1", "share/man/man1/ggml-npu-bench.1",
                     "share/bash-completion/completions/ggml-npu", "share/zsh/site-functions/_ggml-npu",
                     "share/fish/vendor_completions.d/ggml-npu.fish"):
            file = self.release / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name, encoding="utf-8")
        (self.release / "install.sh").write_bytes((ROOT / "dist" / "install.sh").read_bytes())
        self.write_sums()
        self.prefix = self.root / "prefix"
        self.installed = self.prefix / "lib" / "ggml-rust-npu" / PLUGIN

    def write_sums(self):
        sums = self.release / "SHA256SUMS"
        dist.write_sums(sums, sorted(path for path in self.release.rglob("*") if path.is_file() and path != sums), self.release)

    def install(self, *args, code=0, path=None):
        # The caller's PATH is not used: it may have a llama.cpp of the user's, and install.sh links into its folder.
        env = cpu_env(PATH=f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin")
        done = self.run_command("install.sh", ["sh", self.release / "install.sh", "--prefix", self.prefix, *args], env)
        self.assertEqual(done.code, code, done.all)
        return done

    def llama(self):
        """A folder with a program and its backends, as llama.cpp's releases have."""
        folder = self.root / "llama"
        folder.mkdir()
        for name in ("llama-cli", "libggml-cpu-haswell.so"):
            (folder / name).touch(0o755)
        return folder

    def test_files_are_in_place_and_the_variable_is_printed(self):
        done = self.install()
        self.assertEqual(self.installed.read_text(encoding="utf-8"), f"lib/{PLUGIN}")
        self.assertTrue((self.installed.parent / "libggml_rust_npu_skel_v75.so").exists())
        self.assertTrue((self.prefix / "bin" / "ggml-npu").exists())
        self.assertEqual(len([path for path in (self.prefix / "share").rglob("*") if path.is_file()]), 5)
        self.assertEqual(re.findall(r"export GGML_BACKEND_PATH=(.*)", done.out), [str(self.installed)])

    def test_llama_without_backends_beside_it_gets_the_variable(self):
        static = self.root / "static"
        static.mkdir()
        (static / "llama-cli").touch(0o755)
        self.assertIn(f"export GGML_BACKEND_PATH={self.installed}\n", self.install(path=static).out)
        self.install("--remove", path=static)

    def test_plugin_is_linked_where_the_found_llama_looks(self):
        folder = self.llama()
        done = self.install(path=folder)
        self.assertEqual((folder / LINK).resolve(), self.installed.resolve())
        self.assertNotIn("export GGML_BACKEND_PATH", done.out)
        # Installing again must work, as for an update.
        self.install(path=folder)
        self.assertEqual((folder / LINK).resolve(), self.installed.resolve())

    def test_a_link_to_an_older_plugin_is_replaced_and_those_of_others_are_left(self):
        folder = self.llama()
        ours, other = self.root / "old" / "lib" / "ggml-rust-npu" / PLUGIN, self.root / "gone.so"
        for target, is_replaced in [(ours, True), (other, False)]:
            with self.subTest(target.name):
                (folder / LINK).unlink(missing_ok=True)
                (folder / LINK).symlink_to(target)
                done = self.install("--into", folder)
                self.assertEqual((folder / LINK).readlink(), self.installed if is_replaced else target)
                self.assertEqual("export GGML_BACKEND_PATH" in done.out, not is_replaced)

    def test_a_link_to_an_older_plugin_that_cannot_be_replaced_is_named(self):
        folder = self.llama()
        (folder / LINK).symlink_to(self.root / "old" / "lib" / "ggml-rust-npu" / PLUGIN)
        # Root may remove any file, so a stand-in for `rm` refuses.
        done = self.install("--into", folder, code=1, path=self.stand_in("rm", "exit 1"))
        self.assertEqual(done.log, f"install.sh: {folder / LINK}, a link of an earlier installation, cannot be replaced\n")
        self.assertNotIn("ggml's own", done.out)

    def test_place_of_ggmls_own_backend_is_left_to_it(self):
        for name in (LINK, "libggml-hexagon-v75.so"):
            with self.subTest(name):
                folder = self.root / "into"
                folder.mkdir(exist_ok=True)
                (folder / name).write_text("of ggml", encoding="utf-8")
                done = self.install("--into", folder)
                self.assertIn("export GGML_BACKEND_PATH", done.out)
                self.assertEqual([path.name for path in folder.iterdir()], [name])
                (folder / name).unlink()

    def test_remove_leaves_nothing(self):
        folder = self.llama()
        self.install("--into", folder)
        self.install("--into", folder, "--remove")
        self.assertEqual([path for path in self.prefix.rglob("*") if not path.is_dir()], [])
        self.assertFalse((folder / LINK).is_symlink())

    def test_damaged_file_is_refused(self):
        (self.release / "lib" / PLUGIN).write_text("damaged", encoding="utf-8")
        done = self.install(code=1)
        self.assertIn("missing or damaged", done.log)
        self.assertFalse(self.prefix.exists())

    def stand_in(self, name, script):
        """Writes a program that replaces `name`; returns its folder, for PATH."""
        file = self.root / "stand-in" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)
        return file.parent

    def test_first_copy_that_fails_ends_it_with_one_line(self):
        # Root may write everywhere, so a stand-in for `cp` refuses.
        refusing = self.stand_in("cp", 'echo "cp: cannot create \'$2\': Permission denied" >&2; exit 1')
        done = self.install(code=1, path=refusing)
        self.assertEqual((done.out, len(done.log.splitlines())), ("", 1), done.all)
        self.assertRegex(done.log, r"^install\.sh: .*/lib/ggml-rust-npu/.* was not written: .*Permission denied$")
        self.assertEqual([path for path in self.prefix.rglob("*") if not path.is_dir()], [])

    def test_half_a_copy_is_removed(self):
        self.install()
        done = self.install(code=1, path=self.stand_in("mv", "echo 'mv: no space' >&2; exit 1"))
        self.assertIn("no space", done.log)
        self.assertEqual([path.name for path in self.prefix.rglob("*.new")], [])
        self.assertEqual(self.installed.read_text(encoding="utf-8"), f"lib/{PLUGIN}")

    def test_link_that_fails_ends_it(self):
        done = self.install("--into", self.llama(), code=1, path=self.stand_in("ln", "exit 1"))
        self.assertNotIn("export", done.out)

    def test_tarball_without_plugin_and_tool_says_so_and_installs_nothing(self):
        for name in (f"lib/{PLUGIN}", "bin/ggml-npu"):
            (self.release / name).unlink()
        self.write_sums()
        folder = self.llama()
        done = self.install("--into", folder, code=1)
        self.assertIn(f"this tarball lacks lib/{PLUGIN} bin/ggml-npu", done.log)
        self.assertEqual(done.out, "")
        self.assertFalse(self.prefix.exists())
        self.assertFalse((folder / LINK).is_symlink())

    def test_variable_for_the_dsp_is_printed_only_where_its_libraries_are(self):
        aarch64 = self.stand_in("uname", "echo aarch64")
        variable = f"export DSP_LIBRARY_PATH={self.installed.parent}"
        self.assertIn(variable, self.install(path=aarch64).out)
        self.install("--remove", path=aarch64)
        (self.release / "lib" / "libggml_rust_npu_skel_v75.so").unlink()
        self.write_sums()
        self.assertNotIn(variable, self.install(path=aarch64).out)

    def test_wrong_arguments_are_refused(self):
        self.assertIn("unknown option --prefx", self.install("--prefx", code=1).log)
        self.assertIn("names no folder", self.install("--into", self.root / "none", code=1).log)
