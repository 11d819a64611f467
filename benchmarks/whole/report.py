"""What the rounds of one number of slots say: speeds, paired ratios against the bars, checks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.table import Table

from benchmarks.paired import Ratio, paired_ratio
from benchmarks.reporting import table_of
from benchmarks.whole.lineup import BASELINE, CONTESTANTS, ENGINE, VLLM, WORKER, Played
from benchmarks.whole.near_ties import Difference

#: The worker's speed over another's that the project asks for; the engine in vanilla mode is shown without a bar.
BARS: Final = {ENGINE: 0.95, BASELINE: 1.15, VLLM: 1.3}
OCCUPIED_BAR: Final = 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """One run of every contestant, in the order in which they played."""

    played: tuple[Played, ...]
    differences: tuple[Difference, ...] | None = None  #: None: the worker or its engine did not take part

    def of(self, contestant: str) -> Played | None:
        """Its run, if it took part."""
        return next((one for one in self.played if one.contestant == contestant), None)


@dataclass(frozen=True, slots=True)
class Paired:
    """The worker's speed over another's, round by round."""

    other: str
    ratios: tuple[float, ...]
    ratio: Ratio
    bar: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the bar; None without a bar."""
        return None if self.bar is None else self.ratio.median >= self.bar

    def as_json(self) -> dict[str, Any]:
        """For the last line."""
        least, most = min(self.ratios), max(self.ratios)
        return {**asdict(self.ratio), "min": least, "max": most, "bar": self.bar, "is_met": self.is_met}

    def __str__(self) -> str:
        return f"{self.ratio} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"


@dataclass(frozen=True, slots=True)
class SlotsReport:
    """All rounds of one number of slots."""

    num_slots: int
    num_jobs: int
    rounds: tuple[Round, ...] = field(default=())

    def runs_of(self, contestant: str) -> list[Played]:
        """Its runs, round by round."""
        return [played for one in self.rounds if (played := one.of(contestant)) is not None]

    def paired(self) -> list[Paired]:
        """The worker over everybody else who took part."""
        ours = self.runs_of(WORKER)
        found = []
        for other in CONTESTANTS:
            theirs = self.runs_of(other)
            if ours and theirs and other != WORKER:
                speeds = [[one.tokens_per_s for one in runs] for runs in (ours, theirs)]
                ratios = tuple(a / b for a, b in zip(*speeds, strict=True))
                found.append(Paired(other, ratios, paired_ratio(*speeds), BARS.get(other)))
        return found

    def occupied(self) -> float | None:
        """Median share of the slots that the worker filled while jobs waited."""
        shares = [one.occupied for one in self.runs_of(WORKER) if one.occupied is not None]
        return statistics.median(shares) if shares else None

    def differences(self) -> list[Difference]:
        """Over all rounds in which the worker and its engine played."""
        return [difference for one in self.rounds for difference in one.differences or ()]

    def num_compared(self) -> int:
        """Texts that were compared."""
        return sum(self.num_jobs for one in self.rounds if one.differences is not None)

    def faults(self) -> dict[str, int]:
        """What was wrong with results, added up over runs of both workers; empty where nothing was."""
        found: dict[str, int] = {}
        for one in self.rounds:
            for played in one.played:
                for fault, count in played.faults.items():
                    if count:
                        found[f"{played.contestant}: {fault}"] = found.get(f"{played.contestant}: {fault}", 0) + count
        return found

    def is_sound(self) -> bool:
        """Whether every job has one result that succeeded, and every text that differs differs at a near-tie."""
        return not self.faults() and all(difference.is_near_tie for difference in self.differences())

    def table(self) -> Table:
        """For people."""
        table = table_of(
            f"{self.num_slots} slots, {self.num_jobs} jobs, {len(self.rounds)} rounds",
            "",
            "tokens/s min",
            "median",
            "max",
            "slots occupied",
            "jobs drafted",
            "worker over it",
            "bar",
        )
        paired = {one.other: one for one in self.paired()}
        for name in CONTESTANTS:
            if runs := self.runs_of(name):
                table.add_row(*_row(name, runs, paired.get(name)))
        return table

    def as_json(self) -> dict[str, Any]:
        """For the last line."""
        differences = self.differences()
        ties = [difference for difference in differences if difference.is_near_tie]
        occupied = self.occupied()
        is_met = None if occupied is None else occupied >= OCCUPIED_BAR
        return {
            "order": [[played.contestant for played in one.played] for one in self.rounds],
            "runs": {name: [_run_as_json(one) for one in runs] for name in CONTESTANTS if (runs := self.runs_of(name))},
            "worker_over": {one.other: one.as_json() for one in self.paired()},
            "occupied": {"median": occupied, "bar": OCCUPIED_BAR, "is_met": is_met},
            "texts": {
                "compared": self.num_compared(),
                "identical": self.num_compared() - len(differences),
                "near_ties": len(ties),
                "unexplained": len(differences) - len(ties),
                "differences": [asdict(difference) for difference in differences],
            },
            "faults": self.faults(),
        }


def met(reports: Iterable[SlotsReport]) -> dict[str, bool]:
    """Each bar that could be judged, by slots."""
    found: dict[str, bool] = {}
    for report in reports:
        for one in report.paired():
            if one.is_met is not None:
                found[f"{report.num_slots} slots: worker / {one.other} >= {one.bar}"] = one.is_met
        if (occupied := report.occupied()) is not None:
            found[f"{report.num_slots} slots: occupied >= {OCCUPIED_BAR}"] = occupied >= OCCUPIED_BAR
    return found


def _row(name: str, runs: Sequence[Played], paired: Paired | None) -> list[str]:
    speeds = [one.tokens_per_s for one in runs]
    shares = [one.occupied for one in runs if one.occupied is not None]
    return [
        name,
        *(f"{speed:.1f}" for speed in (min(speeds), statistics.median(speeds), max(speeds))),
        f"{100 * statistics.median(shares):.1f} %" if shares else "",
        f"{statistics.median(one.num_drafted for one in runs):g}",
        "" if paired is None else str(paired),
        "" if paired is None or paired.bar is None else f"{paired.bar:.2f} {'met' if paired.is_met else 'missed'}",
    ]


def _run_as_json(played: Played) -> Mapping[str, Any]:
    return {
        "tokens_per_s": played.tokens_per_s,
        "seconds": played.seconds,
        "tokens": played.num_tokens,
        "occupied": played.occupied,
        "stepping": played.stepping,
        "drafted": played.num_drafted,
    }
