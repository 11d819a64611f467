"""`make bench-drift`: how soon a fall of acceptance is found, at the same measured rate of false alarms, beside river.

The last line is JSON. Everything is seeded; the seeds and sizes are printed first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift import dead
from benchmarks.drift.compiled import compiled_alarms
from benchmarks.drift.contest import (
    CHANGES,
    NULL_SEED,
    RUN_LENGTHS,
    SHIFT_SEED,
    WARM_UP_JOBS,
    Counts,
    Delays,
    changing_streams,
    count,
    information,
    least_delay,
    null_streams,
    run_length_of,
)
from benchmarks.drift.contestants import OURS, Detector, Ours, rates_of, rivals
from benchmarks.drift.table import lost, run_lengths, table
from benchmarks.drift.world import CONDITIONS, Condition
from benchmarks.reporting import parser_of
from scheduler.drift.memory import Floats


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 where alphaloop is the first to find every change, and 1 where a rival is."""
    parser = parser_of(__doc__)
    parser.add_argument("--null-streams", type=int, default=80)
    parser.add_argument("--null-jobs", type=int, default=106_000)
    parser.add_argument("--changes", type=int, default=400, help="streams with a change, for each size and speed")
    parser.add_argument("--conditions", nargs="*", default=[condition.name for condition in CONDITIONS])
    parser.add_argument("--only", nargs="*", help="beginnings of rivals' names")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench-drift"))
    parser.add_argument("--dead", action="store_true", help="only: jobs until a fall to a quarter is noticed")
    given = parser.parse_args(arguments)
    if given.dead:
        return dead.report(Ours(compiled_alarms(given.cache)), given.null_streams, given.null_jobs)
    print(f"seeds {NULL_SEED} and {SHIFT_SEED}; {given.null_streams} steady streams of {given.null_jobs} jobs, "
          f"{given.changes} streams with each change", flush=True)  # fmt: skip
    results = _run(given)
    print(run_lengths(results))
    for with_hindsight in (True, False):
        print("\nsettings chosen for each change" if with_hindsight else "\none setting for each condition")
        print(table(results, with_hindsight=with_hindsight))
    sooner, sooner_with_one = (lost(results, with_hindsight=with_hindsight) for with_hindsight in (True, False))
    summary = {"run_length": RUN_LENGTHS[-1], "sooner_rivals": sooner, "sooner_with_one_setting": sooner_with_one}
    print(json.dumps(summary | {"results": results}))
    return int(bool(sooner))


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    ours = Ours(compiled_alarms(given.cache))
    those = [one for one in rivals() if given.only is None or one.name.startswith(tuple(given.only))]
    found = []
    for condition in CONDITIONS:
        if condition.name in given.conditions:
            counts = _counts(condition, ours, those, given)
            found += _delays(condition, ours, those, counts, given.changes)
    return found


def _counts(
    condition: Condition, ours: Ours, those: Sequence[Detector], given: argparse.Namespace
) -> dict[str, Counts]:
    """False alarms on the same steady streams."""
    rates: list[Floats] = []
    its = np.zeros(len(ours.strengths), dtype=np.int64)
    for stream in null_streams(condition, given.null_streams, given.null_jobs):
        rates.append(rates_of(stream))
        its += [int((ours.detect(stream, strength) >= WARM_UP_JOBS).sum()) for strength in ours.strengths]
    num_jobs = given.null_streams * (given.null_jobs - WARM_UP_JOBS)
    found = {OURS: Counts(ours.strengths, its.tolist(), num_jobs)}
    for strength, num_alarms in zip(ours.strengths, its.tolist(), strict=True):
        length = run_length_of(num_alarms, num_jobs)
        told = f"{condition.name}: told {np.exp(strength):,.0f} jobs between two false alarms, measured"
        print(f"{told} {length.jobs:,.0f} [{length.low:,.0f}, {length.high:,.0f}], {num_alarms} alarms", flush=True)
    for one in those:
        found[one.name] = count(one.detect, rates[: one.max_streams], one.strengths)
    return found


def _delays(
    condition: Condition, ours: Ours, those: Sequence[Detector], counts: dict[str, Counts], num_streams: int
) -> list[dict[str, Any]]:
    """One result for each contestant, run length and change."""
    contestants: list[Ours | Detector] = [ours, *those]
    delays: dict[tuple[str, int], list[list[int]]] = {
        (one.name, length): [] for one in contestants for length in RUN_LENGTHS
    }
    optimum: list[list[float]] = []
    for number, fork in enumerate(changing_streams(condition, num_streams)):
        for one in contestants:
            for length in RUN_LENGTHS:
                if number < one.max_streams:
                    delays[one.name, length].append(one.delays(fork, counts[one.name].strength_for(length)))
        a_job = information(fork.before)
        optimum.append([least_delay(size, a_job, RUN_LENGTHS[-1]) for over, size in CHANGES])
    found = []
    for (name, length), jobs in delays.items():
        strength = counts[name].strength_for(length)
        for (over, size), its, own, least in zip(
            CHANGES, np.array(jobs).T, np.array(delays[OURS, length][: len(jobs)]).T, np.array(optimum).T, strict=True
        ):
            delay, difference = Delays(its), Delays(own - its)
            found.append(
                {
                    "condition": condition.name, "contestant": name, "wanted": length, "strength": strength,
                    "run_length": asdict(counts[name].at(strength)), "size": size, "over": over,
                    "mean_delay": delay.mean, "error": delay.error, "num_missed": delay.num_missed,
                    "num_streams": len(its), "sooner_by": -difference.mean, "sooner_error": difference.error,
                    "optimum": float(least.mean()) if over == 0 and condition.name == "independent" else None,
                }
            )  # fmt: skip
    return found


if __name__ == "__main__":
    raise SystemExit(main())
