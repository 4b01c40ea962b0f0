"""Runs libmtmd on an image or on sound of noise.

Usage: vision.py LIBRARIES MODEL MMPROJ SIDE OUT    writes the embeddings of an image with SIDE x SIDE pixels as F32,
                                                computed twice
       vision.py LIBRARIES MODEL MMPROJ 2s OUT      those of so many seconds of sound

Debian's libmtmd; LIBRARIES is the folder of it and its dependencies.
"""

import array
import ctypes
import random
import sys
from pathlib import Path

# Larger than the structs of settings, which are passed and returned by value. Both sides keep them in memory, and bytes after
# their end are not read. So the default settings pass through without their layout being known.
Settings = ctypes.c_uint8 * 1024

IMAGE, AUDIO = 1, 2  # SOURCE: enum mtmd_input_chunk_type, tools/mtmd/mtmd.h


class Values(ctypes.Structure):
    _fields_ = [("bytes", Settings)]


class Text(ctypes.Structure):
    """SOURCE: struct mtmd_input_text, tools/mtmd/mtmd.h of llama.cpp 0.5.0."""

    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t), ("add_special", ctypes.c_bool),
                ("parse_special", ctypes.c_bool)]


def function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


def need(pointer, what):
    if not pointer:
        sys.exit(f"no {what}")
    return pointer


def noise(mtmd, context, size):
    """Returns a picture, or sound if the size ends in `s`."""
    numbers, pointer = random.Random(7), ctypes.c_void_p
    if size.endswith("s"):
        rate = function(mtmd, "mtmd_get_audio_sample_rate", ctypes.c_int, pointer)(context)
        steps = array.array("h", numbers.randbytes(2 * rate * int(size[:-1])))
        samples = (ctypes.c_float * len(steps))(*(step / 2**16 for step in steps))
        of_sound = function(mtmd, "mtmd_bitmap_init_from_audio", pointer, ctypes.c_size_t, ctypes.c_void_p)
        return of_sound(len(steps), samples)
    side = int(size)
    of_image = function(mtmd, "mtmd_bitmap_init", pointer, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p)
    return of_image(side, side, numbers.randbytes(3 * side * side))


def main():
    folder, model_path, mmproj, size, out = Path(sys.argv[1]), *sys.argv[2:6]
    pointer, number = ctypes.c_void_p, ctypes.c_size_t
    ggml, llama, mtmd = (ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
                         for name in ("libggml.so.0", "libllama.so.0", "libmtmd.so.0"))
    ggml.ggml_backend_load_all()
    settings = function(llama, "llama_model_default_params", Values)()
    load = function(llama, "llama_model_load_from_file", pointer, ctypes.c_char_p, Values)
    model = need(load(model_path.encode(), settings), "model")
    width = function(llama, "llama_model_n_embd", ctypes.c_int32, pointer)(model)
    settings = function(mtmd, "mtmd_context_params_default", Values)()
    start = function(mtmd, "mtmd_init_from_file", pointer, ctypes.c_char_p, pointer, Values)
    context = need(start(mmproj.encode(), model, settings), "context")

    bitmap = noise(mtmd, context, size)
    chunks = function(mtmd, "mtmd_input_chunks_init", pointer)()
    marker = function(mtmd, "mtmd_default_marker", ctypes.c_char_p)()
    text = Text(marker, len(marker), True, True)
    tokenize = function(mtmd, "mtmd_tokenize", ctypes.c_int32, pointer, pointer, ctypes.POINTER(Text),
                        ctypes.POINTER(pointer), number)
    if tokenize(context, chunks, ctypes.byref(text), (pointer * 1)(bitmap), 1) != 0:
        sys.exit("the input is no prompt")
    count = function(mtmd, "mtmd_input_chunks_size", number, pointer)(chunks)
    chunk_at = function(mtmd, "mtmd_input_chunks_get", pointer, pointer, number)
    kind = function(mtmd, "mtmd_input_chunk_get_type", ctypes.c_int, pointer)
    tokens = function(mtmd, "mtmd_input_chunk_get_n_tokens", number, pointer)
    encode = function(mtmd, "mtmd_encode_chunk", ctypes.c_int32, pointer, pointer)
    embeddings = function(mtmd, "mtmd_get_output_embd", ctypes.POINTER(ctypes.c_float), pointer)
    with open(out, "wb") as file:
        for chunk in (chunk_at(chunks, i) for i in range(count)):
            if kind(chunk) in (IMAGE, AUDIO):
                # A second time, with the state that the first one left in the context and the device.
                if encode(context, chunk) != 0 or encode(context, chunk) != 0:
                    sys.exit("the input was not computed")
                file.write(ctypes.string_at(embeddings(context), 4 * width * tokens(chunk)))


if __name__ == "__main__":
    main()
