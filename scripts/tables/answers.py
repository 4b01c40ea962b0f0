"""Accuracy against the number of samples: ggml-npu scale with Qwen2.5-Coder-0.5B-Instruct on SVAMP and GSM8K."""

import json

import fetch
import models
import project
import tasks
from project import JOBS, LOGS, TARGET, Problem, cpu_env, run, say
from tables import cost, runs
from tables.page import Page, Table, number

FOLDER = runs.FOLDER / "answers"
PROMPTS = runs.ROOT / "scripts" / "tables"
PROMPT = PROMPTS / "answers.txt"
# Examples whose steps are separated by an empty line, as beam search needs.
STEPS = PROMPTS / "steps.txt"
# For each set of problems: its name, and the longest solution in tokens.
SETS = {"svamp": ("SVAMP", 96), "gsm8k": ("GSM8K", 160)}
PROBLEMS, SAMPLES, GREEDY, GREEDY_TOKENS = 100, 16, 20, 48
# For beam search: problems of SVAMP, numbers of beams, samples of a step of which one continues, longest solution in tokens.
BEAM_PROBLEMS, BEAMS, WIDTH, BEAM_TOKENS = 30, [4, 16], 4, 128
# Several problems run at the same time, so that slots do not stay empty while a few long samples finish.
AT_ONCE = 4
# The number of cache cells for all samples that run at the same time, and their prompts.
CONTEXT = 16384
CHIP = "hexagon-v75"
# The number of tokens of the examples and a question, for the cost model.
PROMPT_TOKENS = 350
METHODS = ["pass", "majority", "majority-logprob", "majority-score", "best-of-n", "best-of-n-logprob"]
SHAPE = next(shape for shape in cost.SHAPES if shape.name == "Qwen2.5-0.5B")


def command(model, problems, out, count, tokens, env, samples=SAMPLES, settings=(), prompt=PROMPT):
    """Goes on with a journal until it has `count` problems."""
    slots = AT_ONCE * samples
    run([runs.TOOL, "scale", "run", problems, "-o", out, "-n", samples, "--limit", count, "--max-tokens", tokens, "--no-chat",
         "--prompt", prompt.read_text(encoding="utf-8"), *settings, "--timeout", 3600, "--model", model, "--server-bin",
         project.binary("llama-server"), "--", "-np", slots, "-c", CONTEXT, "-t", JOBS, "-fit", "off"],
        LOGS / "results-answers.log", env=env)


def journal(path):
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines[1:]


SAMPLING = ["--scorer", "certainty", "--top-k", 40, "--top-p", 0.95]


def samples(model, name):
    """The journal of a set, finished if it is not."""
    _, tokens = SETS[name]
    out = FOLDER / f"{name}-n{SAMPLES}.jsonl"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not out.exists() or len(journal(out)) < runs.wanted(PROBLEMS):
        say(f"answers: {out.name}")
        tasks.data_sets([name])
        command(model, TARGET / "tasks" / f"{name}.jsonl", out, runs.wanted(PROBLEMS), tokens, cpu_env(),
                settings=SAMPLING)
    return out


def searched(model):
    """Journals of the same problems with the prompt of steps: independent samples, and beam search of each size."""
    found = []
    for name, count, method in [("samples", SAMPLES, []),
                                *((f"beam-n{n}", n, ["--method", "beam", "--width", WIDTH]) for n in BEAMS)]:
        out = FOLDER / f"steps-{name}.jsonl"
        if not out.exists() or len(journal(out)) < runs.wanted(BEAM_PROBLEMS):
            say(f"answers: {out.name}")
            tasks.data_sets(["svamp"])
            command(model, TARGET / "tasks" / "svamp.jsonl", out, runs.wanted(BEAM_PROBLEMS), BEAM_TOKENS, cpu_env(), count,
                    [*SAMPLING, *method], STEPS)
        found.append(out)
    return found


def beams(journals):
    rows = [row for row in report(*journals) if row["method"] in ("beam", "pass", "majority", "best-of-n")]
    rows.sort(key=lambda row: (row["n"], row["method"]))
    return Table(f"## Beam search\n\n{BEAM_PROBLEMS} problems of SVAMP with examples that show steps "
                 f"(scripts/tables/steps.txt), at most {BEAM_TOKENS} tokens. Of N beams 1 in {WIDTH} whose last step has the "
                 "best self-certainty goes on. The other rows choose among independent samples of the same prompt.",
                 ["method", "N", "tokens of a problem", "percent right"],
                 [[f"`{row['method']}`", str(row["n"]), number(row["tokens"], 0), share(row)] for row in rows])


def report(*journals):
    """The rows of a report: method, n, accuracy and its interval, tokens of a problem."""
    log = LOGS / "results-report.log"
    run([runs.TOOL, "scale", "report", *journals, "--json", "--model", cost.file(SHAPE), "--chip", CHIP, "--prompt-tokens",
         PROMPT_TOKENS], log, env=cpu_env())
    text = log.read_text(encoding="utf-8")
    return json.loads(text[text.index("\n["):])


def share(row):
    """Accuracy in percent, with its interval."""
    return f"{row['accuracy'] * 100:.0f} ({row['low'] * 100:.0f} to {row['high'] * 100:.0f})"


def accuracy(name, out):
    rows = report(out)
    counts = sorted({row["n"] for row in rows})
    entries = journal(out)
    found = {(row["method"], row["n"]): row for row in rows}
    lines = [["seconds on V75, modelled", *(number(found["pass", n]["seconds"], 2) for n in counts)]]
    for method in METHODS:
        cells = [f"`{method}`"]
        for n in counts:
            cells.append(share(found[method, n]))
        lines.append(cells)
    cut = sum(solution["cut"] for entry in entries for solution in entry["solutions"]) / (SAMPLES * len(entries))
    title, tokens = SETS[name]
    return Table(f"## {title}\n\nPercent of {len(entries)} problems, the first of the test set, with Wilson's interval of "
                 f"95 %. "
                 f"{cut * 100:.0f} % of the samples were cut at {tokens} tokens.", ["N", *map(str, counts)], lines)


def greedy(source):
    """The same problems, one sample at temperature 0, on the simulated chip and on the CPU backend, in two formats."""
    rows = []
    for kind in ("Q8_0", "F16"):
        model = models.variant(kind, source)
        answers = {}
        for words, env in (("cpu", cpu_env()), (CHIP, cpu_env(GGML_RUST_NPU_SIM=CHIP))):
            out = FOLDER / f"greedy-{kind}-{words}.jsonl"
            if not out.exists() or len(journal(out)) < GREEDY:
                say(f"answers: {out.name}")
                tasks.data_sets(["svamp"])
                command(model, TARGET / "tasks" / "svamp.jsonl", out, GREEDY, GREEDY_TOKENS, env, 1, ["--temperature", 0])
            answers[words] = {entry["id"]: entry["solutions"][0] for entry in journal(out)}
        cpu, chip = answers["cpu"], answers[CHIP]
        if cpu.keys() != chip.keys():
            raise Problem("greedy runs of other problems")
        same = sum(cpu[key]["answer"] == chip[key]["answer"] for key in cpu)
        texts = sum(cpu[key]["text"] == chip[key]["text"] for key in cpu)
        right = [sum(each["correct"] for each in side.values()) for side in (cpu, chip)]
        rows.append([kind, *map(str, right), str(same), str(texts)])
    return Table(f"## The device and the CPU\n\nGreedy decoding of {GREEDY} problems of SVAMP, at most {GREEDY_TOKENS} "
                 f"tokens, the same file on the CPU backend and on the simulated {CHIP}. With weights in Q8_0 the CPU backend "
                 "rounds activations to 8 bits in every product, and the device in those of one or two tokens; with F16 "
                 "neither does.",
                 ["weights", "right on the CPU", "right on the device", "same answer", "same text"], rows)


def write():
    source = fetch.qwen_coder()
    model = models.variant("BF16", source)
    tables = [accuracy(name, samples(model, name)) for name in SETS]
    tables += [beams(searched(model)), greedy(source)]
    last = max(path.stat().st_mtime for path in FOLDER.glob("*.jsonl"))
    return Page("Accuracy against the number of samples",
                f"Figures 5 and 10 of the EuroSys'26 paper, for a model that can be had here: {source.stem}, whose weights are "
                "dequantized to BF16, which was fastest on the CPU that computed. It runs on the CPU backend. Four examples "
                "are "
                "turns of the chat (scripts/tables/answers.txt); temperature 0.8, top-p 0.95, top-k 40; scores are "
                "self-certainty. "
                f"All methods choose among the same samples, the first N of {SAMPLES}. Seconds are those of [the model of "
                "costs](speed.md) for a prompt of the examples and a question, and for steps in which the sequences that "
                "have not "
                "ended go on.",
                "This page cannot show how a reward model chooses, because none was found to fetch. Best-of-N and beam "
                "search choose by the model's own probabilities. No joules were measured, and larger models were not "
                "tried.", tables,
                runs.datetime.date.fromtimestamp(last))
