"""Computes a block of an image generator's UNet with ggml, with random weights.

Usage: unet.py LIBRARIES DEVICE OUT    writes the result as F32, and prints the splits of the graph

Debian's ggml; LIBRARIES is the folder of it. DEVICE is CPU, or another one, which is then used together with the CPU.
"""

import array
import ctypes
import math
import random
import struct
import sys
from pathlib import Path

from vision import function, need

POINTER, INT, FLOAT, LONG, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64, ctypes.c_size_t
# SOURCE: enum ggml_type, ggml_backend_buffer_usage and ggml_scale_mode, ggml 0.21.0.
F32, F16 = 0, 1
WEIGHTS = 1
NEAREST = 0
SIDE, IN, WIDE, TIME, WORDS, TEXT, HEADS, GROUPS = 16, 64, 96, 128, 77, 64, 2, 8


class InitParams(ctypes.Structure):
    """SOURCE: struct ggml_init_params, ggml.h."""

    _fields_ = [("size", SIZE), ("memory", POINTER), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """ggml's functions, with tensors of one context."""

    def __init__(self, folder):
        self.libraries = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in ("libggml-base.so.0", "libggml.so.0")]
        self.context = None

    def call(self, name, result, *arguments):
        kinds = {int: LONG, float: FLOAT, bool: ctypes.c_bool, bytes: ctypes.c_char_p}
        library = next(it for it in self.libraries if hasattr(it, name))
        types = [kinds.get(type(each), type(each) if isinstance(each, ctypes._SimpleCData | ctypes.Structure) else POINTER)
                 for each in arguments]
        return function(library, name, result, *types)(*arguments)

    def start(self):
        self.context = POINTER(self.call("ggml_init", POINTER, InitParams(1 << 24, None, True)))

    def op(self, name, *arguments):
        """A node; integers are C's int."""
        arguments = [INT(each) if isinstance(each, int) else each for each in arguments]
        return POINTER(need(self.call(f"ggml_{name}", POINTER, self.context, *arguments), name))

    def tensor(self, kind, *shape):
        lengths = [LONG(each) for each in shape]
        return POINTER(self.call(f"ggml_new_tensor_{len(shape)}d", POINTER, self.context, INT(kind), *lengths))

    def reshape(self, tensor, *shape):
        lengths = [LONG(each) for each in shape]
        return POINTER(self.call(f"ggml_reshape_{len(shape)}d", POINTER, self.context, tensor, *lengths))


class Block:
    """Convolutions with a time, attention to itself and to a text, and half and twice the size."""

    def __init__(self, ggml):
        self.ggml, self.weights, self.numbers = ggml, [], random.Random(6)

    def weight(self, *shape, spread=None, middle=0.0):
        kind = F16 if len(shape) > 1 else F32
        tensor, spread = self.ggml.tensor(kind, *shape), spread or (3 / math.prod(shape[:-1])) ** 0.5
        values = [middle + spread * self.numbers.uniform(-1, 1) for _ in range(math.prod(shape))]
        self.weights.append((tensor, packed(values, kind)))
        return tensor

    def scaled(self, x, wide, as_channels):
        """With a factor and a sum for each channel."""
        for op, middle in (("mul", 1.0), ("add", 0.0)):
            part = self.weight(wide, spread=0.2, middle=middle)
            x = self.ggml.op(op, x, self.ggml.reshape(part, 1, 1, wide, 1) if as_channels else part)
        return x

    def convolution(self, x, inputs, outputs, size=3, step=1):
        around = size // 2
        x = self.ggml.op("conv_2d", self.weight(size, size, inputs, outputs), x, step, step, around, around, 1, 1)
        return self.ggml.op("add", x, self.ggml.reshape(self.weight(outputs, spread=0.1), 1, 1, outputs, 1))

    def linear(self, x, inputs, outputs):
        return self.ggml.op("add", self.ggml.op("mul_mat", self.weight(inputs, outputs), x), self.weight(outputs, spread=0.1))

    def activated(self, x, wide):
        return self.ggml.op("silu", self.scaled(self.ggml.op("group_norm", x, GROUPS, 1e-6), wide, True))

    def residual(self, x, time):
        h = self.convolution(self.activated(x, IN), IN, WIDE)
        moved = self.linear(self.ggml.op("silu", time), TIME, WIDE)
        h = self.ggml.op("add", h, self.ggml.reshape(moved, 1, 1, WIDE, 1))
        h = self.convolution(self.activated(h, WIDE), WIDE, WIDE)
        return self.ggml.op("add", h, self.convolution(x, IN, WIDE, 1))

    def attention(self, x, other, inputs, cells):
        ggml, rows = self.ggml, SIDE * SIDE

        def heads(part, count):
            return ggml.op("permute", ggml.reshape(part, WIDE // HEADS, HEADS, count, 1), 0, 2, 1, 3)

        query = heads(self.linear(x, WIDE, WIDE), rows)
        key, value = (ggml.op("cast", ggml.op("cont", heads(self.linear(other, inputs, WIDE), cells)), F16) for _ in range(2))
        scale = (WIDE // HEADS) ** -0.5
        found = ggml.op("flash_attn_ext", query, key, value, POINTER(None), scale, 0.0, 0.0)
        return self.linear(ggml.reshape(found, WIDE, rows), WIDE, WIDE)

    def transformer(self, x, text):
        ggml, rows = self.ggml, SIDE * SIDE
        h = self.convolution(self.scaled(ggml.op("group_norm", x, GROUPS, 1e-6), WIDE, True), WIDE, WIDE, 1)
        h = ggml.op("cont", ggml.op("transpose", ggml.reshape(h, rows, WIDE)))

        def normed():
            return self.scaled(ggml.op("norm", h, 1e-5), WIDE, False)

        one = normed()
        h = ggml.op("add", h, self.attention(one, one, WIDE, rows))
        h = ggml.op("add", h, self.attention(normed(), text, TEXT, WORDS))
        gated = ggml.op("geglu", self.linear(normed(), WIDE, 8 * WIDE))
        h = ggml.op("add", h, self.linear(gated, 4 * WIDE, WIDE))
        h = ggml.reshape(ggml.op("cont", ggml.op("transpose", h)), SIDE, SIDE, WIDE, 1)
        return ggml.op("add", x, self.convolution(h, WIDE, WIDE, 1))

    def build(self, x, time, text):
        h = self.transformer(self.residual(x, time), text)
        h = self.convolution(h, WIDE, WIDE, step=2)
        return self.convolution(self.ggml.op("upscale", h, 2, NEAREST), WIDE, WIDE)


def packed(values, kind):
    if kind == F32:
        return array.array("f", values).tobytes()
    return struct.pack(f"<{len(values)}e", *values)


def main():
    folder, name, out = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    ggml = Ggml(folder)
    ggml.call("ggml_backend_load_all", None)

    def backend(device):
        found = need(ggml.call("ggml_backend_dev_by_name", POINTER, device.encode()), device)
        return need(ggml.call("ggml_backend_dev_init", POINTER, POINTER(found), POINTER(None)), device)

    backends = [backend(each) for each in dict.fromkeys((name, "CPU"))]
    ggml.start()
    block = Block(ggml)
    # Only the weights are in the first context, as in real programs.
    inputs = [(SIDE, SIDE, IN, 1), (TIME, 1), (TEXT, WORDS)]
    first = ggml.context
    ggml.start()
    graph_context = ggml.context
    plain = ggml.tensor

    def tensor(kind, *shape):
        ggml.context = first
        made = plain(kind, *shape)
        ggml.context = graph_context
        return made

    ggml.tensor = tensor
    given = [plain(F32, *shape) for shape in inputs]
    for each in given:
        ggml.call("ggml_set_input", None, each)
    result = block.build(*given)
    ggml.call("ggml_set_output", None, result)
    buffer = POINTER(need(ggml.call("ggml_backend_alloc_ctx_tensors", POINTER, first, POINTER(backends[0])), "buffer"))
    ggml.call("ggml_backend_buffer_set_usage", None, buffer, INT(WEIGHTS))

    def put(to, data):
        ggml.call("ggml_backend_tensor_set", None, to, data, SIZE(0), SIZE(len(data)))

    for to, data in block.weights:
        put(to, data)
    graph = POINTER(ggml.call("ggml_new_graph", POINTER, graph_context))
    ggml.call("ggml_build_forward_expand", None, graph, result)
    scheduler = POINTER(ggml.call("ggml_backend_sched_new", POINTER, (POINTER * len(backends))(*backends), POINTER(None),
                                  INT(len(backends)), SIZE(4096), False, True))
    if not ggml.call("ggml_backend_sched_alloc_graph", ctypes.c_bool, scheduler, graph):
        sys.exit("no memory for the graph")
    numbers = random.Random(2)
    for to, shape in zip(given, inputs):
        put(to, packed([numbers.uniform(-1, 1) for _ in range(math.prod(shape))], F32))
    if ggml.call("ggml_backend_sched_graph_compute", INT, scheduler, graph) != 0:
        sys.exit("the graph was not computed")
    count = ggml.call("ggml_nelements", LONG, result)
    values = (FLOAT * count)()
    ggml.call("ggml_backend_tensor_get", None, result, values, SIZE(0), SIZE(4 * count))
    Path(out).write_bytes(bytes(values))
    print("splits", ggml.call("ggml_backend_sched_get_n_splits", INT, scheduler))
    # Ending the context logs where nodes were computed.
    ggml.call("ggml_backend_free", None, POINTER(backends[0]))


if __name__ == "__main__":
    main()
