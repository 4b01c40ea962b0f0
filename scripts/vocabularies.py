"""Random models of new architectures with real vocabularies, as small files.

`test-llama-archs` of llama.cpp writes a random model of an architecture with 128 tokens that are not text. This module gives
it a vocabulary of llama.cpp's tree, so that it reads and writes text and its output has as many rows as a real model's.
`test-llama-archs` leaves Gemma 4 out, so this module writes it whole.

Matrices keep the numbers of `test-llama-archs`. Its norms are about 0 and its products have scales of about 0.1, so that a
token would depend on little but the token before it. Here norms are about 1 and no product has a scale, as in real models.
"""

import array
import math
import struct
from random import Random
from typing import NamedTuple

import models
import project
from model_file import Reader, write
from project import LOGS, Problem

VOCABULARIES = project.llama_source() / "models"

# The standard deviation of the logits.
LOGITS = 3.0
# How many random numbers a matrix has before they repeat. A prime that is larger than any vocabulary, so that each row begins
# at another one.
PERIOD = 262_147


class Recipe(NamedTuple):
    """An architecture as `test-llama-archs` names its file, a vocabulary, and a format that llama-quantize knows."""

    file: str
    vocabulary: str
    kind: str


# Most models use a vocabulary of their family. The tree has none for the following, which use another one:
# - lfm2 and lfm2moe: llama-bpe. llama.cpp splits text for LFM2 by the same rule.
# - gpt-oss: llama-bpe, which is also a vocabulary of byte pairs.
# - granitehybrid: refact, a small one for code and text. gemma4small also has a small one, to keep the file small.
RECIPES = {
    "qwen35": Recipe("qwen35-dense", "qwen35", "Q4_K_M"),
    "qwen35moe": Recipe("qwen35moe-moe", "qwen35", "Q4_K_M"),
    "qwen3next": Recipe("qwen3next-moe", "qwen2", "Q8_0"),
    "gemma4": Recipe("gemma4-dense", "gemma-4", "Q4_K_M"),
    "gemma4small": Recipe("gemma4-dense", "refact", "Q8_0"),
    "gemma4moe": Recipe("gemma4-moe", "gemma-4", "Q8_0"),
    # Experts are in MXFP4, as in the published files.
    "gpt-oss": Recipe("gpt-oss-moe", "llama-bpe", "MXFP4_MOE"),
    "lfm2": Recipe("lfm2-dense", "llama-bpe", "Q4_K_M"),
    "lfm2moe": Recipe("lfm2moe-moe", "llama-bpe", "Q8_0"),
    "granitehybrid": Recipe("granitehybrid-dense", "refact", "Q4_K_M"),
    "mamba2": Recipe("mamba2-dense", "gpt-neox", "Q8_0"),
    "deepseek2": Recipe("deepseek2-moe", "deepseek-llm", "Q4_K_M"),
    "cohere2moe": Recipe("cohere2moe-moe", "command-r", "Q4_K_M"),
}


def model(name, folder):
    """Writes the model of RECIPES[name] into `folder`; returns its path."""
    recipe = RECIPES[name]
    entries, _ = Reader(VOCABULARIES / f"ggml-vocab-{recipe.vocabulary}.gguf").contents()
    vocabulary = {key: value for key, value in entries.items() if key.startswith("tokenizer.")}
    plain, dest = folder / f"{name}-plain.gguf", folder / f"{name}.gguf"
    has_own_writer = recipe.file.startswith("gemma4-")
    contents = gemma4(recipe.file, vocabulary) if has_own_writer else equipped(recipe.file, vocabulary, folder)
    write(plain, *contents)
    models.quantize(plain, dest, recipe.kind)
    plain.unlink()
    return dest


def n_tokens(vocabulary):
    """Returns the number of tokens: the count of a list, after the kinds of the list and of its elements."""
    return struct.unpack_from("<Q", vocabulary["tokenizer.ggml.tokens"], 8)[0]


def normal(name, shape, deviation):
    """Returns a matrix of random numbers in FP16 in the form that `write` accepts. The numbers depend on the name only."""
    random = Random(name)
    period = struct.pack(f"<{PERIOD}e", *(random.gauss(0, deviation) for _ in range(PERIOD)))
    size = 2 * math.prod(shape)
    return shape, (period * -(-size // len(period)))[:size], "f16"


def norm(name, size, mean=1.0):
    """Returns the weights of a norm in the form that `write` accepts."""
    random = Random(name)
    return (size,), [random.gauss(mean, 0.1 * mean) for _ in range(size)]


def equipped(file, vocabulary, folder):
    """Returns the entries and tensors of a model of `test-llama-archs` with a vocabulary."""
    architecture = file.rpartition("-")[0]
    # The name is a regular expression; all models that match are written, both dense and with experts.
    project.run([project.binary("test-llama-archs"), "-s", "1", "-o", folder, "-a", f"^{architecture}$"],
                LOGS / "vocabularies.log", project.cpu_env())
    path = folder / f"{file}.gguf"
    if not path.exists():
        raise Problem(f"test-llama-archs wrote no {path.name}; see target/logs/vocabularies.log")
    entries, old = Reader(path).contents()
    entries = {key: value for key, value in entries.items() if not key.startswith("tokenizer.")} | vocabulary
    count = n_tokens(vocabulary)
    entries[f"{architecture}.vocab_size"] = count
    tensors = {}
    for name, (shape, data, _) in old.items():
        if name.endswith("scale"):
            continue
        if name in ("token_embd.weight", "output.weight"):
            rows = (shape[0], count)
            tensors[name] = normal(name, rows, 1.0 if name.startswith("token") else LOGITS / shape[0] ** 0.5)
        elif name.endswith("norm.weight"):
            tensors[name] = shape, [1 + x for x in array.array("f", data)]
        else:
            tensors[name] = shape, data
    return entries, tensors


def gemma4(file, vocabulary):
    """Returns the entries and tensors of a small Gemma 4.

    The dense one resembles E2B: it has an embedding for each layer, and its last layers share caches. The one with experts
    resembles 26B-A4B: it has neither, and its layers of full attention use their keys as values. Heads have their real lengths.
    """
    has_experts = file.endswith("moe")
    embedding, inner, heads, caches, experts = 256, 512, 2, 1, 4
    # Whether each layer has a sliding window. Layers from number `shared` on have no cache.
    windows = [True, True, True, False, True, False]
    shared = 6 if has_experts else 4
    of_layer = 0 if has_experts else 64
    long, short = 512, 256
    count, layers = n_tokens(vocabulary), len(windows)
    sizes = {
        "vocab_size": count, "context_length": 1024, "embedding_length": embedding, "block_count": layers,
        "feed_forward_length": inner, "attention.head_count": heads, "attention.head_count_kv": caches,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": long, "attention.value_length": long,
        "attention.key_length_swa": short, "attention.value_length_swa": short, "attention.sliding_window": 32,
        "attention.sliding_window_pattern": windows, "attention.shared_kv_layers": layers - shared,
        "embedding_length_per_layer_input": of_layer, "final_logit_softcapping": 30.0, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4, "rope.dimension_count": long, "rope.dimension_count_swa": short,
    }
    if has_experts:
        # Every expert is used, as in test-llama-archs, because after a near tie a different choice would change everything that
        # follows.
        sizes |= {"expert_count": experts, "expert_used_count": experts, "expert_feed_forward_length": inner // 2}
    entries = {"general.architecture": "gemma4"} | {f"gemma4.{key}": size for key, size in sizes.items()} | vocabulary
    # The embedding is used as the output, too.
    tensors = {"token_embd.weight": normal("token_embd", (embedding, count), LOGITS / embedding ** 0.5),
               "output_norm.weight": norm("output_norm", embedding),
               "rope_freqs.weight": ((long // 2,), [1.0] * (long // 8) + [1e30] * (long // 2 - long // 8))}

    def matrix(name, *shape):
        tensors[f"{name}.weight"] = normal(name, shape, shape[0] ** -0.5)

    def vector(name, size, mean=1.0):
        tensors[f"{name}.weight"] = norm(name, size, mean)

    if of_layer:
        matrix("per_layer_token_embd", of_layer * layers, count)
        matrix("per_layer_model_proj", embedding, of_layer * layers)
        vector("per_layer_proj_norm", of_layer)
    for layer, window in enumerate(windows):
        at, head = f"blk.{layer}.", short if window else long
        for name in ("attn_norm", "ffn_norm"):
            vector(at + name, embedding)
        # Layers add more than the embedding does, because otherwise each token would be followed by itself.
        for name in ("post_attention_norm", "post_ffw_norm"):
            vector(at + name, embedding, 4.0)
        # Gemma 4 does not divide scores by the root of the head's length, because its norms do. With this factor, scores have a
        # standard deviation of 2.
        vector(f"{at}attn_q_norm", head, (2 / head ** 0.5) ** 0.5)
        matrix(f"{at}attn_q", embedding, head * heads)
        matrix(f"{at}attn_output", head * heads, embedding)
        if layer < shared:
            vector(f"{at}attn_k_norm", head, (2 / head ** 0.5) ** 0.5)
            matrix(f"{at}attn_k", embedding, head * caches)
            if window or not has_experts:
                matrix(f"{at}attn_v", embedding, head * caches)
        for name in ("ffn_gate", "ffn_up"):
            matrix(at + name, embedding, inner)
        matrix(f"{at}ffn_down", inner, embedding)
        if of_layer:
            matrix(f"{at}inp_gate", embedding, of_layer)
            matrix(f"{at}proj", of_layer, embedding)
            vector(f"{at}post_norm", embedding, 4.0)
        if has_experts:
            matrix(f"{at}ffn_gate_inp", embedding, experts)
            tensors[f"{at}ffn_gate_inp.scale"] = norm(f"{at}ffn_gate_inp.scale", embedding, embedding ** 0.5)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                vector(at + name, embedding)
            matrix(f"{at}ffn_gate_up_exps", embedding, inner, experts)
            matrix(f"{at}ffn_down_exps", inner // 2, embedding, experts)
    return entries, tensors
