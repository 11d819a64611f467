"""Costs of a server that reports the times of its steps: those of a device, over real connections."""

from __future__ import annotations

import pytest

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import Sampling
from alphaloop.messages import Mode
from alphaloop.settings import WorkerSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore
from tests.fakes import FakeEngine
from tests.fixtures import inference_server
from tests.fixtures.inference_server import ServedEngine, draft_ms, engine_over, pass_ms
from tests.fixtures.models import make_job
from worker.costs.learning import StepCosts, open_costs

pytestmark = pytest.mark.postgres


def timed(num_slots: int = 4) -> ServedEngine:
    return ServedEngine(
        FakeEngine(num_slots=num_slots), "lookup", 4, round_s=0.01, switches_drafts=True, times_steps=True
    )


def test_a_pass_and_a_draft_are_timed_apart_and_followed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_over({"both": timed()}) as engine:
        assert engine.times_steps
        (drafter,) = engine.drafters
        assert drafter.num_read(500) == 0  # its drafter reads every prompt in any case
        settings = WorkerSettings(calibration_budget_s=60.0)
        costs = open_costs(settings, engine, CostStore(database))
        assert isinstance(costs, StepCosts)
        assert not costs.table.is_of_servers
        for batch in (1, 2, 4):
            for width in (1, 2, 3, 5):
                assert costs.table.part_ms(None, batch, width) == pytest.approx(pass_ms(batch, width), rel=0.01)
            assert costs.table.part_ms("lookup", batch, 5) == pytest.approx(draft_ms(batch, 4), rel=0.01)
        before = costs.table.part_ms(None, 1, 3)
        # The server becomes twice as slow: the steps that come with replies show it, whatever each request asked for.
        monkeypatch.setattr(inference_server, "pass_ms", lambda batch, width: 2 * pass_ms(batch, width))
        for number in range(60):
            k = number % 3
            mode = Mode.SPECULATIVE if k else Mode.VANILLA
            decision = Decision(mode, "lookup" if k else None, None, k, Reason.FASTER if k else Reason.NOT_FASTER, "")
            job = make_job(f"write text number {number}", number)
            engine.admit(engine.prepare(job, Sampling(8, 0.0)), decision)
            while engine.load().num_running:
                costs.observe(engine.step())
        assert costs.table.part_ms(None, 1, 3) / before == pytest.approx(2.0, rel=0.1)
        assert costs.table.part_ms("lookup", 1, 3) == pytest.approx(draft_ms(1, 2), rel=0.05)


def test_of_two_servers_costs_are_learned_from_requests() -> None:
    with engine_over({"one": timed(), "other": timed()}) as engine:
        assert not engine.times_steps
        assert engine.measures_itself
