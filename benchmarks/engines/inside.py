"""The speed-up that a vLLM server measures of its own rounds, beside a forced comparison on the same server.

    python -m benchmarks.engines.inside --prompts FOLDER --tasks code chat math sql

Each round plays the same jobs three times, in an order that is drawn, `--load` of them under way at a time: all with
their k (`--lengths code=3 chat=1`, else `--k`), all with k=0, and all with their k while the server runs the experiment
over its own rounds (`--share` of their time is control). For each task: tokens a second of its own requests in the
first over those in the second, with bounds by rounds, and what the third measured. They agree where the intervals
overlap, or where they differ by less than 3 %. A table goes to standard error. Last line: JSON. Exit status 1 where a
task does not agree.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import Slice
from benchmarks.engines.mixed import Draw, Played, servers_of, straight
from benchmarks.engines.serve import FOLDER, add_pair, add_prompts, add_run, add_vllm, running
from benchmarks.engines.setting_up import conditions_of, prompts_for
from benchmarks.paired import bootstrap
from benchmarks.reporting import console, parser_of, print_found, table_of

FORCED, VANILLA, MEASURED = "forced", "k=0", "measured"
#: Two figures that differ by less are the same.
_NEGLIGIBLE: Final = 0.03


def forced_speedup(task: str, rounds: Sequence[Mapping[str, Played]]) -> dict[str, float]:
    """Seconds a token without drafts over those with, of one task's requests, with bounds by rounds."""

    def ratio(some: Sequence[Mapping[str, Played]]) -> float:
        vanilla, drafted = (sum(played[name].per_token_s[task] for played in some) for name in (VANILLA, FORCED))
        return vanilla / drafted

    low, high = bootstrap(rounds, ratio)
    return {"ratio": ratio(rounds), "low": low, "high": high}


def agree(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether two figures with bounds are of one thing, as far as they can say."""
    overlap = first["low"] <= second["high"] and second["low"] <= first["high"]
    return overlap or abs(first["ratio"] / second["ratio"] - 1) < _NEGLIGIBLE


def main() -> int:
    """Set up, play, print."""
    options = _options()
    return print_found(
        lambda: _measure(options), lambda found: not all(row["agree"] for row in found["tasks"].values())
    )


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_for(options)
    tasks = sorted(prompts)
    lengths = dict.fromkeys(tasks, options.k) | {
        task: int(k) for task, _, k in (each.partition("=") for each in options.lengths)
    }
    rng = random.Random(options.seed)
    draw = Draw(prompts, options.jobs, options.max_tokens, rng)
    conditions = {
        **conditions_of(options),
        "lengths": lengths,
        "load": options.load,
        "jobs_a_task_and_round": options.jobs,
        "share": options.share,
    }
    console.print(conditions)
    folder = FOLDER / "inside"
    shutil.rmtree(folder, ignore_errors=True)
    server, _ = servers_of(options)
    rounds: list[dict[str, Played]] = []
    slices: list[Slice] = []
    with running([server], folder, options.cores):
        asyncio.run(straight(server, draw.round("warm"), lengths, options.load))
        for number in range(options.rounds):
            jobs = draw.round(f"{number}")
            played: dict[str, Played] = {}
            for name in rng.sample([FORCED, VANILLA, MEASURED], 3):
                k_of = dict.fromkeys(tasks, 0) if name == VANILLA else lengths
                share = options.share if name == MEASURED else 0.0
                played[name] = asyncio.run(straight(server, jobs, k_of, options.load, control_share=share))
                slices += played[name].slices
                console.print(f"round {number}: {name} {played[name].tokens_per_s:.1f} tokens/s")
            rounds.append(played)
    found = {task: _row(task, rounds, slices) for task in tasks if lengths[task]}
    table = table_of("speed-up by task", "task", "k", "measured inside", "forced", "blocks", "agree")
    for task, row in found.items():
        cells = (
            f"{row[name]['ratio']:.2f} [{row[name]['low']:.2f}, {row[name]['high']:.2f}]" for name in (MEASURED, FORCED)
        )
        table.add_row(task, str(lengths[task]), *cells, str(row["num_blocks"]), "yes" if row["agree"] else "no")
    console.print(table)
    return {"tasks": found, "conditions": conditions, "num_rounds": len(rounds)}


def _row(task: str, rounds: Sequence[Mapping[str, Played]], slices: Sequence[Slice]) -> dict[str, Any]:
    measured = measured_speedup(part for part in slices if part.task.split()[0] == task)
    speedup = measured.speedup
    figure = (
        {"ratio": speedup.mean, "low": speedup.low, "high": speedup.high}
        if speedup is not None
        else {"ratio": float("nan"), "low": 0.0, "high": float("inf")}
    )
    forced = forced_speedup(task, rounds)
    return {
        MEASURED: figure,
        FORCED: forced,
        "num_blocks": measured.num_blocks,
        "agree": speedup is not None and agree(figure, forced),
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[], help="only these")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, default=3, help="longest draft, and that of tasks without another length")
    parser.add_argument("--lengths", nargs="*", default=[], help="TASK=k")
    parser.add_argument("--load", type=int, default=4, help="jobs under way at a time")
    parser.add_argument("--jobs", type=int, default=3, help="of each task in a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.3, help="of the rounds' time, control")
    add_prompts(parser, max_tokens=96, max_characters=3000)
    add_pair(parser)
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
