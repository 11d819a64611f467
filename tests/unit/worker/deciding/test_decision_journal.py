"""What of decisions is written, and when; on a store that remembers its rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID, uuid4

import pytest

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostKind, CostPoint
from alphaloop.cost_doubt import LogEstimate
from alphaloop.cost_state import CostBasis, CostState, Deviation
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts
from alphaloop.deciding.evidence_source import JobLengths
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject, TaskRules
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin
from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Mode
from alphaloop.store.decision_records import InputRow, RecordRow
from worker.deciding import decision_journal as module
from worker.deciding.decision_journal import WRITE_EVERY_S, StoredDecisions

NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
LOOKUP: Final = DrafterState("lookup", "r1", 4)
FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 4, timedelta(days=3), PolicyLimits())
KEY: Final = EvidenceKey("code", "t", "e", "greedy", "<=256", "", "lookup", "r1")
PAIR: Final = PairOrigin("lookup", NOON, (1, 5))
ORIGIN: Final = PosteriorOrigin(KEY, NOON, (5,), PAIR)
BASIS: Final = CostBasis(tuple(CostPoint(None, batch, 1, 10.0, 5) for batch in (1, 2, 4)), {})
VANILLA: Final = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "")


def costs(moved: float = 0.0) -> CostState:
    first = Deviation(moved, 0.0, 1)
    return CostState(BASIS, {None: LogEstimate(0.0, 0.0)}, (first, Deviation(0.0, 0.0, 0), Deviation(0.0, 0.0, 0)))


def decision(now: datetime = NOON) -> DecisionInputs:
    return DecisionInputs(
        decision_id=uuid4(),
        subject=Subject("code", "greedy"),
        jobs=(JobFacts(20, 100),),
        rules=TaskRules(),
        num_running=1,
        now=now,
        conditions=EngineConditions(),
        drafters=(LOOKUP,),
        costs=costs().table(),
        lengths=JobLengths(0.0, None, None),
        splits=(),
        posteriors=((ORIGIN,),),
        incumbent=None,
        budget=None,
        settings_from=(None,),
    )


class Store:
    """Rows as they were written; away while told so."""

    def __init__(self) -> None:
        self.inputs: list[InputRow] = []
        self.records: list[RecordRow] = []
        self.is_away = False

    def add(self, session_id: UUID, inputs: Sequence[InputRow], records: Sequence[RecordRow]) -> None:
        if self.is_away:
            raise StoreUnavailable("no connection")
        self.inputs += inputs
        self.records += records

    @property
    def kinds(self) -> list[str]:
        return [row.kind for row in self.inputs]


class Made:
    """A journal whose clock and costs are the test's."""

    def __init__(self) -> None:
        self.store, self.now_s, self.state = Store(), 0.0, costs()
        self.journal = StoredDecisions(self.store, FACTS, lambda: self.state, clock=lambda: self.now_s)

    def note(self, *decisions: DecisionInputs) -> None:
        for inputs in decisions:
            self.journal.note(inputs, (VANILLA,) * len(inputs.jobs))


def test_shared_inputs_are_written_once_a_day() -> None:
    made = Made()
    made.note(decision(), decision())
    made.journal.write()
    first = ["session", "cost_basis", "costs", "pair", "posterior"]
    assert made.store.kinds == first
    made.note(decision(NOON + timedelta(hours=12)))
    made.journal.write()
    assert made.store.kinds == first * 2
    assert len({row.number for row in made.store.inputs}) == 2 * len(first)
    assert [len(row.inputs) for row in made.store.records][:1] == [len(made.store.records[1].inputs)]


def test_a_change_of_costs_or_flags_is_written_with_the_decision_that_used_it() -> None:
    made = Made()
    made.note(decision())
    made.state = costs(0.5)
    made.note(decision())
    made.note(replace(decision(), drafters=(replace(LOOKUP, is_stale=True),)))
    made.journal.write()
    assert made.store.kinds == ["session", "cost_basis", "costs", "pair", "posterior", "costs", "session"]
    moved = [json.loads(row.content)["moved"] for row in made.store.inputs if row.kind == "costs"]
    assert moved == [[], [[0, 0.5, 0.0, 1]]]
    numbers = [json.loads(record.inputs) for record in made.store.records]
    assert len({its["costs"] for its in numbers}) == len({its["session"] for its in numbers}) == 2


def test_a_basis_is_replaced_when_the_differences_outgrow_it() -> None:
    made = Made()
    for number in range(40):
        made.state = costs(float(number))
        made.note(decision())
    made.journal.write()
    # Each differs by one of three deviations: a basis serves four times three of them and one more.
    assert made.store.kinds.count("cost_basis") == 3
    assert made.store.kinds.count("costs") == 40


def test_another_basis_is_written_with_the_first_decision_that_used_it() -> None:
    made = Made()
    made.note(decision())
    other = CostBasis((*BASIS.points, CostPoint("lookup", 1, 5, 30.0, 0, kind=CostKind.SERVED)), {})
    made.state = CostState(other, {None: LogEstimate(0.0, 0.0)}, (*costs().deviations, Deviation(0.1, 0.2, 3)))
    made.note(decision())
    made.journal.write()
    bases = [json.loads(row.content)["points"] for row in made.store.inputs if row.kind == "cost_basis"]
    assert [len(points) for points in bases] == [3, 4]
    assert made.store.kinds.count("costs") == 2


def test_decisions_are_written_once_a_second() -> None:
    made = Made()
    assert not made.journal.is_due
    made.note(decision())
    assert made.journal.is_due
    made.journal.write()
    made.note(decision())
    assert not made.journal.is_due
    made.now_s += WRITE_EVERY_S
    assert made.journal.is_due


def test_decisions_wait_for_a_database_that_is_away_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    made = Made()
    made.store.is_away = True
    noted = [decision() for _ in range(5)]
    for inputs in noted:
        made.note(inputs)
        with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
            made.journal.write()
    made.store.is_away = False
    made.now_s += WRITE_EVERY_S
    assert made.journal.is_due
    made.journal.write()
    assert [record.decision_id for record in made.store.records] == [inputs.decision_id for inputs in noted[2:]]
    assert made.store.kinds == ["session", "cost_basis", "costs", "pair", "posterior"]
    assert [record.getMessage() for record in caplog.records] == ["1 decisions not recorded"] * 2
