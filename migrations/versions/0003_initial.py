"""The whole schema: tables, here and in the files of SQL beside this one, with functions, views and the first partitions.

Frozen: it repeats what alphaloop.tables said when it was written, and is not changed with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Sequence,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0003"
down_revision = None
branch_labels = None
depends_on = None

INSTANT = DateTime(timezone=True)
COUNTS = ARRAY(BigInteger())
NOW = text("now()")
STATE_KEY = (
    "target_revision", "engine", "drafter", "draft_revision", "task", "segment", "sampling_bucket", "prompt_bucket"
)
MODES = "vanilla, speculative, or shadow: a drafter's counts on texts that it did not decode"

TABLES = (
    "jobs",
    "outbox",
    "cancellations",
    "redrives",
    "stored_texts",
    "decode_runs",
    "evidence_rows",
    "acceptance_hourly",
    "acceptance_daily",
    "acceptance_state",
    "cost_profiles",
    "decisions",
    "exploration_budgets",
    "probe_sets",
    "probe_prompts",
    "probe_runs",
    "probe_texts",
    "incidents",
    "notification_sinks",
    "notifications",
    "drift_events",
    "drift_event_states",
    "drift_memories",
    "drift_positions",
    "draft_revisions",
    "schedule_runs",
    "reports",
    "switchback_slices",
    "task_speedups",
    "expectation_pairs",
    "decision_snapshots",
    "code_revisions",
    "leader_terms",
    "leader_leases",
    "workers",
    "server_identities",
)

# One partition a day from yesterday to a week ahead; alphaloop.store.partitions makes the later ones. There is no
# default partition: rows in it would stand in the way of every partition made after them.
FIRST_PARTITIONS = """
SELECT make_partitions(ARRAY(SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, 7) AS n))
"""


def upgrade() -> None:
    """Create everything."""
    run_script("0003_functions.sql", end=";\n\n")
    op.execute(CreateSequence(Sequence("ledger_ids")))
    create_jobs()
    create_evidence()
    create_choices()
    run_script("0003_measuring.sql")
    run_script("0003_drift_memory.sql")
    run_script("0003_exactness.sql")
    run_script("0003_notifications.sql")
    run_script("0003_switchback.sql")
    run_script("0003_decided.sql")
    run_script("0003_running.sql")
    run_script("0003_views.sql")
    run_script("0003_roles.sql", end=";\n\n")
    op.execute(FIRST_PARTITIONS)
    op.execute(f"INSERT INTO code_revisions VALUES ('{revision}')")


def downgrade() -> None:
    """Drop everything."""
    for view in ("open_drift", "failed_jobs", "decision_log", "expectation_now", "task_speedup_now", "task_jobs_now", "task_alpha_now", "evidence_now"):
        op.execute(f"DROP VIEW {view}")
    for table in reversed(TABLES):
        op.drop_table(table)
    op.execute(DropSequence(Sequence("ledger_ids")))
    op.execute("DROP FUNCTION tell_drafts_changed()")
    op.execute("DROP AGGREGATE sum_by_position(bigint[])")
    for signature in (
        "grant_to_roles()", "drop_partitions(date)", "make_partitions(date[])",
        "unpack_doubles(bytea)", "array_add(bigint[], bigint[])", "array_ge(bigint[], bigint[])", "array_sum(bigint[])"
    ):
        op.execute(f"DROP FUNCTION {signature}")


def run_script(name: str, *, end: str = ";\n") -> None:
    """The statements of a file beside this one; each ends with a semicolon at the end of its line, or with `end`."""
    script = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for statement in script.split(end):
        if statement.strip():
            op.execute(statement.strip())


def create_jobs() -> None:
    """Claims, outcomes, and what is to be published."""
    op.create_table(
        "jobs",
        Column("job_id", Text(), nullable=False, comment="The producer's, or derived from where the message lies"),
        Column("payload_sha256", LargeBinary(), nullable=False, comment="Tells a redelivery from a conflict"),
        Column("task", Text(), nullable=False, comment="Kind of prompt"),
        Column(
            "segment", Text(), server_default=text("''"), nullable=False, comment="Caller's label; empty without one"
        ),
        Column("custom_id", Text(), comment="The caller's own name for the job"),
        Column("batch_id", Text(), comment="The caller's group of jobs"),
        Column("purpose", Text(), nullable=False, comment="traffic, probe or control"),
        Column("status", Text(), nullable=False, comment="running, then one of succeeded, failed, expired, cancelled"),
        Column("attempt", Integer(), nullable=False, comment="Number of the claim, from 1; only grows: the fencing token"),
        Column(
            "num_crashes",
            Integer(),
            server_default=text("0"),
            nullable=False,
            comment="Claims that ended without an outcome and were not given back: the worker died or lost its lease",
        ),
        Column(
            "num_failures",
            Integer(),
            server_default=text("0"),
            nullable=False,
            comment="Times that the job itself failed and was to be tried again",
        ),
        Column("owner", Text(), comment="Worker that holds the claim; null once it was given back or the job ended"),
        Column("lease_expires_at", INSTANT, comment="When the claim may be taken over; null once the job ended"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="First claim"),
        Column("finished_at", INSTANT, comment="When the outcome was recorded"),
        Column("outcome", JSON(), comment="The Result message, byte for byte as published"),
        Column(
            "headers",
            JSON(),
            comment="Headers that the job's message hands on to its result; null before the outcome and without any",
        ),
        Column(
            "refused_outcome",
            JSON(),
            comment="The Result that Kafka refused before it was published; outcome is the failure that replaced it",
        ),
        CheckConstraint("(status = 'running') = (outcome IS NULL)", name=op.f("ck_jobs_outcome_when_ended")),
        CheckConstraint(
            "status IN ('running','succeeded','failed','expired','cancelled')", name=op.f("ck_jobs_status")
        ),
        PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
        postgresql_with={"fillfactor": 15},
        comment="One row a job: claim, then the one recorded outcome",
    )
    op.create_index("ix_jobs_batch_id", "jobs", ["batch_id"], postgresql_where=text("batch_id IS NOT NULL"))
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_index("ix_jobs_tried_again", "jobs", ["created_at"], postgresql_where=text("num_failures > 0"))
    op.create_index("ix_jobs_refused", "jobs", ["created_at"], postgresql_where=text("refused_outcome IS NOT NULL"))
    op.create_index(
        "ix_jobs_finished_at", "jobs", ["finished_at"],
        postgresql_using="brin", postgresql_with={"pages_per_range": 32, "autosummarize": True},
    )
    op.create_table(
        "outbox",
        Column("id", BigInteger(), Identity(always=True), nullable=False, comment="Order of recording"),
        Column("topic", Text(), nullable=False, comment="Where they go"),
        Column(
            "job_ids",
            ARRAY(Text()),
            nullable=False,
            comment="The jobs of one transaction: Kafka keys; their rows have the values",
        ),
        Column("owner", Text(), comment="Worker that recorded them and publishes them first"),
        Column("created_at", INSTANT, server_default=NOW, nullable=False, comment="When they were recorded"),
        Column("relayed_at", INSTANT, comment="When a worker last took them over to publish them"),
        Column(
            "set_aside_at", INSTANT, comment="When Kafka had refused them for good; null them again to publish them"
        ),
        Column("set_aside_because", Text(), comment="Why Kafka refused them"),
        PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        comment="Outcomes whose results the broker has not acknowledged yet: one row for each transaction that "
        "recorded them",
    )
    op.create_table(
        "cancellations",
        Column("job_id", Text(), nullable=False, comment="The job to cancel, perhaps not seen yet"),
        Column("requested_at", INSTANT, server_default=NOW, nullable=False, comment="When the request was read"),
        PrimaryKeyConstraint("job_id", name=op.f("pk_cancellations")),
        comment="Requests from the control topic; a job that ended before is not changed",
    )
    op.create_index("ix_cancellations_requested_at", "cancellations", ["requested_at"])
    op.create_table(
        "redrives",
        Column("topic", Text(), nullable=False, comment="Where the dead letter lies"),
        Column("partition", Integer(), autoincrement=False, nullable=False, comment="Its partition"),
        Column("offset", BigInteger(), autoincrement=False, nullable=False, comment="Its offset"),
        Column(
            "written_at_ms",
            BigInteger(),
            autoincrement=False,
            nullable=False,
            comment="Its timestamp in ms since 1970, because offsets begin again in a topic made anew; 0 without one",
        ),
        Column("job_id", Text(), nullable=False, comment="The job that it became"),
        Column(
            "redriven_at",
            INSTANT,
            server_default=NOW,
            nullable=False,
            comment="When the broker had acknowledged that job",
        ),
        PrimaryKeyConstraint("topic", "partition", "offset", "written_at_ms", name=op.f("pk_redrives")),
        comment="Dead letters that `alphaloop dlq redrive` sent again",
    )
    op.create_table(
        "stored_texts",
        Column("url", Text(), nullable=False, comment="Where the text lies: a folder or an object store"),
        Column("job_id", Text(), nullable=False, comment="The job whose text it is"),
        Column(
            "stored_at",
            INSTANT,
            server_default=NOW,
            nullable=False,
            comment="When the result was recorded that refers to it",
        ),
        PrimaryKeyConstraint("url", name=op.f("pk_stored_texts")),
        comment="Texts of results that were too large for Kafka; deleted after their jobs",
    )


def create_evidence() -> None:
    """What was decoded: by job, by hour, by day."""
    op.create_table(
        "decode_runs",
        *ledger_position(),
        Column("attempt", Integer(), nullable=False, comment="The claim that decoded it"),
        Column("purpose", Text(), nullable=False, comment="traffic, probe or control"),
        *evidence_key(primary_key=False),
        Column(
            "is_evidence",
            Boolean(),
            nullable=False,
            comment="Whether acceptance_state holds these counts; not of a control, nor where a drafted row says more",
        ),
        Column("mode", Text(), nullable=False, comment="vanilla or speculative"),
        Column("num_draft_tokens", Integer(), nullable=False, comment="k, the draft length asked for; 0 is vanilla"),
        Column("reason", Text(), nullable=False, comment="Why this mode: alphaloop.deciding.decision.Reason"),
        Column("device", Text(), nullable=False, comment="What decoded it"),
        *counts(),
        Column("num_prompt_tokens", BigInteger(), nullable=False, comment="Tokens of the prompt"),
        Column("num_tokens", BigInteger(), nullable=False, comment="Tokens generated"),
        Column(
            "is_cut",
            Boolean(),
            server_default=text("false"),
            nullable=False,
            comment="Whether a limit ended the text, which says only how long it is at least",
        ),
        Column("batch_size", Integer(), nullable=False, comment="Most sequences that shared a step with it"),
        Column(
            "queue_s", Double(), nullable=False, comment="Seconds from the Kafka timestamp to the start of decoding"
        ),
        Column("time_to_first_token_s", Double(), comment="Seconds from the start of decoding"),
        Column("wall_s", Double(), nullable=False, comment="Seconds of decoding"),
        Column(
            "device_s",
            Double(),
            nullable=False,
            comment="Share of the engine's seconds: each step's divided by its batch",
        ),
        Column("decode_batch_id", Uuid(), nullable=False, comment="The same for jobs that were decided together"),
        CheckConstraint(
            "array_ge(proposed, trials) AND array_ge(trials, accepts)", name=op.f("ck_decode_runs_counts_ordered")
        ),
        CheckConstraint(
            "num_tokens = rounds + array_sum(accepts) - num_cropped", name=op.f("ck_decode_runs_tokens_add_up")
        ),
        PrimaryKeyConstraint("decoded_at", "ledger_id", name=op.f("pk_decode_runs")),
        comment="One row a decoded job: counts by draft position under the key of all evidence",
        postgresql_partition_by="RANGE (decoded_at)",
    )
    op.create_index("ix_decode_runs_decoded_at", "decode_runs", ["decoded_at"], postgresql_using="brin")
    op.create_index("ix_decode_runs_job_id", "decode_runs", ["job_id"])
    op.create_index("ix_decode_runs_task_purpose_decoded_at", "decode_runs", ["task", "purpose", "decoded_at"])
    op.create_table(
        "evidence_rows",
        *ledger_position(),
        *evidence_key(primary_key=False),
        Column(
            "source",
            Text(),
            nullable=False,
            comment="shadow: scored on a text that others decoded; scored: on a control's text, for a probe; "
            "shared_weights: counted in rounds of a drafter with the same weights; drafted: of a drafter that decoded, "
            "its rounds alone or scored at its longest drafts",
        ),
        Column("is_whole", Boolean(), nullable=False, comment="Of whole rounds; only these shadows are in the hourly sums"),
        Column("num_draft_tokens", Integer(), nullable=False, comment="k of the counts"),
        *counts(),
        Column("num_prompt_tokens", BigInteger(), nullable=False, comment="Tokens of the prompt"),
        Column("num_output_tokens", BigInteger(), nullable=False, comment="Tokens of the whole text"),
        Column(
            "is_cut",
            Boolean(),
            comment="The same of a row that counts for the job's length; null where another row of the job does",
        ),
        CheckConstraint(
            "array_ge(proposed, trials) AND array_ge(trials, accepts)", name=op.f("ck_evidence_rows_counts_ordered")
        ),
        CheckConstraint("source IN ('shadow','scored','shared_weights','drafted')", name=op.f("ck_evidence_rows_source")),
        PrimaryKeyConstraint("decoded_at", "ledger_id", name=op.f("pk_evidence_rows")),
        comment="Counts that a job gave of drafters beside its own: a row each",
        postgresql_partition_by="RANGE (decoded_at)",
    )
    op.create_index("ix_evidence_rows_task_decoded_at", "evidence_rows", ["task", "decoded_at"])
    op.create_index(
        "ix_evidence_rows_scored_job_id", "evidence_rows", ["job_id"], postgresql_where=text("source = 'scored'")
    )
    create_rollup("acceptance_hourly", "hour")
    create_rollup("acceptance_daily", "day")
    create_state()


def create_state() -> None:
    """The evidence as it weighs."""
    op.create_table(
        "acceptance_state",
        *evidence_key(primary_key=False),
        Column("as_of", INSTANT, nullable=False, comment="When the last of its jobs ended. The weights of the sums hold at this moment"),
        Column("num_jobs", BigInteger(), nullable=False, comment="Jobs ever added"),
        Column(
            "evidence",
            LargeBinary(),
            nullable=False,
            comment="alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it",
        ),
        Column("last_ledger_id", BigInteger(), nullable=False, comment="The last row of the ledger that was added"),
        Column(
            "changed_in",
            BigInteger(),
            nullable=False,
            comment="Transaction that changed the row last; readers ask for newer ones",
        ),
        PrimaryKeyConstraint(*STATE_KEY, name=op.f("pk_acceptance_state")),
        postgresql_with={"toast_tuple_target": 8160, "fillfactor": 50},
        comment="Sums over the jobs of an evidence key, which fade: what a task's next decision rests on",
    )
    op.create_index(
        "ix_acceptance_state_changed_in", "acceptance_state", ["changed_in"],
        postgresql_using="brin", postgresql_with={"pages_per_range": 4, "autosummarize": True},
    )
    op.execute("ALTER TABLE acceptance_state ALTER COLUMN evidence SET STORAGE EXTERNAL")


def create_choices() -> None:
    """What rounds cost, and what was decided."""
    op.create_table(
        "cost_profiles",
        Column("host", Text(), nullable=False, comment="Machine that was measured"),
        Column("device", Text(), nullable=False, comment="What was measured on it"),
        Column("engine", Text(), nullable=False, comment="Decoding library, version and dtype"),
        Column("target_revision", Text(), nullable=False, comment="Hash of the target's weights"),
        Column(
            "drafter", Text(), nullable=False, comment="Empty: the target's pass; else the time of this drafter's proposal"
        ),
        Column("draft_revision", Text(), nullable=False, comment="Empty for the target"),
        Column("batch", Integer(), nullable=False, comment="Sequences; on servers, requests in flight at one of them"),
        Column(
            "width",
            Integer(),
            nullable=False,
            comment="Target positions a sequence, k + 1; of a prefill, the prompt's tokens",
        ),
        Column("context", Integer(), server_default=text("256"), nullable=False, comment="Tokens before, a sequence"),
        Column(
            "kind",
            Text(),
            server_default=text("'round'"),
            nullable=False,
            comment="round, prefill, or served: a whole round on a server",
        ),
        Column("median_ms", Double(), nullable=False, comment="Median milliseconds, as measured"),
        Column("num_samples", Integer(), nullable=False, comment="Timings behind the median"),
        Column("measured_at", INSTANT, server_default=NOW, nullable=False, comment="When"),
        Column(
            "correction",
            Double(),
            server_default=text("1"),
            nullable=False,
            comment="What real rounds took, over median_ms",
        ),
        whole("num_corrections", "Real rounds of about this shape behind the correction"),
        Column(
            "correction_variance",
            Double(),
            server_default=text("0"),
            nullable=False,
            comment="Variance of ln(correction)",
        ),
        Column("corrected_at", INSTANT, comment="When the correction was last stored; null if never"),
        CheckConstraint("correction > 0", name=op.f("ck_cost_profiles_correction")),
        CheckConstraint("correction_variance >= 0", name=op.f("ck_cost_profiles_correction_variance")),
        CheckConstraint("kind IN ('round','prefill','served')", name=op.f("ck_cost_profiles_kind")),
        CheckConstraint("median_ms > 0", name=op.f("ck_cost_profiles_median_ms")),
        PrimaryKeyConstraint(
            "host", "device", "engine", "target_revision", "drafter", "draft_revision", "batch", "width", "context",
            "kind", name=op.f("pk_cost_profiles"),
        ),
        comment="What a round costs on a device of a machine",
    )
    op.create_table(
        "decisions",
        Column("id", BigInteger(), Identity(always=True), nullable=False, comment="Order"),
        Column("decided_at", INSTANT, server_default=NOW, nullable=False, comment="When the choice changed"),
        Column("task", Text(), nullable=False, comment="Kind of prompt"),
        Column("target_revision", Text(), nullable=False, comment="Hash of the target's weights"),
        Column("device", Text(), nullable=False, comment="Where it applies"),
        Column("sampling_bucket", Text(), nullable=False, comment="Sampling settings it applies to"),
        Column("batch", Integer(), nullable=False, comment="Batch size it was decided at"),
        Column("from_mode", Text(), comment="Before; null for the first decision"),
        Column("from_drafter", Text(), comment="Before"),
        Column("from_num_draft_tokens", Integer(), comment="Before"),
        Column("to_mode", Text(), nullable=False, comment="Now"),
        Column("to_drafter", Text(), comment="Now; null for vanilla"),
        Column("to_num_draft_tokens", Integer(), nullable=False, comment="Now; 0 for vanilla"),
        Column("reason", Text(), nullable=False, comment="alphaloop.deciding.decision.Reason"),
        Column("explanation", Text(), nullable=False, comment="The reason in words, with its figures"),
        Column("owner", Text(), nullable=False, comment="Worker that decided"),
        Column("tokens_per_round", Double(), comment="Expected of the new choice; null if no alternatives were compared"),
        Column("round_ms", Double(), comment="Expected milliseconds of such a round"),
        Column("speedup", Double(), comment="Expected goodput over vanilla"),
        Column("speedup_low", Double(), comment="Lower 95 % bound"),
        Column("speedup_high", Double(), comment="Upper 95 % bound"),
        Column("rival_drafter", Text(), comment="Drafter of the best other alternative; null for vanilla"),
        Column("rival_num_draft_tokens", Integer(), comment="Its k; null where there was none"),
        Column("rival_speedup", Double(), comment="Its expected goodput over vanilla"),
        Column("rival_speedup_low", Double(), comment="Lower 95 % bound"),
        Column("rival_speedup_high", Double(), comment="Upper 95 % bound"),
        Column(
            "jobs",
            Double(),
            comment="Jobs of the drafter in the task, weighted by age; of the rival's drafter, if vanilla was chosen",
        ),
        Column("trials", ARRAY(Double()), comment="Weighted trials of these jobs, by position"),
        Column("accepts", ARRAY(Double()), comment="Weighted accepts of these jobs, by position"),
        PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
        comment="When a task's choice changed, from what to what, and why; exploration and forced modes are not choices",
    )
    op.create_index("ix_decisions_task_decided_at", "decisions", ["task", "decided_at"])
    op.create_index("ix_decisions_decided_at", "decisions", ["decided_at", "id"])
    op.create_table(
        "exploration_budgets",
        Column("task", Text(), nullable=False, comment="Kind of prompt"),
        Column("target_revision", Text(), nullable=False, comment="Hash of the target's weights"),
        Column("device", Text(), nullable=False, comment="What decodes it"),
        Column("sampling_bucket", Text(), nullable=False, comment="Sampling settings it is for"),
        Column("balance", Double(), nullable=False, comment="Tokens that exploration may still be expected to lose"),
        Column("accrued", Double(), nullable=False, comment="Tokens of credit so far"),
        Column("spent", Double(), nullable=False, comment="Tokens spent so far"),
        Column("changed_at", INSTANT, server_default=NOW, nullable=False, comment="When a worker last changed it"),
        PrimaryKeyConstraint(
            "task", "target_revision", "device", "sampling_bucket", name=op.f("pk_exploration_budgets")
        ),
        comment="What a task may still lose to exploration: one budget for all workers, kept over restarts",
    )


def create_rollup(name: str, bucket: str) -> None:
    """Counts and sums under the key of all evidence."""
    op.create_table(
        name,
        Column("bucket", INSTANT, nullable=False, comment=f"Start of the {bucket}, UTC"),
        *evidence_key(primary_key=True),
        Column("purpose", Text(), nullable=False, comment="traffic, probe or control"),
        Column("mode", Text(), nullable=False, comment=MODES),
        Column("num_draft_tokens", Integer(), nullable=False, comment="k; 0 is vanilla"),
        whole("num_jobs", "Jobs"),
        whole("num_cut", "Of the jobs, texts that a limit ended; shadows have none"),
        whole("rounds", "Rounds, prefills among them"),
        whole("num_empty_rounds", "Rounds without a proposal"),
        whole("num_cropped", "rounds + accepted - tokens"),
        whole("num_prompt_tokens", "Tokens of prompts"),
        whole("num_tokens", "Tokens generated"),
        whole("rounds_sq", "Sum over jobs of rounds², for the variance over jobs"),
        whole("tokens_sq", "Sum over jobs of tokens²"),
        whole("rounds_tokens", "Sum over jobs of rounds · tokens"),
        by_position("proposed", "Rounds in which at least this many tokens were proposed"),
        by_position("trials", "Rounds in which this position was tested"),
        by_position("accepts", "Of the trials, accepted"),
        by_position("trials_sq", "Sum over jobs of trials²"),
        by_position("accepts_sq", "Sum over jobs of accepts²"),
        by_position("accepts_trials", "Sum over jobs of accepts · trials"),
        seconds("wall_s", "Seconds of decoding"),
        seconds("device_s", "Engine seconds"),
        PrimaryKeyConstraint(
            "bucket",
            "task",
            "segment",
            "target_revision",
            "drafter",
            "draft_revision",
            "engine",
            "sampling_bucket",
            "prompt_bucket",
            "purpose",
            "mode",
            "num_draft_tokens",
            name=op.f(f"pk_{name}"),
        ),
        comment=f"Counts and sums of decode_runs by {bucket}, and those of shadows in evidence_rows: never rates",
    )
    op.create_index(f"ix_{name}_task_bucket", name, ["task", "bucket"])


def ledger_position() -> list[Column[Any]]:
    """Where a row of the ledger stands."""
    return [
        Column("decoded_at", INSTANT, nullable=False, comment="When the job's last token was decoded"),
        Column("ledger_id", BigInteger(), nullable=False, comment="Order of recording in both tables of the ledger"),
        Column(
            "recorded_in", BigInteger(), nullable=False, comment="Smallest ledger_id of the same transaction: its name"
        ),
        Column(
            "recorded_at", INSTANT, nullable=False, comment="When that transaction recorded it, by the clock of the database"
        ),
        Column("job_id", Text(), nullable=False, comment="The job"),
    ]


def counts() -> list[Column[Any]]:
    """The counts of a job."""
    return [
        Column("rounds", BigInteger(), nullable=False, comment="Target passes that yielded tokens, prefill included"),
        Column("num_empty_rounds", BigInteger(), nullable=False, comment="Rounds in which nothing was proposed"),
        Column("num_cropped", BigInteger(), nullable=False, comment="rounds + accepted - tokens"),
        by_position("proposed", "Rounds in which at least this many tokens were proposed"),
        by_position("trials", "Rounds in which this position was tested"),
        by_position("accepts", "Of the trials, accepted"),
        by_position(
            "chances", "Rounds in which this position was asked for, all before accepted; empty where k never changed"
        ),
    ]


def evidence_key(*, primary_key: bool) -> list[Column[Any]]:
    """What acceptance depends on."""
    parts = {
        "task": "Kind of prompt",
        "segment": "Caller's label; empty without one",
        "target_revision": "Hash of the target's weights",
        "drafter": "Name of the drafter; empty for vanilla",
        "draft_revision": "Revision of the drafter; empty for vanilla",
        "engine": "Decoding library, version and dtype",
        "sampling_bucket": "Sampling settings that share a history",
        "prompt_bucket": "Prompt lengths that share a history",
    }
    default = None if primary_key else text("''")
    return [Column(name, Text(), server_default=default, nullable=False, comment=told) for name, told in parts.items()]


def whole(name: str, comment: str) -> Column[Any]:
    """A sum of whole numbers."""
    return Column(name, BigInteger(), server_default=text("0"), nullable=False, comment=comment)


def by_position(name: str, comment: str) -> Column[Any]:
    """A sum for each draft position."""
    return Column(name, COUNTS, server_default=text("'{}'"), nullable=False, comment=comment)


def seconds(name: str, comment: str) -> Column[Any]:
    """A sum of seconds."""
    return Column(name, Double(), server_default=text("0"), nullable=False, comment=comment)
