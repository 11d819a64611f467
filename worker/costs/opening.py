"""The costs with which a worker starts: those that are stored for this machine, and what they lack, measured now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from alphaloop.cost_state import with_shared_weights
from alphaloop.settings import WorkerSettings
from alphaloop.store.costs import CostStore
from worker.background import Write
from worker.costs.calibrating_servers import calibrate_servers
from worker.costs.calibration import calibrate, plan
from worker.costs.from_requests import RequestCosts
from worker.costs.known import KnownCosts
from worker.costs.live import LiveCosts
from worker.costs.shared_weights import timed_by
from worker.engine import Engine

log = logging.getLogger(__name__)

_HALF_LIFE_ROUNDS: Final = 32  #: a change of speed that lasts so many rounds is followed
_SAVE_EVERY_S: Final = 60.0  #: between two times at which corrected costs are stored


def open_costs(
    settings: WorkerSettings,
    engine: Engine,
    store: CostStore,
    *,
    clock: Callable[[], float] = time.monotonic,
    write: Write = lambda what, act: act(),
) -> KnownCosts:
    """Costs stored for this host, device, engine, target and drafters; what they lack is measured and stored first.

    Corrections are stored through `write`, which may do it later. Servers are asked only where nothing is stored of
    them, and not at all with `calibration_budget_s` = 0.
    """
    if not engine.can_redraft:
        return _open_request_costs(settings, engine, store, clock=clock, write=write)
    identity = engine.identity
    revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
    key = (identity.host, identity.device, identity.engine, identity.target_revision, revisions)
    timed = timed_by(engine.drafters)
    known = store.load(*key).points
    lacking = plan(engine, settings, known).missing(known)
    if lacking.needed:
        log.info(
            "measuring what a round costs here", extra={"action": "calibration_started", "device": identity.device}
        )
        measured = calibrate(
            engine, lacking, num_samples=settings.calibration_samples, budget_s=settings.calibration_budget_s
        )
        store.save(*key, with_shared_weights(measured, timed))
    points = store.load(*key).points
    log.info(
        "costs: %d points, %d of them measured now",
        len(points),
        len(points) - len(known),
        extra={"action": "calibration_done"},
    )
    return LiveCosts(
        points,
        half_life=_HALF_LIFE_ROUNDS,
        save_every_s=_SAVE_EVERY_S,
        timed=timed,
        save=lambda corrected: write("corrected costs", lambda: store.save_corrections(*key, corrected)),
        clock=clock,
    )


def _open_request_costs(
    settings: WorkerSettings, engine: Engine, store: CostStore, *, clock: Callable[[], float], write: Write
) -> RequestCosts:
    identity = engine.identity
    revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
    key = (identity.host, identity.device, identity.engine, identity.target_revision, revisions)
    points = store.load(*key).points
    if not points and settings.calibration_budget_s > 0:
        told = {"action": "calibration_started", "device": identity.device}
        log.info("asking servers what a round costs", extra=told)
        measured = calibrate_servers(engine, budget_s=settings.calibration_budget_s)
        store.save(*key, measured)
        points = store.load(*key).points
        log.info("costs of servers: %d points", len(points), extra={"action": "calibration_done"})
    return RequestCosts(
        engine.drafters,
        points,
        most_in_flight=engine.load().num_slots,
        half_life=_HALF_LIFE_ROUNDS,
        save=lambda learned: write("costs of servers", lambda: store.save(*key, learned)),
        save_every_s=_SAVE_EVERY_S,
        clock=clock,
    )
