"""Code that the tests of stock programs share: the plugin, and running the programs with it."""

import json
import math
import unittest

from harness import DEVICE, HEXAGON, HEXAGON_DEVICE, SIMULATED, Case, device_env

import build
import stock

PROMPT = "Once upon a time, in a small village by the sea,"
TOKENS = 32

CHIPS = {HEXAGON_DEVICE: HEXAGON, DEVICE: SIMULATED}


class Stock(Case):
    """A stock program with the plugin."""

    program = None

    @classmethod
    def setUpClass(cls):
        cls.plugin = cls.made_plugin()
        try:
            cls.program = cls.fetched()
        except stock.Missing as missing:
            raise unittest.SkipTest(str(missing)) from missing

    @classmethod
    def made_plugin(cls):
        return build.plugin()

    @staticmethod
    def fetched():
        return None

    def with_plugin(self, env, **settings):
        return dict(env, GGML_BACKEND_PATH=str(self.plugin), **settings)

    def text_of_static_build(self, chip, *args):
        return self.complete(PROMPT, TOKENS, device_env(chip), *args).out.rstrip("\n")


class DebianStock(Stock):
    """Debian's programs: ggml 0.27.0, API 3, ggml's symbols in global scope."""

    fetched = staticmethod(stock.debian_programs)

    def run_stock(self, name, *args, env):
        done = self.run_command(name, self.program.command(name, *args), env, cwd=self.program.folder)
        self.assertEqual(done.code, 0, done.all[-2000:])
        return done

    @staticmethod
    def of_products(timeline, rows):
        """The unit and the shape of each product of at least so many rows on a timeline."""
        events = json.loads(timeline.read_text(encoding="utf-8"))
        unit = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        # A command that computes a product and the operations after it begins with the product's name.
        products = (event for event in events if event["name"].startswith("MUL_MAT"))
        shapes = ((unit[event["tid"]], [int(size) for size in event["args"]["shape"].split("x")]) for event in products)
        return [(name, shape) for name, shape in shapes if shape[1] >= rows]

    def products(self, timeline, rows):
        """Of the products of at least so many rows on a timeline, the number, and that of those on the matrix unit."""
        found = [name for name, _ in self.of_products(timeline, rows)]
        return found.count("host"), found.count("matrix unit")

    def results(self, timeline, rows):
        """The results of those on the matrix unit, however many commands compute a product."""
        return sum(math.prod(shape) for name, shape in self.of_products(timeline, rows) if name == "matrix unit")
