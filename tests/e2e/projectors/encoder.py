"""Encoders by the shapes of their tensors, and files of random numbers with these shapes."""

import array
import math
import random
import re
import struct
from types import MappingProxyType
from typing import NamedTuple

import embedders
import model_file
import random_model

PATCH, WIDE, HEADS, HIDDEN, LAYERS = 14, 256, 2, 320, 2
# Elements of a vector of the text model.
TEXT = 384
NOTHING = MappingProxyType({})
# Tensors of several dimensions that are added, looked up or joined with numbers in F32.
PLAIN = re.compile(r"position_embd|pos_|img_pos|class_embd|query|attn_rel|conv_dw|codebook|code_embd|mel_filters|\.bias$|gamma")
# So many random numbers fill a tensor, again and again: a prime, so that no two rows of a matrix are alike.
NUMBERS = 65521


class Encoder(NamedTuple):
    """An encoder of a picture or of speech."""

    tensors: dict
    keys: dict
    # Pixels of a side, or seconds.
    side: int
    # Products of many rows that the matrix unit does not compute: of two computed operands, which the vectors multiply in
    # FP32, and of a convolution whose kernels have nine elements.
    on_vectors: int
    is_speech: bool = False


class Layers(NamedTuple):
    """Layers of a transformer."""

    wide: int = WIDE
    heads: int = HEADS
    hidden: int = HIDDEN
    count: int = LAYERS
    # Norms divide by the root of the mean square, and have no bias.
    is_rms: bool = False
    # The network has a gate, and SiLU.
    is_gated: bool = False
    # One product makes queries, keys and values.
    is_fused: bool = False
    # Of keys and values, if they are fewer.
    kv_heads: int = 0
    biases: tuple = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_out", "ffn_up", "ffn_down")

    def tensors(self, prefix):
        found, head = {}, self.wide // self.heads
        keys = head * (self.kv_heads or self.heads)
        outputs = {"attn_qkv": self.wide + 2 * keys} if self.is_fused else {"attn_q": self.wide, "attn_k": keys, "attn_v": keys}
        outputs |= {"attn_out": self.wide, "ffn_up": self.hidden} | ({"ffn_gate": self.hidden} if self.is_gated else {})
        for name in (f"{prefix}.blk.{layer}" for layer in range(self.count)):
            for part, wide in outputs.items():
                found |= linear(f"{name}.{part}", self.wide, wide, part in self.biases)
            found |= linear(f"{name}.ffn_down", self.hidden, self.wide, "ffn_down" in self.biases)
            for part in ("ln1", "ln2"):
                found |= norm(f"{name}.{part}", self.wide, not self.is_rms)
        return found

    def keys(self, kind):
        return {f"clip.{kind}.{key}": value for key, value in {
            "embedding_length": self.wide, "feed_forward_length": self.hidden, "block_count": self.count,
            "attention.head_count": self.heads, "attention.layer_norm_epsilon": 1e-6, "projection_dim": TEXT}.items()} | {
                "clip.use_gelu": not self.is_gated, "clip.use_silu": self.is_gated}


def linear(name, inputs, outputs, has_bias=True):
    return {f"{name}.weight": (inputs, outputs)} | ({f"{name}.bias": (outputs,)} if has_bias else {})


def norm(name, wide, has_bias=True):
    return {f"{name}.weight": (wide,)} | ({f"{name}.bias": (wide,)} if has_bias else {})


def convolution(name, shape, bias=None):
    """A kernel, and a bias of the shape that the graph adds it in."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": bias} if bias else {})


def of_layers(prefix, count, tensors):
    """Tensors that each layer has in addition to those of `Layers`."""
    return {f"{prefix}.blk.{layer}.{name}": shape for layer in range(count) for name, shape in tensors.items()}


def queries(prefix, number, wide, inputs):
    """A layer in which learned queries read each other, and then the rows of an encoder."""
    name, found = f"{prefix}.proj_blk.{number}", {}
    for part in ("self_attn", "cross_attn"):
        rows = inputs if part == "cross_attn" else wide
        for each, width in {"q": wide, "k": rows, "v": rows, "out": wide}.items():
            found |= linear(f"{name}.{part}_{each}", width, wide)
        found |= norm(f"{name}.{part}_norm", wide)
    found |= linear(f"{name}.ffn_up", wide, HIDDEN) | linear(f"{name}.ffn_down", HIDDEN, wide)
    return found | norm(f"{name}.ffn_norm", wide)


class Filler:
    """Random numbers for tensors."""

    def __init__(self):
        self.numbers = random.Random(11)
        self.steps = array.array("h", self.numbers.randbytes(2 * NUMBERS))

    def tensor(self, name, shape):
        """Returns a tensor as `model_file.write` takes it."""
        if name.endswith(("_max", "_min")):
            return shape, [2.0 if name.endswith("max") else -2.0]
        is_factor = (len(shape) == 1 and name.endswith("weight")) or name.endswith(("_var", "a.window"))
        is_weight = len(shape) > 1 and not PLAIN.search(name)
        inputs = shape[0] if "exps" in name else math.prod(shape[:-1])
        spread = (3 / inputs) ** 0.5 if is_weight else 0.3
        kind = "f16" if is_weight else "f32"
        count = math.prod(shape)
        first = self.numbers.randrange(NUMBERS)
        steps = self.steps[first:] + self.steps[:first]
        block = model_file.packed([is_factor + spread * step / 2**15 for step in steps[:count]], kind)
        size = model_file.TYPES[kind][2] * count
        return shape, (block * -(-size // len(block)))[:size], kind


def write(path, encoder):
    """Writes the encoder to `path`, which is returned."""
    filler = Filler()
    model_file.write(path, {"general.architecture": "clip", **encoder.keys},
                     {name: filler.tensor(name, shape) for name, shape in encoder.tensors.items()})
    return path


def write_quantized(path, exact_path, encoder):
    """Writes the encoder with its matrices in Q8_0 to `path`, and the same numbers in F32 to `exact_path`."""
    filler, tensors, exact = Filler(), {}, {}
    for name, shape in encoder.tensors.items():
        shape, data, *kind = filler.tensor(name, shape)
        if kind == ["f16"]:
            values = struct.unpack(f"<{len(data) // 2}e", data)
            exact[name] = shape, values
            if len(shape) == 2:
                data, values = embedders.rounded(values)
                exact[name], kind = (shape, values), ["q8_0"]
        else:
            exact[name] = shape, data, *kind
        tensors[name] = shape, data, *kind
    model_file.write(path, {"general.architecture": "clip", **encoder.keys}, tensors)
    model_file.write(exact_path, {"general.architecture": "clip", **encoder.keys}, exact)


def write_text_model(path):
    """Writes the smallest text model that takes the encoders' vectors to `path`, which is returned."""
    # HunyuanVL's libmtmd wants positions of rows and columns.
    return random_model.write(path, 12, TEXT, 32, 6, layers=1, sections=[16, 8, 8, 0])
