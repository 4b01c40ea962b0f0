"""Runs of llama.cpp's programs and of ggml-npu, whose results are kept in target/results until they are removed there."""

import datetime
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import fetch
import project
from project import JOBS, LOGS, ROOT, TARGET, Problem, cpu_env, run

FOLDER = TARGET / "results"
FILES = FOLDER / "files"
CHUNK_TOKENS = 512
# How many chunks of the text are used for perplexity. Statistics use the chunks after these.
CHUNKS = int(os.environ.get("RESULTS_CHUNKS", "8"))
STATISTICS_FROM = 200
# To make a part of a table: the models to use, and the number of problems.
ONLY = [name for name in os.environ.get("RESULTS_MODELS", "").split(",") if name]
PROBLEMS = os.environ.get("RESULTS_PROBLEMS")
# Tests set this variable to the tool that they have built.
TOOL = Path(os.environ.get("RESULTS_TOOL", ROOT / "target" / "release" / "ggml-npu"))


def chosen(all_models):
    """The models of a table, by name, each made by a function."""
    return {name: source() for name, source in all_models.items() if not ONLY or name in ONLY}


def wanted(problems):
    return min(problems, int(PROBLEMS)) if PROBLEMS else problems


class Result(NamedTuple):
    """A perplexity and its standard error."""

    perplexity: float
    error: float

    def __str__(self):
        return f"{self.perplexity:.3f} ± {self.error:.3f}"


class Kept:
    """The results of the runs of one page."""

    def __init__(self, page):
        self.file = FOLDER / f"{page}.json"
        self.values = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}

    def get(self, key, compute):
        """The value of `key`, a JSON value, which is computed if it is not there yet."""
        if key not in self.values:
            project.say(f"{self.file.stem}: {key}")
            self.values[key] = {"value": compute(), "date": datetime.date.today().isoformat()}
            FOLDER.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
            os.replace(part, self.file)
        return self.values[key]["value"]

    def perplexity(self, key, model, env=None, *args):
        """`model` is a path, or a function that makes the file."""
        def compute():
            return perplexity(self.file.stem, model() if callable(model) else model, env or cpu_env(), *args)
        return Result(*self.get(f"{key}, {CHUNKS} chunks", compute))

    def date(self):
        """The day of the last run."""
        return datetime.date.fromisoformat(max(value["date"] for value in self.values.values()))


def perplexity(page, model, env, *args):
    # Several tables may be made at the same time, so each page has a separate log.
    log = LOGS / f"results-{page}-perplexity.log"
    # llama.cpp may exit before its logging thread has written the last lines (its issue 22142).
    for _ in range(3):
        run([project.binary("llama-perplexity"), "-m", model, "-f", fetch.text(), "-c", CHUNK_TOKENS, "-b", CHUNK_TOKENS, "-ub",
             CHUNK_TOKENS, "--chunks", CHUNKS, "-t", JOBS, "-fit", "off", *args], log, env=env)
        found = re.search(r"Final estimate: PPL = (\S+) \+/- (\S+)", log.read_text(encoding="utf-8", errors="replace"))
        if found:
            return [float(found[1]), float(found[2])]
    raise Problem(f"llama-perplexity printed no perplexity in 3 runs; see target/logs/{log.name}")


def made(name, make):
    """A file in target/results/files, which `make` writes under the path that it gets."""
    path = FILES / name
    if not path.exists():
        FILES.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".part-{name}")
        make(part)
        # The name of a pack is derived from its model's.
        pack, final = (each.with_suffix(".groups.npu") for each in (part, path))
        if pack.exists():
            os.replace(pack, final)
        os.replace(part, path)
    return path


def statistics(model, name, chunks, text=None):
    """Statistics of the model on `chunks` chunks of a text; for the wiki text, chunks that are not used for perplexity."""
    begin = [] if text else ["--chunk", STATISTICS_FROM]
    return made(name, lambda path: run(
        [project.binary("llama-imatrix"), "-m", model, "-f", text or fetch.text(), "-o", path, "-c", CHUNK_TOKENS, "-b",
         CHUNK_TOKENS, "--chunks", chunks, *begin, "--no-ppl", "-t", JOBS, "-fit", "off"],
        LOGS / "results-imatrix.log", env=cpu_env()))


def quantized(model, name, *args):
    """`model`, quantized by ggml-npu."""
    return made(name, lambda path: run([TOOL, "quantize", model, "-o", path, *args], LOGS / "results-quantize.log",
                                       env=cpu_env()))
