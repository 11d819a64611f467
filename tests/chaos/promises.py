"""What may not be broken, whatever happens, and how a broken promise is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Promise(StrEnum):
    """What may not be broken, whatever happens."""

    NOTHING_LOST = "every job ends, with one terminal row and at least one result"
    RIGHT = "every job ends as it has to, and has the right text if it succeeds"
    ONE_OUTCOME = "a job has one outcome: all copies are equal, its counts and each of its failures are recorded once"
    NOTHING_INVENTED = "no row, result, letter or chunk belongs to an unknown job"
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
