"""Where posteriors come from: the evidence behind each one, named by positions in the ledger.

A position is the `ledger_id` of the last row that a key's evidence includes. The row names the key, and a fold of the
ledger up to the position gives the key's evidence bit by bit (alphaloop/store/acceptance_state.py). Positions keep the
order in which the evidence was added up, because sums of floating-point numbers depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError


@dataclass(frozen=True, slots=True)
class PairOrigin:
    """Of the posterior of a drafter over all tasks."""

    drafter: str
    at: datetime  #: when it was inferred
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PosteriorOrigin:
    """Of the posterior of a drafter for one key. It stays in use after `at` (alphaloop/deciding/posteriors.py)."""

    key: EvidenceKey  #: with the drafter
    at: datetime  #: when it was inferred
    positions: tuple[int, ...]
    pair: PairOrigin
    error: ExpectationError = NO_ERROR  #: by value: pairs of expected and measured speed-ups are not in the ledger


@dataclass(frozen=True, slots=True)
class SplitOrigin:
    """Of the finding whether a drafter's acceptance differs between the segments of a task."""

    task: str
    drafter: str
    at: datetime  #: when it was found
    positions: tuple[int, ...]
