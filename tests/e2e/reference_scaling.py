"""The choice among solutions, written a second time and from the methods' definitions.

Answers are whole numbers here: their comparison has separate tests.
"""

import math
from collections import OrderedDict


def vote(solutions, weight):
    """The answer with the largest sum of weights; of equal ones the first one."""
    sums = OrderedDict()
    for solution in solutions:
        if solution["answer"] is not None:
            sums[solution["answer"]] = sums.get(solution["answer"], 0.0) + weight(solution)
    return max(sums, key=sums.get) if sums else None


def best(solutions, score):
    """The answer of the solution with the best score; of equal ones the first."""
    return max(solutions, key=score)["answer"] if solutions else None


AGGREGATES = {
    "last": lambda scores: scores[-1],
    "min": min,
    "product": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


class Served:
    """A scripted server's answers to a prompt, in the order of the seeds."""

    def __init__(self, requests, completion):
        self.completion = completion
        self.requests = {}
        for body in sorted(requests, key=lambda body: body["seed"]):
            self.requests.setdefault((body["prompt"], bool(body["stop"])), []).append(body)

    def take(self, prompt, n, has_stop):
        """The completions of the next request for `n` of them: there must have been one."""
        found = []
        while len(found) < n:
            body = self.requests[prompt, has_stop].pop(0)
            found += [self.completion(prompt, body["seed"] + i, body["stop"]) for i in range(body["n_cmpl"])]
        assert len(found) == n, (prompt, n, len(found))
        return found

    def is_used_up(self):
        return not any(self.requests.values())


def grown(served, prompt, texts, n, has_stop):
    """Each text with its next steps, as (text, scores, has ended): `n` of them in all, given to the texts in turn."""
    children = []
    for index, (text, scores) in enumerate(texts):
        count = n // len(texts) + (index < n % len(texts))
        children.append([])
        for sample in served.take(prompt + text, count, has_stop):
            logprobs = [token["logprob"] for token in sample["completion_probabilities"]]
            is_step = sample["stop_type"] == "word"
            children[-1].append((text + sample["content"] + ("\n\n" if is_step else ""),
                                 [*scores, math.exp(sum(logprobs) / len(logprobs))], not is_step))
    return children


def beam_search(served, prompt, n, width, steps, combine):
    """search-and-learn's beam search with filter_duplicates: the finished beams, the best first."""
    active, completed = [("", [])], []
    for step in range(steps):
        children = grown(served, prompt, active, n, step + 1 < steps)
        beams = [some[turn] for turn in range(n) for some in children if turn < len(some)]
        completed += [beam for beam in beams if beam[2]]
        texts = OrderedDict()
        for text, scores, has_ended in beams:
            if not has_ended:
                texts.setdefault(text, scores)
        active = list(texts.items())
        if not active:
            break
        order = sorted(range(len(active)), key=lambda i: combine(active[i][1]))
        active = [active[i] for i in sorted(order[-(n // width):])]
    return sorted(completed, key=lambda beam: combine(beam[1]), reverse=True)[:n]


def tree_search(served, prompt, n, width, steps, combine):
    """search-and-learn's diverse verifier tree search: the last samples of each tree, which a box ends."""
    trees = [("", [])] * (n // width)
    leaves, growing = [None] * len(trees), list(range(len(trees)))
    for step in range(steps):
        still = []
        for tree, samples in zip(growing, grown(served, prompt, [trees[i] for i in growing], width * len(growing),
                                                step + 1 < steps)):
            best = max(samples, key=lambda sample: combine(sample[1]))
            trees[tree], leaves[tree] = best[:2], samples
            if not best[2] and "boxed{" not in best[0]:
                still.append(tree)
        growing = still
        if not growing:
            break
    return [sample for samples in leaves for sample in samples]


def accuracy(entries, n, aggregate="last"):
    """Right answers with the first `n` solutions of each problem, by each way to choose."""
    combine = AGGREGATES[aggregate]
    ways = {
        "pass": None,
        "majority": lambda some: vote(some, lambda _: 1.0),
        "majority-logprob": lambda some: vote(some, lambda solution: math.exp(solution["logprob"])),
        "best-of-n-logprob": lambda some: best(some, lambda solution: math.exp(solution["logprob"])),
    }
    if entries[0]["solutions"][0]["scores"]:
        ways["majority-score"] = lambda some: vote(some, lambda solution: combine(solution["scores"]))
        ways["best-of-n"] = lambda some: best(some, lambda solution: combine(solution["scores"]))
    counts = {}
    for name, choose in ways.items():
        right = 0
        for entry in entries:
            some = entry["solutions"][:n]
            if choose is None:
                right += any(solution["answer"] == entry["expected"] for solution in some)
            else:
                right += choose(some) == entry["expected"]
        counts[name] = right
    return counts


def interval(correct, problems):
    """Wilson's interval of 95 %: the shares p whose distance from the observed one is 1.96 standard deviations of p."""
    z, share = 1.959964, correct / problems
    def ends(low, high, is_inside):
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if is_inside(middle) else (middle, high)
        return low
    def outside(p):
        return abs(share - p) > z * math.sqrt(max(p * (1 - p), 0) / problems)
    return ends(0.0, share, lambda p: not outside(p)), ends(share, 1.0, outside)
