"""The figures of all contestants, their tables, and the JSON line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Console

from benchmarks.paired import Ratio, paired_ratio, percentile
from benchmarks.reporting import table_of

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


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean over several rounds."""

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


@dataclass(slots=True)
class Entry:
    """One contestant, a figure a round."""

    jobs_per_s: list[float] = field(default_factory=list)
    own: list[dict[str, Any]] = field(default_factory=list)  #: what it says itself
    cpu_us_per_job: list[dict[str, float]] = field(default_factory=list)  #: of broker, database and the contestant
    num_repeated: list[int] = field(default_factory=list)  #: results that arrived more than once


@dataclass(slots=True)
class Findings:
    """Everything that is printed."""

    num_jobs: int
    conditions: dict[str, Any]
    missing: list[str]  #: peers that could not be run, in words
    entries: dict[str, Entry]
    ratios: dict[str, tuple[list[float], Ratio]] = field(default_factory=dict)
    lone: dict[str, Overhead] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One object with all figures."""
        return {
            "benchmark": "pipeline",
            "num_jobs": self.num_jobs,
            "conditions": self.conditions,
            "missing": self.missing,
            "contestants": {
                name: {**asdict(entry), "spread": asdict(Spread.of(entry.jobs_per_s))}
                for name, entry in self.entries.items()
            },
            "ratios": {name: {"rounds": rounds, **asdict(ratio)} for name, (rounds, ratio) in self.ratios.items()},
            "lone": {name: asdict(overhead) for name, overhead in self.lone.items()},
        }


def print_findings(console: Console, findings: Findings) -> None:
    """All tables."""
    console.print(f"{findings.num_jobs} jobs; " + ", ".join(f"{k} {v}" for k, v in findings.conditions.items()))
    for words in findings.missing:
        console.print(f"[yellow]left out:[/] {words}")
    _print_rates(console, findings.entries)
    _print_ratios(console, findings.ratios)
    _print_lone(console, findings.lone)


def _print_rates(console: Console, entries: Mapping[str, Entry]) -> None:
    cpu_of = sorted({who for entry in entries.values() for each in entry.cpu_us_per_job for who in each})
    table = table_of(
        "Jobs a second, by the broker's clock",
        "contestant",
        "min",
        "median",
        "max",
        *(f"{who}, CPU µs a job" for who in cpu_of),
    )
    for name, entry in entries.items():
        spread = Spread.of(entry.jobs_per_s)
        cpu = [
            f"{Spread.of([each[who] for each in entry.cpu_us_per_job if who in each] or [0.0]).median:.0f}"
            for who in cpu_of
        ]
        table.add_row(name, f"{spread.low:,.0f}", f"{spread.median:,.0f}", f"{spread.high:,.0f}", *cpu)
    console.print(table)


def _print_ratios(console: Console, ratios: Mapping[str, tuple[list[float], Ratio]]) -> None:
    if not ratios:
        return
    table = table_of("Ours over the Parallel Consumer, round by round", "pair", "rounds", "median [95 %]")
    for name, (rounds, ratio) in ratios.items():
        table.add_row(name, " ".join(f"{each:.2f}" for each in rounds), str(ratio))
    console.print(table)


def _print_lone(console: Console, lone: Mapping[str, Overhead]) -> None:
    if not lone:
        return
    table = table_of("A lone job", "overhead", "p50 ms", "p99 ms", "max ms", "jobs")
    for name, its in lone.items():
        table.add_row(name, f"{its.p50_ms:.1f}", f"{its.p99_ms:.1f}", f"{its.max_ms:.1f}", str(its.num_jobs))
    console.print(table)
