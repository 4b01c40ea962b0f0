"""Encoders of speech, by projector."""

from projectors.encoder import (HIDDEN, LAYERS, NOTHING, TEXT, Encoder, Layers, convolution, linear, norm, of_layers, queries)

MELS, SECONDS = 128, 4
# Whisper's keys have no bias.
WHISPER = Layers(128, biases=("attn_q", "attn_v", "attn_out", "ffn_up", "ffn_down"))
STACK = "clip.audio.projector.stack_factor"


def speech(name, layers, tensors, keys=NOTHING, positions=0, post_norm=True, mels=MELS, on_vectors=0):
    """Returns an encoder; `positions` are those of a table, and 0 if there is none."""
    found = layers.tensors("a") | ({"a.position_embd.weight": (layers.wide, positions)} if positions else {})
    if post_norm:
        found |= norm("a.post_ln", layers.wide, not layers.is_rms)
    return Encoder(found | tensors, {
        "clip.has_audio_encoder": True, "clip.projector_type": name, "clip.audio.num_mel_bins": mels, **layers.keys("audio"),
        **keys}, SECONDS, on_vectors, True)


def two_convolutions(wide):
    """Convolutions that leave half of the frames."""
    return convolution("a.conv1d.1", (3, MELS, wide), (1, wide)) | convolution("a.conv1d.2", (3, wide, wide), (1, wide))


def whisper(name, tensors, stack=0):
    """One of those with Whisper's encoder."""
    return speech(name, WHISPER, two_convolutions(WHISPER.wide) | tensors, {STACK: stack} if stack else {}, 1500)


def mlp(first, second, inputs, has_bias=True):
    return linear(f"mm.a.mlp.{first}", inputs, HIDDEN, has_bias) | linear(f"mm.a.mlp.{second}", HIDDEN, TEXT, has_bias)


def whispers():
    wide = WHISPER.wide
    meralion = norm("mm.a.norm_pre", 15 * wide) | linear("mm.a.mlp.0", 15 * wide, HIDDEN)
    for number in (1, 2):
        meralion |= linear(f"mm.a.mlp.{number}", HIDDEN, HIDDEN)
    return {
        "ultravox": whisper("ultravox", {
            "mm.a.norm_pre.weight": (5 * wide,), "mm.a.mlp.1.weight": (5 * wide, 2 * HIDDEN), "mm.a.norm_mid.weight": (HIDDEN,),
            "mm.a.mlp.2.weight": (HIDDEN, TEXT)}, 5),
        "qwen2a": whisper("qwen2a", linear("mm.a.fc", wide, TEXT)),
        "voxtral": whisper("voxtral", mlp(1, 2, 5 * wide, False), 5),
        "meralion": whisper("meralion", meralion | linear("mm.a.mlp.3", HIDDEN, TEXT), 15),
        "musicflamingo": whisper("musicflamingo", mlp(1, 2, wide)),
        "glma": whisper("glma", {**norm("mm.a.norm_pre", wide), **mlp(1, 2, 4 * wide), "v.boi": (TEXT,), "v.eoi": (TEXT,)}, 4),
    }


def pictures_of_speech():
    """Those that read a spectrum as a picture, by three convolutions."""
    channels, wide, found = 32, 160, {}
    for number in (1, 2, 3):
        found |= convolution(f"a.conv2d.{number}", (3, 3, 1 if number == 1 else channels, channels), (channels,))
    found["a.conv_out.weight"] = (channels * MELS // 8, wide)
    return {
        "qwen3a": speech("qwen3a", Layers(wide), found | mlp(1, 2, wide), positions=13, on_vectors=1),
        "dots3note_a": speech("dots3note_a", Layers(wide, is_rms=True, is_gated=True),
                              found | norm("mm.a.norm_pre", wide) | mlp(1, 3, wide), on_vectors=1),
    }


def conformer(wide, kernel, has_bias=True):
    """Tensors that a conformer's layer has in addition: a second network, a convolution of each channel."""
    found = linear("ffn_up_1", wide, HIDDEN, has_bias) | linear("ffn_down_1", HIDDEN, wide, has_bias)
    for name in ("ffn_norm", "ffn_norm_1", "norm_conv", "conv_norm"):
        found |= norm(name, wide, has_bias)
    return found | linear("conv_pw1", wide, 2 * wide, has_bias) | linear("conv_pw2", wide, wide, has_bias) | {
        "conv_dw.weight": (kernel, wide)}


def subsampling(wide):
    """Convolutions that leave an eighth of the frames."""
    channels, found = 32, {}
    for number, shape in {0: (3, 3, 1, channels), 2: (3, 3, 1, channels), 3: (1, 1, channels, channels),
                          5: (3, 3, 1, channels), 6: (1, 1, channels, channels)}.items():
        found |= convolution(f"a.conv1d.{number}", shape, (1, 1, channels))
    return found | linear("a.pre_encode.out", channels * MELS // 8, wide)


# Of a conformer's positions: 512 elements, whatever its width. Their queries have a bias.
LONG = Layers(512, 8)
POSITIONS = {"pos_bias_u": (64, 8), "pos_bias_v": (64, 8), "linear_pos.weight": (512, 512)}


def lfm():
    found = subsampling(512) | norm("mm.a.mlp.0", 512) | mlp(1, 3, 512)
    found |= of_layers("a", LAYERS, conformer(512, 9) | POSITIONS | {"conv_dw.bias": (512,)})
    omni = norm("mm.a.mlp.4", TEXT) | linear("mm.a.mlp.5", TEXT, HIDDEN) | linear("mm.a.mlp.6", HIDDEN, TEXT)
    options = {"post_norm": False, "on_vectors": 7}
    return {"lfm2a": speech("lfm2a", LONG, {**found, "a.position_embd.weight": (TEXT, 1500)}, **options),
            "d1omni_a": speech("d1omni_a", LONG, found | omni, **options)}


def parakeet():
    parts = conformer(512, 9, False) | POSITIONS | {"conv_norm_mean": (512,), "conv_norm_var": (512,)}
    parts |= {f"{name}.bias": (512,) for name in ("ffn_norm", "ffn_norm_1", "norm_conv", "conv_norm")}
    # The file of the spectrum's filters, and of a picture's projector, which this one does not use.
    found = {"a.mel_filters": (257, MELS), "a.window": (400,), "mm.a.norm_pre.weight": (512,)}
    found |= {f"mm.model.mlp.{number}.weight": (32, 32) for number in (0, 1, 3)}
    found |= subsampling(512) | mlp(1, 2, 512, False) | of_layers("a", LAYERS, parts)
    keys = {"clip.audio.subsampling_factor": 8, "clip.audio.conv_kernel_size": 9}
    return {"parakeet": speech("parakeet", LONG._replace(biases=()), found, keys, post_norm=False, on_vectors=7)}


def gemma():
    wide = 128
    parts = conformer(wide, 5, False) | {"attn_k_rel.weight": (wide, wide), "per_dim_scale.weight": (wide // 2,)}
    parts |= {f"{name}.weight": (wide,) for name in ("attn_pre_norm", "attn_post_norm", "ffn_post_norm", "ffn_post_norm_1")}
    found = {"a.conv1d.0.weight": (3, 3, 1, 32), "a.conv1d.1.weight": (3, 3, 32, 16), "a.conv1d.0.norm.weight": (32,),
             "a.conv1d.1.norm.weight": (16,), "a.input_projection.weight": (16 * MELS // 4, wide),
             **linear("a.pre_encode.out", wide, 256), "mm.a.input_projection.weight": (256, TEXT),
             **of_layers("a", LAYERS, parts)}
    layers = Layers(wide, is_rms=True, biases=())
    return {"gemma4a": speech("gemma4a", layers, found, post_norm=False, on_vectors=3)}


def granite():
    wide, inputs = 128, 160
    found = {**linear("a.input_projection", inputs, wide), **linear("a.enc_ctc_out", wide, 64),
             **linear("a.enc_ctc_out_mid", 64, wide), "a.proj_query": (wide, 3), **norm("a.proj_norm", wide),
             **linear("a.proj_linear", wide, TEXT)}
    found |= of_layers("a", LAYERS, conformer(wide, 9) | {"attn_rel_pos_emb": (32, 65)})
    for number in range(2):
        # Rows of the last layer and of the first.
        found |= queries("a", number, wide, 2 * wide)
    keys = {f"clip.audio.{key}": value for key, value in {
        "chunk_size": 32, "conv_kernel_size": 9, "max_pos_emb": 32, "projector.window_size": 15, "projector.downsample_rate": 5,
        "projector.head_count": 4, "feature_layer": [1]}.items()}
    layers = Layers(wide, 4, biases=("attn_out", "ffn_up", "ffn_down"))
    return {"granite_speech": speech("granite_speech", layers, found, keys, mels=inputs, post_norm=False, on_vectors=4)}


def codes():
    """One that replaces vectors by the nearest of a table."""
    layers = Layers(128, count=3)
    found = {**two_convolutions(128), "a.downsample.conv.weight": (2, 128, 128), **norm("a.downsample.norm", 128),
             "a.rvq.codebook.weight": (128, 16, 2), "mm.a.code_embd.weight": (128, 16, 2),
             "mm.a.local_norm.weight": (128,), **mlp(1, 2, 128 * 4, False)}
    local = Layers(128, count=1, is_rms=True, is_gated=True, biases=("attn_q", "attn_k", "attn_v"))
    found |= {name.replace("x.blk.", "mm.a.local_blk."): shape for name, shape in local.tensors("x").items()}
    keys = {f"clip.audio.{key}": value for key, value in {
        "rvq.num_quantizers": 2, "rvq.codebook_size": [16, 16], "window_size": 16, "wa_pattern_mode": [0, -1, 0],
        "local_block_count": 1, "local_group_size": 4}.items()}
    # Another code is another vector: in two seconds no vector is as near to a second code.
    return {"mimo_audio": speech("mimo_audio", layers, found, keys, on_vectors=2)._replace(side=2)}


def unified():
    """One without an encoder: frames of the wave itself."""
    return {"gemma4ua": speech("gemma4ua", Layers(640, count=0), {"mm.a.input_projection.weight": (640, TEXT)}, post_norm=False,
                               mels=640)}


def voices():
    """One that reads the wave itself, and makes vectors of a speaker's voice."""
    channels, found = 16, convolution("a.seanet.conv_in", (7, 1, 16), (16,))
    for stage, stride in enumerate((4, 5, 6)):
        name, outputs = f"a.seanet.blk.{stage}", 2 * channels
        found |= {**convolution(f"{name}.res_conv1", (3, channels, channels), (channels,)),
                  **convolution(f"{name}.res_conv2", (1, channels, channels), (channels,)),
                  **convolution(f"{name}.scale_conv", (2 * stride, channels, outputs), (outputs,))}
        channels = outputs
    found |= {**convolution("a.seanet.conv_out", (3, 128, 128), (128,)), "a.downsample.conv.weight": (32, 128, 128),
              "a.speaker_proj.weight": (128, TEXT), **of_layers("a", LAYERS, {"ls1.weight": (128,), "ls2.weight": (128,)})}
    wave = speech("pockettts_spkenc", Layers(128, biases=()), found, post_norm=False, mels=1, on_vectors=1)
    return {"pockettts_spkenc": wave._replace(side=2)}


SPEECH = whispers() | pictures_of_speech() | lfm() | parakeet() | gemma() | granite() | codes() | unified() | voices()
