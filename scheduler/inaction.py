"""What it costs to leave a fall as it is, in tokens a second.

With the device time that a task has now, it would yield `tokens a second · (s before / s now - 1)` more at the former
speed-up s. Measured speed-ups are taken where both are known. Else the expected ones: at the same cost of a round, the
speed-ups are to each other as the tokens a round, 1 + α + … + α^k.
"""

from __future__ import annotations

from dataclasses import dataclass

from alphaloop.switchback.task_speedup import TaskSpeedup
from scheduler.causes import Finding
from scheduler.facts import SettingInForce


@dataclass(frozen=True, slots=True)
class TaskPace:
    """How a task is decoded now."""

    tokens_per_s: float  #: of its traffic, by the clock, over the last day
    setting: SettingInForce | None
    measured_before: TaskSpeedup | None  #: as it was shown before the change
    measured_now: TaskSpeedup | None


def lost_tokens_per_s(finding: Finding, pace: TaskPace) -> float | None:
    """Tokens a second that the fall costs; 0 for a rise, None where that is not known."""
    if pace.tokens_per_s <= 0:
        return None
    alphas = _alphas(finding)
    if alphas is not None and alphas[1] >= alphas[0]:
        return 0.0
    ratio = _measured(finding, pace) or _expected(finding, pace, alphas)
    return None if ratio is None else max(0.0, pace.tokens_per_s * (ratio - 1))


def _measured(finding: Finding, pace: TaskPace) -> float | None:
    before = _speedup(finding, pace.measured_before)
    if before is None or pace.setting is None:
        return None
    if pace.setting.mode == "vanilla":
        return before
    now = pace.measured_now
    if now is None or finding.began_before is None or now.covers_from < finding.began_before:
        return None
    current = _speedup(finding, now)
    return None if current is None else before / current


def _speedup(finding: Finding, measured: TaskSpeedup | None) -> float | None:
    if measured is None or measured.speedup is None or measured.subject.drafter != finding.subject.drafter:
        return None
    return measured.speedup.mean


def _expected(finding: Finding, pace: TaskPace, alphas: tuple[float, float] | None) -> float | None:
    setting = pace.setting
    if alphas is None or setting is None or setting.drafter != finding.subject.drafter:
        return None
    before, after = (sum(alpha**i for i in range(setting.num_draft_tokens + 1)) for alpha in alphas)
    return before / after


def _alphas(finding: Finding) -> tuple[float, float] | None:
    """α_1 before and after: of the jobs where they were tested, else of the probes."""
    for found in (finding.traffic, finding.left, finding.probes):
        if found is not None and found.trials_before and found.trials_after:
            return found.accepts_before / found.trials_before, found.accepts_after / found.trials_after
    return None
