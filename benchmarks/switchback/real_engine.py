"""The speed-up that alphaloop shows, beside forced runs of the same prompts on the real engine.

    python -m benchmarks.switchback.real_engine --prompts FOLDER/sql.jsonl --slots 8

A worker decodes the task's prompts as it decides. Switchback slices of these rounds give the figure that `status`,
`report`, `explain` and the view `task_speedup_now` show. The same worker then decodes the same prompts in blocks, each
forced to vanilla and to speculation one behind the other. A worker of an earlier commit decodes the prompts with whole
batches as control, at the same share of control, and its interval is computed as that commit does. A table goes to
standard error. Last line: JSON. Exit status 1 where the four places show different figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.process import REPOSITORY
from benchmarks.switchback.real_runs import CONFIGS, Figure, Forced, Plan, Shown, play_baseline, play_ours
from benchmarks.whole.checkout import commit_of, worktree
from benchmarks.whole.jobs import read_folder
from benchmarks.whole.servers import running_servers

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
#: The last commit whose control are whole batches.
BASELINE: Final = "6a6cdd7"


def main() -> int:
    """Run both workers, print the table and the JSON line."""
    options = _options()
    plan = _plan(options)
    folder = REPOSITORY / ".alphaloop" / "benchmarks" / "switchback"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        servers = stack.enter_context(running_servers(folder, CONFIGS))
        console.print(
            f"{len(plan.prompts)} prompts of {plan.task}, {plan.max_tokens} tokens each, {plan.num_slots} slots"
        )
        shown, forced = play_ours(plan, servers, folder)
        batches, batch_share = None, None
        if not options.without_baseline:
            commit = commit_of(REPOSITORY, BASELINE)
            checkout = stack.enter_context(worktree(REPOSITORY, commit, folder / "baseline"))
            batches, batch_share = play_baseline(plan, servers, folder, checkout)
    _show(plan.task, shown, forced, batches, batch_share)
    found = {
        "plan": {name: value for name, value in asdict(plan).items() if name != "prompts"},
        "shown": {place: asdict(figure) if figure else None for place, figure in shown.by_place.items()},
        "control_share_seen": shown.control_share,
        "drafter": shown.drafter,
        "forced": asdict(forced),
        "batches": asdict(batches) if batches else None,
        "batches_control_share_seen": batch_share,
        "agrees": shown.agrees,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(found))
    return int(not shown.agrees)


def _show(task: str, shown: Shown, forced: Forced, batches: Figure | None, batch_share: float | None) -> None:
    table = Table(title=f"{task}: speculation over vanilla, 95 % intervals")
    for column in ("what", "low", "ratio", "high", "width", "control share"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for place, figure in shown.by_place.items():
        _add(table, f"switchback, {place}", figure, shown.control_share)
    _add(table, f"forced runs, {forced.num_blocks} paired blocks", forced.figure, None)
    if batch_share is not None:
        _add(table, f"control batches, worker of {BASELINE}", batches, batch_share)
    console.print(table)


def _add(table: Table, what: str, figure: Figure | None, share: float | None) -> None:
    shown = "-" if share is None else f"{share:.1%}"
    if figure is None:
        table.add_row(what, "-", "no figure yet", "-", "-", shown)
    else:
        table.add_row(what, *(f"{one:.3f}" for one in (figure.low, figure.ratio, figure.high, figure.width)), shown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.switchback.real_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, required=True, help="TASK.jsonl with a `prompt` a line")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each job")
    parser.add_argument("--repeats", type=int, default=2, help="times that all prompts are decoded freely")
    parser.add_argument("--blocks", type=int, default=8, help="of forced runs")
    parser.add_argument("--control-share", type=float, default=0.02, help="of the device's time, for both workers")
    parser.add_argument("--without-baseline", action="store_true", help="leave the earlier commit's worker out")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one sending of jobs")
    parser.add_argument("--seed", type=int, default=0, help="of orders and of the workers' exploration")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        task=options.prompts.stem,
        prompts=tuple(read_folder(options.prompts.parent)[options.prompts.stem]),
        num_slots=options.slots,
        max_tokens=options.max_tokens,
        num_repeats=options.repeats,
        num_blocks=options.blocks,
        control_share=options.control_share,
        seed=options.seed,
        timeout_s=options.timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
