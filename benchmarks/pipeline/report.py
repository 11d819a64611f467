"""The tables and the JSON line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.paired import Ratio
from benchmarks.pipeline.figures import Overhead, Spread, stage_figures
from benchmarks.pipeline.stages import STAGES


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
    sampled: dict[str, dict[str, Any]] = field(default_factory=dict)
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
            "stages": {
                name: {"by_stage": stage_figures(one, self.num_jobs), **one} for name, one in self.sampled.items()
            },
            "lone": {name: asdict(overhead) for name, overhead in self.lone.items()},
        }


def print_findings(console: Console, findings: Findings, *, num_functions: int) -> None:
    """All tables."""
    console.print(f"{findings.num_jobs} jobs; " + ", ".join(f"{k} {v}" for k, v in findings.conditions.items()))
    for words in findings.missing:
        console.print(f"[yellow]left out:[/] {words}")
    _print_rates(console, findings.entries)
    _print_ratios(console, findings.ratios)
    for name, sampled in findings.sampled.items():
        _print_stages(console, name, stage_figures(sampled, findings.num_jobs))
        if num_functions:
            _print_functions(console, name, sampled, findings.num_jobs, num_functions)
    _print_lone(console, findings.lone)


def _print_rates(console: Console, entries: Mapping[str, Entry]) -> None:
    cpu_of = sorted({who for entry in entries.values() for each in entry.cpu_us_per_job for who in each})
    columns = ("contestant", "min", "median", "max", *(f"{who}, CPU µs a job" for who in cpu_of))
    table = _table("Jobs a second, by the broker's clock", columns)
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
    table = _table("Ours over the Parallel Consumer, round by round", ("pair", "rounds", "median [95 %]"))
    for name, (rounds, ratio) in ratios.items():
        table.add_row(name, " ".join(f"{each:.2f}" for each in rounds), str(ratio))
    console.print(table)


def _print_stages(console: Console, name: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    title = f"{name}: stages (stacks of all threads, every 2 ms, in a run of its own; shares add up over threads)"
    columns = ("stage", "share of the time", "of it without the processor", "CPU µs a job")
    table = _table(title, columns)
    others = [name for name in figures if name not in STAGES]
    for stage in (*STAGES, *others):
        if its := figures.get(stage):
            words = f"{its['share']:.1%}", f"{its['blocked_share']:.1%}", f"{its['cpu_us_per_job']:.0f}"
            table.add_row(stage, *words)
    console.print(table)


def _print_functions(
    console: Console, name: str, sampled: Mapping[str, Any], num_jobs: int, num_functions: int
) -> None:
    for what, words in (("cumulative_cpu_s", "with all they call"), ("own_cpu_s", "alone")):
        table = _table(f"{name}: functions {words} (sampled)", ("function", "CPU µs a job"))
        for label, seconds in list(sampled[what].items())[:num_functions]:
            table.add_row(label, f"{1e6 * seconds / num_jobs:.1f}")
        console.print(table)


def _print_lone(console: Console, lone: Mapping[str, Overhead]) -> None:
    if not lone:
        return
    table = _table("A lone job", ("overhead", "p50 ms", "p99 ms", "max ms", "jobs"))
    for name, its in lone.items():
        table.add_row(name, f"{its.p50_ms:.1f}", f"{its.p99_ms:.1f}", f"{its.max_ms:.1f}", str(its.num_jobs))
    console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
