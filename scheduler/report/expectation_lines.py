"""Expected beside measured speed-ups, as the report shows them: counts by task and drafter, and every pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from alphaloop.switchback.expectation import ExpectationPair
from alphaloop.switchback.reliability import by_drafter, reliability
from scheduler.report.data_over_time import ExpectationLine, ExpectationPoint
from scheduler.report.part import Estimate


def expectation_lines(pairs: Iterable[ExpectationPair]) -> tuple[ExpectationLine, ...]:
    """A line for each task and drafter, in order of their names."""
    return tuple(_line(its) for its in by_drafter(pairs).values())


def _line(pairs: Sequence[ExpectationPair]) -> ExpectationLine:
    points = tuple(
        ExpectationPoint(
            expected=Estimate.of(pair.expected),
            measured=Estimate.of(pair.measured),
            is_held=pair.is_held,
            covers_from=pair.covers_from,
            covers_to=pair.covers_to,
        )
        for pair in pairs
    )
    return ExpectationLine(**asdict(reliability(pairs)), points=points)
