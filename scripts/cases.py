"""Upstream's test cases: lists those that a device claims, and draws samples of them by fixed rules."""

import csv
import io
import re
import subprocess

import project
from project import device_env, device_of

# test-backend-ops takes its list of cases as one argument, and an argument may have at most 128 KiB.
ARGUMENT_BYTES = 100_000


def supported(chip, **settings):
    """Returns the cases that a chip's device claims, as (operation, parameters), in upstream's order."""
    program = project.binary("test-backend-ops")
    done = subprocess.run([program, "support", "-b", device_of(chip), "--output", "csv"], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=device_env(chip, **settings))
    return claimed(done.stdout)


def claimed(table):
    """Returns the cases of a table that `test-backend-ops support --output csv` printed."""
    rows = csv.DictReader(io.StringIO(table[table.find('"'):]))
    found = [(row["op_name"], row["op_params"]) for row in rows if row["supported"] in ("yes", "true", "1")]
    # Several of upstream's cases have the same text, and one entry runs all of them.
    return list(dict.fromkeys(found))


def types(parameters):
    """Returns the parameters of a case that name types or variants of the operation: all except numbers."""
    named = re.findall(r"(\w+)=([A-Za-z]\w*)", parameters)
    return tuple(f"{name}={value}" for name, value in named)


def evenly(cases, count):
    """Returns at most `count` of `cases`, evenly spaced, the first and the last among them."""
    if len(cases) <= count:
        return cases
    return [cases[i * (len(cases) - 1) // (count - 1)] for i in range(count)]


def of_each_kind(cases, count):
    """Returns at most `count` cases of each operation with the same types and variants."""
    kinds = {}
    for operation, parameters in cases:
        kinds.setdefault((operation, types(parameters)), []).append((operation, parameters))
    return [case for kind in kinds.values() for case in evenly(kind, count)]


def arguments(cases):
    """Splits cases into lists that test-backend-ops accepts after `-o`."""
    parts, length = [[]], 0
    for operation, parameters in cases:
        case = f"{operation}({parameters})"
        if length + len(case) > ARGUMENT_BYTES:
            parts.append([])
            length = 0
        parts[-1].append(case)
        length += len(case) + 1
    return [",".join(part) for part in parts if part]
