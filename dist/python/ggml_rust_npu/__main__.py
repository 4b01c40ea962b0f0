"""`python -m ggml_rust_npu` prints the line that sets ggml's variable, for a shell: `eval "$(python -m ggml_rust_npu)"`.

With `--path`, it prints the plugin's path alone.
"""

import os
import shlex
import sys

from ggml_rust_npu import FOLDER, PLUGIN, VARIABLE


def main():
    """Prints the line, or the path; returns 2 for any other argument."""
    arguments = sys.argv[1:]
    if arguments not in ([], ["--path"]):
        print("usage: python -m ggml_rust_npu [--path]", file=sys.stderr)
        return 2
    print(PLUGIN if arguments else f"export {VARIABLE}={shlex.quote(str(PLUGIN))}")
    return 0


def tool():
    """Becomes the program `ggml-npu`, with the folder of the DSP's libraries in FastRPC's variable."""
    os.environ.setdefault("DSP_LIBRARY_PATH", str(FOLDER))
    program = FOLDER.parent / "bin" / "ggml-npu"
    os.execv(program, ["ggml-npu", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
