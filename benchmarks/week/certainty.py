"""How certain the end of a batch can be while nobody knows what comes: the least width of a promise.

    python -m benchmarks.week.certainty --every 5    # some eight batches of a week

When a quarter of a batch has ended, the week goes on `--futures` times from that moment, each time with other arrivals
of the same law. All else is as it is: every waiting job with its length and acceptance, costs, workers. So the spread
of these ends is that of a promise which knows everything but the arrivals. With `--new-texts` the jobs that have not
started have other lengths and acceptances too, of the same law: the spread of a promise which knows that law, the order
and the costs, and can not know more. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from alphaloop.batches.ends import COVERAGE
from benchmarks.reporting import checkout, console, machine, parser_of, table_of
from benchmarks.week.device import Decoding
from benchmarks.week.play import BACK_S, DIES_S, Play
from benchmarks.week.world import DAY_S, Week, WeekJob, batch_streams, draw_week

_BEGUN: Final = 0.25  #: the part of a batch that has ended when it is promised
#: Numbers of the jobs of a future begin here.
_FIRST_NUMBER: Final = 10_000_000


@dataclass(frozen=True)
class Ends:
    """Of a batch, in seconds from the promise, one a future."""

    batch_id: str
    at_s: float
    came_s: tuple[float, ...]

    @property
    def half_width(self) -> float:
        """Half of the interval of `COVERAGE` over the median."""
        tail = (1 - COVERAGE) / 2
        low_s, high_s = np.quantile(self.came_s, [tail, 1 - tail])
        return float((high_s - low_s) / 2 / np.median(self.came_s))


@dataclass(slots=True)
class Futures:
    """An observer that plays the futures of every `every`-th batch in processes of their own."""

    week: Week
    options: argparse.Namespace
    play: Play | None = None
    found: list[Ends] = field(default_factory=list)
    num_total: Counter[str] = field(default_factory=Counter)
    num_ended: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    due: list[str] = field(default_factory=list)
    #: In the process of a future: its batch, and the end of a pipe that gets the second at which the batch ends.
    asked: tuple[str, int] | None = None

    def came(self, job: WeekJob) -> None:
        """A job of a batch comes with all others of it."""

    def ended(self, job: WeekJob, decoding: Decoding | None, now_s: float) -> None:
        """Count it; the process of a future ends with its batch."""
        if (name := job.batch_id) is None:
            return
        self.num_ended[name] += 1
        if self.asked and name == self.asked[0] and self.num_ended[name] == self.num_total[name]:
            os.write(self.asked[1], json.dumps(now_s).encode())
            os._exit(0)
        if self.num_ended[name] == math.ceil(_BEGUN * self.num_total[name]):
            self.due.append(name)

    def turned(self, now_s: float, num_alive: int) -> None:
        """Play the futures of batches that are at their quarter now."""
        due, self.due = self.due, []
        if self.asked is not None:
            return
        for name in due:
            self.num_batches += 1
            if self.num_batches % self.options.every == 0 and self._is_usual(now_s):
                self._play_on(name, now_s)

    def _is_usual(self, now_s: float) -> bool:
        """Whether arrivals go on for a day, and no worker dies meanwhile."""
        is_inside = DAY_S <= now_s <= self.week.num_days * DAY_S - DAY_S
        return is_inside and not DIES_S - DAY_S <= now_s <= BACK_S

    def _play_on(self, name: str, now_s: float) -> None:
        came_s = []
        for number in range(self.options.futures):
            reading, writing = os.pipe()
            process = os.fork()
            if not process:
                os.close(reading)
                self.asked = name, writing
                self._change_arrivals(now_s, number)
                return
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                came_s.append(float(json.loads(pipe.read())) - now_s)
            os.waitpid(process, 0)
        self.found.append(ends := Ends(name, now_s, tuple(came_s)))
        median_h = float(np.median(came_s)) / 3600
        console.print(
            f"  {name} after {now_s / 3600:.1f} h: {median_h:.1f} h are left, half width {ends.half_width:.2f}"
        )

    def _change_arrivals(self, now_s: float, number: int) -> None:
        assert self.play is not None
        other = drawn(self.options, self.options.seed + 1000 * (number + 1))
        later = [replace(job) for job in other.jobs if job.at_s > now_s]
        for place, job in enumerate(later):
            job.number = _FIRST_NUMBER + place
            if job.batch_id is not None:
                job.batch_id = f"{job.batch_id} of {number}"
        self.play.change_arrivals(now_s, later)
        if self.options.new_texts:
            self.play.change_texts(np.random.default_rng([self.options.seed, number, int(now_s)]))


def drawn(options: argparse.Namespace, seed: int) -> Week:
    """The week with batches of this seed."""
    streams = batch_streams(at_random=options.at_random)
    return draw_week(load=options.load, num_days=options.days, num_workers=options.workers, seed=seed, streams=streams)


def main() -> None:
    """Play, print a table and the JSON line."""
    options = _options()
    week = drawn(options, options.seed)
    futures = Futures(week, options)
    futures.num_total.update(job.batch_id for job in week.jobs if job.batch_id is not None)
    futures.play = Play(week, "slack", num_workers=options.workers, seed=options.seed, observer=futures)
    futures.play.run()
    widths = [ends.half_width for ends in futures.found]
    found = [float(np.quantile(widths, share)) for share in (0.1, 0.5, 0.9)] if widths else []
    table = table_of(
        f"half width of what remains, {len(widths)} batches, {options.futures} futures each",
        "a tenth",
        "median",
        "nine",
    )
    table.add_row(*(f"{width:.2f}" for width in found))
    console.print(table)
    found_here = {"half_widths": widths, "new_texts": options.new_texts}
    print(json.dumps({**found_here, "machine": machine(), "checkout": checkout()}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--futures", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="of so many batches the futures of one are played")
    parser.add_argument("--new-texts", action="store_true", help="draw waiting jobs' lengths and acceptances anew")
    parser.add_argument("--at-random", action="store_true", help="batches come at any time, not at times of the day")
    return parser.parse_args()


if __name__ == "__main__":
    main()
