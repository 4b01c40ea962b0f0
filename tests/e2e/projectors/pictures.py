"""Encoders of pictures, by projector."""

from projectors.encoder import (HIDDEN, LAYERS, NOTHING, PATCH, TEXT, Encoder, Layers, convolution, linear, norm, of_layers,
                                queries)

MERGE, SPATIAL_MERGE = "clip.vision.projector.scale_factor", "clip.vision.spatial_merge_size"
PIXELS = {"clip.vision.image_min_pixels": 112 * 112, "clip.vision.image_max_pixels": 224 * 224}
# Attention with heads of 72 elements, as in SigLIP, of 64, as in CLIP, and of 80, with positions that are rotated.
SIGLIP, CLIP, QWEN = Layers(288, 4), Layers(128), Layers(160)
RMS = QWEN._replace(is_rms=True, is_gated=True)
# Of several patches that a projector makes one.
FOUR = 4


def picture(name, layers, tensors=NOTHING, keys=NOTHING, side=112, patch=PATCH, positions=64, has_class=False, patches=1,
            patch_bias=True, kernel=None, post_norm=True, on_vectors=0):
    """Returns an encoder; `positions` are those of a table, and 0 if there is none."""
    wide, found = layers.wide, {"v.patch_embd.weight": kernel or (patch, patch, 3, layers.wide)}
    if patches == 2:
        found["v.patch_embd.weight.1"] = found["v.patch_embd.weight"]
    if patch_bias:
        found["v.patch_embd.bias"] = (wide,)
    if has_class:
        found["v.class_embd"] = (wide,)
    if positions:
        found["v.position_embd.weight"] = (wide, positions)
    if post_norm:
        found |= norm("v.post_ln", wide, not layers.is_rms)
    return Encoder(found | layers.tensors("v") | dict(tensors), {
        "clip.has_vision_encoder": True, "clip.projector_type": name, "clip.vision.image_size": side,
        "clip.vision.patch_size": patch, "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
        **layers.keys("vision"), **keys}, side, on_vectors)


def two(first, second, inputs, middle=HIDDEN, outputs=TEXT, has_bias=True):
    """Two products, one after the other."""
    return linear(first, inputs, middle, has_bias) | linear(second, middle, outputs, has_bias)


def block(number):
    """One of MobileVLM's: a convolution of each channel, a factor of each channel, a product."""
    name, few = f"mm.model.mb_block.{number}.block", TEXT // 4
    return {f"{name}.0.0.weight": (3, 3, 1, TEXT), **norm(f"{name}.0.1", TEXT), **linear(f"{name}.1.fc1", TEXT, few),
            **linear(f"{name}.1.fc2", few, TEXT), f"{name}.2.0.weight": (TEXT, TEXT), **norm(f"{name}.2.1", TEXT)}


def clip_like(name, tensors, keys=NOTHING, **options):
    return picture(name, CLIP, tensors, keys, **{"has_class": True, "positions": 65} | options)


def llava():
    # Pixels of a picture with 24 patches a side, which MobileVLM's projectors presuppose.
    mobile = {"side": 336, "positions": 577}
    adapter = {**convolution("adapter.conv", (2, 2, 288, 288), (288,)), "adapter.linear.linear.weight": (288, TEXT),
               **norm("adapter.linear.norm1", TEXT), "adapter.linear.dense_h_to_4h.weight": (TEXT, HIDDEN),
               "adapter.linear.gate.weight": (TEXT, HIDDEN), "adapter.linear.dense_4h_to_h.weight": (HIDDEN, TEXT),
               "adapter.boi": (TEXT,), "adapter.eoi": (TEXT,)}
    return {
        "mlp": clip_like("mlp", {**norm("v.pre_ln", 128), **two("mm.0", "mm.2", 128, TEXT)}),
        # Of Yi: with norms.
        "mlp_norm": clip_like("mlp", {**norm("v.pre_ln", 128), **two("mm.0", "mm.3", 128, TEXT), **norm("mm.1", TEXT),
                                      **norm("mm.4", TEXT)}),
        "ldp": clip_like("ldp", {**two("mm.model.mlp.1", "mm.model.mlp.3", 128, TEXT), **block(1), **block(2)}, **mobile),
        "ldpv2": clip_like("ldpv2", {**two("mm.model.mlp.0", "mm.model.mlp.2", 128, TEXT),
                                     **convolution("mm.model.peg.0", (3, 3, 1, TEXT), (TEXT,))}, **mobile),
        "adapter": picture("adapter", SIGLIP, adapter, side=168, positions=144),
    }


def siglip():
    resampler = {"resampler.pos_embed_k": (TEXT, 64), "resampler.query": (TEXT, 64), "resampler.proj.weight": (TEXT, TEXT),
                 "resampler.kv.weight": (128, TEXT)}
    for name in ("q", "k", "v", "out"):
        resampler |= linear(f"resampler.attn.{name}", TEXT, TEXT)
    for name in ("q", "kv", "post"):
        resampler |= norm(f"resampler.ln_{name}", TEXT)
    merger = norm("v.vit_merger.ln1", 288) | norm("v.vit_merger.ds_ln", 288 * FOUR)
    for name in ("q", "k", "v", "out"):
        merger |= linear(f"v.vit_merger.attn_{name}", 288, 288)
    merger |= two("v.vit_merger.ds_ffn_up", "v.vit_merger.ds_ffn_down", 288 * FOUR, outputs=288)
    merger |= norm("mm.input_norm", 288 * FOUR) | two("mm.up", "mm.down", 288 * FOUR)
    minicpmv = {"keys": {"clip.vision.wa_layer_indexes": [0]}, "positions": 70 * 70}
    return {
        "resampler": picture("resampler", CLIP, resampler, {"clip.minicpmv_query_num": 64},
                             positions=70 * 70),
        "minicpmv4_6": picture("minicpmv4_6", SIGLIP, merger, **minicpmv),
        "minicpmv4_7": picture("minicpmv4_7", SIGLIP, {**merger, "v.tok_embd_sep": (TEXT,)}, **minicpmv),
        "idefics3": picture("idefics3", SIGLIP, {"mm.model.fc.weight": (288 * 16, TEXT)},
                            {MERGE: 4, "clip.vision.preproc_image_size": 112}),
        "lfm2": picture("lfm2", SIGLIP, two("mm.1", "mm.2", 288 * FOUR), {MERGE: 2}),
        "d1omni_v": picture("d1omni_v", SIGLIP, two("mm.1", "mm.2", 288 * FOUR), {MERGE: 2}),
        # Half of the first product gates the other half.
        "cohere2v": picture("cohere2v", SIGLIP, {**linear("mm.1", 288 * FOUR, 2 * HIDDEN), **linear("mm.2", HIDDEN, TEXT)},
                            {MERGE: 2, "clip.vision.preproc_max_tiles": 4}),
        "janus_pro": picture("janus_pro", SIGLIP, two("mm.0", "mm.1", 288, TEXT)),
        "phi4": picture("phi4", SIGLIP, two("mm.0", "mm.2", 288, TEXT), PIXELS),
        "gemma3": picture("gemma3", SIGLIP, {"mm.input_projection.weight": (TEXT, 288), "mm.soft_emb_norm.weight": (288,)},
                          {MERGE: 2}),
        "kimivl": picture("kimivl", SIGLIP, {**norm("mm.input_norm", 288), **two("mm.1", "mm.2", 288 * FOUR)}, {MERGE: 2}),
        "paddleocr": picture("paddleocr", QWEN, {**norm("mm.input_norm", 160), **two("mm.1", "mm.2", 160 * FOUR)}, PIXELS,
                             positions=49),
        "granite4_vision": picture("granite4_vision", WINDOWS, windows(), {
            "clip.vision.feature_layer": [0, 1], "clip.vision.projector.spatial_offsets": [-1, 0],
            "clip.vision.projector.query_side": 2, "clip.vision.projector.window_side": 4,
            "clip.vision.projection_dim": TEXT // 2, "clip.vision.image_grid_pinpoints": [112, 112]}),
    }


WINDOWS = Layers(128)


def windows():
    """Two projectors of Granite's, each with queries of windows."""
    found, wide = {"v.image_newline": (TEXT // 2,)}, WINDOWS.wide
    for number in range(2):
        name = f"v.proj_blk.{number}"
        found |= {f"{name}.img_pos": (wide, 16), f"{name}.query": (wide, 4), **linear(f"{name}.linear", wide, TEXT // 2),
                  **norm(f"{name}.norm", wide), **norm(f"{name}.post_norm", wide), **queries("v", number, wide, wide)}
    return found


def others():
    expand, wide = FOUR * 128, CLIP.wide
    # With registers instead of a class.
    nemotron = {"v.class_embd": (wide, 4), "mm.model.mlp.0.weight": (expand,),
                **two("mm.model.mlp.1", "mm.model.mlp.3", expand, has_bias=False)}
    return {
        "internvl": clip_like("internvl", {**norm("mm.model.mlp.0", expand), **two("mm.model.mlp.1", "mm.model.mlp.3", expand)},
                              {MERGE: 2}),
        "nemotron_v2_vl": clip_like("nemotron_v2_vl", nemotron, {MERGE: 2}, positions=64),
        "nemotron_omni": clip_like("nemotron_omni", nemotron, {**PIXELS, MERGE: 2}, positions=64),
        "llama4": clip_like("llama4", {"mm.model.mlp.1.weight": (expand, HIDDEN), "mm.model.mlp.2.weight": (HIDDEN, HIDDEN),
                                       "mm.model.fc.weight": (HIDDEN, TEXT)}, {MERGE: 2}, patch_bias=False,
                            kernel=(PATCH * PATCH * 3, wide)),
        "cogvlm": picture("cogvlm", CLIP._replace(is_fused=True), {
            "mm.model.fc.weight": (wide, HIDDEN), **norm("mm.post_fc_norm", HIDDEN), "mm.up.weight": (HIDDEN, HIDDEN),
            "mm.gate.weight": (HIDDEN, HIDDEN), "mm.down.weight": (HIDDEN, TEXT), "v.boi": (TEXT,), "v.eoi": (TEXT,)},
            has_class=True, positions=65),
        "hunyuanvl": picture("hunyuanvl", CLIP, {
            **convolution("mm.0", (2, 2, wide, HIDDEN), (HIDDEN,)), **convolution("mm.2", (1, 1, HIDDEN, HIDDEN), (HIDDEN,)),
            "v.image_newline": (HIDDEN,), **linear("mm.model.fc", HIDDEN, TEXT), "mm.pre_norm.weight": (wide,),
            "mm.post_norm.weight": (TEXT,), "mm.image_begin": (TEXT,), "mm.image_end": (TEXT,)}, PIXELS, side=168),
        "step3vl": picture("step3vl", QWEN, {
            **convolution("mm.0", (3, 3, 160, HIDDEN), (HIDDEN,)), **convolution("mm.1", (3, 3, HIDDEN, HIDDEN), (HIDDEN,)),
            "mm.model.fc.weight": (HIDDEN, TEXT)}, side=336),
        "muse-glimmer": picture("muse-glimmer", QWEN, {"mm.0.weight": (160 * FOUR, HIDDEN), "mm.1.weight": (HIDDEN, HIDDEN),
                                                       "mm.2.weight": (HIDDEN, TEXT)}, positions=36),
        "kimik25": picture("kimik25", QWEN, {"v.position_embd.weight": (160, 6, 6), **norm("mm.input_norm", 160),
                                             **two("mm.1", "mm.2", 160 * FOUR)}, {MERGE: 2}),
        "youtuvl": picture("youtuvl", QWEN, {"mm.input_norm.weight": (160,), **two("mm.0", "mm.2", 160 * FOUR)},
                           {"clip.vision.window_size": 56, "clip.vision.wa_layer_indexes": [1]}, positions=0,
                           kernel=(PATCH * PATCH * 3, 160)),
        "minimax_m3": picture("minimax_m3", QWEN, {
            **norm("v.pre_ln", 160), **two("mm.1", "mm.2", 160, outputs=HIDDEN),
            **two("mm.merger.fc1", "mm.merger.fc2", HIDDEN * FOUR)}, positions=0, patches=2, patch_bias=False),
    }


def qwen():
    merge = two("mm.0", "mm.2", 160 * FOUR)
    no_table = {"positions": 0, "patches": 2, "patch_bias": False}
    deep, third = {}, TEXT // 3
    for layer in range(LAYERS):
        deep |= {**norm(f"v.deepstack.{layer}.norm", 160 * FOUR),
                 **two(f"v.deepstack.{layer}.fc1", f"v.deepstack.{layer}.fc2", 160 * FOUR, outputs=third)}
    fewer = RMS._replace(heads=4, kv_heads=2, is_fused=True)
    merger = {**convolution("mm.patch_merger", (2, 2, 160, HIDDEN), (HIDDEN,)), "mm.model.fc.weight": (HIDDEN, HIDDEN),
              **norm("mm.post_norm", HIDDEN), "mm.up.weight": (HIDDEN, HIDDEN), "mm.gate.weight": (HIDDEN, HIDDEN),
              "mm.down.weight": (HIDDEN, TEXT), **norm("v.norm_embd", 160, False)}
    mimo = fewer._replace(count=3)
    return {
        "qwen2vl_merger": picture("qwen2vl_merger", QWEN, merge, **no_table),
        "qwen2.5vl_merger": picture("qwen2.5vl_merger", RMS, merge, {"clip.vision.n_wa_pattern": 2}, **no_table),
        "qwen3vl_merger": picture("qwen3vl_merger", QWEN._replace(is_fused=True),
                                  two("mm.0", "mm.2", 160 * FOUR, outputs=third) | deep, patches=2, positions=36),
        "ling3vl": picture("ling3vl", QWEN, {**norm("mm.input_norm", 160), **merge}, patches=2),
        "exaone4_5": picture("exaone4_5", fewer, merge, {**PIXELS, "clip.vision.attention.head_count_kv": 2,
                                                         "clip.vision.n_wa_pattern": 2}, **no_table),
        "glm4v": picture("glm4v", RMS, merger, side=168, patches=2, positions=36),
        "glm5v": picture("glm5v", RMS, merger, {**PIXELS, "clip.vision.swiglu_clamp": 7.0}, side=168, patches=2,
                         positions=0),
        "mimovl": picture("mimovl", mimo, {**two("mm.0", "mm.2", 160 * FOUR, has_bias=False),
                                           **of_layers("v", 3, {"attn_sinks": (4,)})},
                          {**PIXELS, "clip.vision.attention.head_count_kv": 2, "clip.vision.window_size": 8,
                           "clip.vision.wa_pattern_mode": [-1, 0, 1]}, **no_table),
    }


def rotated():
    """Those with positions of rows and columns that are rotated, as Pixtral's."""
    no_table = {"positions": 0, "patch_bias": False}
    pixtral = RMS._replace(wide=256)
    merge = two("mm.0", "mm.2", 160 * FOUR) | norm("mm.input_norm", 160) | norm("mm.post_norm", 160, False)
    experts = {"ffn_gate_inp.weight": (160, 8), "exp_probs_b.weight": (8,), "ffn_gate_exps.weight": (160, HIDDEN, 8),
               "ffn_up_exps.weight": (160, HIDDEN, 8), "ffn_down_exps.weight": (HIDDEN, 160, 8)}
    return {
        "pixtral": picture("pixtral", pixtral, {"v.pre_ln.weight": (256,), **two("mm.1", "mm.2", 256),
                                                "v.token_embd.img_break": (TEXT,)}, **no_table),
        "lightonocr": picture("lightonocr", pixtral, {
            "mm.input_norm.weight": (256,), "mm.patch_merger.weight": (256 * FOUR, 256),
            **two("mm.1", "mm.2", 256, has_bias=False)}, {SPATIAL_MERGE: 2, "clip.vision.preproc_image_size": 112}, **no_table),
        "deepseek4v": picture("deepseek4v", RMS, {
            **two("mm.1", "mm.2", 160 * FOUR), "v.image_newline": (TEXT,),
            **{f"v.token_embd.img_{name}": (TEXT,) for name in ("start", "end", "pad")}},
            {MERGE: 2, "clip.vision.image_min_pixels": 112 * 112}, positions=0),
        "dots_ocr": picture("dots_ocr", RMS, merge, {**PIXELS, MERGE: 2}, positions=0, post_norm=False),
        # The second layer has experts.
        "dots3note_v": picture("dots3note_v", RMS, merge | {f"v.blk.1.{name}": shape for name, shape in experts.items()},
                               {**PIXELS, SPATIAL_MERGE: 2, "clip.vision.expert_used_count": 2}, positions=0, post_norm=False),
    }


def gemma():
    layers = Layers(144, is_rms=True, biases=())
    # Its bounds are numbers of the file.
    bounds = {f"v.blk.0.ffn_up.{name}": (1,) for name in ("input_max", "input_min", "output_max", "output_min")}
    heads = {"attn_q_norm.weight": (72,), "attn_k_norm.weight": (72,), "attn_post_norm.weight": (144,),
             "ffn_post_norm.weight": (144,), "ffn_gate.weight": (144, HIDDEN)}
    return {
        "gemma4v": picture("gemma4v", layers, {
            "v.position_embd.weight": (144, 64, 2), "mm.input_projection.weight": (144, TEXT), "v.std_bias": (144,),
            "v.std_scale": (144,), **of_layers("v", LAYERS, heads), **bounds}, patch=4, patch_bias=False, post_norm=False),
        # Without layers.
        "gemma4uv": picture("gemma4uv", Layers(160, count=0), {
            "v.position_embd.weight": (160, 64, 2), "mm.input_projection.weight": (160, TEXT), **norm("v.patch_norm.1", 432),
            **norm("v.patch_norm.2", 160), **norm("v.patch_norm.3", 160)}, patch=4, kernel=(432, 160), post_norm=False),
        "gemma3nv": mobilenet(),
    }


def mobilenet():
    """A small MobileNetV5: four stages, each of which halves the sides, and the last two joined."""
    few, channels = 32, 64
    tensors = {"v.conv_stem.conv.weight": (3, 3, 3, few), "v.conv_stem.conv.bias": (1, 1, few), "v.conv_stem.bn.weight": (few,),
               "v.blk.0.0.conv_exp.weight": (3, 3, few, channels), "v.blk.0.0.bn1.weight": (channels,),
               "v.blk.0.0.conv_pwl.weight": (1, 1, channels, few), "v.blk.0.0.bn2.weight": (few,)}
    for stage, (inputs, outputs) in enumerate([(few, few), (few, channels), (channels, channels)], 1):
        for number in range(2):
            name, inputs = f"v.blk.{stage}.{number}", outputs if number else inputs
            tensors |= {f"{name}.dw_start.conv.weight": (3, 3, 1, inputs), f"{name}.dw_start.bn.weight": (inputs,),
                        f"{name}.pw_exp.conv.weight": (1, 1, inputs, 128), f"{name}.pw_exp.bn.weight": (128,),
                        f"{name}.dw_mid.conv.weight": (5, 5, 1, 128), f"{name}.dw_mid.bn.weight": (128,),
                        f"{name}.pw_proj.conv.weight": (1, 1, 128, outputs), f"{name}.pw_proj.bn.weight": (outputs,),
                        f"{name}.layer_scale.gamma": (1, 1, outputs)}
    name = "v.blk.3.2"
    tensors |= {f"{name}.norm.weight": (channels,), f"{name}.attn.query.proj.weight": (1, 1, channels, 128),
                f"{name}.attn.key.proj.weight": (1, 1, channels, 32), f"{name}.attn.value.proj.weight": (1, 1, channels, 32),
                f"{name}.attn.output.proj.weight": (1, 1, 128, channels), f"{name}.layer_scale.gamma": (1, 1, channels)}
    for part in ("key", "value"):
        tensors |= {f"{name}.attn.{part}.down_conv.weight": (3, 3, 1, channels), f"{name}.attn.{part}.norm.weight": (channels,)}
    tensors |= {"v.msfa.ffn.pw_exp.conv.weight": (1, 1, 2 * channels, 128), "v.msfa.ffn.pw_exp.bn.weight": (128,),
                "v.msfa.ffn.pw_proj.conv.weight": (1, 1, 128, TEXT), "v.msfa.ffn.pw_proj.bn.weight": (TEXT,),
                "v.msfa.norm.weight": (TEXT,), "mm.input_projection.weight": (TEXT, TEXT), "mm.soft_emb_norm.weight": (TEXT,)}
    found = picture("gemma3nv", Layers(TEXT, count=0), tensors, side=256, patch=1, positions=0, patch_bias=False,
                    post_norm=False, on_vectors=2)
    del found.tensors["v.patch_embd.weight"]
    return found


def yasa():
    """Two stages of ConvNeXt's blocks."""
    few, channels = 32, 64
    tensors = norm("v.patch_ln", few) | norm("v.stage.1.down.ln", few)
    tensors |= convolution("v.stage.1.down.conv", (2, 2, few, channels), (channels,))
    for stage, wide in enumerate((few, channels)):
        name = f"v.stage.{stage}.blk.0"
        tensors |= {**convolution(f"{name}.dw", (7, 7, 1, wide), (wide,)), **norm(f"{name}.ln", wide),
                    **norm(f"{name}.grn", 4 * wide), **linear(f"{name}.pw1", wide, 4 * wide),
                    **linear(f"{name}.pw2", 4 * wide, wide)}
    tensors |= {"v.vision_pos_embed": (channels, 256), **two("mm.0", "mm.2", channels)}
    return {"yasa2": picture("yasa2", Layers(few, count=0), tensors, side=128, patch=4, positions=0, post_norm=False)}


def deepseek():
    """Segment Anything's encoder of 64 x 64 patches, and one of the features that its convolutions return."""
    wide, window, sam = 128, 14, {}
    sam |= {"v.sam.pos_embd.weight": (64, 64, 64), **convolution("v.sam.patch_embd", (16, 16, 3, 64), (64,)),
            "v.sam.neck.0.weight": (1, 1, 64, 32), **norm("v.sam.neck.1", 32), "v.sam.neck.2.weight": (3, 3, 32, 32),
            **norm("v.sam.neck.3", 32), "v.sam.net_2.weight": (3, 3, 32, 64), "v.sam.net_3.weight": (3, 3, 64, wide),
            "v.view_seperator": (TEXT,)}
    # The third layer sees all patches, and no file may do without one.
    for layer, span in enumerate((window, window, 64)):
        name = f"v.sam.blk.{layer}"
        sam |= {**linear(f"{name}.attn.qkv", 64, 192), **linear(f"{name}.attn.out", 64, 64), **norm(f"{name}.pre_ln", 64),
                **norm(f"{name}.post_ln", 64), **linear(f"{name}.mlp.lin1", 64, 128), **linear(f"{name}.mlp.lin2", 128, 64),
                f"{name}.attn.pos_h.weight": (64, 2 * span - 1), f"{name}.attn.pos_w.weight": (64, 2 * span - 1)}
    keys = {f"clip.vision.{key}": value for key, value in {
        "sam.block_count": 3, "sam.head_count": 1, "sam.embedding_length": 64, "window_size": window}.items()}
    return {
        "deepseekocr": clip_like("deepseekocr", {**sam, **norm("v.pre_ln", wide), "v.image_newline": (TEXT,),
                                                 **linear("mm.model.fc", 2 * wide, TEXT)}, keys, positions=257, patch=16,
                                 patch_bias=False, kernel=(16, 16, 3, wide), post_norm=False, on_vectors=2),
        "deepseekocr2": picture("deepseekocr2", Layers(wide, 2, is_rms=True, is_gated=True, kv_heads=1), {
            **sam, "v.resample_query_768.weight": (wide, 144), "v.resample_query_1024.weight": (wide, 256),
            **linear("mm.model.fc", wide, TEXT)}, {**keys, "clip.vision.attention.head_count_kv": 1}, patch=16, positions=0,
            patch_bias=False, on_vectors=2),
    }


PICTURES = llava() | siglip() | others() | qwen() | rotated() | gemma() | yasa() | deepseek()
