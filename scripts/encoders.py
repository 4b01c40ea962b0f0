"""Encoders of pictures and speech by their shapes, and the graphs that Debian's programs give a simulated NPU for them.

SOURCE of dimensions: config.json of each model on huggingface.co.
"""

import itertools
import json
import os
import subprocess
import sys
from typing import NamedTuple

import build
import model_file
import models
import project
import stock
from project import LOGS, TARGET, Problem

FOLDER = TARGET / "shapes"
PICTURE, SPEECH = "picture", "speech"
# For the vision model: the pixels of a picture's side and of a patch's side. The projector joins MERGE x MERGE patches.
SIDE, PATCH, MERGE = 512, 16, 4
# The embedding size of SmolLM2-135M, which reads the projector's output.
TEXT_EMBEDDING = 576


class Encoder(NamedTuple):
    """An encoder; its weights are F16, as the files are that people load."""

    name: str
    workload: str
    embedding: int
    hidden: int
    heads: int
    layers: int
    # The number of graphs, from the first on, that encode one picture or 30 seconds of speech.
    graphs: int

    @property
    def workloads(self):
        return (self.workload,)

    def counted(self):
        """Returns the layers of the files that are counted: the fewest, and one more."""
        return 1, 2

    def periods(self):
        """Returns how often the difference between the two files is to be added to the first."""
        return self.layers - 1


ENCODERS = [
    # The encoder of SmolVLM-256M.
    Encoder("SigLIP-base", PICTURE, 768, 3072, 12, 12, 1),
    # Whisper's graphs: its convolutions, its layers, and the decoder's keys and values.
    Encoder("Whisper-base", SPEECH, 512, 2048, 8, 6, 3),
]


def vision_model(encoder, layers, path):
    """Writes a file of SmolVLM-256M's vision model with `layers` layers and holes in place of weights."""
    wide, hidden = encoder.embedding, encoder.hidden
    patches = (SIDE // PATCH) ** 2
    tensors = {"v.patch_embd.weight": ((PATCH, PATCH, 3, wide), None, "f16"), "v.patch_embd.bias": ((wide,), None, "f32"),
               "v.position_embd.weight": ((wide, patches), None, "f32"),
               "mm.model.fc.weight": ((wide * MERGE ** 2, TEXT_EMBEDDING), None, "f16")}
    blocks = [f"v.blk.{layer}" for layer in range(layers)]
    for name in ("v.post_ln", *(f"{block}.ln{i}" for block in blocks for i in (1, 2))):
        tensors |= {f"{name}.{part}": ((wide,), None, "f32") for part in ("weight", "bias")}
    for block in blocks:
        products = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (wide, wide))
        for part, (inputs, outputs) in (products | {"ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}).items():
            tensors[f"{block}.{part}.weight"] = ((inputs, outputs), None, "f16")
            tensors[f"{block}.{part}.bias"] = ((outputs,), None, "f32")
    model_file.write(path, {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "idefics3",
        "clip.use_gelu": True, "clip.vision.image_size": SIDE, "clip.vision.preproc_image_size": SIDE,
        "clip.vision.patch_size": PATCH, "clip.vision.embedding_length": wide, "clip.vision.feed_forward_length": hidden,
        "clip.vision.projection_dim": TEXT_EMBEDDING, "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": encoder.heads, "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.vision.projector.scale_factor": MERGE}, tensors)


def run(encoder, layers, path, debian):
    """Returns the command line that computes a picture's or a second's encoder with the model, which is at `path`."""
    if encoder.workload == PICTURE:
        vision_model(encoder, layers, path)
        return debian.command(sys.executable, stock.SOURCES / "vision.py", debian.libraries, models.variant("F16"), path, SIDE,
                              os.devnull)
    program = stock.SOURCES / "whisper.py"
    subprocess.run([sys.executable, program, "make", path, *map(str, (encoder.embedding, encoder.heads, layers))], check=True)
    return debian.command(sys.executable, program, "run", debian.libraries / "libwhisper.so.1", path, os.devnull)


def record(encoder, layers, chip, threads, **settings):
    """Returns the encoder's recorded graphs, with `layers` layers, on a simulated chip under `settings`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{encoder.name}-{layers}-{os.getpid()}.model"
    commands = path.with_suffix(".commands")
    commands.unlink(missing_ok=True)
    debian = stock.debian_programs()
    env = project.device_env(chip, GGML_BACKEND_PATH=str(build.plugin()), GGML_RUST_NPU_TRACE=str(commands),
                             GGML_RUST_NPU_HEX_THREADS=str(threads), **settings)
    command = [str(word) for word in run(encoder, layers, path, debian)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=debian.folder)
    path.unlink()
    (LOGS / f"graphs-{encoder.name}-{layers}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise Problem(f"{encoder.name} with {layers} layers: {done.stderr.strip()[-400:]}")
    with open(commands, encoding="utf-8") as file:
        lines = [json.loads(line) for line in itertools.islice(file, encoder.graphs)]
    commands.unlink()
    return lines
