#!/usr/bin/env python3
"""Writes docs/results/probe-*.txt: the output of `ggml-npu devices --probe` on this tree.

Usage: probes.py [hexagon | rknn]     of the stand-ins; or under Qualcomm's library (has the same requirements as `make
vendor`), or
                                      under Rockchip's (`VENDOR=rknn make vendor`)

A test of the tool (tool/tests/probe.rs) compares the reports with docs/guide/probe.md and the protocol of the tree.
"""

import os
import subprocess
import sys
from pathlib import Path

import aarch64
import build
import vendor
import vendor_parts
import vendor_rknn
from project import LOGS, ROOT, TARGET, Problem, cpu_env, device_env, main_with, settle

STAND_INS = ["hexagon-v73", "hexagon-v75", "hexagon-v79", "hexagon-v81", "rk3588", "rk3576", "rk3566"]
UNDER_LIBCDSPRPC = ["v75", "v79"]
PROBE = ["devices", "--probe"]


def write(name, text):
    if "probe.devices: 1\n" not in text:
        raise Problem(f"{name}: no device opened\n{text[-2000:]}")
    file = ROOT / "docs" / "results" / f"probe-{name}.txt"
    # Reports must not name this checkout's folder.
    for folder in (ROOT / "hexagon-ops" / "tools" / ".." / ".." / "target", TARGET):
        text = text.replace(str(folder), "target")
    file.write_text(text, encoding="utf-8")
    print(file.relative_to(ROOT), flush=True)


def stand_ins():
    build.tool(LOGS / "probes-tool.log", cpu_env(), "--workspace")
    tool = Path(os.environ.get("CARGO_TARGET_DIR", TARGET)) / "debug" / "ggml-npu"
    for chip in STAND_INS:
        write(chip, subprocess.run([tool, *PROBE], env=device_env(chip), stdout=subprocess.PIPE, text=True).stdout)


def hexagon():
    loop = vendor.Loop(vendor_parts.tool_host, {})
    for arch in UNDER_LIBCDSPRPC:
        write(f"vendor-{arch}", loop.run(arch, vendor.TOOL, *PROBE).out)


def rknn():
    aarch64.need_all()
    vendor_rknn.library()
    file = vendor_rknn.loop()
    tool = vendor_parts.arm64_tool()
    command = [*map(str, vendor_rknn.runner(file)), tool, *PROBE]
    write("vendor-rk3588", subprocess.run(command, env=cpu_env(**vendor_rknn.settings(file)), stdout=subprocess.PIPE,
                                          text=True).stdout)


def main():
    settle()
    parts = {(): stand_ins, ("hexagon",): hexagon, ("rknn",): rknn}
    if tuple(sys.argv[1:]) not in parts:
        raise Problem("usage: probes.py [hexagon | rknn]")
    try:
        parts[tuple(sys.argv[1:])]()
    except (vendor_parts.Missing, aarch64.Missing) as missing:
        raise Problem(str(missing)) from missing
    return 0


if __name__ == "__main__":
    main_with(main)
