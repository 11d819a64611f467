"""All rules on one seed of a scenario with slots, beside the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaloop.deciding.decision import DraftSetting, Reason
from alphaloop.experiment.estimate import measured_speedup
from benchmarks.policy.compare import BUDGET_SHARE, Score, action_name
from benchmarks.policy.ours_on_slots import OursOnSlots
from benchmarks.policy.scenario import Device, Scenario
from benchmarks.policy.slot_oracle import Known, SlotOracle, StaticSetting
from benchmarks.policy.slots import SlotStream, SlotTrace, draw_slot_stream, play_slots

#: Rules that play on slots, beside the single settings.
RULES = ("ours", "blind_oracle")
#: Draft lengths that play as single settings: all of them would take most of the time.
STATIC_LENGTHS = (1, 2, 3, 4, 6, 8, 12)


def slot_rule_names(scenario: Scenario) -> list[str]:
    """Every rule that plays in a scenario with slots."""
    return [*RULES, *(action_name(*action) for action in _static(scenario))]


def compare_on_slots(
    scenario: Scenario, device: Device, known: Known, seed: int, rules: Sequence[str]
) -> dict[str, Score]:
    """Scores of these rules on the same stream."""
    stream = draw_slot_stream(scenario, device, seed)
    oracle = play_slots(stream, known.table, SlotOracle(known))
    statics: dict[str, SlotTrace] = {}

    def static(name: str) -> SlotTrace:
        if name not in statics:
            setting = DraftSetting(*next(a for a in scenario.actions if action_name(*a) == name))
            statics[name] = play_slots(stream, known.table, StaticSetting(setting))
        return statics[name]

    vanilla = static("vanilla")
    scores = {}
    for name in rules:
        if name == "ours":
            scores[name] = _ours(stream, known, oracle, vanilla, seed)
        elif name == "blind_oracle":
            trace = play_slots(stream, known.table, SlotOracle(known, is_blind=True))
            scores[name] = _score(trace, oracle, vanilla, stream)
        else:
            scores[name] = _score(static(name), oracle, vanilla, stream)
    return scores


def _static(scenario: Scenario) -> list[tuple[str | None, int]]:
    return [(drafter, k) for drafter, k in scenario.actions if drafter is None or k in STATIC_LENGTHS]


def _ours(stream: SlotStream, known: Known, oracle: SlotTrace, vanilla: SlotTrace, seed: int) -> Score:
    scenario = stream.scenario
    rule = OursOnSlots(scenario, stream.device.points(scenario.inferred), seed)
    trace = play_slots(stream, known.table, rule, is_control=rule.is_control)
    rule.close()
    speedups = []
    for subject, truth in sorted(rule.measured.truth.items()):
        found = measured_speedup(one for one in rule.measured.slices if one.task == subject).speedup
        if found is not None:
            speedups.append((found.mean, found.low, found.high, truth.speedup))
    back = jobs_until_back(scenario, rule.choices)
    return _score(trace, oracle, vanilla, stream, speedups=tuple(speedups), jobs_until_back=back)


def jobs_until_back(scenario: Scenario, choices: Sequence[tuple[int, DraftSetting, Reason]]) -> int | None:
    """The longest run of jobs since the hiccup began whose decisions did not choose its drafter; None without one.

    A trial is no choice. 0: the drafter was never given up.
    """
    hiccup = scenario.slots.hiccup if scenario.slots else None
    if hiccup is None:
        return None
    longest = current = 0
    for number, setting, reason in choices:
        if number < hiccup.from_job:
            continue
        is_chosen = setting.drafter == hiccup.drafter and reason is not Reason.EXPLORING
        current = 0 if is_chosen else current + 1
        longest = max(longest, current)
    return longest


def _score(
    trace: SlotTrace,
    oracle: SlotTrace,
    vanilla: SlotTrace,
    stream: SlotStream,
    *,
    speedups: tuple[tuple[float, float, float, float], ...] = (),
    jobs_until_back: int | None = None,
) -> Score:
    # What budget rounds lost: their time, less the oracle's time for as many tokens of the same jobs.
    tokens = np.array([job.needed - 1 for job in stream.jobs])
    by_oracle = trace.budget_tokens * oracle.job_ms / tokens
    lost = max(0.0, float((trace.budget_ms - by_oracle).sum()))
    excused = min(lost, BUDGET_SHARE * oracle.ms)
    return Score(
        of_oracle=oracle.ms / trace.ms,
        of_oracle_net=oracle.ms / (trace.ms - excused),
        of_vanilla=vanilla.ms / trace.ms,
        budget_share=float(trace.budget_tokens.sum() / tokens.sum()),
        budget_loss=lost / oracle.ms,
        cold=None,
        speedups=speedups,
        jobs_until_back=jobs_until_back,
    )
