"""The settings of the processes and of their servers. The TOML files in configs/ explain them under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from alphaloop.deciding.job_facts import PolicyLimits
from alphaloop.messages.job import HARMLESS
from alphaloop.settings.kafka_properties import ExtraProperty
from alphaloop.settings.section import Section, Share
from alphaloop.store.session_limits import SessionLimits

Port = Annotated[int, Field(ge=0, le=65535)]
AtLeastOne = Annotated[int, Field(ge=1)]
RetryDelay = Annotated[int, Field(ge=1, le=86_400)]


class KafkaSettings(Section):
    """How to reach the broker; `extra` passes librdkafka's properties through, except those that promises rest on."""

    bootstrap_servers: str | None = None  #: unset: an embedded broker is started or found
    group_id: str = "alphaloop-workers"  #: consumer group that all workers share
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    oauth_token_url: str | None = None  #: OAUTHBEARER: where the identity provider (OIDC) gives out tokens
    oauth_client_id: str | None = None  #: what it knows these processes by
    oauth_client_secret: SecretStr | None = None
    oauth_scope: str | None = None  #: what the token is to allow, where the provider or the broker asks for it
    oauth_extensions: str | None = None  #: sent to the broker with the token: name=value,name=value
    aws_region: str | None = None  #: OAUTHBEARER in place of a provider: the IAM of AWS MSK in this region
    ssl_ca_location: Path | None = None
    ssl_certificate_location: Path | None = None
    ssl_key_location: Path | None = None
    ssl_key_password: SecretStr | None = None
    session_timeout_ms: int = Field(45_000, ge=1000)  #: silence after which the broker removes a worker from the group
    metadata_refresh_ms: int = Field(5_000, ge=500)  #: how soon a new task's topic is seen
    topic_check_s: float = Field(30.0, gt=0)  #: how soon a topic is noticed that was deleted and made again
    max_message_bytes: int = Field(
        4 << 20, ge=1 << 20
    )  #: of the jobs topics; larger than max_job_bytes so that too large jobs can be refused, not lost
    retry_delays_s: tuple[RetryDelay, ...] = Field(
        (10, 60, 600), max_length=8
    )  #: a job that failed is tried again after each of these; each delay is a topic of every task. Empty: no retries
    num_partitions: int = Field(3, ge=1)  #: of topics that alphaloop creates
    replication_factor: int = Field(1, ge=1)  #: of topics that alphaloop creates
    request_timeout_s: float = Field(10.0, gt=0)  #: wait for the broker's answer to one request
    extra: dict[ExtraProperty, str | int | float | bool] = Field({})

    @model_validator(mode="after")
    def _tokens_come_from_one_place(self) -> Self:
        provider = (self.oauth_token_url, self.oauth_client_id, self.oauth_client_secret)
        rest = (self.oauth_scope, self.oauth_extensions)
        if self.sasl_mechanism != "OAUTHBEARER":
            expected = None if not any((*provider, *rest, self.aws_region)) else "kafka.sasl_mechanism OAUTHBEARER"
        elif self.aws_region:
            expected = "no kafka.oauth_… beside kafka.aws_region" if any((*provider, *rest)) else None
        elif any((*provider, *rest)):
            expected = None if all(provider) else "oauth_token_url, oauth_client_id and oauth_client_secret"
        else:  # librdkafka knows more ways
            has_own = any("sasl.oauthbearer" in name for name in self.extra)
            expected = None if has_own else "kafka.oauth_token_url or kafka.aws_region with OAUTHBEARER"
        if expected:
            raise PydanticCustomError("oauth", "Expected {expected}", {"expected": expected})
        return self


class PostgresSettings(Section):
    """How to reach the database."""

    url: SecretStr | None = None  #: postgresql://user:password@host:port/name; unset: an embedded server
    pool_size: int = Field(2, ge=1)  #: most connections of one process; a worker has one more, for notices
    through_pooler: bool = (
        False  #: the URL leads to a pooler in transaction mode (PgBouncer): no prepared statements, notices or locks
    )
    connect_timeout_s: int = Field(10, ge=1)
    lock_timeout_s: float = Field(5.0, ge=0)  #: wait for another process's lock; then a worker tries again; 0: no limit
    statement_timeout_s: float = Field(60.0, ge=0)  #: longest statement of a worker; 0: no limit
    long_statement_timeout_s: float = Field(
        1800.0, ge=0
    )  #: the same for the scheduler and for commands, which read much; 0: no limit
    idle_transaction_timeout_s: float = Field(
        20.0, ge=0
    )  #: a process that stands still inside a transaction loses it then, so that its locks block nobody; 0: never
    tcp_user_timeout_s: float = Field(20.0, ge=0)  #: a server that acknowledges nothing for so long is given up

    def limits(self) -> SessionLimits:
        """The limits of a worker's sessions."""
        return SessionLimits(
            self.lock_timeout_s,
            self.statement_timeout_s,
            self.idle_transaction_timeout_s,
            self.tcp_user_timeout_s,
            self.through_pooler,
        )

    def long_limits(self) -> SessionLimits:
        """The limits of sessions that read much."""
        return self.limits().with_statements_of(self.long_statement_timeout_s)


class WorkerSettings(Section):
    """configs/worker.toml."""

    batch_size: int = Field(4, ge=1, le=256)  #: number of slots: sequences that run at once
    max_buffered: int = Field(4096, ge=1)  #: jobs of a lane read from Kafka and not yet decoded; then it is paused
    max_buffered_bytes: int = Field(64 << 20, ge=1 << 20)  #: the same in bytes of messages
    max_watermark_distance: int = Field(10_000, ge=1)  #: offsets between the oldest unfinished job and the newest taken
    task_quantum_s: float = Field(1.0, ge=0)  #: device time that a task may use more than others before they go first
    shared_beginning_slack_s: float = Field(
        10.0, ge=0
    )  #: most device time by which jobs may go before their turn to share a prompt's beginning with a running job
    max_job_bytes: int = Field(1 << 20, ge=1024)  #: a larger job becomes a dead letter
    max_json_depth: int = Field(32, ge=4)  #: nesting of a job's JSON; a deeper one becomes a dead letter
    ignored_body_fields: tuple[str, ...] = (
        HARMLESS  #: unknown fields of a job's body that are dropped; others are refused
    )
    max_attempts: int = Field(3, ge=1)  #: further workers that may die with a job, alone, before it fails
    suspect_delay_s: float = Field(5.0, ge=0)  #: a worker runs so long before it takes a job one died with, alone
    lease_s: float = Field(30.0, gt=0)  #: a claim expires this long after its worker renewed it last
    commit_interval_s: float = Field(1.0, gt=0)  #: between two commits of offsets
    drain_s: float = Field(30.0, gt=0)  #: on SIGTERM: time for running jobs to finish
    max_step_s: float = Field(
        600.0, gt=0
    )  #: a longer step of the engine hangs: the process ends, and other workers take its jobs
    max_silence_s: float = Field(120.0, gt=0)  #: the same for a thread beside the engine that does not move
    http_host: str = "127.0.0.1"
    http_port: Port = 9464  #: /metrics, /healthz, /readyz; 0 picks a free one
    metrics_username: str = "metrics"  #: for /metrics, where metrics_password is set
    metrics_password: SecretStr | None = None  #: unset: /metrics is open to whoever reaches the port
    calibration_batches: tuple[AtLeastOne, ...] | None = None  #: always measured; unset: 1 and batch_size
    calibration_widths: tuple[AtLeastOne, ...] | None = None  #: unset: 1 and the longest draft plus one
    calibration_contexts: tuple[AtLeastOne, ...] | None = None  #: tokens before; unset: 256, and 2048 if there is time
    calibration_samples: int = Field(3, ge=1)  #: timings of a shape in each of three passes
    calibration_budget_s: float = Field(
        15.0, ge=0
    )  #: at a start on an unknown device; required shapes may take longer; 0: inference servers are not asked
    correction_half_life_rounds: int = Field(32, ge=1)  #: a change of speed that lasts so many rounds is followed
    correction_save_s: float = Field(60.0, gt=0)  #: between two times at which corrected costs are stored
    history_days: float = Field(14.0, gt=0)  #: how far back `alphaloop explain` and `alphaloop replay` read jobs
    history_half_life_days: float = Field(3.0, gt=0)  #: age at which a job counts half
    evidence_poll_s: float = Field(
        5.0, gt=0
    )  #: between two reads of other workers' evidence; stale flags and promotions are read at once


class PolicySettings(Section):
    """`[policy]` of configs/worker.toml; the same settings as alphaloop.deciding.job_facts.PolicyLimits."""

    explore_share: Share = 0.02  #: expected cost of exploration, as a share of all tokens
    control_share: Share = Field(
        0.02
    )  #: share of speculating tasks' device time that switchback slices decode vanilla: the speed-up is measured so
    first_jobs: float = Field(8.0, ge=0)  #: first credit of a new task for exploration, in jobs
    min_jobs: float = Field(4.0, ge=1)  #: a drafter with fewer jobs in the task is cold
    min_speedup: float = Field(1.01, ge=1.0)  #: expected gain over vanilla below which speculation is not worth it
    switch_gain: float = Field(0.02, ge=0)  #: a rival with this expected gain replaces the incumbent at once
    horizon_jobs: float = Field(300.0, gt=0)  #: later jobs that the result of exploration is expected to serve
    change_jobs: float = Field(500.0, gt=0)  #: prior for the jobs between two changes of a task
    short_output_tokens: float = Field(20.0, ge=0)  #: outputs expected to be shorter are decoded vanilla
    prior_alpha: float = Field(0.5, gt=0, lt=1)  #: prior α of a draft model that no task has used
    prior_spread: float = Field(1.0, gt=0)  #: prior standard deviation between tasks, in logits

    def limits(self) -> PolicyLimits:
        """The settings as the pure policy takes them."""
        return PolicyLimits(**self.model_dump())


class SchedulerSettings(Section):
    """configs/scheduler.toml."""

    interval_s: float = Field(3600.0, gt=0)  #: between measurement runs
    cron: str | None = None  #: five fields, UTC: when measurement runs are due, in place of interval_s
    jitter_s: float = Field(0.0, ge=0)  #: a run is begun up to so much later, by lot; less than between two runs
    misfire_grace_s: int = Field(600, ge=1)  #: a run that is later than this is skipped
    leader_check_s: float = Field(5.0, gt=0)  #: between two attempts to become, or to stay, the leader
    probe_max_age_s: float = Field(86_400.0, gt=0)  #: a drafter whose newest probe is older is measured again
    probe_prompts: int = Field(4, ge=1)  #: prompts of the probe set a run uses for each task and drafter
    probe_max_tokens: int = Field(48, ge=8)  #: output limit of the prompts of a probe set that is registered
    probe_num_draft_tokens: int = Field(
        3, ge=1, le=64
    )  #: k of a probe set that is registered; a drafter with shorter drafts is measured at its longest
    probe_decoded_share: Share = Field(
        0.25
    )  #: share of the prompts that are decoded with a drafter which is due by age alone, at least one; on the others'
    #: controls it is scored
    probe_device_share: Share = 0.01  #: share of the last day's device time that probes may take
    probe_min_device_s: float = Field(60.0, ge=0)  #: allowed in every run, so that a system without jobs is measured
    probe_deadline_s: float = Field(1800.0, gt=0)  #: a probe that has not ended by then expires
    drift_false_alarms_per_month: float = Field(1.0, gt=0)  #: in 30 days, over all streams together
    drift_reference_jobs: int = Field(64, ge=16)  #: first jobs of a stream, with which later ones are compared
    drift_settle_s: float = Field(60.0, ge=0)  #: younger jobs are left to the next run: others may still be recorded
    drift_window_days: float = Field(14.0, gt=0)  #: jobs shown in the report; a stream without one is forgotten
    alpha_margin: float = Field(
        0.05, gt=0, lt=1
    )  #: change of α_1 that does not matter: steady is an interval within it, moved an estimate beyond it
    drift_reopen_days: float = Field(7.0, gt=0)  #: an event that comes back so soon after its end is the same event
    stale_drop: float = Field(
        0.10, gt=0, lt=1
    )  #: fall of probe α_1 under a new target, or of a new draft, that makes a draft stale
    partitions_ahead_days: int = Field(7, ge=1)  #: tables partitioned by day have partitions for so many days ahead
    history_retention_days: int = Field(
        90, ge=2
    )  #: age at which counts of single jobs, decisions, probes, runs and reports are deleted
    jobs_retention_days: int = Field(
        30, ge=1
    )  #: age at which ended jobs are deleted with their texts; longer where the jobs topics keep their messages longer
    hourly_retention_days: int = Field(400, ge=30)  #: age at which hourly sums are deleted; the daily ones stay
    daily_retention_days: int = Field(
        1825, ge=30
    )  #: age at which daily sums, closed drift events and incidents are deleted
    retention_max_s: float = Field(120.0, gt=0)  #: most time that a run spends on deleting; the next run goes on
    report_folder: Path | None = None  #: unset: data_dir/reports
    notify_urls: tuple[SecretStr, ...] = ()  #: addresses that are told of drift and incidents, as apprise writes them
    notify_reports: Literal["never", "changed", "always"] = "never"  #: which reports they are told of, besides
    notify_check_s: float = Field(10.0, gt=0)  #: between two looks for something to tell
    notify_retry_delays_s: tuple[RetryDelay, ...] = Field(
        (60, 300, 1800, 7200, 21_600), max_length=6
    )  #: a notification that was not taken is sent again after each of these, and then no more
    max_run_s: float = Field(1800.0, gt=0)  #: a longer measurement run hangs: the process ends, and another one leads
    http_host: str = "127.0.0.1"
    http_port: Port = 9465  #: /metrics, /healthz, /readyz; 0 picks a free one
    metrics_username: str = "metrics"  #: for /metrics, where metrics_password is set
    metrics_password: SecretStr | None = None  #: unset: /metrics is open to whoever reaches the port


class StartupSettings(Section):
    """What a worker or a scheduler does while Kafka or PostgreSQL does not answer at its start."""

    server_wait_s: float | None = Field(
        None, ge=0
    )  #: longest wait for one server, then the process ends with code 1; unset: for ever; 0: no wait


class LogSettings(Section):
    """How the processes log, always to standard error."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["text", "json"] = "text"


class EmbeddedSettings(Section):
    """The broker and database that alphaloop starts itself."""

    kafka_home: Path | None = None  #: an unpacked Apache Kafka; also KAFKA_HOME
    kafka_version: str = "4.3.1"  #: release that `alphaloop kafka install` fetches
    kafka_mirror: str = "https://downloads.apache.org/kafka"  #: address from which it fetches the release
    kafka_heap_mb: int = Field(384, ge=128)  #: memory of the broker's Java
    broker: Literal["auto", "kafka", "tansu"] = "auto"  #: auto: Kafka if it is installed, else Tansu
    start_timeout_s: float = Field(60.0, gt=0)  #: wait for a server to start
