"""Small embedding models of random numbers for texts of 2,000 tokens, a token for each byte: a BERT with rotated positions,
which pools by the mean, and a Qwen3, which pools by the last token."""

import array
import random
import struct

import model_file
import random_model

EMBEDDING, HIDDEN, HEADS, LAYERS, CONTEXT = 256, 512, 4, 2, 2048
# SOURCE: enum llama_pooling_type, llama.h of llama.cpp 0.5.0.
MEAN, LAST = 1, 3
# The number of elements in a block of Q8_0.
BLOCK = 32
BERT, QWEN3 = "nomic-bert", "qwen3"


def sizes(arch):
    common = {"context_length": CONTEXT, "embedding_length": EMBEDDING, "block_count": LAYERS, "feed_forward_length": HIDDEN,
              "attention.head_count": HEADS, "rope.freq_base": 1e4}
    if arch == BERT:
        return {**common, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": MEAN}
    return {**common, "attention.head_count_kv": HEADS // 2, "attention.key_length": EMBEDDING // HEADS,
            "attention.value_length": EMBEDDING // HEADS, "attention.layer_norm_rms_epsilon": 1e-6, "pooling_type": LAST}


def shapes(arch, words):
    """The shape of each tensor, by its name; those of one dimension that end in `weight` are factors."""
    head, keys = EMBEDDING // HEADS, EMBEDDING if arch == BERT else EMBEDDING // 2
    found = {"token_embd.weight": (EMBEDDING, words)}
    products = {"attn_q": (EMBEDDING, EMBEDDING), "attn_k": (EMBEDDING, keys), "attn_v": (EMBEDDING, keys),
                "attn_output": (EMBEDDING, EMBEDDING), "ffn_gate": (EMBEDDING, HIDDEN), "ffn_up": (EMBEDDING, HIDDEN),
                "ffn_down": (HIDDEN, EMBEDDING)}
    if arch == BERT:
        found |= {"token_types.weight": (EMBEDDING, 2), "token_embd_norm.weight": (EMBEDDING,),
                  "token_embd_norm.bias": (EMBEDDING,)}
        norms, parts = {"attn_output_norm": EMBEDDING, "layer_output_norm": EMBEDDING}, ("weight", "bias")
    else:
        found["output_norm.weight"] = (EMBEDDING,)
        norms = {"attn_norm": EMBEDDING, "ffn_norm": EMBEDDING, "attn_q_norm": head, "attn_k_norm": head}
        parts = ("weight",)
    for layer in range(LAYERS):
        found |= {f"blk.{layer}.{name}.{part}": (wide,) for name, wide in norms.items() for part in parts}
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in products.items()}
    return found


def rounded(values):
    """Rounds numbers to blocks of Q8_0; returns the bytes of the blocks, and their values."""
    blocks, exact = b"", []
    for at in range(0, len(values), BLOCK):
        block = values[at:at + BLOCK]
        scale, = struct.unpack("<e", struct.pack("<e", max(map(abs, block)) / 127))
        steps = [max(-127, min(127, round(value / scale))) for value in block]
        blocks += struct.pack(f"<e{BLOCK}b", scale, *steps)
        exact += [scale * step for step in steps]
    return blocks, exact


def write(path, exact_path, arch):
    """Writes a model with weights in Q8_0 to `path`, and the same numbers in F32 to `exact_path`."""
    numbers, tensors, exact, entries = random.Random(9), {}, {}, random_model.vocabulary()

    def uniform(count, spread, middle=0.0):
        steps = array.array("h", numbers.randbytes(2 * count))
        return [middle + spread * step / 2**15 for step in steps]

    for name, shape in shapes(arch, len(entries["tokenizer.ggml.tokens"])).items():
        if len(shape) == 1:
            values = uniform(shape[0], 0.2, 1.0 if name.endswith("weight") else 0.0)
        else:
            values = uniform(shape[0] * shape[1], 1.0 if name.startswith("token") else (3 / shape[0]) ** 0.5)
        tensors[name] = exact[name] = (shape, values)
        if len(shape) == 2 and not name.startswith("token"):
            blocks, values = rounded(values)
            tensors[name], exact[name] = (shape, blocks, "q8_0"), (shape, values)
    if arch == BERT:
        entries["tokenizer.ggml.token_type_count"] = 2
    entries |= {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in sizes(arch).items()}}
    model_file.write(path, entries, tensors)
    model_file.write(exact_path, entries, exact)
