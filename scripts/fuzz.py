#!/usr/bin/env python3
"""Runs the fuzz targets of fuzz/ with libFuzzer and the address sanitizer, and prints how much each has run.

Usage: fuzz.py [--hours N | --minutes N] [--jobs N] [target...]     5 minutes of each target, one after the other, by default

Times are CPU time of the target. A crash, an input that runs longer than 10 s, or more than 2 GiB of memory ends the target's
run and fails the command; the input stays in target/fuzz/artifacts/, and the target's program runs it again when that file is
its argument, with the variables that are printed. New inputs are kept in target/fuzz/corpus/, seeds are in fuzz/corpus/.
target/fuzz/runs.jsonl adds up all runs, and so does the table.
"""

import argparse
import json
import os
import re
import subprocess
import threading
import time

from project import LOGS, ROOT, TARGET, Problem, main_with, toml, tool_env

FUZZ = ROOT / "fuzz"
BUILD = TARGET / "fuzz"
RUNS = BUILD / "runs.jsonl"

# An input is a sequence of decisions. Longer inputs only repeat the same kinds of decisions.
LONGEST_INPUT = 4096
TIMEOUT_S = 10
MEMORY_MIB = 2048
# The time of one process, which is limited because its memory grows with every new input.
PIECE_S = 900

# The flags that cargo-fuzz would pass.
COVERAGE = ("-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 "
            "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table "
            "-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address")

# Environment variables of a target's runs, used in turn. The target sets those that are missing.
SIM, KEEP, REPACK, THREADS = (f"GGML_RUST_NPU_{name}" for name in ("SIM", "KEEP", "REPACK", "HEX_THREADS"))
CHIPS = [{}, {SIM: "rk3576,hexagon-v73"}, {SIM: "rk3566,hexagon-v79", THREADS: "4"}, {SIM: "rk3562,hexagon-v81"}]
SETUPS = {"border": [*CHIPS, {KEEP: "off", THREADS: "4"}, {REPACK: "always"}], "graph": CHIPS}


def toolchain():
    """The pinned nightly, which hexagon-ops/tools/library.sh names."""
    text = (ROOT / "hexagon-ops" / "tools" / "library.sh").read_text(encoding="utf-8")
    return re.search(r"^toolchain=(\S+)$", text, re.M).group(1)


def host():
    shown = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    return re.search(r"^host: (.+)$", shown, re.M).group(1)


def targets():
    return [each["name"] for each in toml(FUZZ / "Cargo.toml")["bin"]]


def build(names):
    """Builds targets; returns the folder that they are in."""
    triple = host()
    command = ["cargo", f"+{toolchain()}", "build", "--release", "--locked", "--quiet", "--target", triple]
    command += ["--target-dir", BUILD]
    command += [arg for name in names for arg in ("--bin", name)]
    done = subprocess.run([str(arg) for arg in command], cwd=FUZZ, env=dict(tool_env(), RUSTFLAGS=COVERAGE))
    if done.returncode != 0:
        raise Problem("the fuzz targets do not build; they need rustup with the pinned nightly, and a C++ compiler")
    return BUILD / triple / "release"


def piece(program, name, seconds, number):
    """Runs a target once, the `number`th time; returns its record."""
    setups = SETUPS.get(name, [{}])
    setup = setups[number % len(setups)]
    corpus, artifacts = BUILD / "corpus" / name, BUILD / "artifacts" / name
    for folder in corpus, artifacts, LOGS:
        folder.mkdir(parents=True, exist_ok=True)
    seeds = FUZZ / "corpus" / name
    command = [program, f"-artifact_prefix={artifacts}/", f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}",
               f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MIB}", "-len_control=0", "-print_final_stats=1",
               "-verbosity=1", corpus, *([seeds] if seeds.is_dir() else [])]
    log = LOGS / f"fuzz-{name}.log"
    began = time.monotonic()
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen([str(arg) for arg in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                   env=dict(os.environ, RUST_BACKTRACE="1", **setup))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8", errors="replace")

    def last(pattern):
        found = re.findall(pattern, text)
        return int(found[-1]) if found else 0

    return {"target": name, "setup": setup, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 1), "wall_s": round(time.monotonic() - began, 1),
            "runs": last(r"stat::number_of_executed_units: (\d+)") or last(r"(?m)^#(\d+)"),
            "edges": last(r"cov: (\d+)"), "rss_mib": usage.ru_maxrss // 1024, "code": process.returncode}


def pieces(name):
    """The number of times that a target has run."""
    lines = RUNS.read_text(encoding="utf-8").splitlines() if RUNS.is_file() else []
    return sum(json.loads(line)["target"] == name for line in lines)


def run(folder, name, cpu_s, failed):
    """Runs a target for `cpu_s` seconds of CPU time."""
    left = cpu_s
    while left > 1 and name not in failed:
        record = piece(folder / name, name, max(1, round(min(left, PIECE_S))), pieces(name))
        with open(RUNS, "a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        if record["code"] != 0:
            failed.append(name)
            setup = " ".join(f"{key}={value}" for key, value in record["setup"].items())
            print(f"   FAILED {name}: code {record['code']}, with {setup or 'no variable'}, see target/logs/fuzz-{name}.log "
                  f"and target/fuzz/artifacts/{name}/", flush=True)
        left -= max(record["cpu_s"], 1)


def table(names):
    """Prints the sums of all runs so far."""
    total = {name: {"cpu_s": 0, "runs": 0, "edges": 0, "rss_mib": 0} for name in names}
    for line in RUNS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["target"] in total:
            sums = total[record["target"]]
            sums["cpu_s"] += record["cpu_s"]
            sums["runs"] += record["runs"]
            for largest in "edges", "rss_mib":
                sums[largest] = max(sums[largest], record[largest])
    print("| target | CPU minutes | runs | edges seen | most memory, MiB |\n|---|---|---|---|---|")
    for name, sums in total.items():
        print(f"| {name} | {sums['cpu_s'] / 60:.1f} | {sums['runs']:,} | {sums['edges']:,} | {sums['rss_mib']} |")


def main():
    arguments = argparse.ArgumentParser(description="Runs the fuzz targets.")
    arguments.add_argument("--hours", type=float, help="CPU hours of each target")
    arguments.add_argument("--minutes", type=float, default=5, help="CPU minutes of each target, without --hours")
    arguments.add_argument("--jobs", type=int, default=1, help="targets at a time")
    arguments.add_argument("target", nargs="*")
    wanted = arguments.parse_args()
    known = targets()
    names = wanted.target or known
    for name in names:
        if name not in known:
            raise Problem(f"no such target: {name}; one of {', '.join(known)}")
    cpu_s = wanted.hours * 3600 if wanted.hours else wanted.minutes * 60
    folder = build(names)
    failed, waiting = [], list(names)

    def work():
        while waiting:
            name = waiting.pop(0)
            print(f"== {name}", flush=True)
            run(folder, name, cpu_s, failed)

    threads = [threading.Thread(target=work) for _ in range(max(1, wanted.jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table(names)
    return 1 if failed else 0


if __name__ == "__main__":
    main_with(main)
