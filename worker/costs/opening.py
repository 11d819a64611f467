"""The costs with which a worker starts: those that are stored for this machine, and what they lack, measured now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from alphaloop.cost_state import with_shared_weights
from alphaloop.settings import WorkerSettings
from alphaloop.store.costs import CostStore
from worker.background import Write
from worker.costs.calibration import calibrate, plan
from worker.costs.live import LiveCosts
from worker.costs.shared_weights import timed_by
from worker.engine import Engine

log = logging.getLogger(__name__)


def open_costs(
    settings: WorkerSettings,
    engine: Engine,
    store: CostStore,
    *,
    clock: Callable[[], float] = time.monotonic,
    write: Write = lambda what, act: act(),
) -> LiveCosts:
    """Costs stored for this host, device, engine, target and drafters; what they lack is measured and stored first.

    Corrections are stored through `write`, which may do it later.
    """
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
        half_life=settings.correction_half_life_rounds,
        save_every_s=settings.correction_save_s,
        timed=timed,
        save=lambda corrected: write("corrected costs", lambda: store.save_corrections(*key, corrected)),
        clock=clock,
    )
