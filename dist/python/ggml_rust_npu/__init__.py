"""The ggml backend for Qualcomm Hexagon and Rockchip NPUs: where its plugin is, and how a Python program loads it.

A program that reads `GGML_BACKEND_PATH` (llama.cpp from a package, whisper.cpp) needs the path that `python -m ggml_rust_npu`
prints. A Python program with llama-cpp-python calls `load()` before it loads the first model.
"""

import ctypes
import importlib
import importlib.util
import re
from pathlib import Path

__all__ = ["FOLDER", "PLUGIN", "VARIABLE", "LoadError", "load"]

# ggml reads this variable: the file of an additional backend, for programs that load their backends from files.
VARIABLE = "GGML_BACKEND_PATH"
# The plugin, with the libraries that it loads into a Snapdragon's DSP next to it.
FOLDER = Path(__file__).resolve().parent / "lib"
PLUGIN = FOLDER / "libggml-rust_npu.so"

# The name under which the plugin registers.
BACKEND = b"RUST_NPU"


class LoadError(Exception):
    """The backend cannot be registered, for the reason in the text."""


def load(library=None):
    """Registers the backend with the ggml of this process, and returns the names of its devices, such as `["HEX0"]`.

    Call it before the first model is loaded: a model that is loaded already stays where it is. A second call changes nothing and
    returns the same names. The list is empty on a machine without an NPU.

    library: the file of ggml's registry (`libggml.so`). Without it, the one that this process has open is used, after `import
    llama_cpp` if it has none.

    Raises LoadError if there is no ggml, if there are several, or if the plugin refuses the one it gets.
    """
    ggml = ctypes.CDLL(str(library or find_ggml()))
    functions = {
        "ggml_backend_load": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_reg_by_name": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_reg_dev_count": (ctypes.c_size_t, [ctypes.c_void_p]),
        "ggml_backend_reg_dev_get": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    }
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(ggml, name)
        except AttributeError:
            raise LoadError(f"{ggml._name} is no ggml that loads backends: it has no function {name}") from None
        function.restype, function.argtypes = result, arguments
    registry = ggml.ggml_backend_reg_by_name(BACKEND) or ggml.ggml_backend_load(str(PLUGIN).encode())
    if not registry:
        raise LoadError(f"{ggml._name} did not load {PLUGIN}; ggml's log has the reason")
    devices = [ggml.ggml_backend_reg_dev_get(registry, index) for index in range(ggml.ggml_backend_reg_dev_count(registry))]
    return [ggml.ggml_backend_dev_name(device).decode() for device in devices]


def find_ggml():
    """Returns the path of the ggml that this process has open."""
    found = open_libraries()
    if not found and importlib.util.find_spec("llama_cpp") is not None:
        importlib.import_module("llama_cpp")
        found = open_libraries()
    if not found:
        raise LoadError("this process has no libggml.so: install llama-cpp-python, or give load() the file")
    if len(found) > 1:
        raise LoadError(f"this process has several copies of ggml, so give load() one of them: {', '.join(found)}")
    return found[0]


def open_libraries():
    """Returns the paths of all files called `libggml.so`, with or without a version, that this process has open."""
    # In a line of this file, five words come before the path.
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = {words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if re.fullmatch(r"libggml\.so(\.\d+)*", Path(path).name))
