"""What feeds the loop, put together from the settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.settings import Settings
from worker.dead_letters import Forwarder
from worker.intake.polling import Intake
from worker.intake.validation import ReadyJob, Validation
from worker.jobs.admission import AdmissionQueue
from worker.jobs.claiming import Claiming
from worker.jobs.feed import JobFeed
from worker.jobs.lanes import LaneKey
from worker.jobs.leases import LeaseKeeper
from worker.publishing import PublishingQueue
from worker.recording import Recorder
from worker.retry import Retry

#: Jobs that are claimed before the engine has room for them, at least; as many as it has slots if those are more.
LEAST_AHEAD: Final = 8


def open_feed(
    settings: Settings,
    intake: Intake,
    validation: Validation,
    claiming: Claiming,
    leases: LeaseKeeper,
    publishing: PublishingQueue,
    forwarder: Forwarder,
    recorder: Recorder,
    contents: ContentStore | None,
    *,
    num_slots: int,
    wake_engine: Callable[[], object],
    read_s: Callable[[int], float],
    prepare_decisions: Callable[[Iterable[LaneKey]], object],
    retry: Retry,
    is_ending: Callable[[], bool],
    now: Callable[[], datetime],
    rng: random.Random,
) -> JobFeed:
    """Build it. `num_slots` and `wake_engine` are the engine's.

    `read_s`: device seconds in which the target reads so many tokens of a prompt, as measured. `prepare_decisions`: as
    `JobFeed` takes it.
    """
    limits = settings.worker
    queue: AdmissionQueue[ReadyJob] = AdmissionQueue(
        measured_batch=num_slots,
        quantum_s=limits.task_quantum_s,
        ageing_s=limits.priority_ageing_s,
        normal_share=limits.normal_lane_share,
        weight_of=lambda task: validation.task(task).weight,
        read_s=read_s,
        most_slack_s=limits.shared_beginning_slack_s,
    )
    return JobFeed(
        intake,
        validation,
        queue,
        claiming,
        leases,
        publishing,
        forwarder,
        recorder,
        retry=retry,
        is_ending=is_ending,
        now=now,
        rng=rng,
        suspect_delay_s=limits.suspect_delay_s,
        num_ahead=max(LEAST_AHEAD, num_slots),
        max_waiting=limits.max_buffered,
        max_waiting_bytes=limits.max_buffered_bytes,
        contents=contents,
        num_readers=settings.claim_check.num_readers,
        wake_engine=wake_engine,
        prepare_decisions=prepare_decisions,
    )
