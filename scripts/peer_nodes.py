"""Nodes of graphs as the harness of hexagon-ops/tools/peer reads them."""

# ggml's numbers of types. SOURCE: enum ggml_type, ggml.h of llama.cpp 0.5.0.
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6K": 14, "I32": 26, "I64": 27, "Mxfp4": 39, "Bf16": 30}
ZEROS, RANDOM, WEIGHTS, NUMBERS, COUNTED, MASK = range(6)


def described(tensor, use):
    """Returns a tensor as the harness reads it."""
    kind = TYPES.get(tensor["type"])
    if kind is None:
        return None
    return " ".join(map(str, [kind, *tensor["ne"], *tensor["nb"], *use]))


def use_of(node, index, workload):
    """Returns how the harness fills a source, by its place."""
    op, source = node["op"], node["src"][index]
    if (op, index) in (("FLASH_ATTN_EXT", 3), ("SOFT_MAX", 1)):
        return MASK, 1 if workload == "prompt" and source["ne"][1] > 1 else source["ne"][0]
    if op == "MUL_MAT_ID" and index == 2:
        return NUMBERS, node["src"][0]["ne"][2]
    if op in ("GET_ROWS", "ADD_ID") and source["type"] in ("I32", "I64"):
        return NUMBERS, node["src"][index - 1]["ne"][1]
    if source["type"] in ("I32", "I64"):
        return (COUNTED,)
    if source["role"] == "Weights":
        return (WEIGHTS,)
    return (RANDOM,) if op in ("ARGSORT", "TOP_K", "ARGMAX") else (ZEROS,)


def line(node, workload):
    """Returns a node in the harness's format; None if ggml-hexagon lacks one of its types."""
    tensors = [described(node["dst"], (ZEROS,))]
    for index, source in enumerate(node["src"]):
        tensors.append("-1" if source is None else described(source, use_of(node, index, workload)))
    if None in tensors:
        return None
    while tensors[-1] == "-1":
        tensors.pop()
    return " ".join([node["op"], *map(str, node["params"]), *tensors])


def fused(nodes):
    """Returns the nodes as ggml-hexagon combines them: RMS_NORM and MUL. Products of the same activations, and their sums, are
    counted one by one."""
    found = []
    for node in nodes:
        last = found[-1] if found else None
        if last and last["op"] == "RMS_NORM" and node["op"] == "MUL" and node["src"][0]["at"] == last["dst"]["at"]:
            found[-1] = {**last, "op": "RMS_NORM+MUL", "dst": node["dst"],
                         "src": [last["src"][0], node["src"][1], *last["src"][2:]]}
        else:
            found.append(node)
    return found
