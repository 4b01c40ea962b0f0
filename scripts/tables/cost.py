"""What `ggml-npu model` computes for models that papers use; their files' weights are not needed."""

import json
from typing import NamedTuple

import model_file
from project import LOGS, TARGET, cpu_env, run
from tables import runs

CHIP = "hexagon-v75"


class Shape(NamedTuple):
    """A model of the llama family. Its output head is one with the embeddings if it `is_tied`."""

    name: str
    layers: int
    embed: int
    feed: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool = True
    has_bias: bool = False


# SOURCE: config.json of each model; SmolLM2 from its GGUF.
SHAPES = [Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152),
          Shape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, has_bias=True),
          Shape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, has_bias=True),
          Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256),
          Shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256)]


def file(shape, down="q8_0"):
    """A GGUF of a shape, without numbers: Q4_0, the head Q8_0, and ffn_down of the type `down` (the paper's: Q8_0)."""
    path = TARGET / "shapes" / f"{shape.name}-{down}.gguf"
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    tensors = {"token_embd.weight": ([shape.embed, shape.vocabulary], None, "q8_0"),
               "output_norm.weight": ([shape.embed], None)}
    if not shape.is_tied:
        tensors["output.weight"] = ([shape.embed, shape.vocabulary], None, "q8_0")
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        for name, inputs, outputs in [("attn_q", shape.embed, queries), ("attn_k", shape.embed, keys),
                                      ("attn_v", shape.embed, keys), ("attn_output", queries, shape.embed),
                                      ("ffn_gate", shape.embed, shape.feed), ("ffn_up", shape.embed, shape.feed)]:
            tensors[f"{block}.{name}.weight"] = ([inputs, outputs], None, "q4_0")
        tensors[f"{block}.ffn_down.weight"] = ([shape.feed, shape.embed], None, down)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{block}.{name}.weight"] = ([shape.embed], None)
        if shape.has_bias:
            for name, size in ("attn_q", queries), ("attn_k", keys), ("attn_v", keys):
                tensors[f"{block}.{name}.bias"] = ([size], None)
    path.parent.mkdir(parents=True, exist_ok=True)
    model_file.write(path, {
        "general.architecture": "llama", "llama.block_count": shape.layers, "llama.embedding_length": shape.embed,
        "llama.attention.head_count": shape.heads, "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head}, tensors)
    return path


def reckoned(shape, *args, down="q8_0", chip=CHIP):
    """The report of `ggml-npu model` on a shape."""
    log = LOGS / "results-model.log"
    run([runs.TOOL, "model", file(shape, down), "--chip", chip, "--json", *args], log, env=cpu_env())
    text = log.read_text(encoding="utf-8")
    return json.loads(text[text.index("\n{"):])


def step(shape, batch, context, *args, down="q8_0"):
    """Generation of a token by each of `batch` sequences."""
    row, = reckoned(shape, "--batch", batch, "--context", context, *args, down=down)["generation"]
    return row


def prompt_us(shape, tokens):
    """Microseconds for a prompt."""
    row, = reckoned(shape, "--batch", 1, "--context", tokens)["prompts"]
    return tokens * 1e6 / row["tokens_per_s"]
