"""Debian's libmtmd computes an image's embeddings on the devices as on the CPU, and programs answer about the image.

The vision model has the layers of Gemma 3's (SigLIP, pooling, a projection) and random weights.
"""

import array
import base64
import functools
import random
import re
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import model_file
import models
import stock
from harness import HEXAGON, HEXAGON_DEVICE, SIMULATED, cpu_env, device_env, places, server
from stocked import DebianStock

PROGRAM = stock.SOURCES / "vision.py"
IMAGE, PATCH, MERGE = 112, 14, 2
EMBEDDING, HEADS, HIDDEN, LAYERS = 128, 2, 256, 3
# Products with weights in a layer.
PRODUCTS = 6
ROWS = (IMAGE // PATCH) ** 2
# The embedding size of SmolLM2-135M.
TEXT_EMBEDDING = 576
ERROR = 1e-4
DIFFERENCE = 0.05


def vision_model(path):
    numbers, tensors = random.Random(5), {}

    def add(name, *shape, spread=None, middle=0.0):
        count = 1
        for each in shape:
            count *= each
        spread = spread or (count // shape[-1]) ** -0.5
        tensors[name] = (list(shape), [numbers.gauss(middle, spread) for _ in range(count)])

    add("v.patch_embd.weight", PATCH, PATCH, 3, EMBEDDING)
    add("v.patch_embd.bias", EMBEDDING, spread=0.1)
    add("v.position_embd.weight", EMBEDDING, ROWS, spread=0.3)
    # This weight is multiplied transposed.
    add("mm.input_projection.weight", TEXT_EMBEDDING, EMBEDDING, spread=EMBEDDING ** -0.5)
    add("mm.soft_emb_norm.weight", EMBEDDING, spread=0.1, middle=1.0)
    norms = ["v.post_ln", *(f"v.blk.{layer}.ln{i}" for layer in range(LAYERS) for i in (1, 2))]
    for name in norms:
        add(f"{name}.weight", EMBEDDING, spread=0.1, middle=1.0)
        add(f"{name}.bias", EMBEDDING, spread=0.1)
    for layer in range(LAYERS):
        for name, inputs, outputs in [("attn_q", EMBEDDING, EMBEDDING), ("attn_k", EMBEDDING, EMBEDDING),
                                      ("attn_v", EMBEDDING, EMBEDDING), ("attn_out", EMBEDDING, EMBEDDING),
                                      ("ffn_up", EMBEDDING, HIDDEN), ("ffn_down", HIDDEN, EMBEDDING)]:
            add(f"v.blk.{layer}.{name}.weight", inputs, outputs)
            add(f"v.blk.{layer}.{name}.bias", outputs, spread=0.1)
    for name, (shape, values) in tensors.items():
        if len(shape) > 1 and not name.startswith("v.position"):
            tensors[name] = (shape, values, "f16")
    model_file.write(path, {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "gemma3",
        "clip.use_gelu": True, "clip.vision.image_size": IMAGE, "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": EMBEDDING, "clip.vision.feed_forward_length": HIDDEN,
        "clip.vision.projection_dim": TEXT_EMBEDDING, "clip.vision.block_count": LAYERS,
        "clip.vision.attention.head_count": HEADS, "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.vision.projector.scale_factor": MERGE}, tensors)
    return path


def picture():
    """A PNG of noise."""
    numbers = random.Random(8)
    rows = b"".join(b"\0" + numbers.randbytes(3 * IMAGE) for _ in range(IMAGE))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", IMAGE, IMAGE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class Vision(DebianStock):
    def model(self):
        # With F16, neither the CPU nor the devices round activations to 8 bits.
        return models.variant("F16")

    def embeddings(self, mmproj, env):
        out = mmproj.with_name("embeddings")
        done = self.run_stock(sys.executable, PROGRAM, self.program.libraries, self.model(), mmproj, IMAGE, out, env=env)
        return array.array("f", out.read_bytes()), done.log

    def test_embeddings_of_an_image_are_those_of_the_cpu(self):
        """Programs load encoders into memory of the device's default type. Each weight is packed once, and each of its products
        uses the matrix unit."""
        images = set()
        with tempfile.TemporaryDirectory() as folder:
            mmproj = vision_model(Path(folder) / "mmproj.gguf")
            expected, _ = self.embeddings(mmproj, cpu_env())
            self.assertGreater(len(expected), 0)
            self.assertEqual(len(expected) % TEXT_EMBEDDING, 0)
            for chip in HEXAGON, SIMULATED:
                with self.subTest(chip):
                    timeline = Path(folder) / f"{chip}.json"
                    env = device_env(chip, GGML_RUST_NPU_TRACE=str(timeline), GGML_RUST_NPU_LOG="debug")
                    found, log = self.embeddings(mmproj, self.with_plugin(env, GGML_SCHED_DEBUG="2"))
                    error = sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)
                    products, on_matrix_unit = self.products(timeline, ROWS)
                    print(f"{chip}: NMSE {error:.1e}, {on_matrix_unit} of {products} products on the matrix unit")
                    self.assertEqual(len(found), len(expected))
                    self.assertLess(error, ERROR)
                    self.assertEqual(on_matrix_unit, products)
                    # Plus 1 for the convolution of patches.
                    weights = LAYERS * PRODUCTS + 1
                    images.add(products / weights)
                    self.assertEqual(log.count("is packed beside it"), weights)
                    self.assertNotIn("please report this on github", log)
                    told = re.findall(r"(\d+) of (\d+) nodes of a graph of (\d+) rows, in (\d+) split", log)
                    self.assertEqual([(rows, splits) for *_, rows, splits in told], [(str(ROWS), "1")])
                    # A product with exchanged operands, as for the convolution, was once logged as one of the CPU's.
                    self.assertNotRegex(log, "nodes of a graph of .*MUL_MAT")
                    if chip == HEXAGON:
                        self.assertEqual(told[0][0], told[0][1])
                        self.assertEqual(set(re.findall(r"## SPLIT #\d+: (\w+)", log)), {HEXAGON_DEVICE})
        self.assertEqual(images, {2})

    def test_an_encoder_has_its_weights_once_where_everything_is_packed(self):
        with tempfile.TemporaryDirectory() as folder:
            mmproj = vision_model(Path(folder) / "mmproj.gguf")
            expected, _ = self.embeddings(mmproj, cpu_env())
            timeline = Path(folder) / "timeline.json"
            settings = {"TRACE": str(timeline), "LOG": "debug", "REPACK": "always"}
            env = device_env(HEXAGON, **{f"GGML_RUST_NPU_{name}": value for name, value in settings.items()})
            found, log = self.embeddings(mmproj, self.with_plugin(env))
            products, on_matrix_unit = self.products(timeline, ROWS)
        error = sum((a - b) ** 2 for a, b in zip(expected, found)) / sum(a * a for a in expected)
        print(f"NMSE {error:.1e}, {on_matrix_unit} of {products} products on the matrix unit")
        self.assertLess(error, ERROR)
        self.assertEqual(on_matrix_unit, products)
        self.assertNotIn("is packed beside it", log)
        # Those of two computed operands are the CPU's.
        self.assertRegex(log, rf"nodes of a graph of {ROWS} rows, in 2 splits; not 2 MUL_MAT ")

    def test_the_command_line_describes_an_image(self):
        with tempfile.TemporaryDirectory() as folder:
            mmproj, image = vision_model(Path(folder) / "mmproj.gguf"), Path(folder) / "noise.png"
            image.write_bytes(picture())
            args = ["-m", self.model(), "--mmproj", mmproj, "--image", image, "-p", "What is this?", "-n", 8, "--temp", 0, "-c",
                    1024, "-t", 1, "--chat-template", "chatml"]
            texts = [self.with_end(functools.partial(self.run_stock, "llama-mtmd-cli", *args, env=env)).out
                     for env in (cpu_env(), *(self.with_plugin(device_env(chip)) for chip in (HEXAGON, SIMULATED)))]
        self.assertGreater(len(texts[0].strip()), 0)
        self.assertEqual(texts[1:], texts[:1] * 2)

    def answer(self, mmproj, env, name):
        """An answer about a picture, with the likeliest tokens at each place."""
        url = "data:image/png;base64," + base64.b64encode(picture()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        with server(self.model(), env, "-c", 1024, "-np", 1, "-t", 1, "--mmproj", mmproj, "--chat-template", "chatml",
                    name=name, program=self.program.command("llama-server"), cwd=self.program.folder) as running:
            answer = running.post("/v1/chat/completions", {
                "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "logprobs": True,
                "top_logprobs": 5})
        return {"completion_probabilities": answer["choices"][0]["logprobs"]["content"]}

    def test_a_server_answers_about_an_image(self):
        with tempfile.TemporaryDirectory() as folder:
            mmproj = vision_model(Path(folder) / "mmproj.gguf")
            expected = self.answer(mmproj, cpu_env(), "vision-cpu")
            (_, first), *_ = places(expected)
            self.assertEqual(len(places(expected)), 8)
            for chip in HEXAGON, SIMULATED:
                with self.subTest(chip):
                    answer = self.answer(mmproj, self.with_plugin(device_env(chip)), f"vision-{chip}")
                    (_, found), *_ = places(answer)
                    common = first.keys() & found.keys()
                    difference = max(abs(first[token] - found[token]) for token in common)
                    is_same = self.assert_same_or_tied(expected, answer)
                    print(f"{chip}: logarithms of the first token's probabilities differ by {difference:.4f}, "
                          f"the text is {'the same' if is_same else 'tied'}")
                    self.assertGreaterEqual(len(common), 4)
                    self.assertLess(difference, DIFFERENCE)
