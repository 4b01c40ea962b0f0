"""Encoders of random numbers, one for each projector of llama.cpp 0.7.0 that a picture or speech can reach.

Without one: `gemma3na`, which has no graph; `qwen2.5o`, another name of `qwen2a` and `qwen2.5vl_merger`; `qwen3tts_gen` and
`pockettts_gen`, which make sound; and `qwen3tts_spkenc`, each of whose weights is reshaped before its product. ggml's scheduler
assigns by the weights that are operands themselves, sees none, and gives no node to a device with separate memory.

SOURCE of names, keys and shapes: tools/mtmd/clip.cpp, clip-impl.h and models/ of llama.cpp 0.5.0; of those that are newer,
`d1omni_v`, `d1omni_a`, `cohere2v`, `minicpmv4_7` and `nemotron_omni`, the loader of 0.7.0.
"""

from projectors.encoder import write, write_quantized, write_text_model  # noqa: F401
from projectors.pictures import PICTURES
from projectors.speech import SPEECH

ENCODERS = PICTURES | SPEECH
