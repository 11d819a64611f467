"""Statistics of the pipeline benchmark. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.paired import Ratio, paired_ratio
from benchmarks.pipeline.stages import WAITING

#: Share of the time between first and last result that is left out at the beginning: compilers warm up there.
WARM_UP: Final = 0.1


def jobs_per_s(appended_ms: Sequence[int], *, warm_up: float = WARM_UP) -> float:
    """Results a second by the broker's clock, from the end of the warm-up to the last result.

    The window begins at a moment that no result chose, so a contestant that answers in bursts wins nothing by it.
    Raises ValueError when all results were appended in the same millisecond.
    """
    first, last = min(appended_ms), max(appended_ms)
    begin = first + warm_up * (last - first)
    if last <= begin:
        raise ValueError(f"{len(appended_ms)} results in one millisecond: too few to tell a rate")
    return 1000 * sum(at > begin for at in appended_ms) / (last - begin)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value."""
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds of lone jobs."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    num_jobs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Overhead:
        """At least one job."""
        return cls(1000 * percentile(seconds, 0.5), 1000 * percentile(seconds, 0.99), 1000 * max(seconds), len(seconds))


def ratios(
    rates: Mapping[str, Sequence[float]], ours: Sequence[str], peers: Sequence[str]
) -> dict[str, tuple[list[float], Ratio]]:
    """`OURS / PEER` to the ratio of each round and their median; also against the best peer of each round."""
    against = {peer: list(rates[peer]) for peer in peers}
    if len(peers) > 1:
        against["best parallel consumer"] = [max(each) for each in zip(*against.values(), strict=True)]
    return {
        f"{name} / {peer}": (
            [a / b for a, b in zip(rates[name], theirs, strict=True)],
            paired_ratio(rates[name], theirs),
        )
        for name in ours
        for peer, theirs in against.items()
    }


def stage_figures(sampled: Mapping[str, Any], num_jobs: int) -> dict[str, dict[str, float]]:
    """By stage, all threads together: thread-seconds a second, the part of it without the processor, CPU µs a job.

    Waiting for work is kept apart by thread: how long a thread had nothing to do says something, the sum does not.
    `sampled` is benchmarks.pipeline.sampling.Sampled.as_json(). Shares may add up to more than 1: threads run beside
    each other. `native threads` is what the process used beyond its Python threads.
    """
    seconds = sampled["seconds"]
    found: dict[str, dict[str, float]] = {}
    for one in sampled["threads"]:
        name = f"{WAITING}: {one['thread']}" if one["stage"] == WAITING else one["stage"]
        its = found.setdefault(name, {"share": 0.0, "blocked_share": 0.0, "cpu_us_per_job": 0.0})
        its["share"] += one["wall_s"] / seconds
        its["blocked_share"] += max(0.0, one["wall_s"] - one["cpu_s"]) / seconds
        its["cpu_us_per_job"] += 1e6 * one["cpu_s"] / num_jobs
    python_s = sum(one["cpu_s"] for one in sampled["threads"])
    native_s = max(0.0, sampled["process_cpu_s"] - python_s)
    found["native threads"] = {
        "share": native_s / seconds,
        "blocked_share": 0.0,
        "cpu_us_per_job": 1e6 * native_s / num_jobs,
    }
    return found
