"""Views for people: rates are computed here, where they are shown."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

VIEWS = {
    "task_alpha_now": (
        "Acceptance by task over the last 24 hours, to the full hour, from speculative jobs",
        """
        SELECT
            task,
            sum(num_jobs)::bigint AS num_jobs,
            array_sum(sum_by_position(trials)) AS trials,
            array_sum(sum_by_position(accepts)) AS accepts,
            array_sum(sum_by_position(accepts))::float8 / nullif(array_sum(sum_by_position(trials)), 0) AS alpha,
            (sum_by_position(accepts))[1]::float8 / nullif((sum_by_position(trials))[1], 0) AS alpha_1,
            min(num_draft_tokens) AS min_num_draft_tokens,
            max(num_draft_tokens) AS max_num_draft_tokens
        FROM acceptance_hourly
        WHERE mode = 'speculative' AND bucket >= date_trunc('hour', now() - interval '24 hours')
        GROUP BY task
        """,
        {
            "task": "Kind of prompt",
            "num_jobs": "Jobs decoded speculatively, probes among them",
            "trials": "Draft tokens tested",
            "accepts": "Of the trials, accepted",
            "alpha": "accepts / trials over all positions; falls as k grows, so read it with k",
            "alpha_1": "Acceptance of the first drafted token; does not move with k",
            "min_num_draft_tokens": "Smallest k used",
            "max_num_draft_tokens": "Largest k used",
        },
    ),
    "task_speedup_now": (
        "Tokens a device second, speculative against vanilla, by task over the last 24 hours, to the full hour",
        """
        SELECT
            task,
            coalesce(sum(num_jobs) FILTER (WHERE mode = 'speculative'), 0)::bigint AS speculative_jobs,
            coalesce(sum(num_jobs) FILTER (WHERE mode = 'vanilla'), 0)::bigint AS vanilla_jobs,
            sum(num_tokens) FILTER (WHERE mode = 'speculative')
                / nullif(sum(device_s) FILTER (WHERE mode = 'speculative'), 0) AS speculative_tokens_per_s,
            sum(num_tokens) FILTER (WHERE mode = 'vanilla')
                / nullif(sum(device_s) FILTER (WHERE mode = 'vanilla'), 0) AS vanilla_tokens_per_s,
            sum(num_tokens) FILTER (WHERE mode = 'speculative')
                / nullif(sum(device_s) FILTER (WHERE mode = 'speculative'), 0)
                / nullif(
                    sum(num_tokens) FILTER (WHERE mode = 'vanilla')
                        / nullif(sum(device_s) FILTER (WHERE mode = 'vanilla'), 0),
                    0
                ) AS speedup
        FROM acceptance_hourly
        WHERE bucket >= date_trunc('hour', now() - interval '24 hours')
        GROUP BY task
        """,
        {
            "task": "Kind of prompt",
            "speculative_jobs": "Jobs decoded speculatively",
            "vanilla_jobs": "Jobs decoded vanilla, controls among them",
            "speculative_tokens_per_s": "Tokens a second of the device's time",
            "vanilla_tokens_per_s": "Tokens a second of the device's time: the task's own control",
            "speedup": "The first over the second; null until both were seen",
        },
    ),
    "decision_log": (
        "When a task's choice changed, newest first",
        """
        SELECT
            decided_at,
            task,
            CASE WHEN from_mode IS NULL THEN NULL
                 WHEN from_mode = 'vanilla' THEN 'vanilla'
                 ELSE from_drafter || ' k=' || from_num_draft_tokens END AS was,
            CASE WHEN to_mode = 'vanilla' THEN 'vanilla'
                 ELSE to_drafter || ' k=' || to_num_draft_tokens END AS became,
            reason,
            explanation,
            sampling_bucket,
            batch,
            target_revision,
            device,
            owner
        FROM decisions
        ORDER BY decided_at DESC, id DESC
        """,
        {
            "decided_at": "When",
            "task": "Kind of prompt",
            "was": "Choice before; null for the first",
            "became": "Choice from then on",
            "reason": "One word: alphaloop.policy.Reason",
            "explanation": "The reason with its figures",
            "sampling_bucket": "Sampling settings it applies to",
            "batch": "Batch size it was decided at",
            "target_revision": "Hash of the target's weights",
            "device": "Where it applies",
            "owner": "Worker that decided",
        },
    ),
    "failed_jobs": (
        "Jobs that failed, were too late or were cancelled, and why; newest first",
        r"""
        SELECT
            finished_at, job_id, task, status, attempt, custom_id, batch_id, purpose,
            error->>'code' AS code, error->>'message' AS message, error->>'field' AS field
        FROM jobs,
            -- The operators on json refuse a document that holds the character NUL anywhere, so ask first.
            LATERAL (SELECT CASE WHEN outcome::text NOT LIKE '%\\u0000%' THEN outcome->'error' END AS error) AS why
        WHERE status IN ('failed', 'expired', 'cancelled')
        ORDER BY finished_at DESC
        """,
        {
            "finished_at": "When the outcome was recorded",
            "job_id": "The job",
            "task": "Kind of prompt",
            "status": "failed, expired or cancelled",
            "attempt": "The claim that ended it, from 1",
            "custom_id": "The caller's own name for the job",
            "batch_id": "The caller's group of jobs",
            "purpose": "traffic, probe or control",
            "code": "The error's code: alphaloop.errors",
            "message": "The error in words",
            "field": "The field at fault, if one was",
        },
    ),
    "open_drift": (
        "Drift that is not over, oldest first",
        """
        SELECT
            id, task, drafter, draft_revision, target_revision, cause, verdict, opened_at, now() - opened_at AS open_for
        FROM drift_events
        WHERE closed_at IS NULL
        ORDER BY opened_at, id
        """,
        {
            "id": "Number of the event",
            "task": "Kind of prompt",
            "drafter": "Drafter whose acceptance moved",
            "draft_revision": "Its revision",
            "target_revision": "Hash of the target's weights",
            "cause": "traffic_changed, draft_stale or unexplained",
            "verdict": "One sentence",
            "opened_at": "When it was found",
            "open_for": "Since then",
        },
    ),
}


def upgrade() -> None:
    """Create the views and say what their columns mean."""
    for name, (told, query, columns) in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")
        op.execute(f"COMMENT ON VIEW {name} IS {quoted(told)}")
        for column, comment in columns.items():
            op.execute(f"COMMENT ON COLUMN {name}.{column} IS {quoted(comment)}")


def downgrade() -> None:
    """Drop the views."""
    for name in reversed(VIEWS):
        op.execute(f"DROP VIEW {name}")


def quoted(value: str) -> str:
    """A literal of standard SQL."""
    return "'" + value.replace("'", "''") + "'"
