"""The figures of tasks that every screen shows: jobs, probes and controls apart, and the acceptance of traffic.

Status, explain, the report, the console and the metrics read them here; the views task_jobs_now and task_alpha_now
count the same jobs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Row, text

from alphaloop.acceptance import Interval
from alphaloop.clustered_share import MOST_RUNS, share_interval
from alphaloop.messages import Purpose
from alphaloop.store.claims import RUNNING
from alphaloop.store.database import Database

#: The time that figures cover, unless somebody asks for another.
WINDOW: Final = timedelta(days=1)
_HOUR_S: Final = 3600

_JOBS: Final = text("""
    SELECT task, purpose, status, count(*) AS num_jobs FROM jobs
    WHERE created_at >= :since AND created_at <= :until AND (CAST(:task AS text) IS NULL OR task = :task)
    GROUP BY task, purpose, status
    ORDER BY task, purpose, status
""")
# Speculative traffic in the order of its decoding, put together into runs: the clusters of alphaloop.clustered_share.
# Of a task the jobs that may be compared with each other, where there are most of them: a row of task_alpha_now.
_ACCEPTANCE: Final = text("""
    WITH jobs AS (
        SELECT task, drafter, draft_revision, sampling_bucket, target_revision, engine, decoded_at, job_id,
               num_draft_tokens AS k, accepts[1] AS a1, trials[1] AS n1, array_sum(accepts) AS a, array_sum(trials) AS n
        FROM decode_runs
        WHERE mode = 'speculative' AND purpose = 'traffic' AND decoded_at >= :since AND decoded_at <= :until
            AND trials[1] > 0 AND (CAST(:task AS text) IS NULL OR task = :task)
    ), shown AS (
        SELECT DISTINCT ON (task) task, drafter, draft_revision, sampling_bucket, target_revision, engine
        FROM jobs GROUP BY task, drafter, draft_revision, sampling_bucket, target_revision, engine
        ORDER BY task, count(*) DESC, drafter, draft_revision, sampling_bucket, target_revision, engine
    )
    SELECT task, drafter, sampling_bucket, count(*) AS num_jobs, sum(a1)::bigint AS a1, sum(n1)::bigint AS n1,
           sum(a)::bigint AS a, sum(n)::bigint AS n, min(k) AS least_k, max(k) AS most_k
    FROM (
        SELECT task, drafter, sampling_bucket, a1, n1, a, n, k,
            ntile(:most_runs) OVER (PARTITION BY task ORDER BY decoded_at, job_id) AS run
        FROM jobs JOIN shown USING (task, drafter, draft_revision, sampling_bucket, target_revision, engine)
    ) AS numbered
    GROUP BY task, drafter, sampling_bucket, run
""")


@dataclass(slots=True)
class TaskFigures:
    """Jobs of a task by status, those of traffic apart from probes and controls, and acceptance with 95 % intervals.

    A job counts in the hour of its first claim. Acceptance is that of traffic with one drafter, target, engine and
    sampling settings: those of most jobs; `alpha_1` and `alpha` are None without a trial.
    """

    task: str
    jobs: dict[str, int] = field(default_factory=dict)  #: traffic by status
    probes: dict[str, int] = field(default_factory=dict)  #: by status
    controls: dict[str, int] = field(default_factory=dict)  #: of probes, by status
    num_alpha_jobs: int = 0  #: behind `alpha_1` and `alpha`
    trials: int = 0
    accepts: int = 0
    alpha_1: Interval | None = None
    alpha: Interval | None = None
    alpha_drafter: str | None = None
    alpha_sampling_bucket: str | None = None
    alpha_num_draft_tokens: tuple[int, int] | None = None  #: smallest and largest k of the jobs behind `alpha`

    @property
    def num_jobs(self) -> int:
        """Traffic of every status."""
        return sum(self.jobs.values())

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

    def count(self, purpose: str, status: str, num_jobs: int) -> None:
        """Count jobs of a purpose that have this status."""
        of_purpose = {Purpose.PROBE: self.probes, Purpose.CONTROL: self.controls}
        of_purpose.get(Purpose(purpose), self.jobs)[status] = num_jobs

    def show(self, rows: list[Row[Any]]) -> None:
        """Take the acceptance of these runs of jobs."""
        self.num_alpha_jobs = sum(row.num_jobs for row in rows)
        self.trials, self.accepts = sum(row.n for row in rows), sum(row.a for row in rows)
        self.alpha_1 = share_interval([(row.a1, row.n1) for row in rows])
        self.alpha = share_interval([(row.a, row.n) for row in rows])
        self.alpha_drafter, self.alpha_sampling_bucket = rows[0].drafter, rows[0].sampling_bucket
        self.alpha_num_draft_tokens = min(row.least_k for row in rows), max(row.most_k for row in rows)


def begin_of(until: datetime, window: timedelta = WINDOW) -> datetime:
    """Where a window before `until` begins: at a full hour, because older counts are kept by the hour."""
    begin_s = (until - window).timestamp()
    return datetime.fromtimestamp(begin_s - begin_s % _HOUR_S, UTC)


def task_figures(
    database: Database, until: datetime | None = None, window: timedelta = WINDOW, task: str | None = None
) -> dict[str, TaskFigures]:
    """By task, the figures of the window before `until`, or before now; only tasks with a job in it, or this one."""
    found: dict[str, TaskFigures] = {}
    # Without an end the database's clock, by which jobs are claimed, may be ahead of this one.
    between = {
        "since": begin_of(until or datetime.now(UTC), window),
        "until": until or datetime.max.replace(tzinfo=UTC),
        "task": task,
    }
    with database.begin() as connection:
        for row in connection.execute(_JOBS, between):
            found.setdefault(row.task, TaskFigures(row.task)).count(row.purpose, row.status, row.num_jobs)
        runs: dict[str, list[Row[Any]]] = defaultdict(list)
        for row in connection.execute(_ACCEPTANCE, {**between, "most_runs": MOST_RUNS}):
            runs[row.task].append(row)
    for task, rows in runs.items():
        found.setdefault(task, TaskFigures(task)).show(rows)
    return found


def figures_of(database: Database, task: str, until: datetime | None = None) -> TaskFigures:
    """The figures of one task."""
    return task_figures(database, until, task=task).get(task) or TaskFigures(task)
