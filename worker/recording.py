"""From a job's end to its record: what is recorded of it, and the thread that records it.

What is recorded is a Result, a row, and evidence of every drafter. A row names the drafter that most rounds belong to.
Where a server reported what was drafted and accepted, but not in which rounds, the sums are the evidence.

All outcomes that wait share one Postgres transaction (group commit). While one group is being committed the next one
gathers, so a slow disk makes groups larger and not the device slower. Where jobs are short, groups also gather for a
moment, because a transaction takes as long for one job as for many.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from pydantic_core import to_jsonable_python

from alphaloop.acceptance import PREFILL, EvidenceKey, prompt_bucket
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import DrafterCounts, EngineIdentity, Generation, Served, ShadowCounts, tolerance_of
from alphaloop.errors import StoreValueRefused, package_missing
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Failure, Mode, Purpose, Result, Status
from alphaloop.messages.result import choices_to_write, encode_fields
from alphaloop.probes import ProbeText
from alphaloop.server_identity import Granularity
from alphaloop.settings import Settings
from alphaloop.store.job_counts import DecodeRun, ShadowRun
from alphaloop.store.outcomes import OutboxMessage, Outcome
from alphaloop.store.reuse import Reused, SourcesGone
from alphaloop.store.task_memory import ResultToRemember
from alphaloop.wording import named, words
from worker.background import BoundedQueue, Retry
from worker.claims import AnsweredEqual, ClaimedJob, LeaseKeeper
from worker.dead_letters import FailedTry, failed_job
from worker.intake.polling import Intake
from worker.metrics import WorkerMetrics
from worker.publishing import Publication, RecordedGroup

if TYPE_CHECKING:
    from worker.foundation import Foundation
    from worker.tracing import Tracing

OUTCOME_REFUSED: Final = "outcome_refused"
#: What these jobs are for stays, however they were decoded.
_MEASURING: Final = (Reason.EXPLORING, Reason.PROBE, Reason.CONTROL)
_SUCCEEDED: Final = Status.SUCCEEDED.value
_MOST_KEYS: Final = 4096  #: that are remembered
log = logging.getLogger(__name__)
#: Outcomes of one transaction at most. More would hold the locks of shared rows for longer than a commit takes.
MOST_AT_ONCE: Final = 512
MOST_BYTES_AT_ONCE: Final = 8 << 20
#: Between the beginnings of two transactions where jobs end together, because one costs some 5 ms of processor time
#: whatever its size; the rest of 50 ms is for commit and broker. A job does not wait after one that was recorded alone.
GATHER_S: Final = 0.03
_IDLE_WAIT_S: Final = 0.2
#: Outcomes that wait to be recorded before the loop waits.
MOST_WAITING: Final = 4096
#: Between two looks whether the streams of held outcomes are settled.
_LOOK_S: Final = 0.005
#: An outcome waits no longer for its stream, because a `tokens` topic that is away must not hold up results.
MOST_HELD_S: Final = 1.0
#: Half of what one transaction takes at most, so that what is held and what has just come fit in one.
MOST_HELD: Final = 256
MOST_HELD_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A claimed job and what became of it."""

    claimed: ClaimedJob
    outcome: Outcome


@dataclass(eq=False)
class Recorder:
    """Result, counts, status and outbox in one transaction; outcomes whose claim was lost are dropped.

    The outcome of a streamed job is held until every chunk was acknowledged or dropped. Once an outcome is recorded,
    the relay of any worker may end the stream. If this worker then dies with chunks that no broker has, they are lost,
    because the job is not decoded again. Then the final chunk has to have the whole text, which costs a reader the wait
    for the end; so an outcome waits for its chunks, but not for long: it goes on nevertheless after `MOST_HELD_S`, when
    the worker has to hurry, and if it is among the oldest when too much is held. Its result then names the
    chunks that may be missing.

    `record` writes outcomes as this worker's and returns what is to be published, as OutcomeStore does.
    """

    record: Callable[[Sequence[Outcome]], list[OutboxMessage]]
    intake: Intake
    leases: LeaseKeeper
    publishing: BoundedQueue[Publication]
    metrics: WorkerMetrics
    _: KW_ONLY
    retry: Retry
    max_bytes: int
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self._gather_until = -math.inf
        self._waiting: BoundedQueue[EndedJob] = BoundedQueue(
            max_items=MOST_WAITING,
            max_bytes=self.max_bytes,
            num_bytes_of=lambda job: len(job.outcome.result),
            give_up=self.retry.gives_up,
        )
        self._held: list[tuple[float, EndedJob]] = []  # until when each waits for its stream, the oldest first
        self._num_let_go = 0  # those of the group in hand that were held
        self._recorded: deque[Outcome] = deque()
        #: Called with jobs whose text cannot be reused after all.
        self.decode_instead: Callable[[Sequence[ClaimedJob]], object] = lambda claimed: None

    def __len__(self) -> int:
        """Outcomes that are not recorded yet, those of the transaction in hand among them.

        One of a streamed job may count twice.
        """
        return self._waiting.num_unsettled + len(self._held) + self._num_let_go

    def put(self, ended: Sequence[EndedJob]) -> None:
        """Hand over outcomes; waits for room unless the worker is in a hurry."""
        self._waiting.put(ended)

    def fail(self, failed: FailedTry) -> None:
        """Hand over the outcome of a job that cannot be tried again."""
        self.put([ended(failed.claimed, Status.FAILED, failed.failure, now=failed.failed_at)])

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Record what waits as one group and hand its messages on; returns how many outcomes won their record."""
        if (gathering_s := self._gather_until - self.clock()) > 0:
            self.retry.hurry.wait(gathering_s)
        if not (group := self._take(timeout_s)):
            return 0
        self._gather_until = self.clock() + GATHER_S if len(group) > 1 else -math.inf
        group, messages = self._record(group)
        self.leases.let_go(job.claimed.job_id for job in group)
        won = {(message.key or b"").decode(): message.value for message in messages}
        winners = [job for job in group if won.get(job.claimed.job_id) == job.outcome.result]
        # Before the results are published, so that a job sent because of a result is decided with this evidence.
        self._recorded.extend(job.outcome for job in winners)
        failed = [failed_job(job.claimed.ready.delivery, job.outcome.result, self.intake) for job in winners]
        recorded = RecordedGroup(
            tuple(messages),
            tuple(job.claimed.ready.delivery for job in group),
            self.intake,
            tuple(job.claimed.job_id for job in group),
            tuple(filter(None, failed)),
            tuple(self.tracing.recorded(winners)) if self.tracing else (),
        )
        self.publishing.put([recorded])
        self._count(winners)
        self.metrics.fenced.inc(len(group) - len(won))
        return len(won)

    def _take(self, timeout_s: float) -> list[EndedJob]:
        """A group that may be recorded now: what waits, and what is no longer held."""
        wait_s = min(timeout_s, _LOOK_S) if self._held else timeout_s
        max_bytes = MOST_BYTES_AT_ONCE - sum(len(job.outcome.result) for _, job in self._held)
        taken = self._waiting.take(MOST_AT_ONCE - len(self._held), wait_s, max_bytes=max_bytes)
        ready = [job for job in taken if job.claimed.stream is None]
        until = self.clock() + MOST_HELD_S
        streamed = [*self._held, *((until, job) for job in taken if job.claimed.stream is not None)]
        held = self._to_hold(streamed)
        kept = {id(job) for _, job in held}
        let_go = [_with_missing_chunks(job) for _, job in streamed if id(job) not in kept]
        self._num_let_go = len(let_go)  # first, because another thread may ask for the length
        self._held = held
        return ready + let_go

    def _to_hold(self, streamed: Sequence[tuple[float, EndedJob]]) -> list[tuple[float, EndedJob]]:
        """Those whose streams are not settled, as far as there is room for them, the newest before older ones."""
        held: list[tuple[float, EndedJob]] = []
        num_bytes, now = 0, self.clock()
        for until, job in reversed(streamed):
            size, stream = len(job.outcome.result), job.claimed.stream
            has_room = not held or (len(held) < MOST_HELD and num_bytes + size <= MOST_HELD_BYTES)
            if has_room and now < until and stream and not stream.is_settled and not self.retry.gives_up():
                held.append((until, job))
                num_bytes += size
        return held[::-1]

    def _record(self, group: list[EndedJob]) -> tuple[list[EndedJob], list[OutboxMessage]]:
        """Record the group; returns it as it was recorded, and the messages to publish.

        An outcome that Postgres does not take, alone, is recorded without what no job depends on: what drafters were
        scored with, a probe's text, what is to be remembered. If that is refused too, a failure that says so replaces
        it: the job must not stop the others, nor be decoded again and again.
        """
        outcomes = [job.outcome for job in group]
        try:
            return group, self.retry.until_done("record", lambda: self.record(outcomes)) if outcomes else []
        except SourcesGone as gone:
            self.decode_instead([job.claimed for job in group if job.claimed.job_id in gone.job_ids])
            return self._record([job for job in group if job.claimed.job_id not in gone.job_ids])
        except StoreValueRefused as error:
            if len(group) > 1:
                parts = [self._record([job]) for job in group]
                return [job for jobs, _ in parts for job in jobs], [message for _, sent in parts for message in sent]
            bare = replace(outcomes[0], shadows=(), probe_text=None, remembered=None, reuse_key=None)
            if bare != outcomes[0]:
                log.error("the evidence of a job is not taken: %s", error.message, extra={"action": "evidence_refused"})
                return self._record([replace(group[0], outcome=bare)])
            log.error("outcome not taken: %s", error.message, extra={"action": "outcome_refused"})
        claimed = group[0].claimed
        failure = Failure(code=OUTCOME_REFUSED, message="the database does not take the outcome of this job")
        failed = ended(claimed, Status.FAILED, failure, now=self.now())
        return [failed], self.retry.until_done("record", lambda: self.record([failed.outcome]))

    def _count(self, winners: Sequence[EndedJob]) -> None:
        by_label: dict[tuple[str, str], list[Outcome]] = {}
        for job in winners:
            lane = job.claimed.ready.lane
            by_label.setdefault((lane.task, lane.purpose), []).append(job.outcome)
        for (task, purpose), outcomes in by_label.items():
            self.metrics.recorded(task, purpose, outcomes)

    def take_recorded(self) -> list[Outcome]:
        """Outcomes that were recorded since the last call: evidence for the next decision. Called by the loop."""
        return [self._recorded.popleft() for _ in range(len(self._recorded))]


def open_recorder(
    base: Foundation,
    record: Callable[[Sequence[Outcome]], list[OutboxMessage]],
    intake: Intake,
    leases: LeaseKeeper,
    publishing: BoundedQueue[Publication],
) -> Recorder:
    """What records this worker's outcomes with `record`, traced where the settings want traces."""
    return Recorder(
        record,
        intake,
        leases,
        publishing,
        base.metrics,
        retry=base.retry,
        max_bytes=base.max_bytes,
        now=base.now,
        tracing=open_tracing(base.settings, base.engine.identity, owner=base.owner, now=base.now),
    )


def open_tracing(
    settings: Settings, identity: EngineIdentity, *, owner: str, now: Callable[[], datetime]
) -> Tracing | None:
    """What takes the traces of jobs; None for no traces, the default.

    Raises ConfigError when traces are wanted and OpenTelemetry is not installed.
    """
    if settings.tracing.endpoint is None:
        return None
    try:
        from worker.tracing import Tracing
    except ImportError as error:
        raise package_missing(error, "tracing.endpoint") from None
    group_id = settings.kafka.named(settings.kafka.group_id)
    return Tracing(settings.tracing, identity, owner=owner, group_id=group_id, now=now)


def succeeded(
    claimed: ClaimedJob,
    generation: Generation,
    decision: Decision,
    identity: EngineIdentity,
    *,
    queue_s: float,
    now: datetime,
    decode_batch_id: UUID | None = None,
) -> Outcome:
    """The outcome of a decoded job, with its counts."""
    identity = identity.of(claimed.ready.job.body.model)
    run = _run_of(claimed, generation, decision, identity, queue_s=queue_s, now=now, decode_batch_id=decode_batch_id)
    return _outcome(
        claimed,
        _SUCCEEDED,
        {
            "target": identity.target,
            "target_revision": identity.target_revision,
            **_answer_of(generation),
            "finish_reason": generation.finish_reason,
            "usage": {
                "prompt_tokens": run.num_prompt_tokens,
                "completion_tokens": run.num_tokens,
                "total_tokens": run.num_prompt_tokens + run.num_tokens,
                **_details_of(generation),
            },
            "timings": {
                "queue_s": queue_s,
                "time_to_first_token_s": generation.time_to_first_token_s,
                "wall_s": generation.wall_s,
                "device_s": generation.device_s,
            },
            "decoding": {
                "mode": run.mode,
                **({"drafter": run.key.drafter} if run.key.drafter else {}),
                **({"draft_revision": run.key.draft_revision} if run.key.draft_revision else {}),
                "target_revision": identity.target_revision,
                "engine": identity.engine,
                "num_draft_tokens": run.num_draft_tokens,
                "reason": run.reason,
                "explanation": _explained(decision, run.mode) + _remark(generation),
                **(_rounds_of(generation) if claimed.ready.prepared.reports_round_counts else {}),
                "batch_size": generation.batch_size,
            },
        },
        now=now,
        run=run,
        shadows=(*(_shadow(run, scored) for scored in generation.shadows), *_drafted(run, generation)),
        probe_text=_probe_text(claimed, generation, identity),
        remembered=_to_remember(claimed, generation, identity),
        reuse_key=claimed.ready.reuse.key if claimed.ready.reuse else None,
    )


#: What a result has in common with that of an equal job.
_OF_EQUAL_JOBS: Final = {"target", "target_revision", "text", "choices", "finish_reason", "usage"}


def answered_equal(answered: AnsweredEqual, *, now: datetime) -> EndedJob:
    """A job that is answered with the text of an equal one, with its outcome: no run, no evidence, no device time."""
    claimed, result = answered.claimed, answered.result
    fields = result.model_dump(mode="json", include=_OF_EQUAL_JOBS, exclude_none=True)
    if result.usage is not None:
        fields["usage"]["prompt_tokens_details"] = {"cached_tokens": result.usage.prompt_tokens}
    fields["timings"] = {"queue_s": claimed.waited_s(now), "wall_s": 0.0, "device_s": 0.0}
    fields["reused_from"] = answered.source.source_job_id
    return EndedJob(claimed, _outcome(claimed, _SUCCEEDED, fields, now=now, reused=answered.source))


def _rounds_of(generation: Generation) -> dict[str, Any]:
    """The counts by position; nothing where a server that drafts reported none."""
    counts, served = generation.counts, generation.served
    if not (generation.is_counted or any(counts.proposed)):
        return {}
    positions = _POSITIONS.get(served.granularity) if served and any(counts.proposed) else None
    return {
        "rounds": counts.rounds,
        "num_empty_rounds": counts.num_empty_rounds,
        **({"positions": positions} if positions else {}),
        "proposed": counts.proposed,
        "trials": counts.trials,
        "accepts": counts.accepts,
        "num_cropped": counts.num_cropped,
        **({"num_forced": counts.num_forced} if counts.num_forced else {}),
    }


_POSITIONS: Final[dict[Granularity, str]] = {"sums": "estimated", "reached": "reached"}


def _answer_of(generation: Generation) -> dict[str, Any]:
    """The text, and the choices where these say more; no text where the first one is calls of tools alone."""
    if not (choices := choices_to_write(generation.choices)):
        return {"text": generation.text}
    content = choices[0].said.content
    written = to_jsonable_python(choices, exclude_none=True)
    return {**({} if content is None else {"text": content}), "choices": written}


def _details_of(generation: Generation) -> dict[str, Any]:
    number = generation.num_reasoning_tokens
    return {} if number is None else {"completion_tokens_details": {"reasoning_tokens": number}}


def ended(claimed: ClaimedJob, status: Status, failure: Failure, *, now: datetime) -> EndedJob:
    """A job that was not decoded to its end, with its outcome."""
    return EndedJob(claimed, _outcome(claimed, status.value, {"error": failure.model_dump(exclude_none=True)}, now=now))


def _outcome(
    claimed: ClaimedJob,
    status: str,
    fields: Mapping[str, Any],
    *,
    now: datetime,
    run: DecodeRun | None = None,
    shadows: tuple[ShadowRun, ...] = (),
    probe_text: ProbeText | None = None,
    remembered: ResultToRemember | None = None,
    reuse_key: bytes | None = None,
    reused: Reused | None = None,
) -> Outcome:
    """The outcome with its result, which has these `fields` and what every result repeats of its job.

    The result is written without the model, because validating and dumping it takes half of the time of an outcome.
    """
    job = claimed.ready.job
    labels = {
        "custom_id": job.custom_id,
        "batch_id": job.batch_id,
        "endpoint": "/v1/completions" if job.body.prompt is not None else None,
        "redrive_of": job.redrive_of,
        "segment": job.segment,
    }
    result = encode_fields(
        {
            "object": "alphaloop.result",
            "job_id": claimed.job_id,
            "status": status,
            "task": job.task,
            **{name: value for name, value in labels.items() if value is not None},
            "purpose": job.purpose.value,
            **({"ignored_fields": job.ignored_fields} if job.ignored_fields else {}),
            **fields,
            "attempt": claimed.attempt,
            **({"num_chunks": claimed.stream.num_chunks} if claimed.stream else {}),
            "recorded_at": now,
        }
    )
    return Outcome(
        job_id=claimed.job_id,
        attempt=claimed.attempt,
        status=status,
        result=result,
        topic=RESULTS,
        headers=claimed.carried,
        run=run,
        shadows=shadows,
        probe_text=probe_text,
        remembered=remembered,
        reuse_key=reuse_key,
        reused=reused,
    )


def _remark(generation: Generation) -> str:
    """What the reader of a text has to know beside it."""
    if not generation.num_unparsed_calls:
        return ""
    num = generation.num_unparsed_calls
    was = (
        "pieces looked like tool calls, could not be parsed, and were"
        if num > 1
        else "piece looked like a tool call, could not be parsed, and was"
    )
    return f"; {num} {was} kept as text"


def _run_of(
    claimed: ClaimedJob,
    generation: Generation,
    decision: Decision,
    identity: EngineIdentity,
    *,
    queue_s: float,
    now: datetime,
    decode_batch_id: UUID | None,
) -> DecodeRun:
    """The row of a job. It names the drafter that most rounds belong to; of several the first."""
    job, sampling = claimed.ready.job, claimed.ready.prepared.sampling
    drafted = _drafted_most(generation)
    mode = Mode.SPECULATIVE if drafted else Mode.VANILLA
    key = _key(
        job.task,
        identity.target_revision,
        identity.engine,
        sampling.bucket,
        prompt_bucket(generation.num_prompt_tokens),
        claimed.ready.prepared.segment,
        (drafted.drafter or "") if drafted else "",
        drafted.draft_revision if drafted else "",
        sampling.form_bucket,
    )
    return DecodeRun(
        key=key,
        decode_batch_id=decode_batch_id or uuid4(),
        purpose=job.purpose.value,
        mode=mode.value,
        num_draft_tokens=drafted.num_draft_tokens if drafted else 0,
        reason=_reason(decision, mode),
        device=identity.device,
        counts=generation.counts,
        chances=generation.chances,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_tokens=generation.counts.num_tokens,
        batch_size=generation.batch_size,
        queue_s=queue_s,
        time_to_first_token_s=generation.time_to_first_token_s,
        wall_s=generation.wall_s,
        device_s=generation.device_s,
        decoded_at=now,
        is_counted=generation.is_counted,
        is_cut="length" in (generation.finish_reason, *(choice.finish_reason for choice in generation.choices)),
        num_texts=sampling.n,
        proposers=generation.proposers,
        target=identity.target,
        batch_id=job.batch_id,
    )


def _reason(decision: Decision, mode: Mode) -> str:
    """The decision's reason; `decided_otherwise` where load, the experiment or a failure changed the mode."""
    if decision.mode is not mode and decision.reason not in _MEASURING:
        return "decided_otherwise"
    return decision.reason_said


def _explained(decision: Decision, mode: str) -> str:
    """The decision's explanation, after what was decided where that is not how the job was decoded."""
    first = f"{named(decision.drafter, decision.num_draft_tokens)} at first ({words(decision.reason)}): "
    return ("" if decision.mode.value == mode else first) + decision.explanation


def _drafted_most(generation: Generation) -> DrafterCounts | Served | None:
    """The drafter that most rounds belong to; of several the first, and None where nothing drafted."""
    if generation.drafted:
        return max(generation.drafted, key=lambda drafter: drafter.counts.rounds)
    return generation.served if generation.served and generation.served.drafter is not None else None


@lru_cache(maxsize=_MOST_KEYS)
def _key(*fields: str) -> EvidenceKey:
    """The key of these fields, made once: many jobs have it, and equal keys are compared fastest if they are one."""
    return EvidenceKey(*fields)


def _probe_text(claimed: ClaimedJob, generation: Generation, identity: EngineIdentity) -> ProbeText | None:
    """What is kept of a probe's or control's text, to compare both; None for traffic, and for what was sampled."""
    sampling = claimed.ready.prepared.sampling
    if claimed.ready.job.purpose is Purpose.TRAFFIC or sampling.temperature > 0 or sampling.is_adjusted:
        return None
    if not generation.token_ids:  # the server does not report them
        return None
    return ProbeText(
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        max_tokens=sampling.max_tokens,
        near_tie=tolerance_of(identity.dtype),
        second_ids=tuple(choice.token_id for choice in generation.second_choices),
        gaps=tuple(choice.gap for choice in generation.second_choices),
    )


def _to_remember(claimed: ClaimedJob, generation: Generation, identity: EngineIdentity) -> ResultToRemember | None:
    """The text, for the memory of its task; None where that is off, and where a server decoded it."""
    if not claimed.ready.prepared.is_remembered or generation.served is not None or not generation.token_ids:
        return None
    job = claimed.ready.job
    return ResultToRemember(job.task, job.segment or "", job.batch_id, identity.target_revision, generation.token_ids)


def _shadow(run: DecodeRun, shadow: ShadowCounts) -> ShadowRun:
    """The same job under the key of a drafter that did not decode it."""
    return ShadowRun(
        key=replace(run.key, drafter=shadow.drafter, draft_revision=shadow.draft_revision),
        num_draft_tokens=shadow.num_draft_tokens,
        counts=shadow.counts,
        chances=shadow.chances,
        is_whole=shadow.is_whole,
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=run.num_tokens - run.counts.num_forced,
        decoded_at=run.decoded_at,
    )


def _drafted(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
    """Evidence of the job's own drafters, each of its rounds alone, where the run's counts are of other rounds too.

    If one drafter had every round after the prefill, the run itself is the evidence; so is a vanilla run. Otherwise
    each drafter's rounds are counted under its own key, with their own chances and one round for the prefill, which
    evidence leaves out again. So tokens a round and acceptance come from the drafter's own rounds, and the round that
    ended the text is censored as in any run. Load or lot chooses these rounds before their tokens are known, so the
    choice causes no bias. A drafter that was scored on the whole text is left out, because the score has more counts.
    Where a server's counters are the evidence, it is the slice that the job ended.
    """
    if not generation.is_counted:
        return _evidence_of_slice(run, generation)
    drafted = generation.drafted
    is_whole = not drafted or (len(drafted) == 1 and generation.num_vanilla_rounds == 1)
    if is_whole or not run.is_evidence:
        return []
    scored = {shadow.drafter for shadow in generation.shadows if shadow.is_whole}
    return [
        replace(
            _shadow(
                run,
                ShadowCounts(
                    drafter.drafter,
                    drafter.draft_revision,
                    drafter.num_draft_tokens,
                    PREFILL + drafter.counts,
                    drafter.chances,
                ),
            ),
            is_drafted=True,
            is_whole=False,
        )
        for drafter in drafted
        if drafter.drafter not in scored
    ]


def _evidence_of_slice(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
    """One row under the drafter's key, none where no slice ended; the run's own counts are no evidence.

    A slice of several requests is one row of the job that ended it, and counts as one job: jobs of a slice cannot be
    distinguished, so their variance is taken from slice to slice. Its lengths are the mean of its jobs.
    """
    served = generation.served
    if served is None or not served.drafter or (slice_counts := served.slice_counts) is None:
        return []
    if run.purpose == Purpose.CONTROL:
        return []
    counted = ShadowCounts(served.drafter, served.draft_revision, served.num_draft_tokens, slice_counts.counts)
    row = replace(_shadow(run, counted), is_drafted=True)
    num_prompt_tokens = round(slice_counts.num_prompt_tokens / slice_counts.num_requests)
    num_output_tokens = round(slice_counts.num_tokens / slice_counts.num_requests)
    return [replace(row, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)]


def _with_missing_chunks(job: EndedJob) -> EndedJob:
    """The ended job; its result says if chunks of its stream may be missing, so that the final one has the text."""
    num_chunks = job.claimed.stream.num_unacknowledged if job.claimed.stream else 0
    if not num_chunks:
        return job
    result = Result.decode(job.outcome.result).model_copy(update={"num_unacknowledged_chunks": num_chunks})
    return replace(job, outcome=replace(job.outcome, result=result.encode()))
