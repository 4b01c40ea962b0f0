"""Debian's llama-finetune trains a random model on simulated devices: the losses are those of the CPU."""

import re
import tempfile
from pathlib import Path

import model_file
import random_model
from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, cpu_env, device_env
from stocked import DebianStock

EMBEDDING, HIDDEN, HEADS = 512, 2560, 8
# Hexagon packs F32 matrices with more elements than this, which are those of the feed-forward network here.
PACKED_FROM = 1 << 20

# The shortest context that llama.cpp makes.
CONTEXT = 256
# The text has three contexts, with a new part at every half context: two are used for training, one for validation.
TEXT = "".join(f"{number} bottles of beer on the wall, " for number in range(30, 8, -1))
EPOCHS = 2
RATES = {"adamw": "1e-4", "sgd": "1e-2"}

# The largest difference between losses. All sums are in FP32, in another order than on the CPU; on the simulated V75 they
# differ by at most 1.1e-5.
TOLERANCE = 1e-4
# The least change of the loss by training. Training without effect would give the first loss each time.
LEARNT = 0.05

class Training(DebianStock):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.random_model = random_model.write(Path(cls.folder.name) / "random.gguf", 43, EMBEDDING, HIDDEN, HEADS)
        cls.text = Path(cls.folder.name) / "text"
        cls.text.write_text(TEXT, encoding="utf-8")
        cls.of_cpu = {}

    def train(self, optimizer, env, *args):
        """The losses of each epoch, of training and of validation, with the weights afterwards and the log."""
        out = Path(self.folder.name) / "trained.gguf"
        out.unlink(missing_ok=True)
        done = self.run_stock(
            "llama-finetune", "-m", self.random_model, "-f", self.text, "-ngl", 99, "-c", CONTEXT, "-b", CONTEXT,
            "-ub", CONTEXT, "-t", 1, "-fit", "off", "-opt", optimizer, "-lr", RATES[optimizer], "-epochs", EPOCHS,
            "-val-split", "0.3", "-o", out, "-v", *args, env=env)
        # Each line of progress overwrites the one before it; the last of each kind has the loss of the epoch.
        epochs = [re.findall(r"(train|val):[^\r]*?loss=(-?[\d.]+)", epoch) for epoch in re.split(r"\n(?=train:)", done.log)]
        losses = [tuple(float(dict(epoch)[kind]) for kind in ("train", "val")) for epoch in epochs if len(dict(epoch)) == 2]
        self.assertEqual(len(losses), EPOCHS, done.log[-2000:])
        return losses, model_file.Reader(out).tensors(), done.log

    def losses_of_cpu(self, optimizer):
        if optimizer not in self.of_cpu:
            self.of_cpu[optimizer] = self.train(optimizer, cpu_env())[0]
        return self.of_cpu[optimizer]

    def assert_trains_as_the_cpu(self, device, chips, *args, packed=(), **settings):
        """With `packed`, the devices that have packed weights to train."""
        before = model_file.Reader(self.random_model).tensors()
        for optimizer in RATES:
            with self.subTest(optimizer):
                expected = self.losses_of_cpu(optimizer)
                losses, after, log = self.train(optimizer, self.with_plugin(device_env(chips, **settings)), *args)
                print(f"{chips} {optimizer}: {losses}, the CPU's {expected}")
                self.assertIn(f"using device {device}", log)
                self.assertEqual(sorted(re.findall(r"(\w+): the program trains", log)), list(packed))
                for have, want in zip(losses, expected):
                    for one, other in zip(have, want):
                        self.assertLess(abs(one - other), TOLERANCE * other)
                self.assertGreater(expected[0][0] - losses[-1][0], LEARNT)
                still = [name for name in before if after[name] == before[name]]
                self.assertEqual(still, ["token_embd.weight"])

    def test_hexagon(self):
        """Regression: training ended in GGML_ABORT, because packed weights were where no backend could compute the
        optimizer's step."""
        self.assertGreater(EMBEDDING * HIDDEN, PACKED_FROM)
        self.assert_trains_as_the_cpu(HEXAGON_DEVICE, HEXAGON, packed=[HEXAGON_DEVICE], GGML_RUST_NPU_SIM_COHERENCE="strict")

    def test_two_hexagons(self):
        """The moments of all weights are on the first device, and those of packed weights of the second one are written back.

        Without `-ts`, the second one has the output's weights alone, which are not packed.
        """
        self.assert_trains_as_the_cpu("HEX1", f"{HEXAGON},{HEXAGON}", "-ts", "1,3", packed=["HEX0", "HEX1"])

    def test_rockchip(self):
        self.assert_trains_as_the_cpu(DEVICE, SIMULATED)
