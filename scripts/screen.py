#!/usr/bin/env python3
"""The picture of a first session in a terminal: docs/figures/screen.txt has the programs' output, screen.svg shows it.

Usage: screen.py record     runs the commands on a simulated V75 and writes screen.txt; `make figures` draws it then

A test compares the recorded devices with the tool's current output.
"""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from html import escape
from textwrap import wrap

import build
import models
from project import HEXAGON, LOGS, ROOT, Problem, binary, cpu_env, device_env, main_with, say

TEXT = ROOT / "docs" / "figures" / "screen.txt"
QUESTION = "What is the capital of France?"
# The width of a line in characters, and sizes of characters and lines in pixels.
COLUMNS, ADVANCE, LINE, TOP, MARGIN = 100, 7.6, 19, 46, 16

STYLE = """  <style>
    text { font: 12.5px ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; fill: #e6edf3; }
    text { white-space: pre; }
    .page { fill: #0d1117; stroke: #3d444d; }
    .bar { fill: #161b22; }
    .name { fill: #9198a1; }
    .prompt { fill: #3fb950; }
    .command { font-weight: 700; }
    .note { fill: #9198a1; }
  </style>"""


def printed(shown, command, env):
    """A command as a user types it, and its output."""
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Problem(f"{shown} ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
    return [f"$ {shown}", *done.stdout.rstrip("\n").split("\n")]


def answered(model, env):
    """llama-server's answer to the question, and its log line about the device."""
    log = LOGS / "screen-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(log, "wb") as out:
        server = subprocess.Popen([binary("llama-server"), "-m", model, "-ngl", "99", "-c", "1024", "--port", str(port)],
                                  env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48}
        address = f"http://127.0.0.1:{port}"
        wait(f"{address}/health", server)
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.wait(30)
    line = re.search(r"HEX0: .*nodes of a token.*", log.read_text(encoding="utf-8", errors="replace"))
    if not line:
        raise Problem(f"the server printed no line about its device; see target/logs/{log.name}")
    return text, line[0]


def wait(address, server):
    """Waits until the server answers."""
    for _ in range(600):
        if server.poll() is not None:
            raise Problem("llama-server ended; see target/logs/screen-server.log")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise Problem("llama-server does not answer after five minutes")


def record():
    """Runs the commands, and writes their output."""
    build.static()
    model, tool, env = models.variant("Q4_0"), build.release_tool(), device_env(HEXAGON)
    variable = f"GGML_RUST_NPU_SIM={HEXAGON}"
    lines = printed(f"{variable} ggml-npu devices", [tool, "devices"], env)
    table = printed(f"ggml-npu model SmolLM2-135M-Instruct-Q4_0.gguf --chip {HEXAGON}",
                    [tool, "model", model, "--chip", HEXAGON], cpu_env())
    # Only the first table is shown, at nominal rates. The sentences before it are longer than a line.
    blank = table.index("")
    head = [part for line in table[1:blank] for part in wrap(line, COLUMNS)]
    lines += ["", table[0], *head, "", *table[blank + 1:table.index("", blank + 1)]]
    text, device = answered(model, env)
    lines += ["", f"$ {variable} llama-server -m SmolLM2-135M-Instruct-Q4_0.gguf -ngl 99 -c 1024 &", device,
              "$ curl -s localhost:8080/v1/chat/completions -d "
              f"'{{\"messages\": [{{\"role\": \"user\", \"content\": \"{QUESTION}\"}}]}}'",
              *wrap(text.split("\n\n")[0], COLUMNS)]
    TEXT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    say(f"{TEXT.relative_to(ROOT)} has {len(lines)} lines; `make figures` draws them")


def folded(line):
    """A line in pieces that fit; a short one keeps its spaces, which align the columns of tables."""
    return wrap(line, COLUMNS, subsequent_indent="    ") if len(line) > COLUMNS else [line]


def draw():
    """The SVG of the recorded lines."""
    lines = TEXT.read_text(encoding="utf-8").rstrip("\n").split("\n")
    lines = [part for line in lines for part in folded(line)]
    width, height = round(COLUMNS * ADVANCE) + 2 * MARGIN, TOP + LINE * len(lines) + 6
    title = "ggml-npu lists a simulated Hexagon NPU and reckons a model on it, and llama-server answers with it"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" xml:space="preserve">',
           f"  <title>{escape(title)}</title>",
           "  <!-- Drawn by scripts/screen.py from screen.txt; `make figures`. -->", STYLE,
           f'  <rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
           f'  <path class="bar" d="M1 28V9a8 8 0 0 1 8-8H{width - 9}a8 8 0 0 1 8 8v19z"/>',
           *(f'  <circle cx="{x}" cy="14" r="5" fill="{colour}"/>' for x, colour in
             ((18, "#f85149"), (36, "#d29922"), (54, "#3fb950"))),
           f'  <text class="name" x="{width / 2:.0f}" y="18" text-anchor="middle">simulated NPU</text>']
    for number, line in enumerate(lines):
        y, place = TOP + LINE * number + 4, f'x="{MARGIN}"'
        if line.startswith("$ "):
            out.append(f'  <text {place} y="{y}"><tspan class="prompt">$ </tspan>'
                       f'<tspan class="command">{escape(line[2:])}</tspan></text>')
        elif line:
            kind = ' class="note"' if line.startswith("- ") else ""
            out.append(f"  <text{kind} {place} y=\"{y}\">{escape(line)}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    if sys.argv[1:] != ["record"]:
        raise Problem("usage: screen.py record")
    record()
    return 0


if __name__ == "__main__":
    main_with(main)
