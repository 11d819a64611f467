"""The settings of the processes and of the servers they need; configs/ explains them under the same names."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from alphaloop.claim_check.addresses import prefix_of
from alphaloop.messages.job import HARMLESS
from alphaloop.settings.section import Section, Share

_OFFSETS: Final = "the worker commits an offset only after the job's outcome is recorded and published"
_REPORTS: Final = "a result counts as published only after the broker's own report of it"
_STORED: Final = "a result counts as published only after all replicas in sync have stored it"
_GROUP: Final = "the worker hands partitions over in small steps, as the cooperative assignor of classic groups does"
_ALIASES: Final = "the setting of its own has to hold for all clients and topics"

#: Properties of librdkafka that `kafka.extra` may not set because promises rest on their values, and the reason.
#: Aliases of one property all stand here.
RESERVED: Final = {
    "enable.auto.commit": _OFFSETS,
    "auto.commit.enable": _OFFSETS,
    "auto.commit.interval.ms": _OFFSETS,
    "enable.auto.offset.store": _OFFSETS,
    "offset.store.method": _OFFSETS,
    "offset.store.path": _OFFSETS,
    "offset.store.sync.interval.ms": _OFFSETS,
    "auto.offset.reset": "a group without offsets has to begin with the oldest job, or jobs are passed over",
    "isolation.level": "a job of an aborted transaction was never sent",
    "client.id": "it says which database a worker of the group has, so that two installations do not share one",
    "group.id": f"{_ALIASES}: kafka.group_id",
    "group.instance.id": "two workers with one instance id put each other out of the group",
    "group.protocol": _GROUP,
    "group.remote.assignor": _GROUP,
    "partition.assignment.strategy": _GROUP,
    "acks": _STORED,
    "request.required.acks": _STORED,
    "enable.idempotence": "a retry of a send may not store a message twice or in another order",
    "enable.gapless.guarantee": "one message that the broker refuses would end the producer",
    "transactional.id": "results are published outside Kafka's transactions (docs/decisions/0003)",
    "retries": "a message is sent again until its time is up",
    "message.send.max.retries": "a message is sent again until its time is up",
    "delivery.report.only.error": _REPORTS,
    "dr_cb": _REPORTS,
    "dr_msg_cb": _REPORTS,
    "message.max.bytes": f"{_ALIASES}: kafka.max_message_bytes",
    "test.mock.num.brokers": "the client would talk to a broker in its own memory, which loses messages",
}


def _not_reserved(name: str) -> str:
    if name in RESERVED:
        raise PydanticCustomError("reserved", "Expected another property: {reason}", {"reason": RESERVED[name]})
    return name


#: A property that `kafka.extra` may set.
ExtraProperty = Annotated[str, AfterValidator(_not_reserved)]


Port = Annotated[int, Field(ge=0, le=65535)]
RetryDelay = Annotated[int, Field(ge=1, le=86_400)]


def _not_of_jobs(prefix: str) -> str:
    if prefix.startswith("jobs."):
        why = "an installation without a prefix reads the topics that begin with jobs."
        raise PydanticCustomError("prefix", "Expected another prefix: {why}", {"why": why})
    return prefix


NamePrefix = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9._-]*$", max_length=100), AfterValidator(_not_of_jobs)
]


class KafkaSettings(Section):
    """How to reach the broker; `extra` passes librdkafka's properties through, except those that promises rest on."""

    bootstrap_servers: str | None = None  #: unset: an embedded broker is started or found
    group_id: str = "alphaloop-workers"  #: consumer group that all workers share
    prefix: NamePrefix = ""  #: of all topics and groups, such as team-a. where several installations share a cluster
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    oauth_token_url: str | None = None  #: OAUTHBEARER: where the identity provider (OIDC) gives out tokens
    oauth_client_id: str | None = None  #: what it knows these processes by
    oauth_client_secret: SecretStr | None = None
    aws_region: str | None = None  #: OAUTHBEARER in place of a provider: the IAM of AWS MSK in this region
    ssl_ca_location: Path | None = None
    ssl_certificate_location: Path | None = None
    ssl_key_location: Path | None = None
    ssl_key_password: SecretStr | None = None
    session_timeout_ms: int = Field(45_000, ge=1000)  #: silence after which the broker removes a worker from the group
    max_message_bytes: int = Field(
        4 << 20, ge=1 << 20
    )  #: of the jobs topics; larger than max_job_bytes so that too large jobs can be refused, not lost
    retry_delays_s: tuple[RetryDelay, ...] = Field(
        (10, 60, 600), max_length=8
    )  #: a job that failed is tried again after each of these; each is a topic of a task that failed. Empty: no retries
    num_partitions: int = Field(3, ge=1)  #: of topics that alphaloop creates
    replication_factor: int = Field(1, ge=1)  #: of topics that alphaloop creates
    extra: dict[ExtraProperty, str | int | float | bool] = Field({})  #: other properties of librdkafka, by their names

    def named(self, name: str) -> str:
        """A topic or a group as the cluster knows it."""
        return self.prefix + name

    @model_validator(mode="after")
    def _tokens_come_from_one_place(self) -> Self:
        provider = (self.oauth_token_url, self.oauth_client_id, self.oauth_client_secret)
        if self.sasl_mechanism != "OAUTHBEARER":
            expected = None if not any((*provider, self.aws_region)) else "kafka.sasl_mechanism OAUTHBEARER"
        elif self.aws_region:
            expected = "no kafka.oauth_… beside kafka.aws_region" if any(provider) else None
        elif any(provider):
            expected = None if all(provider) else "oauth_token_url, oauth_client_id and oauth_client_secret"
        else:  # librdkafka knows more ways
            has_own = any("sasl.oauthbearer" in name for name in self.extra)
            expected = None if has_own else "kafka.oauth_token_url or kafka.aws_region with OAUTHBEARER"
        if expected:
            raise PydanticCustomError("oauth", "Expected {expected}", {"expected": expected})
        return self


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long every session of a pool may wait and hold others up, in seconds; 0 is no limit.

    Without limits a suspended process blocks every other one. Past a limit Postgres ends the statement or session.
    """

    lock_s: float = 5.0  #: wait for a lock of another transaction
    statement_s: float = 60.0  #: one statement, its waits included
    idle_transaction_s: float = 20.0  #: a transaction whose process sends nothing, so that its locks become free
    unacknowledged_s: float = 20.0  #: data that the other machine does not acknowledge, so that a lost one is noticed
    through_pooler: bool = False  #: set for each transaction, because a pooler hands each one another session

    @property
    def parameters(self) -> Mapping[str, str]:
        """The server's parameters by name: the limits, and what changes a text's meaning or ends sessions.

        With `exit_on_error` a refused value would look like an outage, and its statement be repeated for ever; a
        listener's session is idle by design.
        """
        return {
            "timezone": "UTC",
            "datestyle": "ISO, MDY",
            "intervalstyle": "postgres",
            "bytea_output": "hex",
            "extra_float_digits": "1",
            "standard_conforming_strings": "on",
            "array_nulls": "on",
            "transform_null_equals": "off",
            "default_transaction_isolation": "read committed",
            "exit_on_error": "off",
            "idle_session_timeout": "0",
            "lock_timeout": _milliseconds(self.lock_s),
            "statement_timeout": _milliseconds(self.statement_s),
            "idle_in_transaction_session_timeout": _milliseconds(self.idle_transaction_s),
        }

    @property
    def connecting(self) -> Mapping[str, Any]:
        """The driver's parameters for each new connection."""
        ours = {"tcp_user_timeout": int(self.unacknowledged_s * 1000), "keepalives_idle": 30, "client_encoding": "utf8"}
        # A statement that one session has prepared is not known to the next.
        return {**ours, "prepare_threshold": None} if self.through_pooler else ours


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"


#: The longest statement of the scheduler and of commands, which read much.
_LONG_STATEMENT_S: Final = 1800.0
#: For migrations: they rewrite tables, and wait for each other.
UNLIMITED: Final = SessionLimits(lock_s=0, statement_s=0, idle_transaction_s=0)


class PostgresSettings(Section):
    """How to reach the database."""

    url: SecretStr | None = None  #: postgresql://user:password@host:port/name; unset: an embedded server
    through_pooler: bool = (
        False  #: the URL leads to a pooler in transaction mode (PgBouncer): no prepared statements, notices or locks
    )

    def limits(self) -> SessionLimits:
        """The limits of a worker's sessions."""
        return SessionLimits(through_pooler=self.through_pooler)

    def long_limits(self) -> SessionLimits:
        """The limits of sessions that read much."""
        return replace(self.limits(), statement_s=_LONG_STATEMENT_S)


class ListeningSettings(Section):
    """What answers over HTTP."""

    http_host: str = "127.0.0.1"  #: where it listens; of the console another than the machine's own needs a password


class FiguresSettings(ListeningSettings):
    """A process that says how it is: /metrics, /healthz, /readyz."""

    metrics_password: SecretStr | None = None  #: unset: /metrics is open to whoever reaches the port


class WorkerSettings(FiguresSettings):
    """configs/worker.toml."""

    batch_size: int = Field(4, ge=1, le=256)  #: number of slots: sequences that run at once
    max_buffered_bytes: int = Field(
        64 << 20, ge=1 << 20
    )  #: of messages of a lane that were read and are not yet decoded, and as much again of unread ones after them
    task_quantum_s: float = Field(1.0, ge=0)  #: device time that a task may use more than others before they go first
    max_job_bytes: int = Field(1 << 20, ge=1024)  #: a larger job is refused
    ignored_body_fields: tuple[str, ...] = (
        HARMLESS  #: unknown fields of a job's body that are dropped; others are refused
    )
    max_attempts: int = Field(3, ge=1)  #: further workers that may die with a job, alone, before it fails
    lease_s: float = Field(30.0, gt=0)  #: a claim expires this long after its worker renewed it last
    drain_s: float = Field(30.0, gt=0)  #: on SIGTERM: time for running jobs to finish
    max_step_s: float = Field(
        600.0, gt=0
    )  #: a longer step of the engine hangs: the process ends, and other workers take its jobs
    http_port: Port = 9464  #: /metrics, /healthz, /readyz; 0 picks a free one
    calibration_budget_s: float = Field(
        15.0, ge=0
    )  #: at a start on an unknown device; required shapes may take longer; 0: those alone, and servers are not asked


class PolicySettings(Section):
    """`[policy]` of configs/worker.toml."""

    explore_share: Share = 0.02  #: expected cost of exploration, as a share of all tokens
    control_share: float = Field(
        0.02, ge=0, le=0.38
    )  #: share of speculating tasks' device time that switchback slices decode vanilla: the speed-up is measured so


class SchedulerSettings(FiguresSettings):
    """configs/scheduler.toml."""

    interval_s: float = Field(3600.0, gt=0)  #: between measurement runs
    cron: str | None = None  #: five fields, UTC: when measurement runs are due, in place of interval_s
    probe_max_age_s: float = Field(86_400.0, gt=0)  #: a drafter whose newest probe is older is measured again
    probe_prompts: int = Field(4, ge=1)  #: prompts of the probe set a run uses for each task and drafter
    probe_device_share: Share = 0.01  #: share of the last day's device time that probes may take
    probe_min_device_s: float = Field(60.0, ge=0)  #: allowed in every run, so that a system without jobs is measured
    drift_false_alarms_per_month: float = Field(1.0, gt=0)  #: in 30 days, over all streams together
    drift_settle_s: float = Field(60.0, ge=0)  #: younger jobs are left to the next run: others may still be recorded
    history_retention_days: int = Field(
        90, ge=2
    )  #: age at which counts of single jobs, decisions, probes, runs and reports are deleted
    jobs_retention_days: int = Field(
        30, ge=1
    )  #: age at which ended jobs are deleted with their texts; longer where the jobs topics keep their messages longer
    drain_within_s: float = Field(
        3600.0, ge=60, le=604_800
    )  #: work without a deadline is to be through so fast after it came: says how many workers are needed
    notify_urls: tuple[
        SecretStr, ...
    ] = ()  #: addresses that hear of drift, incidents and lacks, as apprise writes them
    notify_reports: Literal["never", "changed", "always"] = "never"  #: which reports they also get
    notify_batches: Literal["never", "failed", "always"] = (
        "never"  #: of which ended batches they also hear; failed: those with a request without a text
    )
    http_port: Port = 9465  #: /metrics, /healthz, /readyz; 0 picks a free one


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
    broker: Literal["auto", "kafka", "tansu"] = "auto"  #: auto: Kafka if it is installed, else Tansu


PublicUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$", max_length=500)]
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")


class ConsoleSettings(ListeningSettings):
    """The web page that a scheduler serves. Without a password it only shows figures."""

    is_on: bool = True
    http_port: Port = 9466  #: 0 picks a free one
    public_url: PublicUrl | None = (
        None  #: what people type where it is not http_host and http_port, such as https://alphaloop.example.org
    )
    password: SecretStr | None = None  #: then every page asks for it, and shows texts and carries out actions
    database_url: SecretStr | None = (
        None  #: another login than postgres.url, whose rights are the scheduler's: it may not read texts
    )
    max_batch_mb: int = Field(100, ge=1, le=1000)  #: largest batch file that is taken
    max_open_batches: int = Field(20, ge=1, le=10_000)  #: batches that a key of the API may have at once
    max_stored_mb: int = Field(10_000, ge=1)  #: files that a key of the API may have, all together

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names by which a browser may ask, so that no other site can point its own name here; None: any name."""
        if self.public_url is None and self.http_host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
            return None
        public = urlsplit(self.public_url).hostname if self.public_url else None
        named = [f"[{host}]" if ":" in host else host for host in (self.http_host, public) if host]
        return tuple(dict.fromkeys((*_LOOPBACK_NAMES, *named)))

    @property
    def is_https(self) -> bool:
        """Whether people reach it over TLS."""
        return self.public_url is not None and self.public_url.startswith("https:")

    @property
    def _is_loopback(self) -> bool:
        if self.http_host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.http_host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _reached_by_others_needs_a_password(self) -> Self:
        if self.is_on and self.password is None and not self._is_loopback:
            raise PydanticCustomError(
                "password",
                "Expected a password, because other machines reach {host}; set console.password",
                {"host": self.http_host or "every address"},
            )
        return self


class ClaimCheckSettings(Section):
    """Where content lies that is too large for a message: prompts of jobs, texts of results."""

    url: str | None = None  #: a folder, or s3://bucket/path (gs, abfs); unset: nothing travels by reference
    read_urls: tuple[str, ...] = Field(
        (), max_length=100
    )  #: further folders or prefixes from which workers read the prompts of jobs
    max_bytes: int = Field(32 << 20, ge=1 << 10)  #: of one prompt or text
    options: dict[str, SecretStr | bool | int | float] = Field(
        {}
    )  #: of the object store's client, such as endpoint_url; credentials come better from its own environment variables

    @field_validator("url")
    @classmethod
    def _one_spelling(cls, url: str | None) -> str | None:
        return None if url is None else prefix_of(url)

    @field_validator("read_urls")
    @classmethod
    def _one_spelling_each(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(prefix_of(url) for url in urls)

    def client_options(self) -> dict[str, str | bool | int | float]:
        """The options as the client takes them. They hold secrets: never log them."""
        return {
            name: option.get_secret_value() if isinstance(option, SecretStr) else option
            for name, option in self.options.items()
        }


class RefreshSettings(Section):
    """Drafters that are trained anew, `alphaloop draft refresh`: who opens refreshes, and what a trainer may take."""

    automatic: bool = (
        False  #: whether the scheduler opens refreshes, for a new target and for a stale draft; then `up` starts a
        #: trainer
    )
    max_device_s_a_day: float = Field(
        3600.0, ge=0
    )  #: beyond it in the last 24 hours the scheduler opens none; those by hand count and are not held up
    max_training_s: float = Field(600.0, gt=0)  #: of one refresh, over all its attempts
    num_threads: int = Field(1, ge=1)  #: of a trainer on the CPU
    min_texts: int = Field(64, ge=10)  #: fewer prompts of a drafter's tasks are too few to train with
    command: tuple[
        str, ...
    ] = ()  #: trains in place of alphaloop: called with the paths DATASET TARGET PARENT OUT after its own arguments
    max_command_bytes: int = Field(
        8 << 30, ge=1 << 20
    )  #: memory that the command may take, and as much again of files that it may write
    hook: tuple[
        str, ...
    ] = ()  #: starts servers with a draft kept for them: called with TARGET DRAFTER REVISION FOLDER after its arguments
    max_hook_s: float = Field(600.0, gt=0)  #: then the hook is ended


class DraftsSettings(Section):
    """Where trained drafts are kept, a folder a revision, for every worker and trainer."""

    url: str | None = None  #: a folder, or s3://bucket/path (gs, abfs); unset: `drafts` in data_dir

    @field_validator("url")
    @classmethod
    def _one_spelling(cls, url: str | None) -> str | None:
        return None if url is None else prefix_of(url)


HttpUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+\S*$", max_length=2000)]


class TracingSettings(Section):
    """Where spans go. They hold names, counts and times, and never text of a prompt or of a result."""

    endpoint: HttpUrl | None = (
        None  #: OTLP over HTTP, with its path: http://collector:4318/v1/traces; unset: no traces are made
    )
