"""Runs libllama on tokens.

Usage: tokens.py LIBRARIES MODEL COUNT OUT    writes the vectors of COUNT tokens as F32

Debian's libllama; LIBRARIES is the folder of it and its dependencies.
"""

import ctypes
import sys
from pathlib import Path

from vision import Values, function, need


class Batch(ctypes.Structure):
    """SOURCE: struct llama_batch, include/llama.h of llama.cpp 0.5.0."""

    _fields_ = [("n_tokens", ctypes.c_int32), *((name, ctypes.c_void_p) for name in (
        "token", "embd", "pos", "n_seq_id", "seq_id", "logits"))]


def main():
    folder, model_path, count, out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    pointer = ctypes.c_void_p
    ggml, llama = (ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in ("libggml.so.0", "libllama.so.0"))
    ggml.ggml_backend_load_all()
    load = function(llama, "llama_model_load_from_file", pointer, ctypes.c_char_p, Values)
    model = need(load(model_path.encode(), function(llama, "llama_model_default_params", Values)()), "model")
    start = function(llama, "llama_init_from_model", pointer, pointer, Values)
    context = need(start(model, function(llama, "llama_context_default_params", Values)()), "context")
    function(llama, "llama_set_embeddings", None, pointer, ctypes.c_bool)(context, True)
    tokens = (ctypes.c_int32 * count)(*((7 * i) % 64 for i in range(count)))
    batch = function(llama, "llama_batch_get_one", Batch, pointer, ctypes.c_int32)(tokens, count)
    if function(llama, "llama_encode", ctypes.c_int32, pointer, Batch)(context, batch) != 0:
        sys.exit("the tokens were not computed")
    width = function(llama, "llama_model_n_embd_out", ctypes.c_int32, pointer)(model)
    vectors = need(function(llama, "llama_get_embeddings", pointer, pointer)(context), "vectors")
    with open(out, "wb") as file:
        file.write(ctypes.string_at(vectors, 4 * width * count))
    function(llama, "llama_free", None, pointer)(context)


if __name__ == "__main__":
    main()
