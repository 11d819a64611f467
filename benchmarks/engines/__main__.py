"""Routing by task over two real vLLM servers, beside sending everything to one of them; and what the worker costs.

    python -m benchmarks.engines
    python -m benchmarks.engines --prompts FOLDER --model TARGET --draft DRAFT
    python -m benchmarks.engines --blocks 4 --jobs 2 8 --cores 2,3

One worker, one Kafka, one PostgreSQL. Each block of one task and one load is played three times, in an order that is
drawn: all jobs to the vanilla server, all to the speculative one (both by `decoding` of the job), and routed by the
worker's own decisions. Both servers have the same cores, so each policy has them. Before the first block, each policy
plays jobs of every task at every load unmeasured: a static policy that is known to be the better one has a history too,
and routing has explored what is new once and for all. The worker learns from all three policies, as it would from
probes and exploration. A table goes to standard error. Last line: JSON. Exit status 1 where a job has two different
results. FOLDER holds TASK.jsonl files with a `prompt` a line; without it prompts come from this Python's own sources.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks.engines.serve import FOLDER, add_pair, add_prompts, add_run, add_vllm
from benchmarks.engines.setting_up import Running, conditions_of, prompts_for, set_up
from benchmarks.jobs import PromptJob
from benchmarks.paired import bootstrap, percentile
from benchmarks.reporting import console, parser_of, print_found
from benchmarks.servers import wait_until_idle
from benchmarks.workers import Sent

LOADS: Final = (1, 8, 1)


@dataclass(frozen=True, slots=True)
class Block:
    """Jobs of one task that are sent one after the other, `load` of them under way at a time."""

    number: int
    task: str
    load: int
    prompts: tuple[str, ...]

    def jobs(self, played_as: str, *, max_tokens: int) -> list[PromptJob]:
        """The same prompts for every policy, under names of its own."""
        return [
            PromptJob(f"{played_as}-{self.number:04d}-{place:03d}", self.task, prompt, max_tokens)
            for place, prompt in enumerate(self.prompts)
        ]


def draw_blocks(
    prompts: Mapping[str, Sequence[str]], *, num_blocks: int, jobs_each: Mapping[int, int], seed: int
) -> list[Block]:
    """`num_blocks` of each phase. A prompt comes again when all of its task were used."""
    rng = random.Random(seed)
    sources = {task: cycle(rng.sample(list(found), len(found))) for task, found in sorted(prompts.items())}
    tasks = cycle(sorted(sources))
    blocks: list[Block] = []
    for load in LOADS:
        for _ in range(num_blocks):
            task = next(tasks)
            taken = tuple(next(sources[task]) for _ in range(jobs_each[load]))
            blocks.append(Block(len(blocks), task, load, taken))
    return blocks


VANILLA, SPECULATIVE, ROUTED = "vanilla", "speculative", "routed"
POLICIES: Final = (VANILLA, SPECULATIVE, ROUTED)


@dataclass(frozen=True, slots=True)
class PlayedBlock:
    """One block, played by every policy in turn."""

    block: Block
    played: Mapping[str, Sent]


def goodput(blocks: Sequence[PlayedBlock], policy: str) -> float:
    """Tokens a second over all blocks."""
    seconds = sum(one.played[policy].seconds for one in blocks)
    return sum(one.played[policy].num_tokens for one in blocks) / seconds


def over_better_static(blocks: Sequence[PlayedBlock]) -> float:
    """Goodput of the routed blocks over that of the static policy that is better on these very blocks."""
    return goodput(blocks, ROUTED) / max(goodput(blocks, VANILLA), goodput(blocks, SPECULATIVE))


def routes(blocks: Sequence[PlayedBlock]) -> Counter[str]:
    """Jobs that were routed, by what drafted."""
    return Counter(result.drafter or VANILLA for one in blocks for result in one.played[ROUTED].results)


def reasons(blocks: Sequence[PlayedBlock]) -> Counter[str]:
    """Jobs that were routed, by what drafted and why."""
    return Counter(
        f"{result.drafter or VANILLA}: {result.decoding.reason if result.decoding else 'not told'}"
        for one in blocks
        for result in one.played[ROUTED].results
    )


def summary(blocks: Sequence[PlayedBlock]) -> dict[str, Any]:
    """For the table and the JSON line."""
    low, high = bootstrap(blocks, over_better_static)
    return {
        "num_blocks": len(blocks),
        "tokens_per_s": {policy: round(goodput(blocks, policy), 2) for policy in POLICIES},
        "routed_over_better_static": round(over_better_static(blocks), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "routes": dict(routes(blocks)),
        "reasons": dict(reasons(blocks).most_common()),
    }


def by_task(blocks: Sequence[PlayedBlock]) -> dict[str, dict[str, Any]]:
    """By task, tokens a second of each policy and where its jobs were routed."""
    found: dict[str, dict[str, Any]] = {}
    for task in sorted({one.block.task for one in blocks}):
        own = [one for one in blocks if one.block.task == task]
        found[task] = {policy: round(goodput(own, policy), 2) for policy in POLICIES} | {"routes": dict(routes(own))}
    return found


_DECODING: Final = {VANILLA: "vanilla", SPECULATIVE: "speculative", ROUTED: "auto"}


def main() -> int:
    """Set up, play, print."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: bool(found["jobs_with_two_different_results"]))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_for(options)
    few, many = options.jobs
    blocks = draw_blocks(prompts, num_blocks=options.blocks, jobs_each={1: few, 8: many}, seed=options.seed)
    conditions = _conditions(options)
    console.print(conditions)
    rng = random.Random(options.seed)
    with set_up(
        options,
        sorted(prompts),
        FOLDER / "routing",
        dtype=options.dtype,
        num_requests=max(LOADS),
        ahead=options.ahead,
        worker=dict(given.split("=", 1) for given in options.worker),
    ) as running:
        _history(running, prompts, options)
        played = [_play(running, block, options.max_tokens, rng) for block in blocks]
        alone = [one for one in played if one.block.load == 1]
        beside = {policy: [seconds for one in alone for seconds in one.played[policy].beside_s] for policy in POLICIES}
        alpha = running.alpha_by_task()
        contradicted = len(running.client.contradicted)
    found = {
        "conditions": conditions,
        "routing": summary(played),
        "by_load": {
            str(load): summary([one for one in played if one.block.load == load]) for load in sorted(set(LOADS))
        },
        "by_task": {task: told | {"alpha": alpha.get(task)} for task, told in by_task(played).items()},
        "beside_the_request_ms": _quantiles_ms([seconds for its in beside.values() for seconds in its])
        | {"by_policy": {policy: _quantiles_ms(its) for policy, its in beside.items()}},
        "jobs_with_two_different_results": contradicted,
    }
    _show(found)
    return found


_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _quantiles_ms(seconds: list[float]) -> dict[str, float]:
    found = {name: round(1000 * percentile(seconds, share), 2) for name, share in _SHARES.items()}
    return {"num_jobs": len(seconds)} | found


def _history(running: Running, prompts: dict[str, list[str]], options: argparse.Namespace) -> None:
    """Unmeasured jobs of every task at every load, so that the first block is routed with evidence."""
    for load, num_jobs in zip((1, 8), options.history, strict=True):
        for number, (task, found) in enumerate(sorted(prompts.items())):
            block = Block(number, task, load, tuple(found[-num_jobs:]) if num_jobs else ())
            for policy in POLICIES:
                jobs = block.jobs(f"history-{policy}-{load}", max_tokens=options.max_tokens)
                wait_until_idle(running.processes.values())
                running.client.play(jobs, decoding=_DECODING[policy], load=load)


def _play(running: Running, block: Block, max_tokens: int, rng: random.Random) -> PlayedBlock:
    played = {}
    for policy in rng.sample(POLICIES, len(POLICIES)):
        jobs = block.jobs(policy, max_tokens=max_tokens)
        wait_until_idle(running.processes.values())
        played[policy] = running.client.play(jobs, decoding=_DECODING[policy], load=block.load)
    told = ", ".join(f"{name} {one.num_tokens / one.seconds:.1f}" for name, one in sorted(played.items()))
    console.print(f"block {block.number}: {block.task}, load {block.load}: {told} tokens/s")
    return PlayedBlock(block, played)


def _show(found: dict[str, Any]) -> None:
    table = Table("task", *POLICIES, "routed to", "alpha", title="tokens a second")
    for task, told in found["by_task"].items():
        alpha = told["alpha"]
        where = ", ".join(f"{name} {num}" for name, num in told["routes"].items())
        shown = f"{alpha['alpha']:.2f}" if alpha else "-"
        table.add_row(task, *(f"{told[policy]:.1f}" for policy in POLICIES), where, shown)
    console.print(table)
    for name, told in (("all", found["routing"]), *((f"load {n}", one) for n, one in found["by_load"].items())):
        console.print(
            f"{name}: routed over the better static {told['routed_over_better_static']:.3f} "
            f"[{told['low']:.3f}, {told['high']:.3f}], {told['num_blocks']} blocks"
        )
    console.print(f"beside the request, load 1, ms: {found['beside_the_request_ms']}")


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **conditions_of(options),
        "cores_of_the_rest": sorted(os.sched_getaffinity(0)),
        "drafts": f"draft model {Path(options.draft).name}" if options.draft else "look-up, k = 4",
        "prompts": "a folder" if options.prompts else "Python's own sources",
        "blocks": len(LOADS) * options.blocks,
        "jobs_a_block": options.jobs,
        "worker": options.worker,
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[], help="only these")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--blocks", type=int, default=26, help="of each of the three loads")
    parser.add_argument("--jobs", type=int, nargs=2, default=[2, 16], help="a block of load 1, and of load 8")
    parser.add_argument(
        "--history", type=int, nargs=2, default=[4, 16], help="jobs of every task by each policy before, by load"
    )
    parser.add_argument("--ahead", type=int, default=2, help="requests that may wait in a server's own queue")
    parser.add_argument("--worker", nargs="+", default=[], metavar="NAME=VALUE", help="BATCH_SIZE=8")
    add_prompts(parser, max_tokens=96, max_characters=3000)
    add_pair(parser)
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
