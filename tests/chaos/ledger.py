"""What Kafka and Postgres say after a run, as plain data for the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """A job's row in Postgres."""

    status: str
    outcome: bytes | None  #: the recorded Result, byte for byte
    num_decode_runs: int  #: evidence of successful decodings
    num_failures: int = 0  #: tries that failed and were followed by another one


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """One message of the results topic."""

    job_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Letter:
    """One message of a dead-letter topic."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One message of the tokens topic."""

    job_id: str
    attempt: int
    seq: int
    text: str
    status: str | None = None  #: of the outcome, in the final chunk only
    whole_text: str | None = None  #: in a final chunk before which others may be missing

    @property
    def is_final(self) -> bool:
        """Whether the stream ends here."""
        return self.status is not None


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed offset, as seen at a moment of the run."""

    at_s: float
    partition: str  #: GROUP TOPIC[NUMBER]
    offset: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that the oracle judges."""

    rows: Mapping[str, Row]
    results: Sequence[ResultRecord]
    letters: Sequence[Letter]
    chunks: Sequence[ChunkRecord]
    commits: Sequence[Commit]  #: in the order in which they were seen
    lag: Mapping[str, int] = field(default_factory=dict)  #: by topic[partition], at the end
    num_in_outbox: int = 0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  #: most resident memory of each worker
    exit_codes: Mapping[str, int] = field(default_factory=dict)  #: of workers that were told to end, where not 0
    leaks: Sequence[str] = ()  #: where a log holds a secret or text of a job
