"""The models in other formats, made by llama-quantize from the fetched file and kept in target/models.

Fetched models are already quantized, so a variant is the fetched numbers, dequantized, in another format; `exact` is a variant
dequantized again.
"""

import hashlib

import fetch
import project
from project import LOGS, MODELS, run


def cached_name(source, suffix):
    """Returns the path of `source` in another format. Files of the user are distinguished by path, size and time."""
    for known in (fetch.SMOLLM2, fetch.GEMMA3, fetch.TINYLLAMA, fetch.QWEN_CODER, fetch.QWEN_CODER_1_5B):
        if source == known.file:
            return MODELS / f"{known.name}-{suffix}.gguf"
    status = source.stat()
    identity = f"{source} {status.st_size} {status.st_mtime_ns}"
    return MODELS / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}-{suffix}.gguf"


def quantize(source, dest, kind):
    """`source` in the format `kind` (a name that llama-quantize knows), as `dest`."""
    return project.made_once(dest, lambda part: run(
        [project.binary("llama-quantize"), "--allow-requantize", source, part, kind], LOGS / f"quantize-{kind}.log",
        project.cpu_env()))


def variant(kind, source=None):
    """The model, or the GGUF `source`, in the format `kind`."""
    source = source or fetch.model()
    return quantize(source, cached_name(source, kind), kind)


def exact(kind, source=None):
    """Returns the exact form of the model in the format `kind`: the same numbers, dequantized to F32."""
    source = source or fetch.model()
    return quantize(variant(kind, source), cached_name(source, f"{kind}-as-F32"), "F32")
