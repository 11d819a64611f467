"""The demo's screens: outcomes by task while they arrive, and one table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import Decoded, NextJob, at_load, drafted_by_load, percent, setting
from alphaloop.cli.screen import FittedTable, table
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
        if isinstance(outcome, Result) and outcome.usage and outcome.timings:
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
        shown = table("task", "done", "", "tokens", "tok/s", right=["done", "tokens", "tok/s"])
        for task, counted in self.by_task.items():
            shown.add_row(
                task,
                f"{counted.done}/{counted.total}",
                ProgressBar(total=counted.total, completed=counted.done, width=24),
                str(counted.tokens),
                rate(counted.tokens / counted.device_s if counted.device_s else None),
            )
        total = sum(counted.total for counted in self.by_task.values())
        tokens = sum(counted.tokens for counted in self.by_task.values())
        seconds = time.monotonic() - self.started
        shown.add_section()
        shown.add_row(
            f"{seconds:.0f} s", f"{self.done}/{total}", "", str(tokens), rate(tokens / seconds if seconds else None)
        )
        return shown


def final_table(lines: Sequence[Mapping[str, Any]], num_sent: Mapping[str, int]) -> FittedTable:
    """One row a task, from the report's own figures, for a terminal of 80 columns."""
    shown = table(
        "task",
        "jobs",
        "rounds drafted",
        "k",
        "α₁ [95 %]",
        "speed-up [95 %]",
        "next job",
        right=["jobs"],
    )
    for line in lines:
        if line["task"] in num_sent:
            done = None if line["decoded"] is None else Decoded.of_json(line["decoded"])
            shown.add_row(
                line["task"],
                str(line["num_jobs"]),
                "\n".join([percent(done.drafted_share) if done else "-", *drafted_by_load(done)]),
                _lengths(done),
                _acceptance(line),
                _speedup(line),
                _next(line),
            )
    return shown


def _lengths(done: Decoded | None) -> str:
    return draft_lengths(done.num_draft_tokens or ()).removeprefix("k ") or "-" if done else "-"


def _acceptance(line: Mapping[str, Any]) -> str:
    value = line["alpha_1"]
    found = share_with_interval(None if value is None else Interval(value["mean"], value["low"], value["high"]))
    return f"{found}\nof probes" if value is not None and line["acceptance_from"] == "probes" else found


def _speedup(line: Mapping[str, Any]) -> str:
    measured = line["measured"]
    if measured is None:
        return "-"
    bounds, lengths = measured["speedup"], (measured["min_num_draft_tokens"], measured["max_num_draft_tokens"])
    if bounds is None or measured["verdict"] == Verdict.NO_VERDICT_YET:
        return NO_VERDICT
    found = f"{share(bounds['mean'])} [{share(bounds['low'])} {share(bounds['high'])}]"
    return f"{found}\n{measured['drafter']}, {draft_lengths(lengths)}, {measured['mean_running']:.1f} running"


def _next(line: Mapping[str, Any]) -> str:
    if line["mode"] is None:
        return "-"
    drafter = line["drafter"] if line["mode"] == Mode.SPECULATIVE else None
    its = drafter, line["num_draft_tokens"], line["reason"], line["explanation"], line["next_running"], ""
    one, measured = NextJob(line["mode"], *its), line["measured"]
    is_its_own = measured is not None and measured["drafter"] == drafter
    reason = reason_word(line["reason"] or None, measured["verdict"] if is_its_own else None)
    return f"{setting(one)}\n{at_load(one)}\n{reason}"
