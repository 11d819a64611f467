"""Promised ends of batches in simulated weeks, and what came.

    python -m benchmarks.week.promises            # ten minutes: six weeks, some 500 batches
    python -m benchmarks.week.promises --weeks 1

Every batch is promised when a share of it has ended that is drawn from 0 to .95, and for the history, as production
keeps it, when 0, a quarter, a half and three quarters have. Only the first counts for coverage: one promise a batch.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from alphaloop.batches.ends import (
    Kept,
    LatelyDecoded,
    Line,
    OpenBatch,
    Outlook,
    PromiseCorrection,
    Situation,
    arrivals_of,
    outlooks,
    quarter_of,
)
from alphaloop.store.promises import MOST_LATELY
from benchmarks.reporting import checkout, console, machine, parser_of, table_of
from benchmarks.week.device import Decoding
from benchmarks.week.play import Play
from benchmarks.week.world import DAY_S, HOSTILE, SEGMENT_WEIGHTS, WeekJob, batch_streams, draw_week

_STAGES: Final = (0.0, 0.25, 0.5, 0.75)


@dataclass(slots=True)
class _Batch:
    id: str
    line: Line
    created_s: float
    deadline_s: float
    num_total: int
    drawn: float
    num_ended: int = 0
    num_expired: int = 0
    ended_s: float = math.inf
    promises: dict[str, Promise] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Promise:
    """What was said of a batch."""

    at_s: float
    quarter: int
    outlook: Outlook
    middle_s: float
    low_s: float
    high_s: float


class Promising:
    """Promises as production does, from what a database and a broker know."""

    def __init__(self, jobs: Sequence[WeekJob], seed: int) -> None:
        rng = np.random.default_rng(seed)
        by_batch: defaultdict[str, list[WeekJob]] = defaultdict(list)
        for job in jobs:
            if job.batch_id is not None:
                by_batch[job.batch_id].append(job)
        self.batches = {}
        for name, of in by_batch.items():
            line = of[0].lane.task, of[0].stream.segment
            drawn = float(rng.uniform(0, 0.95))
            self.batches[name] = _Batch(name, line, of[0].at_s, of[0].deadline_s, len(of), drawn)
        self._open: dict[str, _Batch] = {}
        self._due: list[_Batch] = []
        self._unfinished: Counter[str] = Counter()
        self._lately: defaultdict[str, deque[LatelyDecoded]] = defaultdict(lambda: deque(maxlen=MOST_LATELY))
        self._hours: defaultdict[Line, Counter[int]] = defaultdict(Counter)
        self._kept: list[Kept] = []

    def came(self, job: WeekJob) -> None:
        """A producer sent it."""
        self._unfinished[job.lane.task] += 1
        if job.batch_id is not None and job.batch_id not in self._open:
            batch = self._open[job.batch_id] = self.batches[job.batch_id]
            self._due.append(batch)

    def ended(self, job: WeekJob, decoding: Decoding | None, now_s: float) -> None:
        """Count it."""
        self._unfinished[job.lane.task] -= 1
        line = job.lane.task, job.stream.segment
        if decoding is not None and not job.is_expired:
            wall_s = now_s - decoding.started_s
            self._lately[line[0]].append(LatelyDecoded(*line, job.batch_id, job.at_s, now_s, wall_s, decoding.device_s))
            self._hours[line][int(now_s // 3600)] += 1
        if job.batch_id is None:
            return
        batch = self._open[job.batch_id]
        batch.num_ended += 1
        batch.num_expired += job.is_expired
        if batch.num_ended == batch.num_total:
            batch.ended_s = now_s
            del self._open[batch.id]
            for name, said in batch.promises.items():
                if name != "drawn" and said.outlook.why is None and not batch.num_expired:
                    came_s = now_s - said.at_s
                    outlook = said.outlook
                    self._kept.append(Kept(batch.id, outlook.median_s, outlook.sd_s, came_s, said.quarter))
        else:
            self._due.append(batch)

    def turned(self, now_s: float, num_alive: int) -> None:
        """Promise what is due."""
        due: list[tuple[_Batch, str]] = []
        for batch in self._due:
            done = batch.num_ended / batch.num_total
            due += [(batch, str(stage)) for stage in _STAGES if done >= stage and str(stage) not in batch.promises]
            if done >= batch.drawn and "drawn" not in batch.promises:
                due.append((batch, "drawn"))
        self._due.clear()
        due = [(batch, name) for batch, name in due if batch.id in self._open]
        if not due:
            return
        found, corrections = outlooks(self.situation(now_s, num_alive)), PromiseCorrection.by_quarter(self._kept)
        for batch, name in due:
            outlook, quarter = found[batch.id], quarter_of(batch.num_total - batch.num_ended, batch.num_total)
            interval_s = (math.nan, math.nan, math.nan) if outlook.why else corrections[quarter].interval_s(outlook)
            batch.promises[name] = Promise(now_s, quarter, outlook, *interval_s)

    def situation(self, now_s: float, num_alive: int) -> Situation:
        """What the database and the broker say."""
        first = 0
        hour = int(now_s // 3600)
        return Situation(
            now_s=now_s,
            num_workers=num_alive,
            batches=[
                OpenBatch(b.id, b.created_s, {b.line: b.num_total - b.num_ended}, b.deadline_s)
                for b in self._open.values()
            ],
            num_unfinished=self._unfinished,
            lately=list(chain.from_iterable(self._lately.values())),
            arrivals=arrivals_of(self._hours, max(first, hour - 7 * 24), hour),
            segment_weight=SEGMENT_WEIGHTS.__getitem__,
        )


def main() -> None:
    """Play, print a table and the JSON line."""
    options = _options()
    weeks, at_random = range(options.first, options.first + options.weeks), options.at_random
    work = [
        (load, options.days, options.workers, seed, at_random, options.hostile)
        for load in options.load
        for seed in weeks
    ]
    rows: list[dict[str, Any]] = []
    with get_context("fork").Pool(options.processes) as pool:
        for part in pool.imap(_play, work):
            rows += part
            console.print(f"  {len(rows)} batches, {covered(rows):.3f} covered")
    for load in options.load:
        _print(load, [row for row in rows if row["load"] == load])
    if options.keep:
        options.keep.write_text(json.dumps(rows))
    summary = {str(load): figures([row for row in rows if row["load"] == load]) for load in options.load}
    print(json.dumps({"promises": summary, "machine": machine(), "checkout": checkout()}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--load", type=float, nargs="+", default=[0.9])
    parser.add_argument("--weeks", type=int, default=6)
    parser.add_argument("--first", type=int, default=1, help="seed of the first week; each further week has the next")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-random", action="store_true", help="batches come at any time, not at times of the day")
    parser.add_argument("--hostile", choices=HOSTILE, help="weeks that production's model of them leaves out")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="write every promise there, as JSON")
    return parser.parse_args()


def _play(work: tuple[float, float, int, int, bool, str | None]) -> list[dict[str, Any]]:
    load, num_days, num_workers, seed, at_random, hostile = work
    week = draw_week(
        load=load,
        num_days=num_days,
        num_workers=num_workers,
        seed=seed,
        streams=batch_streams(at_random=at_random),
        hostile=hostile,
    )
    promising = Promising(week.jobs, seed)
    Play(week, "slack", num_workers=num_workers, seed=seed, observer=promising).run()
    # Nothing comes after the last day, which no history foretells.
    ended = [batch for batch in promising.batches.values() if batch.created_s < (num_days - 1) * DAY_S]
    return [row for batch in ended for row in _rows(batch, load, seed)]


def _rows(batch: _Batch, load: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for name, said in batch.promises.items():
        came_s = batch.ended_s - said.at_s
        row = {"load": load, "seed": seed, "batch": batch.id, "stage": name, "drawn": batch.drawn, "at_s": said.at_s}
        row |= {"why": said.outlook.why, "num_total": batch.num_total, "came_s": came_s}
        row |= {"median_s": said.outlook.median_s, "sd_s": said.outlook.sd_s}
        row |= {"middle_s": said.middle_s, "low_s": said.low_s, "high_s": said.high_s}
        rows.append(row)
    return rows


def covered(rows: Sequence[dict[str, Any]], stage: str = "drawn") -> float:
    """Share of the promises of this stage whose interval holds the end; of those that promised."""
    said = [row for row in rows if row["stage"] == stage and row["why"] is None]
    num: int = sum(row["low_s"] <= row["came_s"] <= row["high_s"] for row in said)
    return num / max(1, len(said))


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the bars are about."""
    said = [row for row in rows if row["stage"] == "drawn" and row["why"] is None]
    quarter = [row for row in rows if row["stage"] == "0.25" and row["why"] is None]
    widths = [(row["high_s"] - row["low_s"]) / 2 / row["came_s"] for row in quarter]
    return {
        "num": len(said),
        "num_unknown": sum(row["stage"] == "drawn" and row["why"] is not None for row in rows),
        "covered": covered(rows),
        "covered_by_stage": {stage: covered(rows, stage) for stage in map(str, _STAGES)},
        "half_width_at_a_quarter": [float(np.quantile(widths, share)) for share in (0.5, 0.9)] if widths else [],
        "within_a_fifth": sum(width <= 0.2 for width in widths) / max(1, len(widths)),
    }


def _print(load: float, rows: Sequence[dict[str, Any]]) -> None:
    of = figures(rows)
    table = table_of(f"offered load {load:g}: {of['num']} promises, one a batch", "figure", "value")
    for name, value in of.items():
        table.add_row(name, json.dumps(value))
    console.print(table)


if __name__ == "__main__":
    main()
