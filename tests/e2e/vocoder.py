"""A small WavTokenizer of random numbers, which makes frequencies of tokens.

SOURCE of names and shapes: src/models/wavtokenizer-dec.cpp of llama.cpp 0.5.0.
"""

import array
import math
import random

import model_file

ARCH = "wavtokenizer-dec"
WORDS, FEATURES, WIDE, HIDDEN, OUT, LAYERS = 64, 96, 128, 384, 96, 2
KEYS = {"vocab_size": WORDS, "context_length": 1024, "features_length": FEATURES, "embedding_length": FEATURES,
        "embedding_length_out": OUT, "feed_forward_length": HIDDEN, "block_count": 6, "attention.head_count": 1,
        "attention.layer_norm_epsilon": 1e-6, "attention.group_norm_epsilon": 1e-6, "attention.group_norm_groups": 8,
        "attention.causal": False, "posnet.embedding_length": WIDE, "posnet.block_count": 6,
        "convnext.embedding_length": WIDE, "convnext.block_count": LAYERS}


def shapes():
    """The shape of each tensor, by its name without `.weight`; biases follow from them."""
    found = {"token_embd": (FEATURES, WORDS), "conv1d": (7, FEATURES, WIDE), "token_embd_norm": (WIDE,), "output_norm": (WIDE,),
             "output": (WIDE, OUT), "posnet.2.attn_norm": (1, WIDE), "posnet.5.attn_norm": (1, WIDE)}
    found |= {f"posnet.2.attn_{name}": (1, WIDE, WIDE) for name in ("q", "k", "v", "output")}
    for block in (0, 1, 3, 4):
        for part in (1, 2):
            found |= {f"posnet.{block}.norm{part}": (1, WIDE), f"posnet.{block}.conv{part}": (3, WIDE, WIDE)}
    for layer in range(LAYERS):
        found |= {f"convnext.{layer}.{name}": shape for name, shape in {
            "dw": (7, 1, WIDE), "norm": (WIDE,), "pw1": (WIDE, HIDDEN), "pw2": (HIDDEN, WIDE), "gamma": (WIDE,)}.items()}
    return found


def write(path):
    """Writes the model, with products and convolutions in F16, to `path`, which is returned."""
    numbers, tensors = random.Random(3), {}

    def add(name, shape, spread, middle=0.0, *kind):
        steps = array.array("h", numbers.randbytes(2 * math.prod(shape)))
        tensors[name] = (shape, [middle + spread * step / 2**15 for step in steps], *kind)

    for name, shape in shapes().items():
        is_factor = "norm" in name or "gamma" in name
        if is_factor or name == "token_embd":
            add(f"{name}.weight", shape, 0.3 if is_factor else 1.0, 1.0 if is_factor else 0.0)
        else:
            add(f"{name}.weight", shape, (3 / math.prod(shape[:-1])) ** 0.5, 0.0, "f16")
        if name not in ("token_embd", "convnext.0.gamma", "convnext.1.gamma"):
            is_column = len(shape) == 3 or name.startswith("posnet")
            add(f"{name}.bias", (1, shape[-1]) if is_column else (shape[-1],), 0.1)
    model_file.write(path, {"general.architecture": ARCH, "tokenizer.ggml.model": "none",
                            **{f"{ARCH}.{key}": value for key, value in KEYS.items()}}, tensors)
    return path
