"""Model files byte by byte: reads a GGUF, and writes small ones."""

import array
import math
import struct

# Sizes of the simple value types of a GGUF, by number; the other types have a length.
# SOURCE: enum gguf_type, ggml/include/gguf.h of llama.cpp 0.5.0.
PLAIN = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
ALIGNMENT = 32


class Reader:
    """Reads the header of a GGUF."""

    def __init__(self, path):
        self.bytes, self.at = path.read_bytes(), 8

    def number(self, form):
        value, = struct.unpack_from("<" + form, self.bytes, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.number("Q")
        self.at += length
        return self.bytes[self.at - length:self.at].decode()

    def skip(self, kind):
        if kind == STRING:
            self.text()
        elif kind == ARRAY:
            each, count = self.number("I"), self.number("Q")
            if each in PLAIN:
                self.at += count * PLAIN[each]
            else:
                for _ in range(count):
                    self.skip(each)
        else:
            self.at += PLAIN[kind]

    def contents(self):
        """Returns the entries in the form that `write` accepts, and the shape, bytes and type of each tensor, by name.

        No metadata of these files changes the alignment.
        """
        tensors, pairs = self.number("Q"), self.number("Q")
        entries = {}
        for _ in range(pairs):
            key, start = self.text(), self.at
            self.skip(self.number("I"))
            entries[key] = self.bytes[start:self.at]
        found = []
        for _ in range(tensors):
            name, dims = self.text(), self.number("I")
            shape = tuple(self.number("Q") for _ in range(dims))
            found.append((name, shape, self.number("I"), self.number("Q")))
        start = -(-self.at // ALIGNMENT) * ALIGNMENT
        ends = [offset for *_, offset in found[1:]] + [len(self.bytes) - start]
        return entries, {name: (shape, self.bytes[start + offset:start + end], kind)
                         for (name, shape, kind, offset), end in zip(found, ends)}

    def tensors(self):
        """Returns the type and bytes of each tensor, by name."""
        _, tensors = self.contents()
        return {name: (kind, data) for name, (_, data, kind) in tensors.items()}


# Tensor types: ggml's number, the elements of a block, and the bytes of a block.
# SOURCE: enum ggml_type and the blocks of ggml-common.h, llama.cpp 0.5.0.
TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q8_0": (8, 32, 34), "q6_K": (14, 256, 210),
         "mxfp4": (39, 32, 17)}
F32 = TYPES["f32"][0]
# The numbers of the value types that are written. SOURCE: as above.
NUMBER, INTEGER, REAL, FLAG = 4, 5, 6, 7


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key, value):
    """A key with a flag, a number, a text, a list of flags, numbers or texts, or bytes from `Reader.contents`."""
    if isinstance(value, bytes):
        return text(key) + value
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", FLAG, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", NUMBER, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", REAL, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value[0], bool):
        return text(key) + struct.pack(f"<IIQ{len(value)}?", ARRAY, FLAG, len(value), *value)
    if isinstance(value[0], (int, float)):
        kind, form = (INTEGER, "i") if isinstance(value[0], int) else (REAL, "f")
        return text(key) + struct.pack(f"<IIQ{len(value)}{form}", ARRAY, kind, len(value), *value)
    return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))


def packed(values, kind):
    return struct.pack(f"<{len(values)}e", *values) if kind == "f16" else array.array("f", values).tobytes()


def write(path, entries, tensors):
    """Writes a GGUF: of each tensor, by name, its shape (fastest dimension first), its numbers or bytes, and its type.

    The default type is `f32`. Without numbers the file has a hole, which reads as zeros and needs no space.
    """
    infos, data, offset = b"", [], 0
    for name, (shape, values, *kind) in tensors.items():
        kind, = kind or ["f32"]
        number, elements, size = TYPES[kind]
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
        if values is not None and not isinstance(values, bytes):
            values = packed(values, kind)
        data.append((offset, values))
        offset += -(-math.prod(shape) // elements * size // ALIGNMENT) * ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    head += b"".join(entry(key, value) for key, value in entries.items()) + infos
    start = -(-len(head) // ALIGNMENT) * ALIGNMENT
    with open(path, "wb") as file:
        file.write(head)
        for at, values in data:
            if values is not None:
                file.seek(start + at)
                file.write(values)
        file.truncate(start + offset)
