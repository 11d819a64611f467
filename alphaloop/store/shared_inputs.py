"""Inputs that decisions share, read by their numbers and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Integer, Uuid, and_, func, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql import bindparam

from alphaloop.cost import CostTable
from alphaloop.cost_state import CostState
from alphaloop.deciding.decision_inputs import SessionFacts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin, SplitOrigin
from alphaloop.deciding.recorded import NotReproducible
from alphaloop.store.decision_codec import InputNumbers, SharedInputs
from alphaloop.store.input_codec import read_basis, read_costs, read_pair, read_posterior, read_session, read_split
from alphaloop.tables import decision_inputs

#: A session, and the number of one of its inputs.
Name: TypeAlias = tuple[UUID, int]
#: What inputs name in turn, by the field that holds the number.
_NAMED: Final = ("basis", "pair")
_MAX_TABLES: Final = 64


class InputReader:
    """The inputs of some decisions. Everything that is asked for is held, except cost tables, which are large."""

    def __init__(self) -> None:
        self._content: dict[Name, Any] = {}
        self._sessions: dict[Name, tuple[SessionFacts, tuple[DrafterState, ...]]] = {}
        self._posteriors: dict[Name, PosteriorOrigin] = {}
        self._pairs: dict[Name, PairOrigin] = {}
        self._bases: dict[Name, CostState] = {}
        self._tables = lru_cache(_MAX_TABLES)(self._cost_table)

    def fetch(self, connection: Connection, names: Iterable[Name], since: datetime, until: datetime) -> None:
        """Read these inputs, and those that they name, of decisions in [since, until]; each is stored on its day."""
        wanted = set(names) - self._content.keys()
        if not wanted:
            return
        inputs, ordered = decision_inputs.c, sorted(wanted)
        given = (
            func.unnest(
                bindparam("sessions", [session for session, _ in ordered], ARRAY(Uuid)),
                bindparam("numbers", [number for _, number in ordered], ARRAY(Integer)),
            )
            .table_valued("session_id", "number")
            .render_derived("given")
        )
        query = (
            select(inputs.session_id, inputs.number, inputs.content)
            .join_from(
                given, decision_inputs, and_(inputs.session_id == given.c.session_id, inputs.number == given.c.number)
            )
            .where(inputs.used_at >= since, inputs.used_at <= until)
        )
        found = {(row.session_id, row.number): row.content for row in connection.execute(query)}
        self._content |= found
        named = ((name[0], content[field]) for name, content in found.items() for field in _NAMED if field in content)
        self.fetch(connection, named, since, until)

    def session(self, session_id: UUID, number: int) -> tuple[SessionFacts, tuple[DrafterState, ...]]:
        """What the session's decisions share, and its drafters then."""
        name = session_id, number
        if name not in self._sessions:
            self._sessions[name] = read_session(self._of(name))
        return self._sessions[name]

    def shared(self, session_id: UUID, numbers: InputNumbers) -> SharedInputs:
        """The inputs behind these numbers. Raises NotReproducible where one is missing."""
        _, drafters = self.session(session_id, numbers.session)
        return SharedInputs(
            drafters,
            self._tables((session_id, numbers.costs)),
            tuple(tuple(self._posterior((session_id, one)) for one in group) for group in numbers.posteriors),
            tuple(self._split((session_id, one)) for one in numbers.splits),
        )

    def positions(self, session_id: UUID, numbers: InputNumbers) -> Iterator[int]:
        """Every position in the ledger that the inputs name."""
        for origin in (self._posterior((session_id, one)) for group in numbers.posteriors for one in group):
            yield from origin.positions
            yield from origin.pair.positions
        for one in numbers.splits:
            yield from self._split((session_id, one)).positions

    def _cost_table(self, name: Name) -> CostTable:
        content = self._of(name)
        base = name[0], content["basis"]
        if base not in self._bases:
            self._bases[base] = read_basis(self._of(base))
        return read_costs(content, self._bases[base]).table()

    def _posterior(self, name: Name) -> PosteriorOrigin:
        if name not in self._posteriors:
            content = self._of(name)
            pair = name[0], content["pair"]
            if pair not in self._pairs:
                self._pairs[pair] = read_pair(self._of(pair))
            self._posteriors[name] = read_posterior(content, self._pairs[pair])
        return self._posteriors[name]

    def _split(self, name: Name) -> SplitOrigin:
        return read_split(self._of(name))

    def _of(self, name: Name) -> Any:
        if name not in self._content:
            raise NotReproducible(f"input {name[1]} of decision session {name[0]} is not stored")
        return self._content[name]
