"""Image encoders of random numbers, one for each of many projectors that llama.cpp 0.7.0 has, as files for `--mmproj`.

SOURCE of names, keys and shapes: tools/mtmd/clip.cpp, clip-impl.h and models/ of llama.cpp 0.6.0, whose projectors 0.7.0 has.
"""

import array
import math
import random
from types import MappingProxyType
from typing import NamedTuple

import model_file

PATCH, HIDDEN, LAYERS = 14, 512, 2
# Of SmolLM2-135M.
TEXT = 576
NOTHING = MappingProxyType({})
SHARED_KEYS = {"clip.vision.image_mean": [0.5, 0.5, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.5]}


class Encoder(NamedTuple):
    """An encoder; its weights are F16."""

    # Pixels of a side.
    side: int = 112
    wide: int = 288
    # With heads of 72 elements, as in SigLIP.
    heads: int = 4
    # Of a row of positions: patches, and one more with a class; 0 if positions are rotated.
    positions: int = 64
    # Of the projector, by name; those of one dimension are F32.
    tensors: dict = NOTHING
    keys: dict = NOTHING
    has_class: bool = False
    # Its norms divide by the root of the mean square, and its network has a gate.
    is_gated: bool = False
    patch_bias: bool = True


def linear(name, inputs, outputs):
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def norm(name, wide):
    return {f"{name}.weight": (wide,), f"{name}.bias": (wide,)}


def block(number):
    """One of MobileVLM's: a convolution of each channel, a factor of each channel, a product."""
    name, few = f"mm.model.mb_block.{number}.block", TEXT // 4
    return {f"{name}.0.0.weight": (3, 3, 1, TEXT), **norm(f"{name}.0.1", TEXT), **linear(f"{name}.1.fc1", TEXT, few),
            **linear(f"{name}.1.fc2", few, TEXT), f"{name}.2.0.weight": (TEXT, TEXT), **norm(f"{name}.2.1", TEXT)}


CLIP, QWEN = {"wide": 256, "has_class": True}, {"wide": 160, "heads": 2, "positions": 0, "patch_bias": False}
MERGE = "clip.vision.projector.scale_factor"
# Pixels of a picture with 24 patches a side, which MobileVLM's projectors presuppose.
MOBILE = {**CLIP, "side": 336, "positions": 577}

ENCODERS = {
    "mlp": Encoder(**CLIP, positions=65, tensors={**norm("v.pre_ln", 256), **linear("mm.0", 256, TEXT),
                                                  **linear("mm.2", TEXT, TEXT)}),
    "ldp": Encoder(**MOBILE, tensors={**linear("mm.model.mlp.1", 256, TEXT), **linear("mm.model.mlp.3", TEXT, TEXT),
                                      **block(1), **block(2)}),
    "ldpv2": Encoder(**MOBILE, tensors={**linear("mm.model.mlp.0", 256, TEXT), **linear("mm.model.mlp.2", TEXT, TEXT),
                                        "mm.model.peg.0.weight": (3, 3, 1, TEXT), "mm.model.peg.0.bias": (TEXT,)}),
    "idefics3": Encoder(tensors={"mm.model.fc.weight": (288 * 16, TEXT)},
                        keys={MERGE: 4, "clip.vision.preproc_image_size": 112}),
    "lfm2": Encoder(tensors={**linear("mm.1", 288 * 4, HIDDEN), **linear("mm.2", HIDDEN, TEXT)}, keys={MERGE: 2}),
    "janus_pro": Encoder(tensors={**linear("mm.0", 288, TEXT), **linear("mm.1", TEXT, TEXT)}),
    "phi4": Encoder(tensors={**linear("mm.0", 288, TEXT), **linear("mm.2", TEXT, TEXT)},
                    keys={"clip.vision.image_min_pixels": 112 * 112, "clip.vision.image_max_pixels": 224 * 224}),
    "pixtral": Encoder(wide=256, positions=0, is_gated=True, patch_bias=False,
                       tensors={"v.pre_ln.weight": (256,), **linear("mm.1", 256, TEXT), **linear("mm.2", TEXT, TEXT),
                                "v.token_embd.img_break": (TEXT,)}),
    "internvl": Encoder(**CLIP, positions=65, tensors={**norm("mm.model.mlp.0", 1024), **linear("mm.model.mlp.1", 1024, TEXT),
                                                       **linear("mm.model.mlp.3", TEXT, TEXT)}, keys={MERGE: 2}),
    "kimivl": Encoder(tensors={**norm("mm.input_norm", 288), **linear("mm.1", 1152, HIDDEN), **linear("mm.2", HIDDEN, TEXT)},
                      keys={MERGE: 2}),
    "llama4": Encoder(**CLIP, positions=65, tensors={"mm.model.mlp.1.weight": (1024, HIDDEN),
                                                     "mm.model.mlp.2.weight": (HIDDEN, HIDDEN),
                                                     "mm.model.fc.weight": (HIDDEN, TEXT)}, keys={MERGE: 2}),
    "qwen2vl_merger": Encoder(**QWEN, tensors={"v.patch_embd.weight.1": (PATCH, PATCH, 3, 160), **linear("mm.0", 640, 640),
                                               **linear("mm.2", 640, TEXT)}),
    "qwen2.5vl_merger": Encoder(**QWEN, is_gated=True,
                                tensors={"v.patch_embd.weight.1": (PATCH, PATCH, 3, 160), **linear("mm.0", 640, 640),
                                         **linear("mm.2", 640, TEXT)}, keys={"clip.vision.n_wa_pattern": 2}),
}


def shapes(projector):
    """The shape of each tensor, by its name."""
    it = ENCODERS[projector]
    wide, parts = it.wide, ("weight",) if it.is_gated else ("weight", "bias")
    found = {"v.patch_embd.weight": (PATCH, PATCH, 3, wide), **it.tensors}
    if projector == "llama4":
        found["v.patch_embd.weight"] = (PATCH * PATCH * 3, wide)
    if it.patch_bias and projector != "llama4":
        found["v.patch_embd.bias"] = (wide,)
    if it.has_class:
        found["v.class_embd"] = (wide,)
    if it.positions:
        found["v.position_embd.weight"] = (wide, it.positions)
    norms = ["v.post_ln", *(f"v.blk.{layer}.ln{i}" for layer in range(LAYERS) for i in (1, 2))]
    found |= {f"{name}.{part}": (wide,) for name in norms for part in parts}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            found |= linear(f"v.blk.{layer}.{name}", wide, wide)
        found |= linear(f"v.blk.{layer}.ffn_up", wide, HIDDEN) | linear(f"v.blk.{layer}.ffn_down", HIDDEN, wide)
        if it.is_gated:
            found |= linear(f"v.blk.{layer}.ffn_gate", wide, HIDDEN)
    return found


def write(path, projector):
    """Writes the encoder with a projector to `path`, which is returned."""
    it, numbers, tensors = ENCODERS[projector], random.Random(11), {}
    for name, shape in shapes(projector).items():
        is_factor = len(shape) == 1 and name.endswith("weight")
        is_weight = len(shape) > 1 and not name.startswith("v.position")
        spread = (3 / math.prod(shape[:-1])) ** 0.5 if is_weight else 0.3
        steps = array.array("h", numbers.randbytes(2 * math.prod(shape)))
        values = [is_factor + spread * step / 2**15 for step in steps]
        tensors[name] = (shape, values, "f16") if is_weight else (shape, values)
    model_file.write(path, {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": projector,
        "clip.use_gelu": not it.is_gated, "clip.use_silu": it.is_gated, "clip.vision.image_size": it.side,
        "clip.vision.patch_size": PATCH, "clip.vision.embedding_length": it.wide, "clip.vision.feed_forward_length": HIDDEN,
        "clip.vision.projection_dim": TEXT, "clip.vision.block_count": LAYERS, "clip.vision.attention.head_count": it.heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, **SHARED_KEYS, **it.keys}, tensors)
    return path
