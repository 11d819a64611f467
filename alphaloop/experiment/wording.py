"""A measured speed-up in words: the same on every screen, always with its draft lengths and its load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, Protocol, TypeVar

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import NextJob
from alphaloop.deciding.decision import reason_said
from alphaloop.experiment.estimate import LEAST_BLOCKS, Verdict
from alphaloop.wording import how_many, words

NO_VERDICT: Final = "no verdict yet"
_EXPECTED: Final = ("expected_faster", "not_surely_faster")


class LoadShown(Protocol):
    """A figure of a drafter, with the longest draft and the load at which it was measured."""

    @property
    def drafter(self) -> str: ...
    @property
    def max_num_draft_tokens(self) -> int: ...
    @property
    def mean_running(self) -> float: ...


class SpeedupShown(LoadShown, Protocol):
    """A measured speed-up, as screens show it: alphaloop.experiment.figures.TaskSpeedup, or the report's line."""

    @property
    def revisions(self) -> tuple[str, str] | None: ...
    @property
    def speedup(self) -> Interval | None: ...
    @property
    def verdict(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def control_share(self) -> float: ...
    @property
    def computed_at(self) -> datetime: ...


Shown = TypeVar("Shown", bound=SpeedupShown)


def figure(measured: SpeedupShown | None) -> str:
    """`1.62 [1.55 1.70]`; `no verdict yet` instead of the estimate where the interval allows both.

    A dash where no slice was recorded.
    """
    if measured is None:
        return "-"
    if measured.speedup is None:
        return f"{NO_VERDICT} ({measured.num_blocks} of {LEAST_BLOCKS} blocks)"
    bounds = measured.speedup
    estimate = NO_VERDICT if measured.verdict == Verdict.NO_VERDICT_YET else f"{bounds.mean:.2f}"
    return f"{estimate} [{bounds.low:.2f} {bounds.high:.2f}]"


def load(measured: LoadShown | None) -> str:
    """`k up to 5, 6.2 running`: the longest draft of the treatment, and the mean number of sequences in a round."""
    if measured is None:
        return ""
    return f"{draft_lengths((measured.max_num_draft_tokens,))}, {measured.mean_running:.1f} running"


def draft_lengths(lengths: Collection[int]) -> str:
    """`k up to 5`: the longest draft that a round of a figure was allowed; empty without any.

    Jobs keep only their longest k, so rounds show the same.
    """
    return f"k up to {max(lengths)}" if lengths else ""


def control(measured: SpeedupShown | None) -> str:
    """`12 blocks, 2.0% control`: the evidence, and the share of the time that it took."""
    if measured is None:
        return ""
    return f"{how_many(measured.num_blocks, 'block')}, {measured.control_share:.1%} control"


def computed(measured: Iterable[SpeedupShown | None]) -> str:
    """`Speed-ups computed at 2026-11-23 11:58 UTC.`; with two moments where they differ, empty without any."""
    moments = sorted({_moment(figure) for figure in measured if figure is not None})
    return f"Speed-ups computed at {' to '.join(sorted({moments[0], moments[-1]}))} UTC." if moments else ""


def _moment(measured: SpeedupShown) -> str:
    return f"{measured.computed_at:%Y-%m-%d %H:%M}"


class ExpectationsShown(LoadShown, Protocol):
    """How reliable expectations were: alphaloop.experiment.figures.Reliability, or the report's line."""

    @property
    def task(self) -> str: ...
    @property
    def num_pairs(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    @property
    def ratio(self) -> float: ...
    @property
    def ratio_bounds(self) -> tuple[float, float] | None: ...


def expectations(compared: ExpectationsShown) -> str:
    """How expected speed-ups compared with measured ones, in one sentence."""
    return (
        f"Expected speed-ups of {compared.drafter} ({load(compared)}): {compared.num_held} of "
        f"{how_many(compared.num_pairs, 'interval')} held the measured one, which was {ratio(compared)} "
        "of the expected."
    )


def ratio(compared: ExpectationsShown) -> str:
    """`0.94 [0.88 1.00]`: measured over expected; without bounds where there is one pair."""
    bounds = compared.ratio_bounds
    return f"{compared.ratio:.2f}" + ("" if bounds is None else f" [{bounds[0]:.2f} {bounds[1]:.2f}]")


def expectations_of_all(compared: Sequence[ExpectationsShown]) -> str:
    """The same of all tasks, in one line; empty without any."""
    if not compared:
        return ""
    held, num = sum(pairs.num_held for pairs in compared), sum(pairs.num_pairs for pairs in compared)
    each = ", ".join(f"{p.task} {p.num_held} of {p.num_pairs} with {p.drafter}" for p in compared)
    return (
        f"Expected speed-ups of the last 7 days: {held} of {how_many(num, 'interval')} held the measured one ({each})."
    )


def judged(chosen: NextJob, measured: SpeedupShown | None) -> NextJob:
    """The choice, its reason as every screen and its JSON have it: `expected_faster`, or what was measured of that.

    What was measured counts for it where its own drafter was measured, and not another.
    """
    if (reason := reason_said(chosen.reason, chosen.expected_low)) not in _EXPECTED:
        return chosen
    own = own_of(chosen, measured)
    verdict = Verdict.NO_VERDICT_YET if own is None else Verdict(own.verdict)
    if verdict is Verdict.FASTER:
        return replace(chosen, reason=verdict.value)
    return replace(chosen, reason=reason if verdict is Verdict.NO_VERDICT_YET else f"{reason},measured_{verdict.value}")


def why(chosen: NextJob | None) -> str:
    """The reason of a judged choice."""
    return "-" if chosen is None else words(chosen.reason)


def own_of(chosen: NextJob | None, measured: Shown | None) -> Shown | None:
    """What was measured, if it is of the chosen drafter, under the revisions that it would be asked with."""
    if chosen is None or measured is None or measured.drafter != chosen.drafter:
        return None
    is_known = None not in (chosen.revisions, measured.revisions)
    return None if is_known and chosen.revisions != measured.revisions else measured


def sentence(drafter: str, measured: SpeedupShown) -> str:
    """What the experiment says of a drafter, in one sentence."""
    blocks = how_many(measured.num_blocks, "block")
    where = f"{drafter}, {load(measured)}; {blocks} of control rounds, {measured.control_share:.1%} of the time"
    at = f"Computed at {_moment(measured)} UTC."
    bounds = measured.speedup
    if bounds is None:
        return f"No verdict yet ({where}): {LEAST_BLOCKS} blocks are the least. {at}"
    text = f"Speed-up {bounds.mean:.2f}x vanilla, {bounds.low:.2f} to {bounds.high:.2f} ({where})"
    return f"{text}: {words(measured.verdict)}. {at}"
