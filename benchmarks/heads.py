"""α, cost, tokens a round and tokens a second of every configured drafter, beside look-up, over the tasks of a folder.

    python -m benchmarks.heads --prompts FOLDER --models configs/models.toml --k heads=4 --k lookup=12

The drafters are those of `[models.drafters]` in the file, "lookup" among them. For each task and load the engine writes
the same greedy texts with each drafter in turn, one right behind the other, in an order that changes from pass to pass.
Ratios of tokens a second are paired, by task and pass; of a hybrid also, for each task, over the better of its sources
there, with bounds from three passes on. A round's tokens are those that it put out, without the first of a text;
prefill is part of the seconds. α is that of the first position, of a tree that of all its tokens there. c is
the time of a proposal, a token, over that of a pass of the target that is one token wide. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import PreparedJob, Sampling
from alphaloop.settings.models import HybridDrafterSettings, ModelSettings
from benchmarks.jobs import forced, prompts_of, sample, without_prefix_cache
from benchmarks.paired import Ratio, paired_ratio
from benchmarks.reporting import console, machine, parser_of, table_of

LOOKUP = "lookup"
#: Tokens before a timed round, and how often it is timed.
_CONTEXT, _NUM_TIMED = 256, 9


def main() -> None:
    """Measure and print."""
    options = _options()
    settings = without_prefix_cache(ModelSettings.model_validate(tomllib.loads(options.models.read_text())["models"]))
    if LOOKUP not in settings.drafters:
        raise SystemExit(f"expected a drafter {LOOKUP} in {options.models}")
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    lengths = {name: one.max_draft_tokens for name, one in settings.drafters.items()}
    lengths |= {name: int(k) for name, k in (given.split("=") for given in options.k)}
    found: dict[str, Any] = {}
    for load in options.load:
        found[f"load {load}"] = _measured(settings, prompts, lengths, load, options)
    print(json.dumps({"machine": machine(), "k": lengths, **found}))


def _measured(
    settings: ModelSettings, prompts: dict[str, list[str]], lengths: dict[str, int], load: int, options: Any
) -> dict[str, Any]:
    from engine.own import load_engine

    engine = load_engine(settings, num_slots=load)
    rng = random.Random(options.seed)
    speeds: defaultdict[str, list[float]] = defaultdict(list)
    rounds: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    tested: defaultdict[str, AcceptanceCounts] = defaultdict(AcceptanceCounts)
    by_task: dict[str, dict[str, float]] = {}
    sources = {
        name: one.sources
        for name, one in settings.drafters.items()
        if isinstance(one, HybridDrafterSettings) and name in lengths
    }
    over_sources: dict[str, dict[str, Ratio]] = {name: {} for name in sources}
    texts: dict[str, dict[str, tuple[int, ...]]] = {}
    for task, of_task in sorted(prompts.items()):
        jobs = _prepared(engine, task, sample(of_task, options.num, seed=options.seed), options.max_tokens)
        before = {name: len(rounds[name]) for name in lengths}
        for _ in range(options.passes):
            order = list(lengths)
            rng.shuffle(order)
            for name in order:
                seconds, num_tokens, counts, counted, texts[name] = _decoded(engine, jobs, name, lengths[name])
                tested[name] += counts
                speeds[name].append(num_tokens / seconds)
                rounds[name].append(counted)
        if len({tuple(sorted(one.items())) for one in texts.values()}) > 1:
            console.print(f"{task}: texts differ between drafters, by a near-tie or by a fault")
        by_task[task] = {name: _per_round(rounds[name][before[name] :]) for name in lengths}
        here = {name: its[-options.passes :] for name, its in speeds.items()}
        for hybrid, its_sources in sources.items():
            better = max(its_sources, key=lambda source: sum(here[source]))
            over_sources[hybrid][task] = paired_ratio(here[hybrid], here[better])
    alpha = {name: one.accepts[0] / one.trials[0] if one.trials else 0.0 for name, one in tested.items()}
    pass_ms = engine.measure_round_ms(None, load, 1, _CONTEXT, _NUM_TIMED)
    cost = {
        name: engine.measure_round_ms(name, load, 1 + k, _CONTEXT, _NUM_TIMED) / k / pass_ms
        for name, k in lengths.items()
    }
    table = table_of(f"load {load}", "", "α", "c", "tokens a round", "tokens/s over look-up's")
    ratios = {name: paired_ratio(speeds[name], speeds[LOOKUP]) for name in lengths}
    for name in lengths:
        row = (f"{alpha[name]:.2f}", f"{cost[name]:.3f}", f"{_per_round(rounds[name]):.2f}")
        table.add_row(name, *row, str(ratios[name]))
    console.print(table)
    if over_sources:
        table = table_of(f"load {load}: tokens/s over the better source", "task", *over_sources)
        for task in by_task:
            table.add_row(task, *(str(its[task]) for its in over_sources.values()))
        console.print(table)
    return {
        "alpha": {name: round(one, 3) for name, one in alpha.items()},
        "c": {name: round(one, 4) for name, one in cost.items()},
        "tokens_a_round": {name: round(_per_round(rounds[name]), 3) for name in lengths},
        "by_task": {task: {name: round(one, 3) for name, one in row.items()} for task, row in by_task.items()},
        "speed_over_lookup": {name: [one.median, one.low, one.high] for name, one in ratios.items()},
        "speed_over_the_better_source": {
            hybrid: {task: [one.median, one.low, one.high] for task, one in its.items()}
            for hybrid, its in over_sources.items()
        },
    }


def _prepared(engine: Any, task: str, prompts: list[str], max_tokens: int) -> list[PreparedJob]:
    from alphaloop.messages import Job

    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    messages = ([{"role": "user", "content": prompt}] for prompt in prompts)
    bodies = ({"messages": one, "max_tokens": max_tokens, "temperature": 0} for one in messages)
    return [
        engine.prepare(Job.model_validate({"job_id": f"{task}-{number}", "task": task, "body": body}), sampling)
        for number, body in enumerate(bodies)
    ]


def _decoded(
    engine: Any, jobs: list[PreparedJob], drafter: str, k: int
) -> tuple[float, int, AcceptanceCounts, tuple[int, int], dict[str, tuple[int, ...]]]:
    """Seconds, tokens, trials, (tokens behind the first of each text, rounds that put them out), and the texts."""
    waiting, texts, counts = list(jobs), {}, AcceptanceCounts()
    num_tokens = num_behind = num_rounds = 0
    began = time.perf_counter()
    while waiting or engine.load().num_running:
        while waiting and engine.has_room(waiting[0]):
            engine.admit(waiting.pop(0), forced(drafter, k))
        for one in engine.step().finished:
            texts[one.job_id] = one.token_ids
            counts += one.counts
            num_tokens += len(one.token_ids)
            num_behind += len(one.token_ids) - 1
            num_rounds += one.counts.rounds + one.num_vanilla_rounds - 1
    return time.perf_counter() - began, num_tokens, counts, (num_behind, num_rounds), texts


def _per_round(counted: list[tuple[int, int]]) -> float:
    tokens, rounds = (sum(one[index] for one in counted) for index in (0, 1))
    return tokens / max(rounds, 1)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="a folder with a JSONL file a task")
    parser.add_argument("--models", type=Path, required=True, help="TOML with [models.target] and the drafters")
    parser.add_argument("--k", action="append", default=[], help="NAME=LENGTH, else its max_draft_tokens")
    parser.add_argument("--load", type=int, action="append", help="sequences at once; 1 and 8 if not given")
    parser.add_argument("--num", type=int, default=4, help="prompts a task")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-characters", type=int, default=4000, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.load = options.load or [1, 8]
    return options


if __name__ == "__main__":
    main()
