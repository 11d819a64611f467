"""Stored corrections go on growing older while no worker runs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

import pytest
from sqlalchemy import text

from alphaloop.costs import HALF_LIFE_S, PRIOR_SD, CostKind, CostPoint, timing_variance
from alphaloop.deciding.goodput import DrafterState
from alphaloop.settings import WorkerSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject
from tests.fakes import FakeEngine
from tests.fixtures.costs import ServerLaw, answered, step_of
from worker.costs.learning import open_costs

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

WHERE: Final = CostSubject("h", "cpu", "e", "t", {"model": "r1", "lookup": "r1"})
CALIBRATED: Final = (
    CostPoint(None, 1, 1, 30.0, 9, correction_variance=timing_variance(9)),
    CostPoint(None, 1, 9, 36.0, 9, correction_variance=timing_variance(9)),
    CostPoint("model", 1, 2, 5.0, 9, correction_variance=timing_variance(9)),
    CostPoint("model", 1, 9, 40.0, 9, correction_variance=timing_variance(9)),
    CostPoint("model", 1, 64, 9.0, 9, 0, CostKind.PREFILL, correction_variance=timing_variance(9)),
    CostPoint("lookup", 1, 9, 0.1, 9, correction_variance=timing_variance(9)),
)


def age(database: Database, seconds: float) -> None:
    """All that is stored was stored so much earlier."""
    database.change(
        text(
            "UPDATE cost_profiles SET measured_at = measured_at - make_interval(secs => :s),"
            " corrected_at = corrected_at - make_interval(secs => :s)"
        ),
        {"s": seconds},
    )


def corrected(point: CostPoint) -> CostPoint:
    factor = {None: 1.2, "model": 3.0, "lookup": 1.0}[point.drafter]
    return replace(point, correction=factor, num_corrections=40, correction_variance=0.01)


def test_a_restart_goes_on_with_the_doubt(database: Database) -> None:
    store = CostStore(database)
    store.save(WHERE, CALIBRATED)
    assert set(store.load(WHERE).points) == set(CALIBRATED)
    store.save_corrections(WHERE, map(corrected, CALIBRATED))
    assert set(store.load(WHERE).points) == set(map(corrected, CALIBRATED))
    age(database, HALF_LIFE_S)
    loaded = {(point.drafter, point.width): point for point in store.load(WHERE).points}
    assert loaded[None, 9] == corrected(CALIBRATED[1]), "the target's own estimate does not fade"
    for width in (2, 9, 64):
        point = loaded["model", width]
        assert point.correction == pytest.approx(1.2 * math.sqrt(3.0 / 1.2), rel=0.01)
        assert point.correction_variance == pytest.approx(0.01 / 4 + 0.75 * PRIOR_SD**2, rel=0.01)
    assert loaded["lookup", 9].correction == pytest.approx(math.sqrt(1.2), rel=0.01)


def test_calibrating_anew_ends_the_doubt(database: Database) -> None:
    store = CostStore(database)
    store.save(WHERE, CALIBRATED)
    store.save_corrections(WHERE, map(corrected, CALIBRATED))
    age(database, 100 * HALF_LIFE_S)
    store.save(WHERE._replace(drafters={"lookup": "r1"}), CALIBRATED[:1], replaces_all=True)
    kept = {(point.drafter, point.width) for point in store.load(WHERE).points}
    assert kept == {(None, 1), ("model", 2), ("model", 9), ("model", 64)}, "of other drafters everything stays"
    store.save(WHERE, CALIBRATED, replaces_all=True)
    assert set(store.load(WHERE).points) == set(CALIBRATED)


class _Asked(FakeEngine):
    """Servers whose rounds take 20 ms, and 30 where they draft."""

    def __init__(self) -> None:
        drafters = (DrafterState("lookup", "r1", 4, least_draft_tokens=4),)
        super().__init__(num_slots=8, drafters=drafters, context_length=8192)
        self.num_asked = 0

    @property
    def can_redraft(self) -> bool:
        return False

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        self.num_asked += 1
        return 30.0 if drafter else 20.0


def test_servers_are_asked_once_and_what_requests_tell_is_kept(database: Database) -> None:
    engine, settings, store = _Asked(), WorkerSettings(calibration_budget_s=60.0), CostStore(database)
    without_budget = open_costs(WorkerSettings(calibration_budget_s=0.0), engine, store)
    assert engine.num_asked == 0
    assert not without_budget.table.points
    costs = open_costs(settings, engine, store)
    asked = engine.num_asked
    assert asked > 0
    assert costs.table.rounds(1).round_ms("lookup", 4) == pytest.approx(30.0, rel=0.05)
    assert costs.table.is_served("lookup")
    rng = random.Random(1)
    for _ in range(300):
        costs.observe(step_of([answered(rng, ServerLaw(60.0), 1, drafter="lookup", k=4, tokens_per_round=2.0)]))
    assert costs.save()
    again = open_costs(settings, engine, store)
    assert engine.num_asked == asked
    assert again.table.rounds(1).round_ms("lookup", 4) == pytest.approx(60.0, rel=0.1)
    assert again.table.rounds(1).round_ms(None, 0) == pytest.approx(20.0, rel=0.1)
