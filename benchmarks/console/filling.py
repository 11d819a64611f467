"""A made-up system, written by the store's own functions and into Kafka: what the console's pages show.

A day of jobs, those that workers hold, what a scheduler has found, dead letters, and an uploaded batch.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import insert

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.batches.lines import BatchReader, BatchRequest, KeptBatches
from alphaloop.batches.progress import send
from alphaloop.costs import CostPoint
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.errors import InvalidField, MalformedMessage, MessageError, UnknownTask
from alphaloop.experiment.figures import SpeedupSubject
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import TOKENS, ensure_topic, ensure_topics
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Chunk, Mode, Origin, Result, Status, chunk_headers, dead_letter, text_chunk
from alphaloop.messages.headers import encoded
from alphaloop.messages.result import DecodingReport, Failure, Timings, Usage
from alphaloop.settings import Settings
from alphaloop.store.api import ApiBatch, new_id
from alphaloop.store.database import Database, values_of
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry
from alphaloop.store.decisions import BudgetSubject, DecisionLog
from alphaloop.store.drift import (
    DriftEventStore,
    EventChange,
    EventContent,
    EventState,
    Incident,
    IncidentKind,
    IncidentStore,
)
from alphaloop.store.job_counts import DecodeRun, JobCounts
from alphaloop.store.jobs import ClaimRequest, JobStore
from alphaloop.store.known_jobs import BatchStore
from alphaloop.store.outcomes import Outcome, OutcomeStore, record_counts
from alphaloop.store.switchback import SliceRow, SwitchbackStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from alphaloop.tables import api_batches

HOST, DEVICE, ENGINE = "gpu-node-1", "NVIDIA H100 80GB HBM3", "transformers-5.23.0/bfloat16"
TARGET_NAME: Final = "SmolLM2-1.7B-Instruct"
DRAFTER: Final = "lookup"
TARGET, DRAFT = (hashlib.sha256(name).hexdigest()[:40] for name in (b"target", b"draft"))
WORKERS: Final = ("gpu-node-1-4711-9f1c22ab", "gpu-node-2-4712-03be91d0")
RUNNING: Final = 6
#: Milliseconds of one sequence without speculation.
ROUND_S: Final = 0.02
#: How long ago the acceptance of a task fell.
FALLEN_FOR: Final = timedelta(hours=2, minutes=40)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A task: its acceptance, whether it speculates, and how many times faster that is."""

    task: str
    alpha: float
    speculates: bool
    tokens_per_round: float
    alpha_lately: float | None = None  #: since the drift of `findings`

    def alpha_at(self, age: timedelta) -> float:
        """Counts of jobs that were decoded that long ago."""
        return self.alpha_lately if self.alpha_lately is not None and age < FALLEN_FOR else self.alpha


def plans(num_tasks: int) -> list[TaskPlan]:
    """The tasks of the pictures, and as many others as are asked for."""
    named = [
        TaskPlan("code", 0.74, True, 2.6, 0.63),
        TaskPlan("summarization", 0.62, True, 2.1),
        TaskPlan("sql", 0.81, True, 3.1),
        TaskPlan("translation", 0.31, False, 1.3),
        TaskPlan("question_answering", 0.44, True, 1.55),
        TaskPlan("creative_writing", 0.18, False, 1.2),
    ]
    rng = random.Random(num_tasks)
    others = [
        TaskPlan(f"customer-{number:04d}", alpha := rng.uniform(0.1, 0.9), alpha > 0.4, 1 + 2 * alpha)
        for number in range(num_tasks - len(named))
    ]
    return (named + others)[:num_tasks]


_BATCH: Final = "batch-of-monday"


def run_of(plan: TaskPlan, at: datetime, now: datetime, rng: random.Random, k: int = 5) -> DecodeRun:
    """The counts of a job that was decoded at `at`."""
    is_spoken = plan.speculates or rng.random() < 0.3
    counts, alpha = (
        AcceptanceCounts().with_round(0, 0, num_emitted=1),
        plan.alpha_at(now - at) + 0.06 * rng.uniform(-1, 1),
    )
    while counts.num_tokens < 160:
        accepted = 0
        while is_spoken and accepted < k and rng.random() < alpha - 0.02 * accepted:
            accepted += 1
        counts = counts.with_round(k if is_spoken else 0, accepted, num_emitted=accepted + 1)
    wall_s = counts.rounds * ROUND_S * (1.1 if is_spoken else 1.0)
    return DecodeRun(
        key=EvidenceKey(
            task=plan.task,
            target_revision=TARGET,
            engine=ENGINE,
            sampling_bucket="greedy",
            prompt_bucket="<=256",
            drafter=DRAFTER if is_spoken else "",
            draft_revision=DRAFT if is_spoken else "",
        ),
        purpose="traffic",
        mode=Mode.SPECULATIVE if is_spoken else Mode.VANILLA,
        num_draft_tokens=k if is_spoken else 0,
        reason="expected_faster" if plan.speculates else Reason.EXPLORING if is_spoken else Reason.NOT_FASTER,
        device=DEVICE,
        counts=counts,
        num_prompt_tokens=rng.randint(80, 240),
        num_tokens=counts.num_tokens,
        batch_size=RUNNING,
        queue_s=rng.uniform(0.05, 0.8),
        time_to_first_token_s=0.05,
        wall_s=wall_s,
        device_s=wall_s / RUNNING,
        decoded_at=at,
        target=TARGET_NAME,
    )


def hold_jobs(database: Database, tasks: Sequence[TaskPlan], now: datetime, rng: random.Random) -> list[WorkerLoad]:
    """Seventy claimed jobs of two workers; all but fifteen have ended. Returns what the workers say of themselves."""
    store, outcomes, loads = JobStore(database), OutcomeStore(database), list[WorkerLoad]()
    for owner in WORKERS:
        names = [(f"{rng.choice(tasks).task}-{rng.randrange(16**6):06x}", rng.choice(tasks)) for _ in range(35)]
        requests = [
            ClaimRequest(name, hashlib.sha256(name.encode()).digest(), plan.task, "", f"row-{i}", _BATCH, "traffic")
            for i, (name, plan) in enumerate(names)
        ]
        claims = {claim.job_id: claim for claim in store.claim(requests, owner=owner, lease_s=3600, max_attempts=3)}
        done = names[: 35 - rng.randint(5, 10)]
        ended = [ended_job(name, plan, claims[name].attempt, now, rng) for name, plan in done]
        outcomes.record(ended, owner=owner)
        running = [name for name, _ in names[len(done) :]][:RUNNING]
        tokens = {name: rng.randint(5, 150) for name in running}
        load = WorkerLoad(owner, DEVICE, TARGET_NAME, 8, 12, 35 - len(done), tokens, rng.uniform(600, 900))
        WorkerStore(database).say(load)
        loads.append(load)
    return loads


def ended_job(
    job_id: str, plan: TaskPlan, attempt: int, now: datetime, rng: random.Random, batch_id: str = _BATCH
) -> Outcome:
    """What a worker records of a job; a few have failed."""
    run = run_of(plan, now - timedelta(seconds=rng.uniform(0, 50)), now, rng)
    has_failed = rng.random() < 0.08
    counts = run.counts
    result = Result(
        job_id=job_id,
        status=Status.FAILED if has_failed else Status.SUCCEEDED,
        task=plan.task,
        batch_id=batch_id,
        text=None if has_failed else "The river keeps its own slow time.",
        finish_reason=None if has_failed else "stop",
        usage=Usage(
            prompt_tokens=run.num_prompt_tokens,
            completion_tokens=run.num_tokens,
            total_tokens=run.num_prompt_tokens + run.num_tokens,
        ),
        timings=Timings(queue_s=run.queue_s, time_to_first_token_s=0.05, wall_s=run.wall_s, device_s=run.device_s),
        decoding=DecodingReport(
            mode=Mode(run.mode),
            drafter=run.key.drafter or None,
            draft_revision=run.key.draft_revision or None,
            target_revision=TARGET,
            engine=ENGINE,
            num_draft_tokens=run.num_draft_tokens,
            reason=run.reason,
            explanation="lookup, k=5 is expected to be faster" if run.key.drafter else "vanilla is not slower",
            rounds=counts.rounds,
            num_empty_rounds=counts.num_empty_rounds,
            proposed=counts.proposed,
            trials=counts.trials,
            accepts=counts.accepts,
            num_cropped=counts.num_cropped,
            batch_size=RUNNING,
        ),
        error=Failure(code="decode_failed", message="a step of the engine failed three times") if has_failed else None,
        attempt=attempt,
        recorded_at=now,
    )
    return Outcome(job_id, attempt, result.status, result.encode(), "results", {}, run)


def find(database: Database, now: datetime) -> None:
    """Write all three."""
    store = DriftEventStore(database)
    fallen = EventContent(
        DriftSubject("code", DRAFTER, DRAFT, TARGET),
        "traffic_changed",
        "Acceptance of lookup on code fell from 0.74 to 0.63, change -0.11 [-0.14 -0.08]; its probes are steady.",
        "The jobs have changed, not the draft: look at what new producers send, or let the policy choose a smaller k.",
        {"flagged_by": "traffic"},
        41.5,
        now - timedelta(hours=3),
        now - timedelta(hours=2, minutes=20),
    )
    over = EventContent(
        DriftSubject("summarization", DRAFTER, DRAFT, TARGET),
        "setup_changed",
        "α₁ of summarization with lookup fell by 0.07 [0.04 0.10] when the engine's dtype changed.",
        "Nothing, if the change was meant.",
        {"flagged_by": "probes"},
        0.0,
        None,
        None,
    )
    store.write([EventChange(None, EventState.OPENED, fallen, fallen.verdict)], now - timedelta(hours=2))
    (first,) = store.open_events()
    store.write(
        [EventChange(first.id, EventState.CONFIRMED, fallen, "Later jobs agree: 0.63 [0.61 0.66].")],
        now - timedelta(hours=1),
    )
    store.write([EventChange(None, EventState.OPENED, over, over.verdict)], now - timedelta(days=2))
    second = max(event.id for event in store.open_events())
    closed = "Back within ±0.05 of 0.62 for 64 jobs: an equivalence test says so."
    store.write([EventChange(second, EventState.CLOSED, over, closed)], now - timedelta(days=1))
    wrong = Incident(
        IncidentKind.WRONG_TEXT,
        "sql",
        DRAFTER,
        DRAFT,
        TARGET,
        ENGINE,
        ("probe-5f0c6f9d", "control-5f0c6f9d"),
        "A probe's text differs from its control's at token 17, by 3.1 nats: more than a near-tie.",
        {},
    )
    IncidentStore(database).open([wrong], now - timedelta(minutes=40))


_HALF_LIFE: Final = timedelta(days=3)


def fill(
    database: Database, tasks: Sequence[TaskPlan], *, now: datetime, seed: int = 1, has_drift: bool = True
) -> list[WorkerLoad]:
    """Write the day before `now`, and what runs at this moment. Returns what the workers say of themselves."""
    rng = random.Random(seed)
    _measured_engine(database)
    for plan in tasks:
        _traffic(database, plan, now, rng)
    _slices(database, [plan for plan in tasks[:6] if plan.speculates or plan.task == "translation"], now)
    SwitchbackStore(database).refresh(now)
    _choices(database, tasks, now)
    if has_drift:
        find(database, now)
    return hold_jobs(database, tasks[:6], now, rng)


def _measured_engine(database: Database) -> None:
    registry = DraftRegistry(database)
    registry.register(DRAFTER, DRAFT, TARGET)
    # Wider than six positions a pass of the target is no longer nearly free: k=5 is the best.
    points = [
        CostPoint(drafter, batch, width, base + 0.15 * batch + slope * (width + 4 * max(0, width - 6)), 9)
        for drafter, base, slope in ((None, 18.0, 1.0), (DRAFTER, 0.2, 0.01))
        for batch in (1, 8, 16)
        for width in (1, 4, 6, 9, 13)
    ]
    CostStore(database).save(CostSubject(HOST, DEVICE, ENGINE, TARGET, {DRAFTER: DRAFT}), points)


def _traffic(database: Database, plan: TaskPlan, now: datetime, rng: random.Random) -> None:
    """Jobs over the day, none for two hours in the middle of it."""
    hours = range(1, 24) if plan.task.startswith("customer") else [h / 3 for h in range(1, 72)]
    moments = [now - timedelta(hours=h, seconds=rng.uniform(0, 900)) for h in hours if not 11 < h < 13]
    if plan.task.startswith("customer"):
        moments = rng.sample(moments, 4)
    else:
        moments += [now - timedelta(seconds=rng.uniform(1, 55)) for _ in range(6)]
    jobs = [
        JobCounts(f"{plan.task}-{number}", 1, run_of(plan, at, now, rng)) for number, at in enumerate(sorted(moments))
    ]
    with database.begin() as connection:
        record_counts(connection, jobs, _HALF_LIFE, recorded_at=now)


def _slices(database: Database, tasks: Sequence[TaskPlan], now: datetime) -> None:
    rng, rows = random.Random(2), []
    for plan in tasks:
        subject = SpeedupSubject(plan.task, "greedy", TARGET, ENGINE, HOST, DEVICE, DRAFTER, DRAFT)
        for block in range(40 if plan.speculates else 5):
            begins = now - timedelta(minutes=30 * block + 5)
            for number, phase in enumerate((Phase.BETWEEN, Phase.BEFORE, Phase.CONTROL, Phase.AFTER)):
                is_control = phase is Phase.CONTROL
                # Few, so that all of them together took less device time than the task's jobs.
                num_rounds = 7 if phase is Phase.BETWEEN else 3
                num = num_rounds * RUNNING
                cost = 1.0 if is_control else 1.25 * rng.uniform(0.94, 1.06)
                one = Slice(
                    block_id=f"{plan.task}-{block}",
                    task=plan.task,
                    phase=phase,
                    treatment=Treatment(DRAFTER, 5),
                    started_at=begins + timedelta(seconds=number),
                    num_rounds=num_rounds,
                    num_sequence_rounds=num,
                    num_tokens=num if is_control else round(num * plan.tokens_per_round),
                    num_proposed=0 if is_control else num * 5,
                    sequence_s=num * ROUND_S * cost,
                    sum_running=num_rounds * RUNNING,
                    sum_context=num_rounds * 180.0,
                )
                rows.append(SliceRow(subject, one, WORKERS[0]))
    SwitchbackStore(database).add(rows)


def _choices(database: Database, tasks: Sequence[TaskPlan], now: datetime) -> None:
    log = DecisionLog(database)
    for plan in tasks:
        vanilla = Alternative(None, 0, 1.0, 20.0, 1.0, 1.0, 1.0)
        gain = plan.tokens_per_round / 1.25
        drafted = Alternative(DRAFTER, 5, plan.tokens_per_round, 25.0, gain, gain * 0.9, gain * 1.12)
        first = Decision(
            Mode.VANILLA,
            None,
            None,
            0,
            Reason.NO_HISTORY,
            "no job of this task yet",
            (vanilla, drafted),
        )
        log.record_change(BudgetSubject(plan.task, TARGET, DEVICE, "greedy"), RUNNING, first, WORKERS[0])
        if plan.speculates:
            told = f"lookup, k=5 is expected at {gain:.2f}x vanilla ({gain * 0.9:.2f} to {gain * 1.12:.2f})"
            second = Decision(Mode.SPECULATIVE, DRAFTER, DRAFT, 5, Reason.FASTER, told, (drafted, vanilla))
        else:
            told = f"lookup, k=5 is expected at {gain:.2f}x vanilla, which is not faster beyond noise"
            second = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, told, (vanilla, drafted))
        log.record_change(BudgetSubject(plan.task, TARGET, DEVICE, "greedy"), RUNNING, second, WORKERS[0])


RUNNING_JOB: Final = "order-4711"
_FLUSH_S: Final = 60.0
_TEXT: Final = (
    "def median(values: list[float]) -> float:\n",
    '    """The middle value, or the mean of the two in the middle."""\n',
    "    ordered = sorted(values)\n",
    "    middle = len(ordered) // 2\n",
    "    if len(ordered) % 2:\n",
)
_LETTERS: Final[tuple[tuple[str, MessageError | Failure, str | None], ...]] = (
    ("code", InvalidField("expected at most 2, found 9", field="body.temperature"), "order-4702"),
    ("sql", Failure(code="decode_failed", message="a step of the engine failed three times"), "query-88"),
    ("code", MalformedMessage("expected a JSON object, found something else"), None),
    ("summarization", UnknownTask("no task 'summarisation'", hint="expected one of code, sql"), "mail-17"),
    ("code", InvalidField("no such field", field="body.tempreature", hint="did you mean temperature?"), "order-4705"),
)


def send_messages(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """Write all of it; `plan` is the task of the batch and of the running job."""
    ensure_topics(settings.kafka, {*settings.tasks, *(task for task, *_ in _LETTERS)})
    _letters(settings)
    _stream(settings, database, plan)
    _batch(settings, database, plan)


def _letters(settings: Settings) -> None:
    with closing(Producer(settings.kafka, client_id="benchmark")) as producer:
        for offset, (task, reason, job_id) in enumerate(_LETTERS):
            fields = {"prompt": "Write a haiku about rivers.", **({"job_id": job_id} if job_id else {})}
            letter = dead_letter(
                reason,
                Origin("cluster", f"jobs.{task}", 0, 400 + offset),
                group="alphaloop-workers",
                num_deliveries=1,
                key=job_id.encode() if job_id else None,
                value=json.dumps(fields).encode(),
                headers=(("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
                job_id=job_id or f"refused-{offset}",
            )
            ensure_topic(settings.kafka, letter.topic)
            producer.send(letter.topic, key=letter.key, value=letter.value, headers=letter.headers)
            producer.flush(_FLUSH_S)


def _stream(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """A job that is being decoded, and the chunks of its text so far."""
    JobStore(database).claim([_claim(RUNNING_JOB, plan)], owner=WORKERS[0], lease_s=3600, max_attempts=3)
    with closing(Producer(settings.kafka, client_id="benchmark")) as producer:
        for seq, text in enumerate(_TEXT):
            chunk = Chunk(RUNNING_JOB, 1, seq, text)
            value = text_chunk(chunk, created=int(datetime.now(UTC).timestamp()), model=TARGET_NAME)
            producer.send(TOKENS, key=RUNNING_JOB.encode(), value=value, headers=encoded(chunk_headers(chunk, {})))
        producer.flush(_FLUSH_S)


def _batch(settings: Settings, database: Database, plan: TaskPlan) -> None:
    """Sixty lines: two are wrong, and half of the others have ended."""
    chat = {"messages": [{"role": "user", "content": "Write a haiku about rivers."}], "max_tokens": 64}
    lines = [_line(f"row-{number:02d}", chat) for number in range(58)]
    lines += [_line("row-hot", {**chat, "temperature": 9}), "{half a line"]
    content, now = io.BytesIO("\n".join(lines).encode()), datetime.now(UTC)
    kept = KeptBatches(settings.console_batches).add(content)
    noted: dict[str, str | int] = {"source": "console", "by": "alphaloop", "name": "haiku.jsonl"}
    noted |= {"task": plan.task, "num_bytes": content.tell(), "num_total": len(lines)}
    content.seek(0)
    found = list(BatchReader(settings, kept.batch_id, task=plan.task).read(content))
    send(iter(found), settings, database, kept.batch_id, noted=noted)
    jobs = [line.job for line in found if isinstance(line, BatchRequest)]
    claims = [_claim(job.job_id, plan, job.custom_id, kept.batch_id) for job in jobs[:34]]
    claimed = JobStore(database).claim(claims, owner=WORKERS[0], lease_s=3600, max_attempts=3)
    rng = random.Random(3)
    ended = [ended_job(one.job_id, plan, one.attempt, now, rng, kept.batch_id) for one in claimed[:29]]
    OutcomeStore(database).record(ended, owner=WORKERS[0])


def list_batches(database: Database, num_batches: int, now: datetime) -> None:
    """Batches without their jobs: every other one is the API's and has ended, of the others every tenth has not."""
    store, made = BatchStore(database), list[dict[str, Any]]()
    for number in range(num_batches):
        by_status = {"succeeded": 900 + number % 90, "failed": number % 10, "invalid": number % 3}
        num_total, name, at = sum(by_status.values()), f"rows-{number}.jsonl", now - timedelta(minutes=number)
        if number % 2:
            batch = ApiBatch(
                id=new_id("batch_"),
                key_name="nightly",
                segment="gold",
                task="code",
                tasks=(),
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata=None,
                input_file_id=f"file-{number}",
                created_at=at,
                expires_at=at + timedelta(days=1),
                completed_at=at,
                status="completed",
                num_total=num_total,
                num_completed=by_status["succeeded"],
                num_failed=num_total - by_status["succeeded"],
                by_status=by_status,
            )
            made.append(values_of(batch))
        else:
            batch_id, is_open = f"batch-{hashlib.sha256(name.encode()).hexdigest()[:24]}", number % 20 == 0
            told = {"id": batch_id, "source": "command", "by": "platform", "name": name, "task": "code"}
            noted: dict[str, str | int] = {**told, "num_bytes": 300 * num_total, "num_total": num_total + 50 * is_open}
            store.note(noted, by_status["invalid"])
            store.keep({batch_id: {"by_status": by_status, "is_open": is_open}})
    if made:
        database.change(insert(api_batches), made)


def _claim(job_id: str, plan: TaskPlan, custom_id: str | None = None, batch_id: str | None = None) -> ClaimRequest:
    payload = hashlib.sha256(job_id.encode()).digest()
    return ClaimRequest(job_id, payload, plan.task, "", custom_id, batch_id, "traffic")


def _line(custom_id: str, body: dict[str, object]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})
