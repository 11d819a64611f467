"""The state of the tasks now: the rows of the status table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, text

from alphaloop.acceptance import Interval
from alphaloop.clustered_share import MOST_RUNS, share_interval
from alphaloop.store.claims import RUNNING
from alphaloop.store.database import Database
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.switchback.task_speedup import TaskSpeedup

# Speculative traffic in the order of its decoding, put together into runs: the clusters of alphaloop.clustered_share.
# Of a task the jobs that may be compared with each other, where there are most of them: a row of task_alpha_now.
_ACCEPTANCE = text("""
    WITH jobs AS (
        SELECT task, drafter, draft_revision, sampling_bucket, target_revision, engine, decoded_at, job_id,
               num_draft_tokens AS k, accepts[1] AS a1, trials[1] AS n1, array_sum(accepts) AS a, array_sum(trials) AS n
        FROM decode_runs
        WHERE mode = 'speculative' AND purpose = 'traffic' AND decoded_at > now() - :window AND trials[1] > 0
    ), shown AS (
        SELECT DISTINCT ON (task) task, drafter, draft_revision, sampling_bucket, target_revision, engine
        FROM jobs GROUP BY task, drafter, draft_revision, sampling_bucket, target_revision, engine
        ORDER BY task, count(*) DESC, drafter, draft_revision, sampling_bucket, target_revision, engine
    )
    SELECT task, sum(a1)::bigint AS a1, sum(n1)::bigint AS n1, sum(a)::bigint AS a, sum(n)::bigint AS n,
           min(k) AS least_k, max(k) AS most_k
    FROM (
        SELECT task, a1, n1, a, n, k, ntile(:most_runs) OVER (PARTITION BY task ORDER BY decoded_at, job_id) AS run
        FROM jobs JOIN shown USING (task, drafter, draft_revision, sampling_bucket, target_revision, engine)
    ) AS numbered
    GROUP BY task, run
""")
# The last choice; if there is none (only exploration and forced modes), the last setting used.
_CHOICE = text("""
    SELECT DISTINCT ON (task) task, mode, drafter, num_draft_tokens, reason, explanation
    FROM (
        SELECT 0 AS rank, task, decided_at AS at, to_mode AS mode, to_drafter AS drafter,
               to_num_draft_tokens AS num_draft_tokens, reason, explanation
        FROM decisions
        UNION ALL
        SELECT 1, task, decoded_at, mode, nullif(drafter, ''), num_draft_tokens, reason, ''
        FROM decode_runs WHERE purpose = 'traffic' AND decoded_at > now() - :window
    ) AS seen
    ORDER BY task, rank, at DESC
""")


@dataclass(slots=True)
class TaskNow:
    """One task: jobs by status, the choice in force, acceptance with 95 % intervals over jobs, measured speed-up.

    Acceptance is that of traffic with one drafter, target, engine and sampling settings: those of most jobs. `alpha_1`
    and `alpha` are None without a trial, `mode` and `reason` without a decoded job, `measured` where no slice of the
    task was recorded in the last day.
    """

    task: str
    jobs: dict[str, int] = field(default_factory=dict)
    mode: str | None = None
    drafter: str | None = None
    num_draft_tokens: int = 0
    reason: str | None = None
    explanation: str = ""
    trials: int = 0
    accepts: int = 0
    alpha_1: Interval | None = None
    alpha: Interval | None = None
    alpha_num_draft_tokens: tuple[int, int] | None = None  #: smallest and largest k of the jobs behind `alpha`
    measured: TaskSpeedup | None = None

    @property
    def num_jobs(self) -> int:
        """Jobs of every status."""
        return sum(self.jobs.values())


def waits(tasks: Iterable[TaskNow], unfinished: Mapping[str, int]) -> dict[str, int]:
    """By task, the jobs that no worker has claimed: of the unfinished messages those that are held are left out."""
    held = {now.task: now.jobs.get(RUNNING, 0) for now in tasks}
    return {task: max(0, number - held.get(task, 0)) for task, number in unfinished.items()}


class Overview:
    """Reads the figures of the status table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tasks_now(self, window: timedelta = timedelta(days=1)) -> list[TaskNow]:
        """Every task with a job in the last `window`, by name."""
        since: Mapping[str, timedelta] = {"window": window}
        by_task: dict[str, TaskNow] = {}
        with self._database.begin() as connection:
            counted = text(
                "SELECT task, status, count(*) FROM jobs WHERE created_at > now() - :window GROUP BY task, status"
            )
            for task, status, number in connection.execute(counted, since):
                by_task.setdefault(task, TaskNow(task)).jobs[status] = number
            for row in connection.execute(_CHOICE, since):
                if now := by_task.get(row.task):
                    now.mode, now.drafter, now.num_draft_tokens = row.mode, row.drafter, row.num_draft_tokens
                    now.reason, now.explanation = row.reason, row.explanation
            runs: dict[str, list[Row[Any]]] = defaultdict(list)
            for row in connection.execute(_ACCEPTANCE, {**since, "most_runs": MOST_RUNS}):
                runs[row.task].append(row)
            for task, rows in runs.items():
                now = by_task.setdefault(task, TaskNow(task))
                now.trials, now.accepts = sum(row.n for row in rows), sum(row.a for row in rows)
                now.alpha_1 = share_interval([(row.a1, row.n1) for row in rows])
                now.alpha = share_interval([(row.a, row.n) for row in rows])
                now.alpha_num_draft_tokens = min(row.least_k for row in rows), max(row.most_k for row in rows)
        for task, measured in SwitchbackStore(self._database).shown(datetime.now(UTC)).items():
            by_task.setdefault(task, TaskNow(task)).measured = measured
        return [by_task[task] for task in sorted(by_task)]
