"""Models by their shapes: files with the metadata and the tensors of a real model, and holes in place of its weights.

The tensors of a model come from llama.cpp: `graphs tensors` prints all that it looks for, and each model's row lists the
optional ones that its files lack. A file holds fewer layers than the model (`Shape.layers`), and the cost of a layer is the
difference between two files.
"""

import os
import re
import subprocess
from typing import NamedTuple

import model_file
import project
from project import TARGET, Problem

FOLDER = TARGET / "shapes"


class Shape(NamedTuple):
    """A model. SOURCE of dimensions: config.json of each model on huggingface.co, under the names of llama.cpp's GGUF."""

    name: str
    arch: str
    # The model's number of layers; their pattern repeats after `period`.
    layers: int
    period: int
    # Metadata keys, without the architecture's prefix.
    keys: dict
    # The type of weights and of the embedding. The embedding is also the output, unless `absent` lacks "output.weight".
    kind: str = "q4_0"
    embedding: str = "q6_K"
    # Regular expressions for tensors that the model's files do not have.
    absent: tuple = ("^output.weight", ".bias")
    # Types of other tensors, by part of their name.
    kinds: tuple = ()
    # Tensors of each layer that llama.cpp looks for only if others are missing, with their dimensions.
    extra: tuple = ()
    # The workloads, by their names in `graphs`.
    workloads: tuple = ("prompt", "token", "sequences")

    def counted(self):
        """Returns the layers of the files: of one with the fewest, and of one with a period more. They are the same if all
        layers are counted."""
        if self.period == self.layers:
            return self.layers, self.layers
        first = self.layers % self.period + self.period if self.layers % self.period else self.period
        return first, first + self.period

    def periods(self):
        """Returns how often the difference between the two files is to be added to the first."""
        first, _ = self.counted()
        return (self.layers - first) // self.period


def transformer(embd, ff, heads, kv, head, vocab, freq=1e6, eps=1e-6, **more):
    """Returns the metadata of a model with attention and a gated network in each layer."""
    return {
        "vocab_size": vocab, "context_length": 32768, "embedding_length": embd, "feed_forward_length": ff,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": eps, "rope.freq_base": freq,
        "rope.dimension_count": head, **more}


LFM2 = [i in (2, 5, 8, 10, 12, 14) for i in range(16)]
GRANITE = [i in (5, 15, 25, 35) for i in range(40)]

SHAPES = [
    Shape("Qwen3-0.6B", "qwen3", 28, 1, transformer(1024, 3072, 16, 8, 128, 151936)),
    Shape("Qwen3-1.7B", "qwen3", 28, 1, transformer(2048, 6144, 16, 8, 128, 151936)),
    Shape("Qwen3-4B", "qwen3", 36, 1, transformer(2560, 9728, 32, 8, 128, 151936)),
    Shape("Qwen3.5-4B", "qwen35", 32, 4, transformer(2560, 9216, 16, 4, 256, 248320, 1e7, **{
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.time_step_rank": 32,
        "ssm.group_count": 16}), absent=("^output.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias")),
    Shape("Llama-3.2-1B", "llama", 16, 1, transformer(2048, 8192, 32, 8, 64, 128256, 5e5, 1e-5)),
    Shape("Llama-3.2-3B", "llama", 28, 1, transformer(3072, 8192, 24, 8, 128, 128256, 5e5, 1e-5)),
    Shape("Qwen2.5-1.5B", "qwen2", 28, 1, transformer(1536, 8960, 12, 2, 128, 151936),
          absent=("^output.weight", "^output.bias", "attn_output.bias")),
    Shape("Qwen2.5-3B", "qwen2", 36, 1, transformer(2048, 11008, 16, 2, 128, 151936),
          absent=("^output.weight", "^output.bias", "attn_output.bias")),
    Shape("Gemma-3-1B", "gemma3", 26, 6, transformer(1152, 6912, 4, 1, 256, 262144, **{
        "attention.sliding_window": 512})),
    Shape("Gemma-4-E2B", "gemma4", 35, 35, transformer(1536, [6144] * 15 + [12288] * 20, 8, 1, 512, 262144, **{
        "attention.key_length_swa": 256, "attention.value_length_swa": 256, "attention.sliding_window": 512,
        "attention.shared_kv_layers": 20, "embedding_length_per_layer_input": 256, "rope.freq_base_swa": 1e4,
        "rope.dimension_count_swa": 256, "final_logit_softcapping": 30.0,
        "attention.sliding_window_pattern": [(i + 1) % 5 != 0 for i in range(35)]})),
    Shape("Phi-3-mini", "phi3", 32, 1, transformer(3072, 8192, 32, 32, 96, 32064, 1e4, 1e-5),
          absent=(".bias", "rope_factors", "attn_q.", "attn_k.", "attn_v."), extra=(("attn_qkv.weight", (3072, 9216)),)),
    Shape("gpt-oss-20b", "gpt-oss", 24, 2, transformer(2880, 2880, 64, 8, 64, 201088, 1.5e5, 1e-5, **{
        "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880,
        "attention.sliding_window": 128}), "q8_0", "q8_0", (), (("_exps.weight", "mxfp4"),)),
    Shape("LFM2-1.2B", "lfm2", 16, 16, {
        **transformer(2048, 8192, 32, 8, 64, 65536, 1e6, 1e-5),
        "attention.head_count_kv": [8 if it else 0 for it in LFM2], "shortconv.l_cache": 3}),
    Shape("granite-4.0-h-micro", "granitehybrid", 40, 40, {
        **transformer(2048, 8192, 32, 8, 64, 100352, 1e4, 1e-5),
        "attention.head_count_kv": [8 if it else 0 for it in GRANITE],
        "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.time_step_rank": 64,
        "ssm.group_count": 1, "logit_scale": 8.0, "residual_scale": 0.22, "embedding_scale": 12.0,
        "attention.scale": 0.015625}, absent=("^output.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias",
                                              "attn_output.bias", "ffn_up.bias", "ffn_down.bias", "ffn_gate.bias")),
    Shape("Mamba2-1.3B", "mamba2", 48, 1, {
        "vocab_size": 50288, "context_length": 32768, "embedding_length": 2048, "feed_forward_length": 0,
        "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5, "ssm.conv_kernel": 4, "ssm.inner_size": 4096,
        "ssm.state_size": 128, "ssm.time_step_rank": 64, "ssm.group_count": 1}, absent=("^output.weight",)),
    Shape("RWKV7-1.5B", "rwkv7", 24, 1, {
        "vocab_size": 65536, "context_length": 32768, "embedding_length": 2048, "feed_forward_length": 8192,
        "attention.head_count": 0, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64,
        "attention.decay_lora_rank": 96, "attention.iclr_lora_rank": 96, "attention.value_residual_mix_lora_rank": 64,
        "attention.gate_lora_rank": 256}, absent=()),
    Shape("MiniLM-L6", "bert", 6, 1, {
        "vocab_size": 30522, "context_length": 512, "embedding_length": 384, "feed_forward_length": 1536,
        "attention.head_count": 12, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": 1,
        "tokenizer.ggml.token_type_count": 2},
        "q8_0", "q8_0", ("attn_qkv", "attn_q_norm", "attn_k_norm", "attn_norm_2"), workloads=("prompt",)),
]


def entries(shape, layers):
    """Returns the metadata of a file with `layers` layers."""
    keys = {key: value[:layers] if isinstance(value, list) and len(value) == shape.layers else value
            for key, value in shape.keys.items()}
    return {"general.architecture": shape.arch, f"{shape.arch}.block_count": layers, "tokenizer.ggml.model": "none",
            **{key if key.startswith("tokenizer.") else f"{shape.arch}.{key}": value for key, value in keys.items()}}


# Tensors that only files of other quantizers, or ranking models, have.
ABSENT = ("\\.(input_)?scale$", "^cls", "^dense_")

# Tensors that llama-quantize leaves in F32 although they have two dimensions. SOURCE: tensor_allows_quantization,
# src/llama-quant.cpp of llama.cpp 0.5.0.
PLAIN = ("_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj", "position_embd", "token_types",
         "ssm_conv1d", "shortconv.conv.weight", "time_mix_first", "time_mix_w0", "time_mix_w1", "time_mix_w2",
         "time_mix_v0", "time_mix_v1", "time_mix_v2", "time_mix_a0", "time_mix_a1", "time_mix_a2", "time_mix_g1",
         "time_mix_g2", "time_mix_decay_w1", "time_mix_decay_w2", "time_mix_lerp_fused", "attn_rel_b.weight")


def kind_of(shape, name, dims):
    """Returns the type of a tensor in the model's files."""
    if len(dims) < 2 or not name.endswith("weight") or any(part in name for part in PLAIN):
        return "f32"
    kind = shape.embedding if name in ("token_embd.weight", "output.weight") else shape.kind
    kind = next((it for part, it in shape.kinds if part in name), kind)
    return kind if dims[0] % model_file.TYPES[kind][1] == 0 else "f16"


def write(shape, layers, program):
    """Writes a file with `layers` layers; returns its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Another process may be counting the same model.
    path = FOLDER / f"{shape.name}-{layers}-{os.getpid()}.gguf"
    metadata = path.with_suffix(".metadata.gguf")
    model_file.write(metadata, entries(shape, layers), {})
    listed = subprocess.run([program, "tensors", metadata], capture_output=True, text=True, env=project.cpu_env())
    metadata.unlink()
    if listed.returncode:
        raise Problem(f"llama.cpp refuses the shape of {shape.name}: {listed.stderr.strip()[-500:]}")
    tensors = {f"blk.{layer}.{name}": (dims, None, kind_of(shape, name, dims)) for layer in range(layers)
               for name, dims in shape.extra}
    for line in listed.stdout.splitlines():
        name, _, *dims = line.split(" ")
        if any(re.search(part, name) for part in (*ABSENT, *shape.absent)):
            continue
        dims = tuple(map(int, dims))
        tensors[name] = (dims, None, kind_of(shape, name, dims))
    model_file.write(path, entries(shape, layers), tensors)
    return path
