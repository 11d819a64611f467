"""`alphaloop calibrate`: measure what rounds cost on this device, and store it for every worker of this device."""

from __future__ import annotations

import time
from contextlib import closing

from alphaloop.commands import AdvanceEvent, CalibrateOrder, Calibration, ReportEvent, StageEvent, Tell
from alphaloop.cost import CostPoint
from alphaloop.cost_state import with_shared_weights
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import ConfigError
from alphaloop.settings import Settings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from worker.costs.calibrating_servers import calibrate_servers
from worker.costs.calibration import calibrate, plan
from worker.costs.shared_weights import timed_by
from worker.engine import Engine
from worker.engine_opening import open_engine


def calibrate_device(order: CalibrateOrder, settings: Settings, tell: Tell) -> int:
    """Measure, store unless told not to, report. Raises AlphaloopError."""
    began = time.perf_counter()
    database = None if order.no_store else _database(with_running_stack(settings))
    tell(StageEvent(name="loading the model"))
    with closing(open_engine(settings.models, num_slots=settings.worker.batch_size, database=database)) as engine:
        points = _measure(engine, settings, order.budget, tell)
    identity = engine.identity
    if database is not None:
        revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
        CostStore(database).replace(
            identity.host, identity.device, identity.engine, identity.target_revision, revisions, points
        )
        database.close()
    seconds = time.perf_counter() - began
    tell(ReportEvent(data=Calibration(identity, points, seconds, is_stored=database is not None)))
    return 0


def _measure(engine: Engine, settings: Settings, budget_s: float, tell: Tell) -> tuple[CostPoint, ...]:
    tell(StageEvent(name="measuring"))
    if not engine.can_redraft:
        return tuple(calibrate_servers(engine, budget_s=budget_s, on_measured=lambda: tell(AdvanceEvent())))
    points = calibrate(
        engine,
        plan(engine, settings.worker),
        num_samples=settings.worker.calibration_samples,
        budget_s=budget_s,
        on_measured=lambda done, total: tell(AdvanceEvent(total=total)),
    )
    return tuple(with_shared_weights(points, timed_by(engine.drafters)))


def _database(settings: Settings) -> Database:
    if settings.postgres.url is None:
        raise ConfigError("no database is configured", hint="start `alphaloop up`, set DATABASE_URL or give --no-store")
    postgres = settings.postgres
    database = Database(settings.postgres.url, connect_timeout_s=postgres.connect_timeout_s, limits=postgres.limits())
    database.check_revision()
    return database
