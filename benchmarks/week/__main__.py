"""A simulated week of jobs with deadlines: production's admission beside the same without slack, first come, and two
clairvoyants.

    python -m benchmarks.week                        # a quarter of an hour: offered loads .9 and 1.3, seven days
    python -m benchmarks.week --load 1.3 --days 1    # a minute
    python -m benchmarks.week --load .9 --hostile heavy-tail    # also costs-change and one-partition

Arrivals by day and night, three tasks with different acceptance and length, a batch every night, and a worker that dies
on the third day. The clairvoyants know every length, have one queue for all workers and nothing claimed ahead; of the
two, the earliest deadline and the least slack, the better one counts. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from statistics import fmean
from typing import Any, Final

from benchmarks.reporting import checkout, console, machine, parser_of, table_of
from benchmarks.week.play import CLAIRVOYANT, CONTESTANTS, Play, Played
from benchmarks.week.world import HOSTILE, draw_week
from worker.ordering.segment_order import AGEING_S, TOP_PRIORITY, UNDATED_SHARE

_Work = tuple[float, float, int, int, str | None, str]
_LABELS: Final = {
    "slack": "alphaloop: bands, then slack",
    "priority": "priority with age, no slack",
    "arrival": "first come",
    "earliest deadline": "clairvoyant, earliest deadline",
    "least slack": "clairvoyant, least slack",
}


def main() -> None:
    """Play, print tables and the JSON line."""
    options = _options()
    work: list[_Work] = [
        (load, options.days, options.workers, options.seed, options.hostile, name)
        for load in options.load
        for name in CONTESTANTS
    ]
    found: defaultdict[float, dict[str, dict[str, Any]]] = defaultdict(dict)
    with get_context("fork").Pool(options.processes) as pool:
        for (load, *_, name), figures in pool.imap_unordered(_play, work):
            found[load][name] = figures
            console.print(f"  offered {load:g}, {_LABELS[name]}: {figures['met']:.4f} of the deadlines met")
    for load in options.load:
        _print(load, found[load])
    summary = {str(load): {"contestants": by_name, **ratios(by_name)} for load, by_name in found.items()}
    about = {"days": options.days, "hostile": options.hostile, "machine": machine(), "checkout": checkout()}
    print(json.dumps({"week": summary, **about}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--load", type=float, nargs="+", default=[0.9, 1.3], help="offered, over what workers decode")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hostile", choices=HOSTILE, help="a week that production's model of it leaves out")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def _play(work: _Work) -> tuple[_Work, dict[str, Any]]:
    load, num_days, num_workers, seed, hostile, name = work
    week = draw_week(load=load, num_days=num_days, num_workers=num_workers, seed=seed, hostile=hostile)
    played = Play(week, name, num_workers=num_workers, seed=seed).run()
    return work, {"load": week.load, **figures_of(played)}


def figures_of(played: Played) -> dict[str, Any]:
    """Shares of deadlines met, of all and by stream; waits of the lowest priority, which has no deadlines."""
    dated = [job for job in played.jobs if job.deadline_s < math.inf]
    by_stream: defaultdict[str, list[bool]] = defaultdict(list)
    for job in dated:
        by_stream[" ".join(filter(None, (job.stream.task, job.stream.segment)))].append(job.ended_s <= job.deadline_s)
    waits_s = [job.ended_s - job.at_s for job in played.jobs if job.deadline_s == math.inf]
    return {
        "num_dated": len(dated),
        "met": played.num_met / len(dated),
        "by_stream": {name: sum(met) / len(met) for name, met in sorted(by_stream.items())},
        "num_started_in_vain": sum(job.num_starts > 0 and job.is_expired for job in dated),
        "undated_h": [_hours(waits_s, share) for share in (0.5, 0.99, 1.0)],
        "most_of_the_bound": most_of_the_bound(played),
    }


def most_of_the_bound(played: Played) -> float:
    """The longest wait of a job without a deadline over the bound that ageing gives it: 1 or less, if that holds.

    The bound (docs/concepts/order.md): it is in the top band after a while, and from then on its segment, alone in its
    task, has the task's share of the devices, of which one start in `1 / UNDATED_SHARE` is for those that came before.
    """
    undated = [each for each in played.decoded if each.job.deadline_s == math.inf]
    if not undated:
        return 0.0
    task, segment = undated[0].job.lane.task, undated[0].job.stream.segment
    line = [each for each in played.decoded if (each.job.lane.task, each.job.stream.segment) == (task, segment)]
    job_s = fmean(each.device_s for each in line)
    num_tasks = len({job.lane.task for job in played.jobs})
    start_s = job_s * num_tasks / played.num_workers  #: between two starts of the segment, while all tasks wait
    came, started = sorted(each.job.at_s for each in undated), sorted(each.started_s for each in undated)
    most = 0.0
    for each in undated:
        at_s = each.job.at_s
        num_before = bisect_right(came, at_s) - bisect_right(started, at_s)
        bound_s = (TOP_PRIORITY - each.job.stream.priority) * AGEING_S + num_before * start_s / UNDATED_SHARE
        most = max(most, (each.started_s - at_s) / bound_s)
    return most


def _hours(seconds: Sequence[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] / 3600


def ratios(by_name: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What the bars are about."""
    ours, best = by_name["slack"]["met"], max(by_name[name]["met"] for name in CLAIRVOYANT)
    return {"of_the_clairvoyant": ours / best, "over_first_come": ours / by_name["arrival"]["met"]}


def _rows(by_name: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for name in CONTESTANTS:
        figures = by_name[name]
        median_h, p99_h, most_h = figures["undated_h"]
        by_stream = [f"{met:.3f}" for met in figures["by_stream"].values()]
        undated = f"{median_h:.1f} / {p99_h:.1f} / {most_h:.1f}"
        yield [_LABELS[name], f"{figures['met']:.4f}", *by_stream, str(figures["num_started_in_vain"]), undated]


def _print(load: float, by_name: dict[str, dict[str, Any]]) -> None:
    of = by_name["slack"]
    title = f"offered load {of['load']:.2f}: share of {of['num_dated']:,} deadlines met"
    table = table_of(title, "order", "all", *of["by_stream"], "started in vain", "undated, hours: median / 99 % / most")
    for row in _rows(by_name):
        table.add_row(*row)
    console.print(table)
    found = ratios(by_name)
    console.print(
        f"alphaloop over the better clairvoyant: {found['of_the_clairvoyant']:.3f}; "
        f"over first come: {found['over_first_come']:.2f}"
    )
    console.print(f"longest wait without a deadline: {of['most_of_the_bound']:.2f} of the bound that ageing gives")


if __name__ == "__main__":
    main()
