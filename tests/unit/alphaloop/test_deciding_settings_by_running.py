"""How a job drafts while more or fewer sequences run than it was decided for."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.draft_lengths import settings_by_running
from alphaloop.deciding.goodput import DrafterState
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
