"""`alphaloop capacity` over the simulated week: planned from days 1 to 3, judged on days 4 to 7 and other arrivals.

    python -m benchmarks.week.capacity                    # twenty minutes
    python -m benchmarks.week.capacity --days 2 --learn 1 --workers 3    # a minute

Two workers decode the first days under production's admission and decisions. From what they recorded, fleets are
planned for some deadlines. Then a fleet of each size decodes the same week under production's admission, and the device
hours that it was busy in the later days are compared with those that were planned. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any, Final

from alphaloop.capacity.curve import DecodedJobs, LoadCurve, arrivals_of
from alphaloop.capacity.fleet import PERIOD_S, least_fleet, play
from benchmarks.reporting import checkout, console, machine, parser_of, table_of
from benchmarks.week.device import Decoding
from benchmarks.week.play import Play, Played
from benchmarks.week.world import DAY_S, NUM_SLOTS, draw_week

LEARNED_WITH: Final = 2  #: workers
BAR: Final = 0.15  #: of the device hours


def main() -> None:
    """Learn, plan, play, compare."""
    options = _options()
    learned = _play((options, LEARNED_WITH))
    learn_s = options.learn * DAY_S
    jobs = [as_recorded(each) for each in learned.decoded if each.job.ended_s < learn_s]
    curve = LoadCurve.of_jobs(jobs)
    arrivals = sorted((arrivals_of(decoded, curve) for decoded in jobs), key=lambda coming: coming.at_s)
    needed = {
        hours: least_fleet(arrivals, curve, num_slots=NUM_SLOTS, deadline_s=3600 * hours).num_devices
        for hours in options.deadline
    }
    sizes = sorted({LEARNED_WITH, *needed.values(), *options.workers})
    with get_context("fork").Pool(options.processes) as pool:
        found = pool.map(_play, [(options, size) for size in sizes])
    table = table_of(
        f"device hours a day, planned from {options.learn} days, used later",
        "devices",
        "deadlines",
        "planned",
        "used",
        "ratio",
    )
    ratios: dict[int, float] = {}
    for size, played in zip(sizes, found, strict=True):
        planned = play(arrivals, curve, num_devices=size, num_slots=NUM_SLOTS)
        planned_h = sum(planned.busy_s[: int(learn_s / PERIOD_S)]) / options.learn / 3600
        used_h = busy_h(played, range(options.learn, options.days))
        ratios[size] = planned_h / used_h
        asked = ", ".join(f"{hours:g} h" for hours, number in needed.items() if number == size) or "-"
        table.add_row(str(size), asked, f"{planned_h:.1f}", f"{used_h:.1f}", f"{ratios[size]:.3f}")
    console.print(table)
    console.print(f"within {BAR:.0%}: {all(abs(ratio - 1) <= BAR for ratio in ratios.values())}")
    summary: dict[str, Any] = {"ratios": ratios, "needed": needed, "loads": curve.loads, "slowness": curve.slowness}
    print(json.dumps({"capacity": summary, "days": options.days, "machine": machine(), "checkout": checkout()}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--load", type=float, default=0.9, help=f"offered, over what {LEARNED_WITH} workers decode")
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--learn", type=int, default=3, help="days to plan from")
    parser.add_argument("--deadline", type=float, nargs="+", default=[0.5, 4.0, 24.0], help="hours")
    parser.add_argument("--workers", type=int, nargs="*", default=[3, 4], help="other fleets to compare")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def _play(work: tuple[argparse.Namespace, int]) -> Played:
    options, num_workers = work
    week = draw_week(load=options.load, num_days=options.days, num_workers=LEARNED_WITH, seed=options.seed)
    return Play(week, "slack", num_workers=num_workers, seed=options.seed).run()


def as_recorded(decoding: Decoding) -> DecodedJobs:
    """What `decode_runs` says of a job."""
    wall_s = decoding.job.ended_s - decoding.started_s
    return DecodedJobs(
        task=decoding.job.stream.task,
        device="laptop",
        is_speculative=decoding.decision.num_draft_tokens > 0,
        arrived_s=decoding.job.at_s,
        num_jobs=1,
        num_texts=1,
        num_tokens=decoding.job.num_tokens,
        wall_s=wall_s,
        load=max(1.0, wall_s / decoding.device_s),
    )


def busy_h(played: Played, days: Sequence[int]) -> float:
    """Device hours a day."""
    return sum(played.busy_s.get(day, 0.0) for day in days) / len(days) / 3600


if __name__ == "__main__":
    main()
