"""How a job drafts while more, fewer or other sequences run than it was decided for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.draft_lengths import (
    LengthsTogether,
    RunningGroup,
    RunningSequence,
    lengths_together,
    settings_by_running,
)
from alphaloop.deciding.goodput import DrafterState, climbed
from alphaloop.deciding.job_facts import Aim, Objective
from alphaloop.deciding.policy import decide
from alphaloop.deciding.posterior import Posterior
from alphaloop.messages import Decoding, Mode, Purpose
from tests.fixtures.deciding import context_of, inferred

LOOKUP, DRAFT = DrafterState("lookup", "r1", 8), DrafterState("draft", "r1", 5)
MEASURED = (1, 2, 4, 8, 16)
VANILLA = DraftSetting()


def costs(per_position_ms: float, *, draft_ms: float = 1.0, read_ms: float = 0.0) -> CostTable:
    """A pass takes 20 ms, and so much for each position of each sequence; the draft model so much a token."""
    points = [CostPoint(None, b, w, 20 + per_position_ms * b * w, 5) for b in MEASURED for w in (1, 9)]
    points += [CostPoint("lookup", b, w, 0.1, 5) for b in MEASURED for w in (2, 9)]
    points += [CostPoint("draft", b, w, draft_ms * (w - 1) + 0.1 * b, 5) for b in MEASURED for w in (2, 6)]
    if read_ms:
        points += [CostPoint(name, 1, 100, read_ms, 3, 0, CostKind.PREFILL) for name in (None, "draft")]
    return CostTable(points)


def posteriors(lookup: float, draft: float = 0.01) -> dict[str, Posterior]:
    sure = partial(inferred, jobs=100.0, sd=0.01)
    return {"lookup": sure(lookup, k=8), "draft": sure(draft, k=5)}


def found(
    known: dict[str, Posterior], table: CostTable, num_running: int, num_slots: int = 16, **more: object
) -> tuple[Decision, tuple[DraftSetting, ...]]:
    context = context_of(num_running, 1, 200.0, **more)
    decision = decide(known, [LOOKUP, DRAFT], table, context)
    return decision, settings_by_running(decision, known, [LOOKUP, DRAFT], table, context, num_slots)


def test_a_vanilla_job_drafts_once_the_device_has_emptied() -> None:
    decision, settings = found(posteriors(0.7), costs(3.0), 16)
    assert (decision.mode, decision.setting) == (Mode.VANILLA, VANILLA)
    assert len(settings) == 16
    assert settings[15] == VANILLA
    drafting = [setting.drafter for setting in settings]
    assert drafting[0] == "lookup"
    assert drafting == sorted(drafting, key=lambda name: name is None), "vanilla only while many run"
    lengths = [setting.num_draft_tokens for setting in settings]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[3]


def test_a_job_keeps_to_one_drafter() -> None:
    """Alone the draft model would be best. At eight, look-up is, and no job changes from one drafter to the other."""
    known, table = posteriors(0.55, 0.9), costs(1.0, draft_ms=2.5)
    alone, _ = found(known, table, 1)
    assert alone.drafter == "draft"
    decision, settings = found(known, table, 8)
    assert decision.drafter is not None
    assert {setting.drafter for setting in settings} <= {None, decision.drafter}
    _, from_vanilla = found(known, costs(6.0, draft_ms=2.5), 16)
    assert len({setting.drafter for setting in from_vanilla} - {None}) == 1


def test_a_draft_that_would_have_to_read_a_long_text_late_stays_out() -> None:
    known = posteriors(0.01, 0.8)
    cheap, dear = (found(known, costs(6.0, read_ms=ms), 16, prompt_tokens=1000.0) for ms in (1.0, 300.0))
    assert cheap[0].setting == dear[0].setting == VANILLA
    assert cheap[1][0].drafter == "draft"
    assert dear[1] == ()


@pytest.mark.parametrize(
    "more",
    [
        {"purpose": Purpose.CONTROL},
        {"purpose": Purpose.PROBE},
        {"decoding": Decoding.VANILLA},
        {"decoding": Decoding.SPECULATIVE},
        {"switched_off": "Translate *"},
        {"objective": Objective(Aim.TIME_PER_TOKEN, 1000.0)},
    ],
)
def test_decisions_that_did_not_compare_speeds_keep_one_setting(more: dict[str, object]) -> None:
    decision, settings = found(posteriors(0.7), costs(3.0), 16, **more)
    assert settings == ()
    assert all(decision.setting_while(n) == decision.setting for n in (1, 5, 99))


def test_settings_hold_beyond_the_last() -> None:
    settings = (DraftSetting("lookup", 4), DraftSetting("lookup", 2))
    chosen = Decision(Mode.SPECULATIVE, "lookup", "r1", 2, Reason.FASTER, "", settings_by_running=settings)
    assert [chosen.setting_while(n).num_draft_tokens for n in (1, 2, 3, 64)] == [4, 2, 2, 2]


def ms_a_token(setting: DraftSetting, known: dict[str, Posterior], table: CostTable, num_running: int) -> float:
    here = table.rounds(num_running)
    if setting.drafter is None:
        return here.part_ms(None, 1) or math.inf
    posterior, k = known[setting.drafter], setting.num_draft_tokens
    ms = here.round_ms(setting.drafter, k, posterior.proposed, posterior.longest_proposed(num_running)[k])
    return (ms or math.inf) / posterior.tokens[k]


@given(
    known=st.builds(posteriors, st.floats(0.02, 0.98), st.floats(0.02, 0.98)),
    table=st.builds(costs, st.floats(0.0, 8.0), draft_ms=st.floats(0.01, 8.0)),
    num_running=st.integers(1, 20),
    num_slots=st.integers(1, 20),
)
def test_no_setting_is_slower_by_the_model_than_the_decisions_own(
    known: dict[str, Posterior], table: CostTable, num_running: int, num_slots: int
) -> None:
    decision, settings = found(known, table, num_running, num_slots)
    again, same = found(known, table, num_running, num_slots)
    assert (decision, settings) == (again, same)
    assert len(settings) in (0, num_slots)
    assert len({setting.drafter for setting in settings} - {None, decision.drafter}) <= (decision.drafter is None)
    if num_running <= num_slots and settings:
        assert settings[num_running - 1] == decision.setting
    for number, setting in enumerate(settings, 1):
        mine = ms_a_token(setting, known, table, number)
        assert mine <= ms_a_token(decision.setting, known, table, number) * (1 + 1e-9)


@given(values=st.lists(st.floats(0, 9), min_size=2, max_size=9), first=st.integers(0, 8))
def test_a_climb_ends_where_no_step_gains_and_never_below_its_start(values: list[float], first: int) -> None:
    """The one search over k, of settings by running sequences and of lengths together."""
    first %= len(values)
    lengths = range(len(values))
    k, worth = climbed(first, values[first], lengths, values.__getitem__)
    assert worth == values[k] >= values[first]
    assert all(values[n] <= worth for n in (k - 1, k + 1) if n in lengths)
    if all(shorter < longer for shorter, longer in itertools.pairwise(values)):
        assert worth == values[-1]


LONG_DRAFT, LOADS = DrafterState("draft", "r1", 7), (1, 2, 4, 8)
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def shared_costs(per_position_ms: float = 0.9, draft_ms: float = 3.5) -> CostTable:
    points = [CostPoint(None, b, w, 20 + 2 * b + per_position_ms * b * (w - 1), 5) for b in LOADS for w in (1, 8)]
    points += [CostPoint("draft", b, w, (draft_ms + 0.2 * b) * (w - 1), 5) for b in LOADS for w in (2, 8)]
    return CostTable(points)


sure = partial(inferred, k=7, jobs=100.0, sd=0.01)


def decided(alpha: float, table: CostTable) -> Decision:
    return decide({"draft": sure(alpha)}, [LONG_DRAFT], table, context_of(4, 1, 200.0))


def worth_a_ms(alphas: tuple[float, ...], lengths: tuple[int, ...], table: CostTable, each: int) -> float:
    """Written out from the formula, for groups of `each` sequences that all use the draft model."""
    num_running, worth = each * len(alphas), 0.0

    def ms(proposed: float, num_drafting: int, longest: int) -> float:
        drafting = table.part_ms("draft", num_drafting, longest + 1) if longest else 0.0
        return (table.part_ms(None, num_running, 1 + proposed) or math.inf) + (drafting or 0.0)

    for alpha, k in zip(alphas, lengths, strict=True):
        tokens = sure(alpha).tokens
        least = min(ms(n, num_running if n else 0, n) / tokens[n] for n in range(8))
        worth += each * least * tokens[k]
    num_drafting = each * sum(k > 0 for k in lengths)
    return worth / ms(sum(lengths) / len(lengths), num_drafting, max(lengths))


def test_the_longest_draft_is_paid_by_all_so_lengths_move_together() -> None:
    table = shared_costs()
    good, poor = decided(0.86, table), decided(0.5, table)
    assert (good.num_draft_tokens, poor.num_draft_tokens) == (4, 1)
    running = [RunningSequence(name, one) for name, one in (("a", good), ("a", good), ("b", poor), ("b", poor))]
    settings = LengthsTogether(lambda: table).settings(running, NOW)
    found = settings[0].num_draft_tokens, settings[2].num_draft_tokens
    assert {setting.drafter for setting in settings} == {"draft"}
    best = max(itertools.product(range(8), repeat=2), key=lambda ks: worth_a_ms((0.86, 0.5), ks, table, 2))
    assert found == best
    assert 4 > found[0] >= found[1] > 1


@given(
    alphas=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)),
    per_position_ms=st.floats(0.0, 6.0),
    draft_ms=st.floats(0.01, 8.0),
    apart=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_together_is_never_worse_than_apart(
    alphas: tuple[float, float], per_position_ms: float, draft_ms: float, apart: tuple[int, int]
) -> None:
    table = shared_costs(per_position_ms, draft_ms)
    groups = [RunningGroup(DraftSetting("draft", k), 2, sure(alpha)) for alpha, k in zip(alphas, apart, strict=True)]
    first, second = (setting.num_draft_tokens for setting in lengths_together(groups, table))
    assert worth_a_ms(alphas, (first, second), table, 2) >= worth_a_ms(alphas, apart, table, 2) * (1 - 1e-9)


def test_a_choice_stays_for_a_second() -> None:
    table, num_asked = shared_costs(), 0

    def asked() -> CostTable:
        nonlocal num_asked
        num_asked += 1
        return table

    lengths = LengthsTogether(asked)
    running = [RunningSequence("a", decided(0.86, table)), RunningSequence("b", decided(0.5, table))]
    later = [one._replace(decision=replace(one.decision, explanation="of the next job")) for one in running]
    for after_s, expected in ((0.0, 1), (0.5, 1), (1.5, 2)):
        assert len(lengths.settings(later if after_s else running, NOW + timedelta(seconds=after_s))) == 2
        assert num_asked == expected
