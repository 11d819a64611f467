"""`python -m benchmarks.drift --dead`: jobs until a drafter that stopped fitting is noticed, also right after an alarm.

A drafter dies where acceptance falls to a quarter, as after a server came back with other weights. Measured are the
first alarm on a stream that was steady until then; the alarm of a death that comes `WAITS` jobs after an earlier fall
was noticed; the alarms raised after such a fall where nothing follows; and false alarms on steady streams.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.drift.contest import LONGEST_DELAY, SHIFT_SEED, WARM_UP_JOBS, kind_of, null_streams
from benchmarks.drift.contestants import Ours, copied
from benchmarks.drift.world import CONDITIONS, Condition, Nature, decoded, nature
from scheduler.drift.memory import Floats, Memory, empty_memory

#: Mean jobs until a death is noticed, at most, by condition; none may be missed.
BARS: Final = {"independent": 20, "clustered by 32": 30}
NUM_STREAMS: Final = 200
LEFT: Final = 0.25  #: of its acceptance, after a death
EARLIER: Final = (0.10, 0.20)  #: falls of α that raise the first alarm
WAITS: Final = (0, 16, 48)  #: jobs from that alarm to the death
FOLLOWED_JOBS: Final = 64  #: after an alarm: the test learns the new level for so long
RUN_LENGTHS: Final = (12_500.0, 50_000.0)  #: jobs between two false alarms, as the test is asked for


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream whose test has followed it until the fourth day, and its further jobs before they are decoded."""

    memory: Memory
    later: Nature
    alpha: float
    k: int
    rng: np.random.Generator

    def jobs(self, first: int, fall: Floats) -> Any:
        """The further jobs from `first` on, with a fall of each job's probability of acceptance."""
        part = Nature._make(values[first : first + len(fall)] for values in self.later)
        return decoded(part, fall, self.k, self.rng)


def streams(condition: Condition, num_streams: int, ours: Ours, strength: float) -> Iterator[Stream]:
    """Streams of every kind, steady until now; their test knows them as it would in operation."""
    for number in range(num_streams):
        rng = np.random.default_rng((SHIFT_SEED, number))
        alpha, k = kind_of(number)
        after = WARM_UP_JOBS + int(rng.integers(2_000))
        whole = nature(condition, alpha, after + LONGEST_DELAY, rng)
        before, later = (Nature._make(part[side] for part in whole) for side in (slice(after), slice(after, None)))
        memory = empty_memory()
        ours.follow(memory, decoded(before, np.zeros(after), k, rng), strength)
        yield Stream(memory, later, alpha, k, rng)


def first_delay(stream: Stream, ours: Ours, strength: float) -> int:
    """Jobs from a death to the alarm."""
    dead = stream.jobs(0, (1 - LEFT) * stream.later.probability)
    return ours.delay(copied(stream.memory), dead, strength)


def second_delays(stream: Stream, ours: Ours, strength: float, earlier: float) -> tuple[int, list[int]] | None:
    """After the alarm of a fall by `earlier`: alarms within FOLLOWED_JOBS where nothing follows, and for each wait the
    jobs from that alarm to the alarm of a death. None where the earlier fall raises no alarm.
    """
    memory = copied(stream.memory)
    fallen = ours.delay(memory, stream.jobs(0, np.full(LONGEST_DELAY, earlier)), strength)
    if fallen + 2 * FOLLOWED_JOBS + max(WAITS) >= LONGEST_DELAY:
        return None
    steady = stream.jobs(fallen, np.full(FOLLOWED_JOBS, earlier))
    num_alarms = len(ours.follow(copied(memory), steady, strength))
    delays = []
    for wait in WAITS:
        fall = np.full(LONGEST_DELAY - fallen, earlier)
        level = stream.later.probability[fallen + wait :] - earlier
        fall[wait:] += (1 - LEFT) * np.maximum(level, 0.0)
        delays.append(ours.delay(copied(memory), stream.jobs(fallen, fall), strength))
    return num_alarms, delays


def measured(condition: Condition, ours: Ours, run_length: float, num_streams: int) -> dict[str, Any]:
    """What the last line says of a condition and a run length."""
    strength = math.log(run_length)
    first: list[int] = []
    later: dict[float, list[tuple[int, list[int]]]] = {earlier: [] for earlier in EARLIER}
    for stream in streams(condition, num_streams, ours, strength):
        first.append(first_delay(stream, ours, strength))
        for earlier, found in later.items():
            if (delays := second_delays(stream, ours, strength, earlier)) is not None:
                found.append(delays)
    return {
        "condition": condition.name, "run_length": run_length, "first": summary(first),
        "after_an_alarm": [
            {
                "earlier_fall": earlier, "num_streams": len(found),
                "num_alarms_without_a_change": sum(num for num, _ in found),
                "waits": [
                    {"wait": wait, **summary([delays[index] for _, delays in found])}
                    for index, wait in enumerate(WAITS)
                ],
            }
            for earlier, found in later.items()
        ],
    }  # fmt: skip


def false_alarms(condition: Condition, ours: Ours, num_streams: int, num_jobs: int) -> list[dict[str, Any]]:
    """Alarms on the steady streams of the contest, after the warm-up."""
    counts = [0] * len(RUN_LENGTHS)
    for stream in null_streams(condition, num_streams, num_jobs):
        for index, run_length in enumerate(RUN_LENGTHS):
            counts[index] += int((ours.detect(stream, math.log(run_length)) >= WARM_UP_JOBS).sum())
    total = num_streams * (num_jobs - WARM_UP_JOBS)
    return [
        {"condition": condition.name, "run_length": length, "num_alarms": num, "num_jobs": total}
        for length, num in zip(RUN_LENGTHS, counts, strict=True)
    ]


def report(ours: Ours, num_null_streams: int, num_null_jobs: int) -> int:
    """Print a row a condition and run length, then all of it as JSON. Exit status 1 where a bar is missed."""
    conditions = [condition for condition in CONDITIONS if condition.name in BARS]
    deaths: list[dict[str, Any]] = []
    for condition in conditions:
        for run_length in RUN_LENGTHS:
            deaths.append(measured(condition, ours, run_length, NUM_STREAMS))
            print(json.dumps(deaths[-1]), flush=True)
    alarms = [row for condition in conditions for row in false_alarms(condition, ours, num_null_streams, num_null_jobs)]
    is_missed = any(row["first"]["mean"] > BARS[row["condition"]] or row["first"]["missed"] for row in deaths)
    print(json.dumps({"seed": SHIFT_SEED, "is_missed": is_missed, "deaths": deaths, "false_alarms": alarms}))
    return int(is_missed)


def summary(delays: Sequence[int]) -> dict[str, Any]:
    """Mean, median and 90th percentile in jobs, and how many were never noticed."""
    values = np.array(delays, dtype=np.float64)
    return {
        "mean": round(float(values.mean()), 1), "median": float(np.median(values)),
        "p90": float(np.percentile(values, 90)), "missed": int((values >= LONGEST_DELAY).sum()),
        "within_30": round(float((values <= 30).mean()), 3),
    }  # fmt: skip
