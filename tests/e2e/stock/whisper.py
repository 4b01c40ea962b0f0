"""Makes a whisper model with random weights, and runs a whisper library on it.

Usage: whisper.py make MODEL [STATE HEADS LAYERS]    of an encoder and a decoder; small if not given
       whisper.py run LIBRARY MODEL LOGITS [plain]    encodes a tone, decodes tokens, writes the logits of the last as F32;
                                              plain: without flash attention
"""

import ctypes
import math
import random
import struct
import sys
from typing import NamedTuple

VOCABULARY, WORDS = 51865, 50257
AUDIO_CONTEXT, TEXT_CONTEXT = 1500, 448
MELS, FILTER = 80, 201
F32, F16 = 0, 1

SAMPLES = 16000
TOKENS = [50258, 50259, 50359, 1000, 2000]


# Bytes for the struct of settings. More than it has, because it is passed and returned by value, so both sides keep it in
# memory.
Settings = ctypes.c_uint8 * 1024
# The index of its second byte. SOURCE: struct whisper_context_params, include/whisper.h of whisper.cpp 1.9.3.
FLASH_ATTENTION = 1


class Values(ctypes.Structure):
    _fields_ = [("bytes", Settings)]


class Sizes(NamedTuple):
    """Sizes of the encoder, which are the decoder's, too."""

    state: int = 128
    heads: int = 2
    layers: int = 2


def tensors(state, layers):
    """(name, shape, type, spread) of each tensor; the shape is innermost first. A spread of None is for factors of 1."""
    yield "encoder.positional_embedding", (state, AUDIO_CONTEXT), F32, 0.1
    yield "encoder.conv1.weight", (3, MELS, state), F16, 1 / math.sqrt(3 * MELS)
    yield "encoder.conv1.bias", (1, state), F32, 0.1
    yield "encoder.conv2.weight", (3, state, state), F16, 1 / math.sqrt(3 * state)
    yield "encoder.conv2.bias", (1, state), F32, 0.1
    yield from norm("encoder.ln_post", state)
    for layer in range(layers):
        yield from block(f"encoder.blocks.{layer}", ["attn"], state)
    yield "decoder.positional_embedding", (state, TEXT_CONTEXT), F32, 0.1
    yield "decoder.token_embedding.weight", (state, VOCABULARY), F16, 0.3
    yield from norm("decoder.ln", state)
    for layer in range(layers):
        yield from block(f"decoder.blocks.{layer}", ["attn", "cross_attn"], state)


def norm(name, state):
    yield f"{name}.weight", (state,), F32, None
    yield f"{name}.bias", (state,), F32, 0.1


def linear(name, inputs, outputs, bias=True):
    yield f"{name}.weight", (inputs, outputs), F16, 1 / math.sqrt(inputs)
    if bias:
        yield f"{name}.bias", (outputs,), F32, 0.1


def block(name, attentions, state):
    yield from norm(f"{name}.mlp_ln", state)
    yield from linear(f"{name}.mlp.0", state, 4 * state)
    yield from linear(f"{name}.mlp.2", 4 * state, state)
    for attention in attentions:
        yield from norm(f"{name}.{attention}_ln", state)
        for part in ("query", "key", "value", "out"):
            yield from linear(f"{name}.{attention}.{part}", state, state, bias=part != "key")


def make(path, *sizes):
    sizes = Sizes(*map(int, sizes))
    rng = random.Random(1)
    draws = [rng.gauss(0, 1) for _ in range(256)]
    with open(path, "wb") as file:
        def ints(*values):
            file.write(struct.pack(f"<{len(values)}i", *values))

        ints(0x67676d6c, VOCABULARY, AUDIO_CONTEXT, *sizes, TEXT_CONTEXT, *sizes, MELS, F16)
        ints(MELS, FILTER)
        file.write(struct.pack(f"<{MELS * FILTER}f", *(0.02 * rng.random() for _ in range(MELS * FILTER))))
        ints(WORDS)
        for index in range(WORDS):
            word = f" w{index}".encode()
            ints(len(word))
            file.write(word)
        for name, shape, kind, spread in tensors(sizes.state, sizes.layers):
            ints(len(shape), len(name), kind, *shape)
            file.write(name.encode())
            code = "<e" if kind == F16 else "<f"
            table = [struct.pack(code, 1.0 if spread is None else spread * draw) for draw in draws]
            file.write(b"".join(table[byte] for byte in rng.randbytes(math.prod(shape))))


def run(library, model, logits, attention="flash"):
    whisper = ctypes.CDLL(library)
    # Whisper's own programs call this, too, in the ggml that the library uses.
    whisper.ggml_backend_load_all()
    whisper.whisper_context_default_params.restype = Values
    load = whisper.whisper_init_from_file_with_params
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, Values)
    whisper.whisper_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    settings = whisper.whisper_context_default_params()
    if settings.bytes[FLASH_ATTENTION] != 1:
        sys.exit("flash attention is not the default")
    settings.bytes[FLASH_ATTENTION] = attention == "flash"
    context = ctypes.c_void_p(load(model.encode(), settings))
    if not context:
        sys.exit("cannot load the model")
    tone = (ctypes.c_float * SAMPLES)(*(0.5 * math.sin(0.2 * i) for i in range(SAMPLES)))
    tokens = (ctypes.c_int32 * len(TOKENS))(*TOKENS)
    steps = [("mel", whisper.whisper_pcm_to_mel(context, tone, SAMPLES, 1)), ("encode", whisper.whisper_encode(context, 0, 1)),
             ("decode", whisper.whisper_decode(context, tokens, len(TOKENS), 0, 1))]
    for step, code in steps:
        if code != 0:
            sys.exit(f"{step}: {code}")
    rows = ctypes.cast(whisper.whisper_get_logits(context), ctypes.POINTER(ctypes.c_float * VOCABULARY))
    with open(logits, "wb") as file:
        file.write(bytes(rows[len(TOKENS) - 1]))


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](*sys.argv[2:])
