"""How fast the engine decodes, beside transformers' `generate` and vLLM's CPU build.

    python -m benchmarks.decode --prompts FOLDER --suite batches --suite tasks
    python -m benchmarks.decode --prompts FOLDER --suite tasks --target FOLDER --draft-of-target FOLDER

FOLDER holds TASK.jsonl files with a `prompt` a line. Every engine is loaded once, in a process of its own; the modes
take turns on each prompt, so that a machine that slows down slows all of them, and every figure is a median of paired
ratios with its 95 % bounds. All in bf16, greedy. Times are whole: reading the prompt, decoding, handing the text over.
vLLM runs where --vllm-python names the interpreter of its environment (`make bench-decode` makes one). Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.contestants.process import Contestant
from benchmarks.engines.serve import NGRAM, dense_folder
from benchmarks.jobs import prompts_of, sample
from benchmarks.paired import Ratio, paired_ratio
from benchmarks.reporting import console, machine, parser_of, table_of

OUR_ENGINE, PEERS = "benchmarks.contestants.our_engine", "benchmarks.contestants.peers"
COPYING_TASKS = ("rag", "summarization", "extraction", "function_calling")
BATCHES = (1, 4, 8, 16)

Speeds = dict[str, dict[tuple[str, str], list[float]]]  #: tokens a second, by group and entry, in order of contests


@dataclass(frozen=True, slots=True)
class Contest:
    """Prompts that every entry generates for, one entry after the other."""

    group: str  #: what a ratio is taken over: a task, a batch size
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    entries: tuple[tuple[str, str], ...]  #: (contestant, mode)
    stop_at_end: bool


def main() -> None:
    """Run the suites, print their tables, and the JSON line."""
    options = _options()
    conditions = {"torch": torch.__version__, "dtype": "bfloat16", "greedy": True}
    found: dict[str, Any] = {"conditions": machine() | conditions}
    for suite in options.suite:
        found[suite] = {"batches": _batches, "tasks": _tasks}[suite](options)
    print(json.dumps(found))


def _batches(options: argparse.Namespace) -> dict[str, Any]:
    contestants = _start(options, {"ours", "transformers", "vllm"})
    speeds = _run(contestants, _batch_contests(options, set(contestants)), "batches")
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
    contestants = _start(options, wanted)
    entries = tuple(entry for entry in (*ours, *theirs, *vllm) if entry[0] in contestants)
    speeds = _run(contestants, _task_contests(options, entries), "tasks")
    rows = {group: _best_against_best(speeds, group) for group in speeds}
    _show("Tasks at batch 1, tokens a second", speeds, rows)
    return _as_json(speeds, rows)


def _batch_contests(options: argparse.Namespace, contestants: set[str]) -> list[Contest]:
    """Vanilla decoding of every engine at every batch size; each round has other prompts, of all tasks."""
    tokenize = _tokenizer(options.target)
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=1200)
    every = [prompt for _, found in sorted(prompts.items()) for prompt in sample(found, 24, seed=options.seed)]
    rng = random.Random(options.seed)
    entries = tuple((name, "vanilla") for name in ("ours", "transformers", "vllm") if name in contestants)
    return [
        Contest(
            f"{batch}",
            tuple(tokenize(prompt) for prompt in rng.sample(every, batch)),
            options.max_tokens,
            _rotated(entries, number),
            stop_at_end=False,
        )
        for batch in BATCHES
        for number in range(options.num)
    ]


def _task_contests(options: argparse.Namespace, entries: tuple[tuple[str, str], ...]) -> list[Contest]:
    """Every entry on the same prompts of each task, one at a time."""
    tokenize = _tokenizer(options.target)
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=3500)
    return [
        Contest(task, (tokenize(prompt),), options.max_tokens, _rotated(entries, number), stop_at_end=True)
        for task in options.task or COPYING_TASKS
        for number, prompt in enumerate(sample(prompts[task], options.num, seed=options.seed))
    ]


def _tokenizer(folder: str) -> Callable[[str], tuple[int, ...]]:
    """Chat prompts as every engine gets them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokenize(prompt: str) -> tuple[int, ...]:
        said = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return tokenize


def _rotated(entries: tuple[tuple[str, str], ...], by: int) -> tuple[tuple[str, str], ...]:
    """Whoever comes first finds the machine colder: none always does."""
    by %= len(entries)
    return entries[by:] + entries[:by]


def _start(options: argparse.Namespace, wanted: set[str]) -> dict[str, Contestant]:
    """The contestants of `wanted` that this machine can run, by name, each with its model loaded."""
    target, draft = options.target, options.draft_of_target
    drafters: dict[str, Any] = {"lookup": LookupDrafterSettings(max_draft_tokens=16)}
    if draft:
        drafters["draft"] = DraftModelDrafterSettings(source=draft, max_draft_tokens=16)
    settings = ModelSettings(
        target=TargetSettings(source=target, num_threads=options.threads, context_length=4096), drafters=drafters
    )
    vllm: dict[str, Any] = {"model": target, "max_model_len": 4096, "max_num_seqs": 16}
    made = {"ours": Contestant("ours", OUR_ENGINE, [settings.model_dump_json(), "16"])}
    if "transformers" in wanted and "transformers" in options.peer:
        made["transformers"] = Contestant(
            "transformers", PEERS, ["transformers", target, draft or "", str(options.threads)]
        )
    speculative: dict[str, Any] = {
        "vllm": None,
        "vllm-ngram": NGRAM,
    }
    if options.vllm_python and "vllm" in options.peer:
        for name in sorted(wanted & speculative.keys()):
            more = {"speculative_config": speculative[name]} if speculative[name] else {}
            made[name] = Contestant(name, PEERS, ["vllm", json.dumps(vllm | more)], python=options.vllm_python)
            # One at a time: each compiles and measures itself while it loads.
            made[name].wait_until_ready()
    for name in ("ours", "transformers"):
        if name in made:
            made[name].wait_until_ready()
    return made


def _run(contestants: dict[str, Contestant], contests: Sequence[Contest], title: str) -> Speeds:
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
    table = table_of(title, "", "median tokens a second", "ratio, median [95 %]")
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


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with TASK.jsonl files")
    parser.add_argument("--suite", action="append", choices=("batches", "tasks"), required=True)
    parser.add_argument("--target", default=None, help="folder of the model; default: SmolLM2")
    parser.add_argument("--draft-of-target", default=None, help="folder of a draft for it")
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
    options.peer = options.peer or ["transformers", "vllm"]
    if options.target is None:
        options.target = str(dense_folder("bfloat16"))
    return options


if __name__ == "__main__":
    main()
