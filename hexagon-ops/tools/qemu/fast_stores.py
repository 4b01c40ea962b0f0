#!/usr/bin/env python3
"""Makes whole-vector stores of QEMU 10.0's target/hexagon one copy, and its shuffles loops over blocks.

Usage: fast_stores.py SOURCE

A store of a vector is 128 probes and 128 stores of a byte otherwise, 1.2 us each.
"""

import re
import sys
from pathlib import Path

WHOLE = """#ifdef CONFIG_USER_ONLY
            if (size == sizeof(MMVector) && env->vstore[i].mask[0] == ~0UL &&
                env->vstore[i].mask[1] == ~0UL) {
%s
                continue;
            }
#endif
"""
STORE = """                void *to = g2h(env_cpu(env), va);
                set_helper_retaddr(ra);
                memcpy(to, &env->vstore[i].data, sizeof(MMVector));
                clear_helper_retaddr();"""
PROBE = """                int first = -(va | TARGET_PAGE_MASK);
                first = first < size ? first : size;
                probe_write(env, va, first, mmu_idx, retaddr);
                if (first < size) {
                    probe_write(env, va + first, size - first, mmu_idx, retaddr);
                }"""
HEAD = "            int size = env->vstore[i].size;\n"
LOOP = "            for (int j = 0; j < size; j++) {\n"


def replace_once(text, old, new):
    assert text.count(old) == 1, f"{text.count(old)} places for {old!r}"
    return text.replace(old, new)


def main():
    target = Path(sys.argv[1]) / "target/hexagon"
    path = target / "op_helper.c"
    text = path.read_text()
    probe = HEAD + LOOP + "                if (test_bit(j, env->vstore[i].mask)) {\n                    probe_write("
    text = replace_once(text, probe, probe.replace(LOOP, WHOLE % PROBE + LOOP))
    text = replace_once(text, HEAD + LOOP, HEAD + WHOLE % STORE + LOOP)
    text = replace_once(text, '#include "cpu.h"\n',
                        '#include "cpu.h"\n#ifdef CONFIG_USER_ONLY\n#include "user/guest-host.h"\n#endif\n')
    path.write_text(text)
    path = target / "imported/mmvec/ext.idef"
    text, count = re.subn(r"fVFOREACH\(8, k\) ?\{\\\s*if \(!\( ?k & offset\)\) \{",
                          r"for (int kb = 0; kb < fVBYTES(); kb += 2 * offset) for (k = kb; k < kb + offset; k++) {\\\n {",
                          path.read_text())
    assert count > 0, "no shuffles found"
    path.write_text(text)


main()
