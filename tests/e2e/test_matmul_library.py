"""librknpu_matmul.so, the vendor's matmul functions over our own command streams, as a C program with the vendor's headers
uses it: over both emulated kernel drivers."""

import re
import subprocess
from pathlib import Path

from harness import LOGS, Case, cpu_env

import fetch
import project
from project import ROOT, TARGET

NAME = "librknpu_matmul.so"
FOLDER = TARGET / "debug"


class MatmulLibrary(Case):
    @classmethod
    def setUpClass(cls):
        # One selection, so that dependencies of both packages are compiled once.
        packages = ["--package", "rknn-loop", "--package", "rknpu-matmul"]
        project.run(["cargo", "build", "--locked", *packages, "--target-dir", TARGET], LOGS / "matmul-library.log", cwd=ROOT)
        cls.headers = fetch.rknn_headers()
        cls.program = TARGET / "matmul-multiply"
        source = Path(__file__).parent / "matmul" / "multiply.c"
        project.run(["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{cls.headers}", source, "-o", cls.program,
                     f"-L{FOLDER}", "-lrknpu_matmul", "-Wl,--no-undefined", f"-Wl,-rpath,{FOLDER}"],
                    LOGS / "matmul-library.log")

    def run_program(self, *args, **variables):
        return self.run_command("multiply", [self.program, *args], cpu_env(**variables))

    def emulated(self, **variables):
        # The loop has the vendor's functions, too: ours come first.
        loaded = f"{FOLDER / NAME}:{FOLDER / 'librknn_loop.so'}"
        return self.run_program(LD_PRELOAD=loaded, **variables)

    def test_products_of_a_c_program_are_right(self):
        for variables in ({"RKNN_LOOP_STRICT": "1"}, {"RKNN_LOOP_KERNEL": "rocket"}):
            with self.subTest(**variables):
                done = self.emulated(**variables)
                self.assertEqual(done.code, 0, done.all)
                products = re.findall(r"^RKNN_\w+ M=\d+ K=\d+ N=\d+: 0 wrong$", done.out, re.M)
                self.assertEqual(len(products), 15, done.out)
                # Errors are said where a C program's user sees them.
                self.assertIn("rknpu_matmul: rknn_matmul_create: no command stream is known for matmul type 5", done.log)

    def test_without_a_driver_there_is_one_line(self):
        done = self.run_program()
        self.assertEqual((done.code, len(re.findall("cannot drive the NPU", done.log))), (1, 1), done.log)
        self.assertIn("rknn_matmul_create failed", done.log)

    def test_functions_are_all_of_the_vendors_header(self):
        text = (self.headers / "rknn_matmul_api.h").read_text(encoding="utf-8")
        declared = set(re.findall(r"^ *int (rknn_\w+)\(", text, re.M))
        self.assertEqual(len(declared), 10)
        listed = subprocess.run(["nm", "-D", "--defined-only", FOLDER / NAME], stdout=subprocess.PIPE, text=True, check=True)
        exported = set(re.findall(r" T (rknn_\w+)$", listed.stdout, re.M))
        # Functions of the vendor's other header, which programs need, too.
        memory = {"rknn_create_mem", "rknn_create_mem_from_fd", "rknn_destroy_mem", "rknn_mem_sync", "rknn_query"}
        self.assertEqual(exported, declared | memory)

    def test_structures_are_those_of_the_vendors_header(self):
        done = self.run_program("structures")
        header = dict(line.split() for line in done.out.splitlines())
        # Numbers that the compiler has checked for the library.
        source = (ROOT / "rknpu-ops" / "src" / "ffi.rs").read_text(encoding="utf-8")
        names = {"MatmulInfo": "rknn_matmul_info", "TensorAttr": "rknn_matmul_tensor_attr", "IoAttr": "rknn_matmul_io_attr",
                 "QuantParams": "rknn_quant_params", "MatmulShape": "rknn_matmul_shape", "TensorMem": "rknn_tensor_mem",
                 "SdkVersion": "rknn_sdk_version"}
        ours = re.findall(r"assert_abi!\((\w+): (\d+) \{([^}]*)\}", source)
        self.assertEqual({name for name, _, _ in ours}, set(names))
        for name, size, fields in ours:
            theirs = [int(offset) for field, offset in header.items() if field.startswith(names[name] + ".")]
            self.assertEqual((int(size), [int(offset) for offset in re.findall(r" @ (\d+)", fields)]),
                             (int(header[names[name]]), theirs), name)
