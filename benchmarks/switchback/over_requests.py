"""How often the experiment over whole requests holds the truth: `python -m benchmarks.switchback.over_requests`.

Two simulated servers, one that speculates and one that does not, each on a device of its own or both on one. The true
speed-up is known, because the simulation computes what each moment of a treated request would have taken at the vanilla
server under the same load.

With `--workers 2` two workers ask the same servers and switch each by itself. `--load` says what they count as load:
`own` requests alone, those of `all` at every moment, or `read`: those of others as the servers tell them now and then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from statistics import median
from typing import Final, get_args

from alphaloop.experiment.assign import RequestDesign, RequestSchedule
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import RequestFacts, Slice
from benchmarks.reporting import parser_of
from benchmarks.switchback.request_world import Experiment, KnownLoad, RequestScenario, RequestWorld
from benchmarks.switchback.world import Truth


@dataclass(frozen=True, slots=True)
class Found:
    """What one run concluded."""

    low: float  #: 0 and infinity where nothing was concluded
    ratio: float
    high: float
    verdict: str
    control_share: float  #: of the device's time, as it came out
    truth: Truth


_NULL: Final = RequestScenario("vanilla against vanilla")
_DRAFT: Final = replace(_NULL, name="draft", num_draft_tokens=4, cost=1.9)
_OTHERS: Final = replace(_NULL, num_others=4)


def scenarios() -> list[RequestScenario]:
    """All that the page shows."""
    found = []
    for law, is_shared in (("own devices", False), ("one device", True)):
        found += [
            replace(_NULL, name=f"{_NULL.name}, {law}", is_shared=is_shared),
            replace(_NULL, name=f"{_NULL.name}, {law}, slow minutes", is_shared=is_shared, slow_every_s=300.0),
            replace(_NULL, name=f"{_NULL.name}, {law}, bursts", is_shared=is_shared, jobs_per_s=2.5, num_slots=16),
            replace(_OTHERS, name=f"{_NULL.name}, {law}, others", is_shared=is_shared),
            replace(_DRAFT, name=f"draft, {law}", is_shared=is_shared),
            replace(_DRAFT, name=f"draft, {law}, bursts", is_shared=is_shared, jobs_per_s=2.5, num_slots=16),
        ]
    return found


def play(scenario: RequestScenario, seed: int, design: RequestDesign, num_requests: int) -> Found:
    """One run, and what the experiment concluded."""
    slices: list[Slice] = []
    schedules = [
        RequestSchedule(design, random.Random(f"{seed} {one}" if one else seed)) for one in range(scenario.num_workers)
    ]

    def experiment(schedule: RequestSchedule) -> Experiment:
        def end(name: str, facts: RequestFacts | None, now: datetime) -> None:
            schedule.end(name, facts, now)
            slices.extend(schedule.take())

        return Experiment(schedule.start, end)

    world = RequestWorld(scenario, seed, [experiment(one) for one in schedules])
    world.run(num_requests)
    found = measured_speedup((*slices, *(one for schedule in schedules for one in schedule.close())))
    speedup = found.speedup
    low, ratio, high = (speedup.low, speedup.mean, speedup.high) if speedup else (0.0, math.nan, math.inf)
    return Found(low, ratio, high, found.verdict, world.control_s / world.trial_s, world.truth)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each scenario."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4000, help="requests on trial of a run, of all workers")
    parser.add_argument("--share", type=float, default=0.15, help="of control")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--only", default="", help="the scenario of this name, or those whose name has it in it")
    parser.add_argument("--workers", type=int, default=1, help="that ask the same two servers")
    parser.add_argument("--load", choices=get_args(KnownLoad), default="all", help="what a worker counts as load")
    parser.add_argument("--read-every", type=float, default=0.5, help="seconds between two answers about the load")
    parser.add_argument("--read-delay", type=float, default=0.05, help="seconds that such an answer is old")
    parser.add_argument("--cost", type=float, default=_DRAFT.cost, help="of a pass that drafts, in vanilla passes")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.runs)
    known = scenarios()
    chosen = [one for one in known if one.name == given.only] or [one for one in known if given.only in one.name]
    print("| scenario | true | covered | ± | mean error | control |\n|---|---|---|---|---|---|")
    with ProcessPoolExecutor(given.processes) as pool:
        for scenario in chosen:
            asked = replace(
                scenario,
                cost=given.cost if scenario.num_draft_tokens else scenario.cost,
                num_workers=given.workers,
                known_load=given.load,
                read_every_s=given.read_every,
                read_delay_s=given.read_delay,
            )
            one = partial(play, asked, design=RequestDesign(given.share), num_requests=given.requests)
            print(_row(scenario.name, list(pool.map(one, seeds, chunksize=4))), flush=True)


def _row(name: str, found: Sequence[Found]) -> str:
    truth = Truth()
    for one in found:
        truth.add(one.truth)
    shown = [one for one in found if one.low > 0]
    num_held = sum(one.low <= truth.speedup <= one.high for one in shown)
    share = sum(one.control_share for one in found) / len(found)
    if not shown:
        return f"| {name} | {truth.speedup:.2f} | no interval | | | {share:.1%} |"
    half = median(math.log(one.high / one.low) / 2 for one in shown)
    error = sum(math.log(one.ratio / truth.speedup) for one in shown) / len(shown)
    return f"| {name} | {truth.speedup:.2f} | {num_held} of {len(shown)} | {half:.1%} | {error:+.1%} | {share:.1%} |"


if __name__ == "__main__":
    main()
