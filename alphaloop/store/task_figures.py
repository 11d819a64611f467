"""The figures of tasks that every screen shows: jobs, probes and controls apart, and the acceptance of traffic.

Status, explain, the report, the console and the metrics read them here; the views task_jobs_now and task_alpha_now
count the same jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, Row, cast, func, select, text

from alphaloop.acceptance import MOST_RUNS, Interval, share_interval
from alphaloop.as_decoded import Decoded, NextJob, at_loads, usual_load
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.messages import Mode, Purpose
from alphaloop.server_identity import how_counted
from alphaloop.settings.task import Bindings
from alphaloop.store.database import Database, Store, any_of
from alphaloop.store.decisions import DecisionChange, change_of
from alphaloop.store.job_counts import DRAFTED_ROUNDS, ROUNDS
from alphaloop.store.jobs import RUNNING
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.workers import SeenWorker, not_served
from alphaloop.tables import acceptance_hourly, decisions

#: The time that figures cover, unless another is asked for.
WINDOW: Final = timedelta(days=1)
_HOUR: Final = timedelta(hours=1)
#: Hours of equal weight from which on they are the clusters: means of 10 to 30 long runs are nearly independent.
_LEAST_HOURS: Final = 10
#: Fields that `figures_of` leaves empty: what is chosen, what was measured, and who serves.
_OF_NOW: Final = frozenset({"next_job", "measured", "target", "not_served"})

_JOBS: Final = text("""
    SELECT task, purpose, CASE WHEN status = 'running' AND (owner IS NULL OR lease_expires_at <= clock_timestamp())
        THEN 'left' ELSE status END AS status, count(*) AS num_jobs FROM jobs
    WHERE created_at >= :since AND created_at <= :until AND (CAST(:tasks AS text[]) IS NULL OR task = ANY(:tasks))
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3
""")
_REUSED: Final = text("""
    SELECT task, count(*) AS num_jobs FROM reused_results
    WHERE reused_at >= :since AND reused_at <= :until AND (CAST(:tasks AS text[]) IS NULL OR task = ANY(:tasks))
    GROUP BY task
""")
# The largest part of a task's traffic that may be compared with each other: a row of task_alpha_now. Sums
# of hours tell which it is, because they are few.
_SHOWN: Final = """
    WITH keys AS (
        SELECT task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine,
            sum(num_jobs) AS num_jobs
        FROM acceptance_hourly
        WHERE mode = 'speculative' AND purpose = 'traffic' AND bucket >= :since AND bucket <= :until
            AND (CAST(:tasks AS text[]) IS NULL OR task = ANY(:tasks))
        GROUP BY task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine
    ), shown AS MATERIALIZED (
        SELECT DISTINCT ON (task) task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine
        FROM keys
        ORDER BY task, num_jobs DESC, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine
    )
"""
# A cluster a row, for alphaloop.acceptance: an hour, or a run of jobs in the order of their decoding.
_HOURS: Final = text(
    _SHOWN  # noqa: S608 - no values
    + """
    SELECT task, drafter, draft_revision, sampling_bucket, form_bucket, sum(num_jobs)::bigint AS num_jobs,
           coalesce(sum(accepts[1]), 0)::bigint AS a1, coalesce(sum(trials[1]), 0)::bigint AS n1,
           sum(array_sum(accepts))::bigint AS a, sum(array_sum(trials))::bigint AS n,
           min(num_draft_tokens) AS least_k, max(num_draft_tokens) AS most_k
    FROM acceptance_hourly
        JOIN shown USING (task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine)
    WHERE mode = 'speculative' AND purpose = 'traffic' AND bucket >= :since AND bucket <= :until
    GROUP BY task, drafter, draft_revision, sampling_bucket, form_bucket, bucket
"""
)
_RUNS: Final = text(
    _SHOWN  # noqa: S608 - no values
    + """
    SELECT task, drafter, draft_revision, sampling_bucket, form_bucket, count(*) AS num_jobs,
           coalesce(sum(a1), 0)::bigint AS a1, coalesce(sum(n1), 0)::bigint AS n1,
           sum(a)::bigint AS a, sum(n)::bigint AS n, min(k) AS least_k, max(k) AS most_k
    FROM (
        SELECT task, drafter, draft_revision, sampling_bucket, form_bucket, num_draft_tokens AS k,
            accepts[1] AS a1, trials[1] AS n1,
            array_sum(accepts) AS a, array_sum(trials) AS n, coalesce(trials[1], 0) > 0 AS is_tested,
            ntile(:most_runs) OVER (
                PARTITION BY task, coalesce(trials[1], 0) > 0 ORDER BY decoded_at, ledger_id
            ) AS run
        FROM decode_runs
            JOIN shown USING (task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine)
        WHERE mode = 'speculative' AND purpose = 'traffic' AND decoded_at >= :since AND decoded_at <= :until
    ) AS numbered
    GROUP BY task, drafter, draft_revision, sampling_bucket, form_bucket, is_tested, run
"""
)

# How traffic was decoded, by the most sequences that shared a step with a job.
_DECODED: Final = text(
    f"""
    SELECT task, batch_size AS running, sampling_bucket, form_bucket, count(*) AS num_jobs,
        sum({ROUNDS})::bigint AS num_rounds,
        sum({DRAFTED_ROUNDS})::bigint AS num_drafted,
        coalesce(array_agg(DISTINCT drafter) FILTER (WHERE mode = 'speculative'), '{{}}') AS drafters,
        min(num_draft_tokens) FILTER (WHERE mode = 'speculative') AS least_k,
        max(num_draft_tokens) FILTER (WHERE mode = 'speculative') AS most_k
    FROM decode_runs
    WHERE purpose = 'traffic' AND decoded_at >= :since AND decoded_at <= :until
        AND (CAST(:tasks AS text[]) IS NULL OR task = ANY(:tasks))
    GROUP BY task, batch_size, sampling_bucket, form_bucket
    ORDER BY task, batch_size, sampling_bucket, form_bucket
"""  # noqa: S608 - no values
)


@dataclass(slots=True)
class TaskFigures:
    """Jobs of a task by status, those of traffic apart from probes and controls, and acceptance with 95 % intervals.

    A job counts in the hour of its first claim. Acceptance is that of traffic with one drafter, target, engine, form
    and sampling settings: those of most jobs; `alpha_1` and `alpha` are None without a trial.
    """

    task: str
    jobs: dict[str, int] = field(default_factory=dict)  #: traffic by status; left: its worker gave it back, or is gone
    num_reused: int = 0  #: traffic that succeeded with the text of an equal job, and was not decoded
    probes: dict[str, int] = field(default_factory=dict)  #: by status
    controls: dict[str, int] = field(default_factory=dict)  #: of probes, by status
    num_alpha_jobs: int = 0  #: of `alpha_1` and `alpha`
    trials: int = 0
    accepts: int = 0
    alpha_1: Interval | None = None
    alpha: Interval | None = None
    alpha_drafter: str | None = None
    alpha_sampling_bucket: str | None = None
    alpha_form_bucket: str | None = None
    alpha_counted: str = ""  #: how, in words, where a server did not report what was tested at each position
    #: Smallest and largest of the longest k of the jobs of `alpha`.
    alpha_num_draft_tokens: tuple[int, int] | None = None
    decoded: Decoded | None = None  #: how the traffic was decoded; None where none was
    #: What its next job would do; None before it was computed, and where it is unknown: before the first calibration.
    next_job: NextJob | None = None
    measured: TaskSpeedup | None = None  #: None where no slice of it was recorded in the last day
    target: str | None = None  #: what decodes it; None where one target decodes all
    not_served: str | None = (
        None  #: why no worker takes its jobs, in words; None where one does, or there is one target
    )

    @property
    def num_jobs(self) -> int:
        """Traffic of every status."""
        return sum(self.jobs.values())

    @property
    def by_status(self) -> dict[str, int]:
        """Traffic as screens count it: what a worker has claimed is held, whether it is decoded yet or not."""
        return {"held" if status == RUNNING else status: number for status, number in self.jobs.items()}

    @property
    def num_probes(self) -> int:
        """Probes of every status."""
        return sum(self.probes.values())

    @property
    def num_controls(self) -> int:
        """Controls of every status."""
        return sum(self.controls.values())

    @property
    def num_held(self) -> int:
        """Jobs, probes and controls that a worker has claimed and that have not ended."""
        return sum(counted.get(RUNNING, 0) for counted in (self.jobs, self.probes, self.controls))

    @property
    def alpha_of(self) -> str:
        """What else belongs to `alpha_1` and `alpha`: `json, positions estimated`; mostly empty."""
        return ", ".join(filter(None, (self.alpha_form_bucket, self.alpha_counted)))

    def count(self, purpose: str, status: str, num_jobs: int) -> None:
        """Count jobs of a purpose that have this status."""
        of_purpose = {Purpose.PROBE: self.probes, Purpose.CONTROL: self.controls}
        of_purpose.get(Purpose(purpose), self.jobs)[status] = num_jobs

    def show(self, rows: Sequence[Row[Any]]) -> None:
        """Take the acceptance of these clusters of jobs."""
        self.num_alpha_jobs = sum(row.num_jobs for row in rows)
        self.trials, self.accepts = sum(row.n for row in rows), sum(row.a for row in rows)
        self.alpha_1 = share_interval([(row.a1, row.n1) for row in rows])
        self.alpha = share_interval([(row.a, row.n) for row in rows])
        self.alpha_drafter = rows[0].drafter
        self.alpha_sampling_bucket, self.alpha_form_bucket = rows[0].sampling_bucket, rows[0].form_bucket
        self.alpha_counted = how_counted(rows[0].draft_revision)
        self.alpha_num_draft_tokens = min(row.least_k for row in rows), max(row.most_k for row in rows)

    def counts_as_json(self) -> dict[str, Any]:
        """What was counted. `explain` has what was chosen and measured at its own place, and not here."""
        decoded = None if self.decoded is None else self.decoded.as_json()
        numbers = {name: getattr(self, name) for name in ("num_jobs", "num_probes", "num_controls")}
        counted = {name: value for name, value in asdict(self).items() if name not in _OF_NOW}
        return {**counted, "decoded": decoded, **numbers}

    def as_json(self, waiting: Mapping[str, int] | None) -> dict[str, Any]:
        """Counts, and the rates that screens show. `waiting`: by task, jobs that no worker has claimed, if known."""
        return {
            **self.counts_as_json(),
            **{name: value for name, value in asdict(self).items() if name in _OF_NOW},
            "waiting": None if waiting is None else waiting.get(self.task, 0),
            "tokens_per_s": self.measured.tokens_per_s if self.measured else None,
            "vanilla_tokens_per_s": self.measured.vanilla_tokens_per_s if self.measured else None,
        }


def begin_of(until: datetime, window: timedelta = WINDOW) -> datetime:
    """Where a window before `until` begins: at a full hour, because older counts are kept by the hour."""
    begin = (until - window).astimezone(UTC)
    return begin.replace(minute=0, second=0, microsecond=0)


def task_figures(
    database: Database, until: datetime | None = None, window: timedelta = WINDOW, task: str | None = None
) -> dict[str, TaskFigures]:
    """By task, the figures of the window before `until`, or before now; only tasks with a job in it, or this one."""
    by_task: dict[str, TaskFigures] = {}
    now = datetime.now(UTC)
    # Without an end the database's clock, by which jobs are claimed, may be ahead of this one.
    between = {
        "since": begin_of(until or now, window),
        "until": until or datetime.max.replace(tzinfo=UTC),
        "tasks": None if task is None else [task],
    }
    with database.begin() as connection:
        for row in connection.execute(_JOBS, between):
            by_task.setdefault(row.task, TaskFigures(row.task)).count(row.purpose, row.status, row.num_jobs)
        for row in connection.execute(_REUSED, between):
            by_task.setdefault(row.task, TaskFigures(row.task)).num_reused = row.num_jobs
        clusters = _clusters(connection, between, is_past=until is not None and until < now - _HOUR)
        ways = _by_task(connection.execute(_DECODED, between))
    for name, rows in clusters.items():
        by_task.setdefault(name, TaskFigures(name)).show(rows)
    for name, rows in ways.items():
        by_task.setdefault(name, TaskFigures(name)).decoded = _decoded(rows)
    return by_task


def figures_of(database: Database, task: str, until: datetime | None = None) -> TaskFigures:
    """The figures of one task."""
    return task_figures(database, until, task=task).get(task) or TaskFigures(task)


def recent_tasks(database: Database, window: timedelta = WINDOW) -> list[TaskFigures]:
    """Every task with a job in the window before now, by name, with its measured speed-up: the status table.

    The window begins at a full hour.
    """
    by_task = task_figures(database, window=window)
    for task, measured in SwitchbackStore(database).shown(datetime.now(UTC)).items():
        by_task.setdefault(task, TaskFigures(task)).measured = measured
    return [by_task[task] for task in sorted(by_task)]


def with_waiting(found: Sequence[TaskFigures], waiting: Mapping[str, int] | None) -> list[TaskFigures]:
    """Also the tasks whose jobs only wait, by name."""
    known = {now.task for now in found}
    fresh = [TaskFigures(task) for task, number in (waiting or {}).items() if number and task not in known]
    return sorted([*found, *fresh], key=lambda now: now.task)


def with_targets(
    found: Sequence[TaskFigures], bindings: Bindings, workers: Sequence[SeenWorker]
) -> Sequence[TaskFigures]:
    """Sets in each its target, and whether that has a worker, where there are several targets; returns them."""
    if len(bindings.targets) > 1:
        for now in found:
            now.target, now.not_served = bindings.target_of(now.task), not_served(bindings, now.task, workers)
    return found


def waits(tasks: Iterable[TaskFigures], unfinished: Mapping[str, int]) -> dict[str, int]:
    """By task, the jobs that no worker has claimed: of the unfinished messages those that are held are left out."""
    held = {now.task: now.num_held for now in tasks}
    return {task: max(0, number - held.get(task, 0)) for task, number in unfinished.items()}


@dataclass(frozen=True, slots=True)
class AcceptanceHour:
    """First drafted tokens of a task's speculative traffic in the hour that began then: tested, and accepted."""

    begins: datetime
    trials: int
    accepts: int

    @property
    def alpha_1(self) -> float | None:
        """Accepted of what was tested."""
        return self.accepts / self.trials if self.trials else None


class TaskPages(Store):
    """Reads what belongs to some tasks; give it those of one page."""

    def last_changes(self, tasks: Collection[str]) -> dict[str, DecisionChange]:
        """By task, how its choice changed last; a task without a logged choice is left out."""
        return {row.task: change_of(row) for row in self._database.rows(_LAST, {"tasks": list(tasks)})}

    def by_hour(self, tasks: Collection[str], since: datetime) -> dict[str, list[AcceptanceHour]]:
        """By task, its hours after `since` in which a first drafted token was tested, oldest first."""
        hours = acceptance_hourly.c
        trials, accepts = (cast(func.sum(column[1]), BigInteger) for column in (hours.trials, hours.accepts))
        query = (
            select(hours.task, hours.bucket, trials, accepts)
            .where(hours.task == any_of(tasks))
            .where(hours.bucket > since, hours.purpose == Purpose.TRAFFIC, hours.mode == Mode.SPECULATIVE)
            .group_by(hours.task, hours.bucket)
            .having(trials > 0)
            .order_by(hours.task, hours.bucket)
        )
        by_task = groupby(self._database.rows(query), key=itemgetter(0))
        return {task: [AcceptanceHour(*hour) for _, *hour in hours] for task, hours in by_task}


_LAST = text("""
    SELECT last.*
    FROM unnest(CAST(:tasks AS text[])) AS wanted(name), LATERAL (
        SELECT * FROM decisions WHERE task = wanted.name ORDER BY decided_at DESC, id DESC LIMIT 1
    ) AS last
""").columns(trials=decisions.c.trials.type, accepts=decisions.c.accepts.type)


def _commonest(rows: Sequence[Row[Any]]) -> tuple[str, str]:
    """The sampling settings and the form of most jobs."""
    jobs: Counter[tuple[str, str]] = Counter()
    for row in rows:
        jobs[row.sampling_bucket, row.form_bucket] += row.num_jobs
    return max(sorted(jobs), key=lambda bucket: jobs[bucket])


def _decoded(rows: Sequence[Row[Any]]) -> Decoded:
    lengths = [k for row in rows for k in (row.least_k, row.most_k) if k is not None]
    sampling_bucket, form_bucket = _commonest(rows)
    return Decoded(
        num_jobs=sum(row.num_jobs for row in rows),
        by_load=at_loads((row.running, row.num_rounds, row.num_drafted) for row in rows),
        drafters=tuple(sorted({drafter for row in rows for drafter in row.drafters})),
        num_draft_tokens=(min(lengths), max(lengths)) if lengths else None,
        running=usual_load((row.running, row.num_rounds) for row in rows),
        sampling_bucket=sampling_bucket,
        form_bucket=form_bucket,
    )


def _clusters(connection: Connection, between: Mapping[str, Any], *, is_past: bool) -> dict[str, list[Row[Any]]]:
    """By task, its hours where enough of them hold its jobs, so that few rows are read; else runs of its jobs.

    The hour in which a past moment lies has later jobs too, so its jobs are read.
    """
    by_task = _by_task(connection.execute(_HOURS, between))
    few = [task for task, rows in by_task.items() if is_past or _num_effective(rows) < _LEAST_HOURS]
    if few:
        jobs = _by_task(connection.execute(_RUNS, {**between, "tasks": few, "most_runs": MOST_RUNS}))
        by_task = {task: rows for task, rows in by_task.items() if task not in few} | jobs
    return by_task


def _by_task(rows: Iterable[Row[Any]]) -> dict[str, list[Row[Any]]]:
    by_task: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_task[row.task].append(row)
    return by_task


def _num_effective(rows: Sequence[Row[Any]]) -> float:
    """The number of equal clusters that would hold as much (Kish 1965)."""
    squares = sum(row.n1 * row.n1 for row in rows)
    return float(sum(row.n1 for row in rows) ** 2 / squares) if squares else 0.0
