"""Recorded decisions, read back and taken again: inputs from the records, evidence from the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, select

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.decision_inputs import DecisionInputs, SessionFacts
from alphaloop.deciding.recorded import NotReproducible, Pairs, Positions, Restored, decide_again, restore
from alphaloop.store.database import Database
from alphaloop.store.decision_codec import numbers_of, outcome_content, read_inputs, settings_from
from alphaloop.store.ledger import LedgerStore
from alphaloop.store.shared_inputs import InputReader
from alphaloop.tables import decision_records, decode_runs

#: Settings are taken over from a decision of the last minute, because no posterior stays in use for longer.
_TAKEN_OVER: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A row of decision_records."""

    decided_at: datetime
    decision_id: UUID
    session_id: UUID
    task: str
    sampling_bucket: str
    num_running: int
    num_jobs: int
    inputs: Mapping[str, Any]
    outcome: Mapping[str, Any]


class RecordedDecisions:
    """Decisions of one period, in the order in which they were taken."""

    def __init__(
        self,
        records: Sequence[DecisionRecord],
        earlier: Mapping[UUID, DecisionRecord],
        reader: InputReader,
        pairs: Mapping[SessionFacts, Pairs],
    ) -> None:
        """`earlier` are the decisions, of this period or before it, whose settings others took over."""
        self.records = records
        self._earlier, self._reader, self._pairs = earlier, reader, pairs
        self._decided: dict[UUID, tuple[Decision, ...]] = {}

    def facts(self, record: DecisionRecord) -> SessionFacts:
        """What the record shares with the other decisions of its session."""
        return self._reader.session(record.session_id, record.inputs["session"])[0]

    def positions(self, record: DecisionRecord) -> Positions:
        """The evidence behind the decision, by position in the ledger."""
        return self._pairs[self.facts(record)].positions

    def inputs(self, record: DecisionRecord) -> DecisionInputs:
        """What the decision was taken from. Raises NotReproducible."""
        shared = self._reader.shared(record.session_id, numbers_of(record.inputs))
        return read_inputs(
            record.decision_id,
            record.decided_at,
            record.task,
            record.sampling_bucket,
            record.num_running,
            record.inputs,
            shared,
        )

    def restored(self, record: DecisionRecord) -> Restored:
        """The evidence and the posteriors of the decision. Raises NotReproducible."""
        facts = self.facts(record)
        return restore(self.inputs(record), facts, self._pairs[facts])

    def decide(self, record: DecisionRecord) -> tuple[Decision, ...]:
        """The decision for each of its jobs, taken again. Raises NotReproducible."""
        if record.decision_id in self._decided:
            return self._decided[record.decision_id]
        origins = (origin for origin in settings_from(record.inputs) if origin)
        earlier = {
            origin.decision_id: self.decide(self._earlier[origin.decision_id])
            for origin in origins
            if origin.decision_id in self._earlier
        }
        facts = self.facts(record)
        decisions = decide_again(self.inputs(record), facts, self._pairs[facts], earlier)
        if record.decision_id in self._earlier:
            self._decided[record.decision_id] = decisions
        return decisions

    def is_reproduced(self, record: DecisionRecord) -> bool:
        """Whether the decision, taken again, is the one that was recorded."""
        try:
            return outcome_content(self.decide(record)) == record.outcome
        except NotReproducible:
            return False


class PastDecisions:
    """Reads recorded decisions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def between(
        self, since: datetime, until: datetime, *, task: str | None = None, half_life: timedelta | None = None
    ) -> RecordedDecisions:
        """The decisions in [since, until), of one task or of all. Memory grows with their number.

        With a `half_life`, evidence fades by that one in place of the recorded ones.
        """
        records = decision_records.c
        where = [records.decided_at >= since, records.decided_at < until]
        with self._database.begin() as connection:
            return self._load(connection, where if task is None else [*where, records.task == task], half_life)

    def last(self, task: str, sampling_bucket: str, until: datetime) -> RecordedDecisions:
        """The last decision for such jobs up to a moment; without records where there is none."""
        records = decision_records.c
        query = (
            select(records.decided_at, records.decision_id)
            .where(records.task == task, records.sampling_bucket == sampling_bucket, records.decided_at <= until)
            .order_by(records.decided_at.desc())
            .limit(1)
        )
        with self._database.begin() as connection:
            return self._one(connection, connection.execute(query).first())

    def of_job(self, job_id: str) -> RecordedDecisions:
        """The decision that a job was decoded with; without records where it is not stored."""
        runs, records = decode_runs.c, decision_records.c
        query = (
            select(records.decided_at, records.decision_id)
            .join_from(decode_runs, decision_records, runs.decode_batch_id == records.decision_id)
            .where(runs.job_id == job_id, records.decided_at <= runs.decoded_at)
            .order_by(records.decided_at.desc())
            .limit(1)
        )
        with self._database.begin() as connection:
            return self._one(connection, connection.execute(query).first())

    def kind_of_job(self, job_id: str) -> tuple[str, str] | None:
        """The segment and the prompt bucket of a decoded job; None where its run is not stored."""
        runs = decode_runs.c
        query = select(runs.segment, runs.prompt_bucket).where(runs.job_id == job_id).limit(1)
        with self._database.begin() as connection:
            row = connection.execute(query).first()
        return None if row is None else (row.segment, row.prompt_bucket)

    def _one(self, connection: Connection, found: Any) -> RecordedDecisions:
        records = decision_records.c
        if found is None:
            return RecordedDecisions([], {}, InputReader(), {})
        is_it = [records.decided_at == found.decided_at, records.decision_id == found.decision_id]
        return self._load(connection, is_it)

    def _load(
        self, connection: Connection, where: Sequence[ColumnElement[bool]], half_life: timedelta | None = None
    ) -> RecordedDecisions:
        records = _read(connection, where)
        if not records:
            return RecordedDecisions([], {}, InputReader(), {})
        since, until = records[0].decided_at, records[-1].decided_at
        wanted = {one.decision_id for record in records for one in settings_from(record.inputs) if one}
        known = {record.decision_id: record for record in records if record.decision_id in wanted}
        columns = decision_records.c
        before = [
            columns.decided_at >= since - _TAKEN_OVER,
            columns.decided_at <= until,
            columns.decision_id.in_(sorted(wanted - known.keys())),
        ]
        earlier = known | {record.decision_id: record for record in _read(connection, before)}
        reader = InputReader()
        every = {record.decision_id: record for record in (*earlier.values(), *records)}.values()
        names = ((record.session_id, number) for record in every for number in numbers_of(record.inputs).all)
        reader.fetch(connection, names, _start_of_day(since - _TAKEN_OVER), until)
        pairs = self._pairs(list(every), reader, since - _TAKEN_OVER, until, half_life)
        return RecordedDecisions(records, earlier, reader, pairs)

    def _pairs(
        self,
        records: Sequence[DecisionRecord],
        reader: InputReader,
        since: datetime,
        until: datetime,
        half_life: timedelta | None,
    ) -> dict[SessionFacts, Pairs]:
        """The evidence from the ledger, read once for all sessions of an engine."""
        by_engine: dict[tuple[str, str, timedelta], tuple[set[SessionFacts], set[int]]] = {}
        for record in records:
            facts, _ = reader.session(record.session_id, record.inputs["session"])
            engine = facts.target_revision, facts.engine, half_life or facts.half_life
            sessions, positions = by_engine.setdefault(engine, (set(), set()))
            sessions.add(facts)
            positions.update(reader.positions(record.session_id, numbers_of(record.inputs)))
        found: dict[SessionFacts, Pairs] = {}
        for (target_revision, engine_name, fading), (sessions, positions) in by_engine.items():
            subject = target_revision, engine_name
            held = LedgerStore(self._database).at_positions(subject, positions, since, until, fading)
            found |= {facts: Pairs(held, replace(facts, half_life=fading)) for facts in sessions}
        return found


def _read(connection: Connection, where: Sequence[ColumnElement[bool]]) -> list[DecisionRecord]:
    records = decision_records.c
    query = select(decision_records).where(*where).order_by(records.decided_at, records.decision_id)
    return [DecisionRecord(**row._mapping) for row in connection.execute(query)]


def _start_of_day(at: datetime) -> datetime:
    return datetime.combine(at.astimezone(UTC).date(), time(), UTC)
