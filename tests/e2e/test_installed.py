"""A static ggml that CMake installed has the archive of Rust code next to its library, and find_package links both."""

import re
import shutil
import tempfile
from pathlib import Path

from harness import Case

import fetch
from project import ROOT, tool_env

# A stand-in for ggml: its function for backends, without their sources, and the part of ggml's file that makes the package.
GGML = """
cmake_minimum_required(VERSION 3.14)
project(ggml C)
include(GNUInstallDirs)
set(GGML_VERSION 0.0.1)
function(ggml_add_backend_library backend)
    add_library(${backend} backend.c)
    install(TARGETS ${backend})
    set(GGML_AVAILABLE_BACKENDS ${backend} CACHE INTERNAL "")
endfunction()
add_library(ggml ggml.c)
add_library(ggml-base base.c)
install(TARGETS ggml ggml-base)
install(FILES ggml.h DESTINATION include)
include(${GGML_RUST_NPU_DIR}/ggml-glue/CMakeLists.txt)
include(CMakePackageConfigHelpers)
include(package.cmake)
"""
PROGRAM = """
cmake_minimum_required(VERSION 3.14)
project(program C)
find_package(ggml REQUIRED)
add_executable(program main.c)
target_link_libraries(program PRIVATE ggml::ggml)
"""
SOURCES = {
    "ggml/CMakeLists.txt": GGML,
    "ggml/ggml.h": "int ggml(void);",
    "ggml/base.c": "int base(void) { return 1; }",
    "ggml/ggml.c": "int reg(void); int ggml(void) { return reg(); }",
    "ggml/backend.c": "int npu_version(void); int base(void); int reg(void) { return npu_version() + base(); }",
    "archive.c": "int npu_version(void) { return 41; }",
    "program/CMakeLists.txt": PROGRAM,
    "program/main.c": "int ggml(void); int main(void) { return ggml(); }",
}


class Installed(Case):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        # CMake may be the one that this checkout installs, which a clone with linked programs has not.
        fetch.tools()
        for name, text in SOURCES.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text, encoding="utf-8")
        source = fetch.llama() / "ggml"
        (package,) = re.findall(r"^# Create CMake package$.*?(?=^if \(MSVC\))",
                                (source / "CMakeLists.txt").read_text(encoding="utf-8"), re.M | re.S)
        (self.root / "ggml" / "package.cmake").write_text(package, encoding="utf-8")
        shutil.copytree(source / "cmake", self.root / "ggml" / "cmake")
        self.succeed_in_root("cc", "-c", "archive.c")
        self.succeed_in_root("ar", "rcs", "libprebuilt.a", "archive.o")

    def succeed_in_root(self, *command):
        done = self.run_command(command[0], command, tool_env(), cwd=self.root)
        self.assertEqual(done.code, 0, done.all)

    def cmake(self, name, *options):
        """Configures and builds a project."""
        self.succeed_in_root("cmake", "-S", name, "-B", f"{name}-build", *options)
        self.succeed_in_root("cmake", "--build", f"{name}-build")

    def test_program_links_an_installed_static_ggml(self):
        prefix = self.root / "prefix"
        self.cmake("ggml", f"-DGGML_RUST_NPU_DIR={ROOT}", f"-DGGML_RUST_NPU_LIB={self.root / 'libprebuilt.a'}",
                   "-DBUILD_SHARED_LIBS=OFF", f"-DCMAKE_INSTALL_PREFIX={prefix}")
        self.succeed_in_root("cmake", "--install", "ggml-build")
        # Moved, because a package is built in one place and used in another.
        moved = prefix.rename(self.root / "moved")
        self.cmake("program", f"-DCMAKE_PREFIX_PATH={moved}")
        self.assertEqual(self.run_command("program", [self.root / "program-build" / "program"], tool_env()).code, 42)
