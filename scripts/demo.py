#!/usr/bin/env python3
"""Generates text on a simulated NPU and shows which device computed which nodes.

CHIP is one that GGML_RUST_NPU_SIM knows (rk3588). The model is the fetched SmolLM2-135M-Instruct (or MODEL), requantized
to Q8_0. PROMPT and N_PREDICT override the prompt and the number of tokens.
"""

import os
import re
import subprocess
from collections import Counter

import build
import models
import project
from project import JOBS, LOGS, Problem, device_env, device_of, main_with, print_tail, say

PROMPT = "Explain in two sentences why the sea is salty."
N_PREDICT = "48"

# Log lines of a program, without the time and level in front.
PLAIN_LOG = ["--no-log-prefix", "--no-log-timestamps"]


def generate(model, log, env, *args):
    """Runs llama-completion; returns its output and its log."""
    command = [project.binary("llama-completion"), "-m", model, "-c", "1024", "-t", str(JOBS), "--seed", "1",
               "--temp", "0", "--no-display-prompt", "-fit", "off", *PLAIN_LOG, *args]
    done = subprocess.run([str(arg) for arg in command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stderr, encoding="utf-8")
    if done.returncode != 0:
        print_tail(log)
        raise Problem(f"llama-completion failed with code {done.returncode}; full log in target/logs/{log.name}")
    return done.stdout.strip(), done.stderr


def speeds(log):
    """Tokens per second of prompt and generation, from the program's own timings."""
    prompt = re.search(r"prompt eval time.*?([\d.]+) tokens per second", log)
    generation = re.search(r"\n[^\n]*\beval time =(?<!prompt eval time =)[^\n]*?([\d.]+) tokens per second", log)
    if not prompt or not generation:
        raise Problem("llama-completion printed no timings; see target/logs/demo.log")
    return prompt.group(1), generation.group(1)


def buffers(log):
    """(purpose, buffer, MiB) for each buffer that the program allocated."""
    pattern = r"(\S+) +(model|KV|compute|output) buffer size = +([\d.]+) MiB"
    return [(kind, name, size) for name, kind, size in re.findall(pattern, log)]


def ops(log):
    """Counts the operations of each kind that the scheduler gave to each device, in the last graph that it printed."""
    last = log.rfind("## SPLIT #0:")
    if last < 0:
        raise Problem("the scheduler printed no graph; see target/logs/demo-splits.log")
    # The scheduler truncates names: a device's to five characters, an operation's to ten.
    nodes = re.findall(r"node # *\d+ \( *(\w+)\):[^\[]*\[ *(\w+) *\]", log[last:])
    return Counter((device, op) for op, device in nodes)


def print_devices(log, device):
    print("\nTensors")
    uses = {"model": "weights", "KV": "KV cache", "compute": "computed tensors", "output": "logits"}
    for kind, name, size in buffers(log):
        if float(size) > 0:
            print(f"  {name:14} {uses[kind]:17} {float(size):8.1f} MiB")
    print("\nOperations for one token")
    counts = ops(log)
    for name in sorted({name for name, _ in counts}, reverse=True):
        full = device if device.startswith(name) else name
        listed = [f"{count} {op}" for (where, op), count in counts.most_common() if where == name]
        print(f"  {full:14} {', '.join(listed)}")


def main():
    build.static()
    model = models.variant("Q8_0")
    chip = os.environ.get("CHIP", project.SIMULATED)
    npu = device_of(chip)
    prompt = os.environ.get("PROMPT", PROMPT)
    n_predict = os.environ.get("N_PREDICT", N_PREDICT)

    say(f"{model.name} on {npu}")
    text, log = generate(model, LOGS / "demo.log", device_env(chip), "-st", "-n", n_predict, "-p", prompt)
    _, splits = generate(model, LOGS / "demo-splits.log", device_env(chip, GGML_SCHED_DEBUG="2"), "-no-cnv", "--no-warmup",
                         "-v", "-n", "2", "-p", "Hi")
    device = re.search(rf"using device {npu} \((.*?)\) \(unknown id\)", splits)
    if not device:
        raise Problem(f"{npu} was not used (is {chip} a chip?); see target/logs/demo-splits.log")

    print(f"\n> {prompt}\n{text}\n")
    prompt_speed, generation_speed = speeds(log)
    print(f"prompt {prompt_speed} tokens/s, generation {generation_speed} tokens/s")
    print_devices(splits, npu)
    print(f"\n{npu} is simulated: {device.group(1)}. The speed is that of this computer, not of an NPU.")
    return 0


if __name__ == "__main__":
    main_with(main)
