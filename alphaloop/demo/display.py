"""The demo's screens: outcomes by task while they arrive, and one table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from alphaloop.acceptance import Interval
from alphaloop.cli.screen import table
from alphaloop.messages import Mode, Result
from alphaloop.outcomes.reading import Outcome, is_success
from alphaloop.switchback.speedup import Verdict
from alphaloop.switchback.wording import NO_VERDICT, draft_lengths, reason_word
from alphaloop.wording import rate, share, share_with_interval


@dataclass(slots=True)
class _TaskProgress:
    total: int
    done: int = 0
    failed: int = 0
    speculative: int = 0
    tokens: int = 0
    device_s: float = 0.0


@dataclass(slots=True)
class TrafficProgress:
    """Counts outcomes by task, and renders itself."""

    by_task: dict[str, _TaskProgress]
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, totals: Mapping[str, int]) -> TrafficProgress:
        """Progress without any outcome."""
        return cls({task: _TaskProgress(total) for task, total in totals.items()})

    def add(self, task: str, outcome: Outcome) -> None:
        """Count one outcome."""
        counted = self.by_task[task]
        counted.done += 1
        counted.failed += not is_success(outcome)
        if isinstance(outcome, Result) and outcome.usage and outcome.timings and outcome.decoding:
            counted.speculative += outcome.decoding.mode is Mode.SPECULATIVE
            counted.tokens += outcome.usage.completion_tokens
            counted.device_s += outcome.timings.device_s

    @property
    def done(self) -> int:
        """Outcomes so far."""
        return sum(counted.done for counted in self.by_task.values())

    @property
    def failed(self) -> int:
        """Outcomes without a text."""
        return sum(counted.failed for counted in self.by_task.values())

    def __rich__(self) -> RenderableType:
        shown = table(
            "task", "done", "", "speculative", "tokens", "tok/s", right=["done", "speculative", "tokens", "tok/s"]
        )
        for task, counted in self.by_task.items():
            shown.add_row(
                task,
                f"{counted.done}/{counted.total}",
                ProgressBar(total=counted.total, completed=counted.done, width=24),
                str(counted.speculative),
                str(counted.tokens),
                rate(counted.tokens / counted.device_s if counted.device_s else None),
            )
        total = sum(counted.total for counted in self.by_task.values())
        tokens = sum(counted.tokens for counted in self.by_task.values())
        seconds = time.monotonic() - self.started
        shown.add_section()
        shown.add_row(
            f"{seconds:.0f} s", f"{self.done}/{total}", "", "", str(tokens), rate(tokens / seconds if seconds else None)
        )
        return shown


def final_table(lines: Sequence[Mapping[str, Any]], num_sent: Mapping[str, int]) -> Table:
    """One row a task, from the report's own figures, for a terminal of 100 columns."""
    shown = table(
        "task",
        "jobs",
        "mode",
        "k",
        "α₁ [95 %]",
        "α",
        "speed-up [95 %]",
        "reason",
        right=["jobs", "k"],
    )
    for line in lines:
        if line["task"] in num_sent:
            shown.add_row(
                line["task"],
                str(line["num_jobs"]),
                _mode(line),
                str(line["num_draft_tokens"] or "-"),
                _estimate(line["alpha_1"]),
                _alpha(line),
                _speedup(line),
                _reason(line),
            )
    return shown


def _mode(line: Mapping[str, Any]) -> str:
    return str(line["drafter"] if line["mode"] == Mode.SPECULATIVE else line["mode"] or "-")


def _alpha(line: Mapping[str, Any]) -> str:
    if not line["alpha"]:
        return share(None)
    of_probes = " of probes" if line["acceptance_from"] == "probes" else ""
    return f"{share(line['alpha']['mean'])} {draft_lengths(line['alpha_num_draft_tokens'])}{of_probes}"


def _speedup(line: Mapping[str, Any]) -> str:
    measured = line["measured"]
    if measured is None:
        return "-"
    bounds, lengths = measured["speedup"], (measured["min_num_draft_tokens"], measured["max_num_draft_tokens"])
    if bounds is None or measured["verdict"] == Verdict.NO_VERDICT_YET:
        return NO_VERDICT
    found = f"{bounds['mean']:.2f} [{bounds['low']:.2f} {bounds['high']:.2f}]"
    another = "" if measured["drafter"] == line["drafter"] else f"{measured['drafter']}, "
    return f"{found}\n{another}{draft_lengths(lengths)}, {measured['mean_running']:.1f} running"


def _reason(line: Mapping[str, Any]) -> str:
    measured = line["measured"]
    is_its_own = measured is not None and measured["drafter"] == line["drafter"]
    return reason_word(line["reason"] or None, measured["verdict"] if is_its_own else None)


def _estimate(value: Mapping[str, float] | None) -> str:
    return share_with_interval(None if value is None else Interval(value["mean"], value["low"], value["high"]))
