"""Decisions for jobs of one lane that start together. A fault in deciding costs no job."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.errors import StoreUnavailable, reason_of
from alphaloop.messages import Mode
from worker.claims import ClaimedJob
from worker.components import Components

log = logging.getLogger(__name__)


def decide_lane(
    components: Components, jobs: Sequence[ClaimedJob], *, num_running: int, decision_id: UUID
) -> Sequence[Decision]:
    """A decision for each of these jobs, which share a lane; the database is waited for.

    If deciding raises, the jobs are decoded vanilla, because their texts do not depend on the decision. Raises
    StoreUnavailable in a hurry only.
    """
    lane = jobs[0].ready.lane
    prepared = [claimed.ready.prepared for claimed in jobs]
    task = components.validation.task(lane.task)
    try:
        decisions: Sequence[Decision] = components.retry.until_done(
            "decide",
            lambda: components.decider.decide_each(
                lane, prepared, task, num_running=num_running, decision_id=decision_id
            ),
        )
    except StoreUnavailable:
        raise
    except Exception as error:
        extra = {"action": "decide_failed", "task": lane.task}
        log.error("not decided, so decoded vanilla", exc_info=error, extra=extra)
        decisions = [_vanilla(error)] * len(jobs)
    most = decisions[0] if len(set(map(id, decisions))) == 1 else max(decisions, key=list(decisions).count)
    components.metrics.decided(lane.task, most)
    return decisions


def _vanilla(error: Exception) -> Decision:
    return Decision(Mode.VANILLA, None, None, 0, Reason.UNDECIDED, f"deciding failed: {reason_of(error)}")
