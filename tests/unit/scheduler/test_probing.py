"""The jobs of probes, and what a probe that differs from its control proves."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.engine import tolerance_of
from alphaloop.messages import Decoding, Purpose, encode_job
from alphaloop.probe_plan import DueProbe
from alphaloop.probes import DecodedText, ProbeSet, ProbeText, TextPair
from alphaloop.store.drift import IncidentKind, KnownIncident
from scheduler.probing import PlannedJob, disproved, examine, make_jobs, merged
from tests.fixtures.drift import probe_set

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
CODE = probe_set("code", [{"prompt": f"question {i}", "temperature": 0.9, "max_tokens": 500} for i in range(5)], 5)
SQL = probe_set("sql", [{"messages": [{"role": "user", "content": "question"}]}])


def made(chosen: list[DueProbe], at: datetime = NOW, num_prompts: int = 3, **sets: ProbeSet) -> list[PlannedJob]:
    found = {"code": CODE, "sql": SQL, **sets}
    return make_jobs(chosen, found, at, num_prompts=num_prompts, deadline=NOW + HOUR)


def test_every_probe_has_a_control_on_the_same_prompt() -> None:
    planned = made([DueProbe("code", "lookup", 5, None), DueProbe("code", "tiny", 5, None)])
    assert [(p.position, p.job.purpose, p.job.probe_drafter) for p in planned[:3]] == [
        (0, Purpose.CONTROL, None),
        (0, Purpose.PROBE, "lookup"),
        (0, Purpose.PROBE, "tiny"),
    ]
    assert len(planned) == 9
    for p in planned:
        assert p.job.body.prompt == CODE.prompts[p.position].body["prompt"]
        assert p.prompt_id == CODE.prompts[p.position].prompt_id
        assert (p.job.body.temperature, p.job.body.max_tokens) == (0.0, 48)
        assert p.job.deadline == NOW + HOUR
        assert (p.job.decoding is Decoding.VANILLA) == (p.job.purpose is Purpose.CONTROL)
    assert planned[1].job.job_id == "probe-code-20260105T120000Z-0-lookup"
    assert len({p.job.job_id for p in planned}) == 9


def test_a_drafter_is_scored_on_the_controls_of_the_prompts_that_it_does_not_decode() -> None:
    chosen = [DueProbe("code", "lookup", 5, None, is_scored=True), DueProbe("code", "tiny", 5, None)]
    decoded = set()
    for hours in range(40):
        planned = made(chosen, NOW + hours * HOUR, 4)
        controls = [p for p in planned if p.job.purpose is Purpose.CONTROL]
        (probe,) = (p for p in planned if p.job.probe_drafter == "lookup")
        assert [p.job.scored_drafters for p in controls if p.position != probe.position] == [("lookup",)] * 3
        assert {p.job.probe_num_draft_tokens for p in controls if p.job.scored_drafters} == {5}
        (undrafted,) = (p for p in controls if p.position == probe.position)
        assert (undrafted.job.scored_drafters, undrafted.job.probe_num_draft_tokens) == ((), None)
        assert len([p for p in planned if p.job.probe_drafter == "tiny"]) == 4
        decoded.add(probe.position)
    assert decoded == {0, 1, 2, 3}, "each prompt has its turn"


def test_the_same_run_makes_the_same_bytes() -> None:
    one, other = (made([DueProbe("sql", "lookup", 5, None, is_scored=True)]) for _ in range(2))
    assert [encode_job(p.job) for p in one] == [encode_job(p.job) for p in other]


def test_long_names_still_make_an_identifier() -> None:
    task, drafter = "t" * 100, "d" * 100
    sets = {task: probe_set(task, [{"prompt": "question"}])}
    planned = made([DueProbe(task, drafter, 3, None)], num_prompts=1, **sets)
    assert all(len(p.job.job_id) <= 200 for p in planned)
    assert len({p.job.job_id for p in planned}) == 2


TOKENS = (5, 6, 7, 8)


def decoded(drafter: str, token_ids: tuple[int, ...] = TOKENS, **changed: Any) -> DecodedText:
    num_tokens = changed.pop("num_tokens", len(token_ids))
    text = ProbeText(token_ids, "length", len(token_ids), tolerance_of("bfloat16"))
    return DecodedText(
        f"job-{drafter}", "code", drafter, drafter, "target-1", "engine-1", num_tokens, replace(text, **changed)
    )


def control(gaps: tuple[float, ...] = (9.0,) * 4, second_ids: tuple[int, ...] = (1, 2, 3, 4)) -> DecodedText:
    return decoded("", gaps=gaps, second_ids=second_ids)


def kinds(pair: TextPair) -> list[IncidentKind]:
    return [one.kind for one in examine(pair)]


def test_equal_texts_are_right() -> None:
    assert examine(TextPair(control(), decoded("lookup"))) == []


@pytest.mark.parametrize(
    ("gap", "second", "found"),
    [
        (0.125, 3, []),
        (0.5, 3, []),
        (0.51, 3, [IncidentKind.WRONG_TEXT]),
        (0.0, 99, []),  # seen with bfloat16: of three equal choices the third
        (0.51, 99, [IncidentKind.WRONG_TEXT]),
    ],
)
def test_texts_may_part_at_a_near_tie_and_nowhere_else(gap: float, second: int, found: list[IncidentKind]) -> None:
    pair = TextPair(control((9.0, 9.0, gap, 9.0), (1, 2, second, 4)), decoded("lookup", (5, 6, 3, 77)))
    assert kinds(pair) == found


def test_a_dropped_token_is_two_incidents() -> None:
    """The text goes on with the token after the one that was lost, and the counts know of the lost one."""
    pair = TextPair(control(), decoded("lookup", (5, 7, 8), num_tokens=4, max_tokens=4))
    assert set(kinds(pair)) == {IncidentKind.WRONG_TEXT, IncidentKind.WRONG_COUNTS, IncidentKind.CUT_SHORT}
    (wrong,) = (one for one in examine(pair) if one.kind is IncidentKind.WRONG_TEXT)
    assert (wrong.evidence["place"], wrong.evidence["control_job_id"]) == (1, "job-")
    assert "from token 2 on" in wrong.sentence


def test_a_text_that_ends_early_differs() -> None:
    shorter = decoded("lookup", TOKENS[:2], finish_reason="stop", max_tokens=4)
    assert kinds(TextPair(control(), shorter)) == [IncidentKind.WRONG_TEXT]


def test_a_control_is_examined_too() -> None:
    pair = TextPair(replace(control(), num_tokens=5), decoded("lookup"))
    (found,) = examine(pair)
    assert (found.kind, found.drafter) == (IncidentKind.WRONG_COUNTS, "")


def test_a_gap_that_no_engine_told_explains_nothing() -> None:
    pair = TextPair(control((), ()), decoded("lookup", (5, 6, 3, 77)))
    (found,) = examine(pair)
    assert found.evidence["gap"] is None


@pytest.mark.parametrize("changed", [{"target_revision": "target-2"}, {"engine": "engine-2"}])
def test_texts_of_two_targets_or_engines_promise_nothing_together(changed: dict[str, str]) -> None:
    assert examine(TextPair(control(), replace(decoded("lookup", (5, 6, 3, 77)), **changed))) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_without_near_ties_a_pair_is_right_only_if_it_is_equal(one: list[int], other: list[int]) -> None:
    first = decoded("", tuple(one), gaps=(1.0,) * len(one), second_ids=(9,) * len(one))
    pair = TextPair(first, decoded("lookup", tuple(other)))
    assert (not kinds(pair)) == (one == other)


def test_the_same_fault_on_several_prompts_is_one_incident() -> None:
    wrong = [TextPair(control(), replace(decoded("lookup", (5, 1)), job_id=f"job-{i}")) for i in range(3)]
    (found,) = merged(one for pair in wrong for one in examine(pair))
    assert found.job_ids == ("job-0", "job-1", "job-2")


def test_later_probes_without_a_fault_disprove_it() -> None:
    wrong, right = TextPair(control(), decoded("lookup", (5, 1))), TextPair(control(), decoded("lookup"))
    (found,) = examine(wrong)
    incident = KnownIncident(1, found, NOW)
    assert disproved([incident], [], []) == []
    assert disproved([incident], [wrong, right], examine(wrong)) == []
    assert disproved([incident], [TextPair(control(), decoded("tiny"))], []) == []
    assert disproved([incident], [right], []) == [incident]
