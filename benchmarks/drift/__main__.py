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

from benchmarks.drift.compiled import compiled_fold
from benchmarks.drift.contest import (
    GRADUAL_JOBS,
    NULL_SEED,
    RUN_LENGTH,
    SHIFT_SEED,
    SIZES,
    Calibration,
    calibrate,
    changing_streams,
    delay,
    null_streams,
)
from benchmarks.drift.contestants import OURS, Contestant, ours, rivals
from benchmarks.drift.plots import draw_curves
from benchmarks.drift.world import CONDITIONS, Condition


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 where alphaloop is the first to find every change, and 1 where a rival is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--null-streams", type=int, default=200)
    parser.add_argument("--null-jobs", type=int, default=200_000)
    parser.add_argument("--changes", type=int, default=200, help="streams with a change, for each size and speed")
    parser.add_argument("--conditions", nargs="*", default=[condition.name for condition in CONDITIONS])
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of contestants' names")
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench-drift"))
    given = parser.parse_args(arguments)
    print(
        f"seeds {NULL_SEED} and {SHIFT_SEED}, {given.null_streams} steady streams of {given.null_jobs} jobs", flush=True
    )
    contestants = [ours(compiled_fold(given.cache)), *rivals()]
    if given.only:
        contestants = [one for one in contestants if one.name.startswith((OURS, *given.only))]
    calibrations: dict[str, dict[str, Any]] = {}
    results: list[dict[str, Any]] = []
    for condition in CONDITIONS:
        if condition.name in given.conditions:
            its = _calibrated(contestants, condition, given)
            calibrations[condition.name] = {name: asdict(one) for name, one in its.items()}
            results += _delays(contestants, its, condition, given.changes)
    if given.plots:
        draw_curves(results, given.plots / "drift-delays.svg")
    worse = _lost(results)
    print(json.dumps({"run_length": RUN_LENGTH, "calibrations": calibrations, "delays": results, "lost": worse}))
    return int(bool(worse))


def _calibrated(
    contestants: Sequence[Contestant], condition: Condition, given: argparse.Namespace
) -> dict[str, Calibration]:
    most = max(
        min(one.max_streams, given.null_streams) for one in contestants if one.name != OURS or len(contestants) == 1
    )
    streams = list(null_streams(condition, min(most, given.null_streams), given.null_jobs))
    found = {}
    for contestant in contestants:
        its = found[contestant.name] = calibrate(contestant, streams)
        print(
            f"{condition.name:16} {contestant.name:32} parameter {its.parameter:9.3g}, "
            f"run length {its.run_length:7.0f} [{its.low:.0f}, {its.high:.0f}]",
            flush=True,
        )
    return found


def _delays(
    contestants: Sequence[Contestant], calibrations: dict[str, Calibration], condition: Condition, num_changes: int
) -> list[dict[str, Any]]:
    found = []
    for over in (0, GRADUAL_JOBS):
        for size in SIZES:
            streams = list(changing_streams(condition, size, over, num_changes))
            for contestant in contestants:
                its = delay(contestant, calibrations[contestant.name].parameter, streams)
                found.append(
                    {
                        "condition": condition.name, "size": size, "over": over, "contestant": contestant.name,
                        "mean_delay": its.mean, "error": its.error, "num_streams": its.num_streams,
                        "num_missed": its.num_missed,
                    }
                )  # fmt: skip
                print(
                    f"{condition.name:16} fall {size:.2f} over {over:3} {contestant.name:32} "
                    f"{its.mean:7.1f} ± {its.error:5.1f} jobs, {its.num_missed} missed",
                    flush=True,
                )
    return found


def _lost(results: list[dict[str, Any]]) -> list[str]:
    """Where a rival was faster."""
    best = {(one["condition"], one["size"], one["over"]): one for one in results if one["contestant"] == OURS}
    return [
        f"{one['contestant']}: {one['condition']}, {one['size']:.2f} over {one['over']}"
        for one in results
        if one["mean_delay"] < best[one["condition"], one["size"], one["over"]]["mean_delay"]
    ]


if __name__ == "__main__":
    raise SystemExit(main())
