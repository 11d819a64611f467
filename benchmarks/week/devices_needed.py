"""A fleet that follows `devices_needed` through simulated days, beside a fixed fleet of the most workers.

    python -m benchmarks.week.devices_needed              # ten minutes: three days
    python -m benchmarks.week.devices_needed --days 1 --series series.json

Every five simulated minutes the workers that are needed are computed as the scheduler does. The fleet follows as an
autoscaler lets it: at most two workers more in three minutes, each of which takes two minutes to start; at most one
fewer in five minutes, and the most of the last ten minutes stay. Batches of a day are among the jobs. `--series` keeps
what the metrics showed. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from alphaloop.batches.enough import Enough
from benchmarks.reporting import checkout, console, machine, parser_of, table_of
from benchmarks.week.contestants import LEAST_PARTITIONS, WorkerAdmission
from benchmarks.week.play import Play, Played
from benchmarks.week.promises import Promising
from benchmarks.week.world import Week, WeekJob, batch_streams, draw_week

EVERY_S: Final = 300.0
_STARTS_AFTER_S: Final = 120.0
_MOST_UP: Final = 4  #: in five minutes, where two come in three
_KEPT_LOOKS: Final = 3  #: of the last ten minutes
#: A worker for each so many jobs, while it is not known how many are needed.
JOBS_OF_A_WORKER: Final = 100
#: Workers over whose capacity the load is offered.
_OFFERED_OF: Final = 2


class ScaledPlay(Play):
    """A play in which no worker dies, and whose number of workers changes."""

    def scale(self, num_workers: int) -> None:
        """So many workers take jobs from now on; the others end what they decode and give back what they claimed."""
        given_back = list[WeekJob]()
        for number, admission in enumerate(self._admissions):
            assert isinstance(admission, WorkerAdmission)
            is_wanted = number < num_workers
            if self._is_alive[number] and not is_wanted:
                given_back += admission.claimed()
            elif is_wanted and not self._is_alive[number]:
                self._admissions[number] = self._worker_of(number, range(num_workers))
            self._is_alive[number] = is_wanted
        for job in given_back:
            self._log.finish(job)
        self._assign(range(num_workers))
        for job in given_back:
            self._append(job)

    def num_decoding(self) -> int:
        """Workers that take jobs, or end what they decode."""
        return sum(bool(alive or device.running) for alive, device in zip(self._is_alive, self._devices, strict=True))

    def _turn(self, now_s: float) -> None:
        for is_alive, device, admission in zip(self._is_alive, self._devices, self._admissions, strict=True):
            if not is_alive and (ended := device.take_ended()):
                admission.ended(ended, now_s)
                for each in ended if self._observer else ():
                    assert self._observer is not None
                    self._observer.ended(each.job, each, now_s)
        super()._turn(now_s)

    def _die(self, now_s: float) -> list[WeekJob]:
        return []

    def _come_back(self, now_s: float) -> list[WeekJob]:
        return []


class Following(Promising):
    """Sees what production sees, and lets the fleet follow."""

    def __init__(self, week: Week, seed: int, *, most: int, drain_within_s: float) -> None:
        super().__init__(week.jobs, seed)
        self._most, self._drain_within_s = most, drain_within_s
        self._wanted = deque([1], maxlen=_KEPT_LOOKS)
        self._ordered = 1
        self._needed: int | None = None
        self._look_at_s = 0.0
        self._starts: list[tuple[float, int]] = []  #: when workers are there, and how many are then
        self._play: ScaledPlay | None = None
        self.pods_s = 0.0  #: from the order of each worker to its end
        self.needed: list[int | None] = []
        self.lag: list[Mapping[str, int]] = []

    def begin(self, play: ScaledPlay) -> None:
        """Look from now on."""
        self._play = play
        play.scale(1)

    def turned(self, now_s: float, num_alive: int) -> None:
        """Let workers that were ordered begin, and look where that is due. Nothing is promised here."""
        assert self._play is not None
        self._due.clear()
        while self._starts and self._starts[0][0] <= now_s:
            self._play.scale(min(self._starts.pop(0)[1], self._ordered))
        if now_s >= self._look_at_s:
            self._look_at_s += EVERY_S
            self._look(self._play, now_s)

    def _look(self, play: ScaledPlay, now_s: float) -> None:
        search = Enough(self.situation(now_s, self._ordered), self._drain_within_s)
        self._needed = search.least(self._needed or 1)
        self.needed.append(self._needed)
        self.lag.append({task: num for task, num in sorted(self._unfinished.items())})
        by_lag = math.ceil(sum(self._unfinished.values()) / JOBS_OF_A_WORKER)
        wanted = by_lag if self._needed is None else self._needed
        self._wanted.append(max(1, min(self._most, wanted)))
        before = self._ordered
        self._ordered = min(max(self._wanted[-1], before), before + _MOST_UP)
        if max(self._wanted) < before:
            self._ordered = before - 1
        self.pods_s += EVERY_S * max(self._ordered, play.num_decoding())
        if self._ordered > before:
            self._starts.append((now_s + _STARTS_AFTER_S, self._ordered))
        elif self._ordered < before:
            self._starts.clear()
            play.scale(self._ordered)


def main() -> None:
    """Play both fleets, print a table and the JSON line."""
    options = _options()
    with get_context("fork").Pool(options.processes) as pool:
        fixed, following = pool.map(_play, [(options, False), (options, True)])
    table = table_of(
        f"offered load {options.load:g} of {_OFFERED_OF} workers, {options.days:g} days", "fleet", "met", "h"
    )
    fleets = {"fixed": fixed, "following": following}
    for name, fleet in fleets.items():
        table.add_row(name, f"{fleet['met']:.4f}", f"{fleet['device_h']:.1f}")
    console.print(table)
    if options.series is not None:
        options.series.write_text(json.dumps(following["series"]) + "\n")
    summary = {name: {n: v for n, v in fleet.items() if n != "series"} for name, fleet in fleets.items()}
    print(json.dumps({"devices_needed": summary, "days": options.days, "machine": machine(), "checkout": checkout()}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--load", type=float, default=0.9, help=f"offered, over what {_OFFERED_OF} workers decode")
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--most", type=int, default=LEAST_PARTITIONS, help="workers")
    parser.add_argument("--drain", type=float, default=600.0, help="scheduler.drain_within_s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--series", type=Path, help="write there what the metrics showed, as JSON")
    return parser.parse_args()


def _play(work: tuple[argparse.Namespace, bool]) -> dict[str, Any]:
    options, follows = work
    streams = batch_streams(at_random=False)
    week = draw_week(
        load=options.load, num_days=options.days, num_workers=_OFFERED_OF, seed=options.seed, streams=streams
    )
    observer = Following(week, options.seed, most=options.most, drain_within_s=options.drain) if follows else None
    play = ScaledPlay(week, "slack", num_workers=options.most, seed=options.seed, observer=observer)
    if observer is not None:
        observer.begin(play)
    played = play.run()
    pods_s = options.most * _lasted_s(played) if observer is None else observer.pods_s
    fleet: dict[str, Any] = figures(played) | {"device_h": pods_s / 3600}
    if observer is not None:
        fleet["series"] = {"every_s": EVERY_S, "needed": observer.needed, "lag": observer.lag}
    return fleet


def _lasted_s(played: Played) -> float:
    return max(job.ended_s for job in played.jobs if job.ended_s < math.inf)


def figures(played: Played) -> dict[str, Any]:
    """Shares of deadlines that were met: of all, of batches, and of other jobs."""
    due = [job for job in played.jobs if job.deadline_s < math.inf]
    of = {
        "met": due,
        "met_of_batches": [job for job in due if job.batch_id is not None],
        "met_of_others": [job for job in due if job.batch_id is None],
    }
    return {name: sum(job.ended_s <= job.deadline_s for job in jobs) / max(1, len(jobs)) for name, jobs in of.items()}


if __name__ == "__main__":
    main()
