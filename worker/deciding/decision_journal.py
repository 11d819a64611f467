"""Records every decision with its inputs, in the background: the thread that decides hands over references only."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID, uuid4

from alphaloop.cost_state import CostState
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin
from alphaloop.store.decision_codec import InputNumbers, inputs_content, outcome_content
from alphaloop.store.decision_records import InputRow, RecordRow
from alphaloop.store.housekeeping import utc_day
from alphaloop.store.input_codec import (
    basis_content,
    costs_content,
    pair_content,
    posterior_content,
    session_content,
    split_content,
)

log = logging.getLogger(__name__)

Shared = TypeVar("Shared")

#: Decisions are written so often at most: many decisions share a transaction.
WRITE_EVERY_S: Final = 1.0
#: Decisions that wait while the database is away. The oldest are dropped first.
MOST_WAITING: Final = 10_000
#: A new basis is stored once the differences from the last one have taken so many times its room.
_REBASED_AFTER: Final = 4
#: Inputs whose number is remembered.
_MOST_NUMBERED: Final = 10_000
_json: Final = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


class Records(Protocol):
    """What is needed of alphaloop.store.decision_records.DecisionRecordStore."""

    def add(self, session_id: UUID, inputs: Sequence[InputRow], records: Sequence[RecordRow]) -> None: ...


class StoredDecisions:
    """A `DecisionJournal` in the database.

    `note` is called by the thread that decides, and `write` by one other thread at a time. An input that many decisions
    share is written once a UTC day, so that the rows of a day do not depend on those of an earlier day. A record may be
    lost: when the process is killed, the last second; and while the database is away, the oldest.
    """

    def __init__(
        self,
        store: Records,
        facts: SessionFacts,
        costs: Callable[[], CostState],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`costs` are those of the decision in hand."""
        self._store, self._facts, self._costs, self._clock = store, facts, costs, clock
        self.session_id: Final = uuid4()
        self._noted: deque[tuple[DecisionInputs, Sequence[Decision], CostState]] = deque()
        self._due = clock()
        self._day: date | None = None
        self._next_number = 0
        self._numbers: dict[int, tuple[object, int]] = {}  # by identity; holds the object so that its id stays taken
        self._base: tuple[CostState, int] | None = None
        self._num_moved = 0  # deviations that were stored since the basis
        self._last_costs: tuple[CostState, int] | None = None  # costs come in order and are many: one is remembered
        self._drafters: tuple[tuple[DrafterState, ...], int] | None = None
        self._inputs: list[InputRow] = []
        self._records: list[RecordRow] = []

    def note(self, inputs: DecisionInputs, decisions: Sequence[Decision]) -> None:
        """Take down a decision that was just taken."""
        self._noted.append((inputs, decisions, self._costs()))

    @property
    def is_due(self) -> bool:
        """Whether decisions wait to be written, and the last write is a second ago."""
        return bool(self._noted or self._records) and self._clock() >= self._due

    def write(self) -> None:
        """Write the decisions that wait. Raises StoreError, and then writes them next time."""
        self._due = self._clock() + WRITE_EVERY_S
        # Encoded at once, because what was noted holds whole cost tables.
        while self._noted:
            self._encode(*self._noted.popleft())
        num_dropped = len(self._records) - MOST_WAITING
        if num_dropped > 0:
            log.warning("%d decisions not recorded", num_dropped, extra={"action": "decisions_not_recorded"})
            del self._records[:num_dropped]
        if self._records:
            self._store.add(self.session_id, self._inputs, self._records)
            self._inputs, self._records = [], []

    def _encode(self, inputs: DecisionInputs, decisions: Sequence[Decision], costs: CostState) -> None:
        day = utc_day(inputs.now)
        if day != self._day or len(self._numbers) >= _MOST_NUMBERED:
            self._day, self._base, self._last_costs, self._drafters = day, None, None, None
            self._numbers.clear()
        numbers = InputNumbers(
            session=self._session(inputs),
            costs=self._cost_number(inputs, costs),
            posteriors=tuple(tuple(self._posterior(inputs, one) for one in group) for group in inputs.posteriors),
            splits=tuple(self._number(inputs, one, "split", split_content) for one in inputs.splits),
        )
        self._records.append(
            RecordRow(
                decided_at=inputs.now,
                decision_id=inputs.decision_id,
                task=inputs.subject.task,
                sampling_bucket=inputs.subject.sampling_bucket,
                num_running=inputs.num_running,
                num_jobs=len(inputs.jobs),
                inputs=_json(inputs_content(inputs, numbers)),
                outcome=_json(outcome_content(decisions)),
            )
        )

    def _session(self, inputs: DecisionInputs) -> int:
        if self._drafters is None or self._drafters[0] != inputs.drafters:
            content = session_content(self._facts, inputs.drafters)
            self._drafters = inputs.drafters, self._add(inputs, "session", content)
        return self._drafters[1]

    def _cost_number(self, inputs: DecisionInputs, costs: CostState) -> int:
        if self._last_costs is not None and self._last_costs[0] is costs:
            return self._last_costs[1]
        if self._base is None or self._base[0].basis is not costs.basis or self._is_far(costs):
            self._base = costs, self._add(inputs, "cost_basis", basis_content(costs))
            self._num_moved = 0
        content = costs_content(costs, *self._base)
        self._num_moved += len(content["moved"])
        self._last_costs = costs, self._add(inputs, "costs", content)
        return self._last_costs[1]

    def _is_far(self, costs: CostState) -> bool:
        return self._num_moved > _REBASED_AFTER * len(costs.deviations)

    def _posterior(self, inputs: DecisionInputs, origin: PosteriorOrigin) -> int:
        def content(of_it: PosteriorOrigin) -> dict[str, Any]:
            return posterior_content(of_it, self._pair(inputs, of_it.pair))

        return self._number(inputs, origin, "posterior", content)

    def _pair(self, inputs: DecisionInputs, origin: PairOrigin) -> int:
        return self._number(inputs, origin, "pair", pair_content)

    def _number(
        self, inputs: DecisionInputs, shared: Shared, kind: str, content: Callable[[Shared], dict[str, Any]]
    ) -> int:
        known = self._numbers.get(id(shared))
        if known is None:
            known = self._numbers[id(shared)] = shared, self._add(inputs, kind, content(shared))
        return known[1]

    def _add(self, inputs: DecisionInputs, kind: str, content: dict[str, Any]) -> int:
        self._next_number += 1
        self._inputs.append(InputRow(inputs.now, self._next_number, kind, _json(content)))
        return self._next_number
