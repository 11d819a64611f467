"""What Kafka and Postgres say after a run, as plain data for the oracle, and the promises that it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


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


class Place(NamedTuple):
    """A record as its sender knows it. Its time tells it apart where a topic was made anew and offsets begin again."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Letter:
    """One message of a dead-letter topic."""

    job_id: str
    reason: str
    place: Place | None = None  #: of the record that it is about
    written_at_ms: int = 0


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
    refused: Mapping[Place, str] = field(default_factory=dict)  #: planted records that are no jobs, and their keys
    may_be_gone: Set[Place] = frozenset()  #: of these, records that went with a topic, or whose results may have
    lag: Mapping[str, int] = field(default_factory=dict)  #: by topic[partition], at the end
    num_in_outbox: int = 0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  #: most resident memory of each worker
    exit_codes: Mapping[str, int] = field(default_factory=dict)  #: of workers that were told to end, where not 0
    leaks: Sequence[str] = ()  #: where a log holds a secret or text of a job


class Promise(StrEnum):
    """What may not be broken, whatever happens."""

    NOTHING_LOST = "every job ends, with one terminal row and at least one result"
    RIGHT = "every job ends as it has to, and has the right text if it succeeds"
    ONE_OUTCOME = "a job has one outcome: all copies are equal, its counts and each of its failures are recorded once"
    NOTHING_INVENTED = "no row, result, letter or chunk belongs to an unknown job"
    ANSWERED = "each record that is no job has one refused result and one dead letter, and nothing else"
    ONLY_POISON = "exactly the planted poison is in the dead-letter topic"
    OFFSETS = "committed offsets never decrease"
    STREAMS = "the chunks of a stream with an end give the job's text: none is missing, or the end has the whole text"
    ENDS = "every outcome of a streamed job ends its stream, with one final chunk that says the same"
    SETTLED = "at the end nothing is left to read or to publish"
    MEMORY = "no worker needs more memory than it may"
    SECRETS = "no log holds a secret or a job's text"


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise broken once."""

    promise: Promise
    what: str
    job_id: str | None = None  #: of the job that it happened to, where it is one
