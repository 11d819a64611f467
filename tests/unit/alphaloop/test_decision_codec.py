"""Inputs of decisions as JSON and back, to the last bit."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostPoint, CostTable
from alphaloop.cost_doubt import LogEstimate
from alphaloop.cost_state import CostBasis, CostState, Deviation
from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts, SettingsOrigin
from alphaloop.deciding.evidence_source import JobLengths
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject, TaskRules
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Aim, Objective
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin, SplitOrigin
from alphaloop.messages import Decoding, Purpose
from alphaloop.store import input_codec as codec
from alphaloop.store.decision_codec import InputNumbers, SharedInputs, inputs_content, numbers_of, read_inputs

finite: Final = st.floats(allow_nan=False, allow_infinity=False)
moments: Final = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
names: Final = st.text(max_size=8)
positions: Final = st.lists(st.integers(1, 2**60), max_size=8).map(tuple)
drafters: Final = st.builds(
    DrafterState,
    name=names,
    revision=names,
    max_draft_tokens=st.integers(1, 12),
    is_stale=st.booleans(),
    offers=st.lists(finite, max_size=3).map(tuple),
    through=st.lists(finite, max_size=3).map(tuple),
    max_prompt_tokens=st.none() | st.integers(1, 1000),
)
settings: Final = st.none() | st.builds(DraftSetting, st.none() | names, st.integers(0, 12))
by_name: Final = st.dictionaries(names, finite, max_size=3)
budgets: Final = st.none() | st.builds(
    ExplorationBudget, finite, finite, finite, st.none() | by_name, by_name, st.none() | moments
)
jobs: Final = st.builds(JobFacts, st.none() | st.integers(0, 9999), st.integers(1, 999), names, st.none() | moments)
objectives: Final = st.just(Objective()) | st.builds(Objective, st.sampled_from(list(Aim)), finite)
pairs: Final = st.builds(PairOrigin, names, moments, positions)
keys: Final = st.builds(EvidenceKey, *(names for _ in EvidenceKey.__slots__))
EMPTY: Final = SharedInputs((), CostTable([]), (), ())


def stored(content: Any) -> Any:
    """As it comes back from the database."""
    return json.loads(json.dumps(content, allow_nan=False))


@given(pairs, keys, moments, positions)
def test_origins_come_back(pair: PairOrigin, key: EvidenceKey, at: datetime, found: tuple[int, ...]) -> None:
    assert codec.read_pair(stored(codec.pair_content(pair))) == pair
    posterior = PosteriorOrigin(key, at, found, pair)
    assert codec.read_posterior(stored(codec.posterior_content(posterior, 3)), pair) == posterior
    split = SplitOrigin(key.task, pair.drafter, at, found)
    assert codec.read_split(stored(codec.split_content(split))) == split


@given(st.lists(drafters, max_size=3), st.integers(0, 64), st.integers(1, 10**15), finite)
def test_a_session_comes_back(found: list[DrafterState], num_slots: int, half_life_us: int, share: float) -> None:
    half_life, limits = timedelta(microseconds=half_life_us), PolicyLimits(explore_share=share)
    facts = SessionFacts("w", "h", "d", "e", "t", num_slots, half_life, limits)
    assert codec.read_session(stored(codec.session_content(facts, found))) == (facts, tuple(found))


deviations: Final = st.builds(Deviation, st.floats(-2, 2), st.floats(0, 1), st.integers(0, 999))


@given(st.lists(st.tuples(deviations, deviations, st.booleans()), min_size=1, max_size=6), st.floats(-2, 2))
def test_costs_come_back_from_what_differs(states: list[tuple[Deviation, Deviation, bool]], level: float) -> None:
    points = tuple(CostPoint("draft" if n % 2 else None, n + 1, 3, 7.0 + n, 5) for n in range(len(states)))
    basis = CostBasis(points, {"gated": "draft"})
    levels = {part: LogEstimate(level, 0.1) for part in (None, "draft")}
    base = CostState(basis, levels, tuple(one for one, _, _ in states))
    now = CostState(basis, levels, tuple(other if moved else one for one, other, moved in states))
    content = stored(codec.costs_content(now, base, 1))
    pairs = zip(now.deviations, base.deviations, strict=True)
    assert len(content["moved"]) == sum(one != other for one, other in pairs)
    again = codec.read_costs(content, codec.read_basis(stored(codec.basis_content(base))))
    assert again.points() == now.points()
    assert again.table().points == now.table().points


@st.composite
def decision_inputs(draw: st.DrawFn) -> DecisionInputs:
    asked = draw(st.lists(jobs, min_size=1, max_size=4))
    origins = st.none() | st.builds(SettingsOrigin, st.uuids(), st.integers(0, 3))
    return DecisionInputs(
        decision_id=draw(st.uuids()),
        subject=Subject(
            draw(names),
            draw(names),
            draw(st.sampled_from(list(Decoding))),
            draw(st.sampled_from(list(Purpose))),
            draw(st.none() | names),
            draw(st.none() | st.integers(1, 9)),
            draw(st.none() | names),
        ),
        jobs=tuple(asked),
        rules=TaskRules(draw(st.floats(1, 999)), draw(st.sampled_from(list(Decoding))), draw(objectives)),
        num_running=draw(st.integers(1, 64)),
        now=draw(moments),
        conditions=EngineConditions(
            draw(st.none() | st.integers(0, 2**40)),
            draw(st.dictionaries(names, names, max_size=2)),
            draw(st.dictionaries(names, st.integers(-(2**40), 2**40), max_size=2)),
        ),
        drafters=(),
        costs=EMPTY.costs,
        lengths=JobLengths(draw(finite), draw(st.none() | finite), draw(st.none() | finite)),
        splits=(),
        posteriors=(),
        incumbent=draw(settings),
        budget=draw(budgets),
        settings_from=tuple(draw(st.lists(origins, min_size=2, max_size=2))),
    )


@given(decision_inputs())
def test_inputs_come_back(inputs: DecisionInputs) -> None:
    numbers = InputNumbers(1, 2, ((3, 4), (5, 6)), (7,))
    content = stored(inputs_content(inputs, numbers))
    assert numbers_of(content) == numbers
    named = (inputs.decision_id, inputs.now, inputs.subject.task, inputs.subject.sampling_bucket, inputs.num_running)
    assert read_inputs(*named, content, EMPTY) == inputs
