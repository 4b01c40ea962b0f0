"""Weights rounded in numpy and stored as F16 again, for rules that no file of llama.cpp has. Needs numpy and gguf.

An F16 file is copied, and the weights of its blocks are overwritten in place; the CPU backend computes with the rounded
weights. Activations are unchanged.
"""

import shutil

from project import Problem

try:
    import gguf
    import numpy as np
except ImportError:
    raise Problem("numpy and gguf are not installed; pip install gguf==0.19.0 numpy") from None

# The elements of a Q4_0 block, and the size of a rotation.
BLOCK = 32
ROTATION = 64


def is_weight(name):
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def rounded(source, dest, rule):
    """Writes `source` with each weight w of its blocks, N rows of K, replaced by `rule(name, w)`."""
    shutil.copyfile(source, dest)
    reader = gguf.GGUFReader(dest, "r+")
    for tensor in reader.tensors:
        if is_weight(tensor.name):
            weight = tensor.data.astype(np.float32)
            tensor.data[:] = rule(tensor.name, weight).astype(np.float16)
    reader.data.flush()


def statistics(path):
    """The mean square of each input, by the name of the weight."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    return {name.removesuffix(".in_sum2"): data.reshape(-1) / float(tensors[name.replace("in_sum2", "counts")].reshape(-1)[0])
            for name, data in tensors.items() if name.endswith(".in_sum2")}


def q4_0(weight):
    """As llama-quantize without statistics.

    SOURCE: quantize_row_q4_0_ref, ggml/src/ggml-quants.c of llama.cpp 0.5.0.
    """
    blocks = weight.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = largest / -8
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    levels = np.clip(np.floor(blocks * inverse + np.float32(8.5)), 0, 15) - 8
    return (levels * scale.astype(np.float16).astype(np.float32)).reshape(weight.shape)


def even(weight, levels, axis):
    """Levels -`levels` to `levels` of one scale for each row (axis 1), or for the tensor (axis None)."""
    scale = np.abs(weight).max(axis=axis, keepdims=True) / levels
    scale[scale == 0] = 1
    return np.clip(np.round(weight / scale), -levels, levels) * scale


def rotation(inputs, seed=1):
    """An orthonormal matrix of `inputs` x `inputs`: signs, then Hadamard transforms of 64."""
    size = ROTATION
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(seed).choice(np.float32([-1, 1]), inputs)
    return hadamard / np.sqrt(np.float32(size)), signs


def rotated(weight, rule):
    """`rule` of the rotated weight, rotated back."""
    hadamard, signs = rotation(weight.shape[1])
    there = ((weight * signs).reshape(len(weight), -1, ROTATION) @ hadamard).reshape(weight.shape)
    back = rule(there).reshape(len(weight), -1, ROTATION) @ hadamard.T
    return back.reshape(weight.shape) * signs


def salient(importance, share):
    """Which inputs are the `share` that is used most."""
    count = max(1, round(share * len(importance)))
    chosen = np.zeros(len(importance), bool)
    chosen[np.argsort(importance)[-count:]] = True
    return chosen


def keeping(weight, chosen):
    """Q4_0 for all inputs except the chosen ones, which are unchanged."""
    return np.where(chosen, weight, q4_0(weight))


def scaled(weight, chosen, factor):
    """Q4_0 with the chosen inputs multiplied by `factor` before, and divided after."""
    scales = np.where(chosen, np.float32(factor), np.float32(1))
    return q4_0(weight * scales) / scales
