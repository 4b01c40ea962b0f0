"""A small llama in F32 with random weights, for what needs a model of a certain shape and no sense."""

import array
import random

import model_file

LAYERS, EMBEDDING, HIDDEN, HEADS = 2, 512, 2560, 8

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def vocabulary():
    """A token for each byte. SOURCE: enum llama_token_type, llama.h of llama.cpp 0.5.0."""
    others = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "▁": NORMAL}
    tokens = [*others, *(f"<0x{byte:02X}>" for byte in range(256))]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [*others.values(), *[BYTE] * 256],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def write(path, context=256):
    """Writes the model; `context` is the number of tokens that it says it was trained with."""
    numbers, tensors = random.Random(43), {}
    entries = vocabulary()
    words = len(entries["tokenizer.ggml.tokens"])

    def add(name, *shape):
        if len(shape) == 1:
            tensors[name] = (shape, [1.0] * shape[0])
            return
        count, unit = shape[0] * shape[1], shape[0] ** -0.5 / 2**15
        values = array.array("h", numbers.randbytes(2 * count))
        tensors[name] = (shape, array.array("f", (value * unit for value in values)).tobytes())

    add("token_embd.weight", EMBEDDING, words)
    add("output.weight", EMBEDDING, words)
    add("output_norm.weight", EMBEDDING)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", EMBEDDING)
        add(f"blk.{layer}.ffn_norm.weight", EMBEDDING)
        for name in "attn_q", "attn_k", "attn_v", "attn_output":
            add(f"blk.{layer}.{name}.weight", EMBEDDING, EMBEDDING)
        for name in "ffn_gate", "ffn_up":
            add(f"blk.{layer}.{name}.weight", EMBEDDING, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, EMBEDDING)
    sizes = {"context_length": context, "embedding_length": EMBEDDING, "block_count": LAYERS, "feed_forward_length": HIDDEN,
             "rope.dimension_count": EMBEDDING // HEADS, "attention.head_count": HEADS, "attention.head_count_kv": HEADS,
             "vocab_size": words, "attention.layer_norm_rms_epsilon": 1e-5}
    model_file.write(path, {"general.architecture": "llama", **{f"llama.{key}": size for key, size in sizes.items()},
                            **entries}, tensors)
    return path
