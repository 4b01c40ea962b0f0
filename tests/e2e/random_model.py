"""Small models of random numbers, with a token for each byte: their texts mean nothing, and are the same each time."""

import array
import random

import model_file

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def vocabulary():
    """A token for each byte. SOURCE: enum llama_token_type, llama.h of llama.cpp 0.5.0."""
    others = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "▁": NORMAL}
    tokens = [*others, *(f"<0x{byte:02X}>" for byte in range(256))]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [*others.values(), *[BYTE] * 256],
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def ascii_only():
    """A request's bias against tokens that are no text: llama-server holds back its answer about those."""
    return [[vocabulary()["tokenizer.ggml.tokens"].index(f"<0x{byte:02X}>"), False] for byte in range(128, 256)]


def write(path, seed, embedding, hidden, heads, layers=2, context=256, window=0, sections=()):
    """Writes a llama in F32 to `path`, which is returned; with `window`, a gemma3 whose first layer sees so many tokens, and
    with `sections`, a qwen2vl, which rotates so many pairs of a head by each of a token's positions."""
    numbers, tensors = random.Random(seed), {}
    entries = vocabulary()
    words = len(entries["tokenizer.ggml.tokens"])

    def add(name, *shape):
        if len(shape) == 1:
            tensors[name] = (shape, [1.0] * shape[0])
            return
        count, unit = shape[0] * shape[1], shape[0] ** -0.5 / 2**15
        values = array.array("h", numbers.randbytes(2 * count))
        tensors[name] = (shape, array.array("f", (value * unit for value in values)).tobytes())

    add("token_embd.weight", embedding, words)
    add("output.weight", embedding, words)
    add("output_norm.weight", embedding)
    for layer in range(layers):
        if window:
            add(f"blk.{layer}.post_attention_norm.weight", embedding)
            add(f"blk.{layer}.post_ffw_norm.weight", embedding)
            for name in "attn_q_norm", "attn_k_norm":
                add(f"blk.{layer}.{name}.weight", embedding // heads)
        add(f"blk.{layer}.attn_norm.weight", embedding)
        add(f"blk.{layer}.ffn_norm.weight", embedding)
        for name in "attn_q", "attn_k", "attn_v", "attn_output":
            add(f"blk.{layer}.{name}.weight", embedding, embedding)
        for name in "ffn_gate", "ffn_up":
            add(f"blk.{layer}.{name}.weight", embedding, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, embedding)
    sizes = {"context_length": context, "embedding_length": embedding, "block_count": layers, "feed_forward_length": hidden,
             "rope.dimension_count": embedding // heads, "attention.head_count": heads, "attention.head_count_kv": heads,
             "vocab_size": words, "attention.layer_norm_rms_epsilon": 1e-5}
    if window:
        sizes |= {"attention.sliding_window": window, "attention.sliding_window_pattern": 2,
                  "attention.key_length": embedding // heads, "attention.value_length": embedding // heads}
    if sections:
        sizes["rope.dimension_sections"] = sections
    name = "gemma3" if window else "qwen2vl" if sections else "llama"
    model_file.write(path, {"general.architecture": name, **{f"{name}.{key}": size for key, size in sizes.items()}, **entries},
                     tensors)
    return path
