"""What decisions read: evidence (`AcceptanceStateStore`), round times (`CostStore`), drafts (`DraftRegistry`).

Every outcome adds to the evidence of its key, and every decision reads it. There is one row a key, however many jobs
the key has seen. The arithmetic is that of alphaloop.deciding.evidence, as in a worker's cache. A changed half-life
holds from the change on. First- and second-order sums fade together, so they stay consistent.

Jobs of one key that are recorded in one transaction are added up first and then added to the row. A
recomputation from the ledger uses the same groups, because sums of floating-point numbers depend on the grouping.

Numbers are packed, because Postgres takes three times as long to send arrays. A row holds big-endian doubles: the sums
that are one number each, then, array by array, those by draft position, all of one length. First those of
`KeyEvidence.all`, then those of `KeyEvidence.recent`. The view evidence_now reads the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import Cursor
from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.acceptance import EvidenceKey
from alphaloop.costs import CostKind, CostPoint, CostTable, after_pause
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence, together
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import StoreError
from alphaloop.server_identity import shown_device, shown_engine
from alphaloop.store.database import OLDEST_RUNNING, RowSet, Store, driver_of, of_row
from alphaloop.tables import KEY, acceptance_state, cost_profiles, draft_revisions


class StateRow(NamedTuple):
    """One key and its evidence, unpacked on access, because a worker reads far more rows than it uses."""

    target_revision: str
    engine: str
    drafter: str
    draft_revision: str
    task: str
    segment: str
    sampling_bucket: str
    prompt_bucket: str
    form_bucket: str
    as_of: datetime
    num_jobs: int
    packed: bytes
    last_ledger_id: int  #: the last row of the ledger that it includes: its position

    @property
    def key(self) -> EvidenceKey:
        """The evidence key."""
        return EvidenceKey(**{name: getattr(self, name) for name in KEY})

    @property
    def evidence(self) -> KeyEvidence:
        """The evidence, as of `as_of`."""
        return unpack(self.packed, self.as_of)


@dataclass(frozen=True, slots=True)
class StateRead:
    """Rows read at one moment. If `is_all` is False, only those that changed since an earlier read."""

    rows: Sequence[StateRow]
    seen: int  #: for the next read: transactions below it are covered by this read or an earlier one
    is_all: bool


class AcceptanceStateStore(Store):
    """Reads the state; `add_jobs` writes it."""

    def read(
        self, target_revision: str, engine: str, drafters: Mapping[str, str], *, since: int | None = None
    ) -> StateRead:
        """The rows of a target, an engine and `drafters` (name → revision), and those of vanilla decoding.

        With `since`, an earlier read's `seen`, only those that changed meanwhile; but all of them if the database was
        restored to a time before that read.
        """
        pairs = [(target_revision, engine, *drafter) for drafter in (("", ""), *drafters.items())]
        with self._database.begin() as connection:
            # Before the rows are read, so that what commits in between is read twice and never missed.
            seen: int = connection.execute(OLDEST_RUNNING).scalar_one()
            is_all = since is None or seen < since
            changed, more = ("", ()) if is_all else (" AND changed_in >= %s", (since,))
            rows = [
                StateRow(*pair, *row) for pair in pairs for row in _read(connection, _OF_PAIR + changed, (*pair, *more))
            ]
        return StateRead(rows, seen, is_all)

    def drop_before(self, at: datetime) -> int:
        """Delete rows without a job since `at`, of drafts and tasks that are gone; returns how many."""
        return self._database.change(delete(acceptance_state).where(acceptance_state.c.as_of < at))


@dataclass(frozen=True, slots=True)
class LockedKeys:
    """Keys locked by `lock_keys`. Its answers can be read after the exchange."""

    keys: Sequence[EvidenceKey]
    drawn: Cursor[tuple[int, datetime]]
    standing: Cursor[Any]

    def ledger_ids(self) -> tuple[list[int], datetime]:
        """The ids that were drawn, ascending, and the moment by the database's clock."""
        rows = self.drawn.fetchall()
        return [ledger_id for ledger_id, _ in rows], rows[0][1]


def lock_keys(driver: psycopg.Connection, jobs: Sequence[tuple[EvidenceKey, EvidenceSums] | None]) -> LockedKeys:
    """Lock the keys of these jobs and draw a ledger_id for each; None in `jobs` is a row that is no evidence.

    Keys are locked in one order, so that two workers cannot deadlock. Rows are read and ledger_ids drawn under the
    locks, so no job of another worker is lost, and the ledger_ids of a key have the order in which jobs were added.
    """
    evidence = [job for job in jobs if job is not None]
    as_of = {key: job.as_of for key, job in reversed(evidence)}
    keys = sorted(as_of, key=attrgetter(*KEY))
    rows = {"rows": RowSet.parameter({**key.columns, "as_of": as_of[key]} for key in keys)}
    if keys:
        driver.execute(_LOCK, rows)
    drawn = driver.execute(_DRAW, {"number": len(jobs)})
    return LockedKeys(keys, drawn, driver.execute(_STANDING, rows))


def add_jobs(
    driver: psycopg.Connection,
    locked: LockedKeys,
    jobs: Sequence[tuple[EvidenceKey, EvidenceSums] | None],
    ledger_ids: Sequence[int],
    half_life: timedelta,
) -> list[StateRow]:
    """Fade the rows of the locked keys and add jobs, one `EvidenceSums` each; returns the rows as they are now."""
    if not locked.keys:
        return []
    standing = {row.key: row for row in map(StateRow._make, locked.standing.fetchall())}
    by_key: dict[EvidenceKey, list[tuple[int, EvidenceSums]]] = {}
    for ledger_id, job in zip(ledger_ids, jobs, strict=True):
        if job is not None:
            by_key.setdefault(job[0], []).append((ledger_id, job[1]))
    changed = [with_jobs(key, standing.get(key), by_key[key], half_life) for key in locked.keys]
    rows = RowSet.parameter(dict(zip(_FOLDED.names, row, strict=True)) for row in changed)
    driver.execute(_CHANGE, {"rows": rows})
    return changed


def with_jobs(
    key: EvidenceKey, standing: StateRow | None, group: Sequence[tuple[int, EvidenceSums]], half_life: timedelta
) -> StateRow:
    """A key's row after jobs (ledger_id, sums) that were recorded together; `standing` is None for a new key."""
    jobs = [job for _, job in group]
    before = standing.evidence if standing else KeyEvidence.empty(jobs[0].as_of)
    evidence = before.with_job(together(jobs, half_life), half_life)
    num_jobs = (standing.num_jobs if standing else 0) + len(jobs)
    return StateRow(
        **key.columns,
        as_of=evidence.all.as_of,
        num_jobs=num_jobs,
        packed=pack(evidence),
        last_ledger_id=group[-1][0],
    )


def pack(evidence: KeyEvidence) -> bytes:
    """The bytes of the evidence, without its moment."""
    both = (evidence.all, evidence.recent)
    length = max(len(getattr(sums, name)) for sums in both for name in _BY_POSITION)
    values: list[float] = []
    for sums in both:
        values += [getattr(sums, name) for name in _NUMBERS]
        for name in _BY_POSITION:
            of_it = getattr(sums, name)
            values += of_it
            values += [0.0] * (length - len(of_it))
    return struct.pack(f">{len(values)}d", *values)


def unpack(packed: bytes, as_of: datetime) -> KeyEvidence:
    """The evidence from the bytes of `pack`; empty for no bytes. Raises StoreError for anything else."""
    if not packed:
        return KeyEvidence.empty(as_of)
    num_values, rest = divmod(len(packed), 16)
    length, more = divmod(num_values - len(_NUMBERS), len(_BY_POSITION))
    if rest or more or length < 0:
        raise StoreError(
            f"expected twice {len(_NUMBERS)} sums and {len(_BY_POSITION)} by position, found {len(packed)} bytes"
        )
    values = struct.unpack(f">{2 * num_values}d", packed)
    return KeyEvidence(_sums(values[:num_values], length, as_of), _sums(values[num_values:], length, as_of))


#: Stored rows depend on these names and their order: only a migration that rewrites the rows may change them.
_NUMBERS: Final = (
    "jobs",
    "jobs_w2",
    "rounds",
    "offered",
    "tokens",
    "output_tokens",
    "prompt_tokens",
    "texts",
    "ends",
)
_BY_POSITION: Final = (
    "proposed",
    "chances",
    "trials",
    "accepts",
    "accepts_w2",
    "chances_w2",
    "accepts_chances_w2",
)


def _sums(values: tuple[float, ...], length: int, as_of: datetime) -> EvidenceSums:
    sums: dict[str, Any] = dict(zip(_NUMBERS, values[: len(_NUMBERS)], strict=True))
    for i, name in enumerate(_BY_POSITION):
        start = len(_NUMBERS) + i * length
        sums[name] = values[start : start + length]
    return EvidenceSums(as_of, **sums)


#: One drafter at a time: an index finds its rows, and the columns that they share are not sent with each row.
_OF_PAIR: Final = """
    SELECT task, segment, sampling_bucket, prompt_bucket, form_bucket, as_of, num_jobs, evidence, last_ledger_id
    FROM acceptance_state
    WHERE target_revision = %s AND engine = %s AND drafter = %s AND draft_revision = %s
"""


def _read(connection: Connection, query: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
    """Rows in Postgres's binary form, without SQLAlchemy, so that packed evidence is not sent as hex."""
    with driver_of(connection).cursor(binary=True) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()


_DRAW: Final = """
    SELECT nextval('ledger_ids'), clock_timestamp() FROM generate_series(1, %(number)s)
"""
_KEYS: Final = RowSet([acceptance_state.c[name] for name in (*KEY, "as_of")])
#: The columns of a `StateRow`.
_FOLDED: Final = RowSet(
    [acceptance_state.c[name] for name in (*KEY, "as_of", "num_jobs", "evidence", "last_ledger_id")]
)
_NAMES: Final = ", ".join(KEY)
#: Locks existing rows without writing them, and inserts missing ones; in Python's order of keys.
_LOCK: Final = f"""
    INSERT INTO acceptance_state AS standing ({_KEYS.columns}, num_jobs, evidence, last_ledger_id, changed_in)
    SELECT {_KEYS.given}, 0, '', 0, pg_current_xact_id()::text::bigint FROM {_KEYS.source}
    ORDER BY {", ".join(f'given.{name} COLLATE "C"' for name in KEY)}
    ON CONFLICT ({_NAMES}) DO UPDATE SET num_jobs = standing.num_jobs WHERE false
"""  # noqa: S608 - names of columns, no values
_STANDING: Final = f"""
    SELECT {", ".join(f"standing.{name}" for name in _FOLDED.names)} FROM acceptance_state AS standing, {_KEYS.source}
    WHERE standing.num_jobs > 0 AND {" AND ".join(f"standing.{name} = given.{name}" for name in KEY)}
"""  # noqa: S608 - names of columns, no values
_CHANGE: Final = f"""
    UPDATE acceptance_state AS standing
    SET as_of = given.as_of, num_jobs = given.num_jobs, evidence = given.evidence,
        last_ledger_id = given.last_ledger_id, changed_in = pg_current_xact_id()::text::bigint
    FROM {_FOLDED.source} WHERE {" AND ".join(f"standing.{name} = given.{name}" for name in KEY)}
"""  # noqa: S608 - names of columns, no values


#: The target's own rows: no drafter, no revision.
_TARGET: Final = ("", "")
_MEASURED: Final = ("median_ms", "num_samples", "correction_variance")


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A device of a host, the engine on it, and the target it served."""

    host: str
    device: str
    engine: str
    target_revision: str
    measured_at: datetime
    batches: tuple[int, ...]  #: batch sizes whose costs were measured

    @property
    def shown_device(self) -> str:
        """Its device, as screens name it."""
        return shown_device(self.device, self.engine, self.host)

    @property
    def shown(self) -> str:
        """The engine and its device, as screens name them."""
        return shown_engine(self.device, self.engine, self.host)


class CostSubject(NamedTuple):
    """What rows of the table are about: a target on an engine, and some drafters (name → revision)."""

    host: str
    device: str
    engine: str
    target_revision: str
    drafters: Mapping[str, str]

    @property
    def conditions(self) -> tuple[ColumnElement[bool], ...]:
        """The rows of the target and of these drafters."""
        costs, names = cost_profiles.c, ("host", "device", "engine", "target_revision")
        return (
            *(costs[name] == getattr(self, name) for name in names),
            tuple_(costs.drafter, costs.draft_revision).in_([_TARGET, *self.drafters.items()]),
        )

    def key(self, point: CostPoint) -> dict[str, object]:
        """The primary key of a point's row."""
        of_target = self._asdict()
        drafters = of_target.pop("drafters")
        revision = drafters[point.drafter] if point.drafter else ""
        shape = {name: getattr(point, name) for name in ("batch", "width", "context", "kind")}
        return {**of_target, "drafter": point.drafter or "", "draft_revision": revision, **shape}


class CostStore(Store):
    """The table of round times, by host, device, engine, target and drafter revisions."""

    def load(self, where: CostSubject) -> CostTable:
        """What was measured for the target and the drafters; empty if nothing was.

        Corrections are faded to now: since they were stored, those of drafters have moved towards the target's, and
        their variance has grown (alphaloop/costs.py).
        """
        costs = cost_profiles.c
        age_s = func.extract("epoch", func.now() - func.coalesce(costs.corrected_at, costs.measured_at)).label("age_s")
        rows = self._database.rows(select(cost_profiles, age_s).where(*where.conditions))
        ages_s: dict[str, float] = {}
        for row in rows:
            if row.drafter:
                ages_s[row.drafter] = min(float(row.age_s), ages_s.get(row.drafter, float("inf")))
        points = [of_row(CostPoint, row, drafter=row.drafter or None, kind=CostKind(row.kind)) for row in rows]
        return CostTable(after_pause(points, ages_s))

    def save(self, where: CostSubject, points: Iterable[CostPoint], *, replaces_all: bool = False) -> None:
        """Store measured points over those of the same shape, in place of their corrections.

        With `replaces_all`, in place of all that was measured for this target and these drafters.
        """
        with self._database.begin() as connection:
            if replaces_all:
                connection.execute(delete(cost_profiles).where(*where.conditions))
            rows = [
                where.key(point) | {name: getattr(point, name) for name in _MEASURED}
                for point in CostTable(points).points
            ]
            if rows:
                statement = insert(cost_profiles)
                anew = {"measured_at": func.now(), "correction": 1.0, "num_corrections": 0, "corrected_at": None}
                statement = statement.on_conflict_do_update(
                    index_elements=list(cost_profiles.primary_key),
                    set_={name: statement.excluded[name] for name in _MEASURED} | anew,
                )
                connection.execute(statement, rows)

    def save_corrections(self, where: CostSubject, points: Iterable[CostPoint]) -> None:
        """Store corrections from real rounds, as of now; skips points that were deleted or measured anew meanwhile."""
        corrected = ("correction", "num_corrections", "correction_variance")
        rows = [
            {f"at_{name}": value for name, value in (where.key(point) | {"median_ms": point.median_ms}).items()}
            | {name: getattr(point, name) for name in corrected}
            for point in CostTable(points).points
        ]
        if not rows:
            return
        names = [*(column.name for column in cost_profiles.primary_key), "median_ms"]
        statement = (
            update(cost_profiles)
            .where(*(cost_profiles.c[name] == bindparam(f"at_{name}") for name in names))
            .values(**{name: bindparam(name) for name in corrected}, corrected_at=func.now())
        )
        self._database.change(statement, rows)

    def first_measured(self, until: datetime) -> datetime | None:
        """The first calibration of the most recent pair of engine and target, up to `until`."""
        costs = cost_profiles.c
        first = (
            select(func.min(costs.measured_at).label("at"))
            .where(costs.drafter == "", costs.measured_at <= until)
            .group_by(costs.engine, costs.target_revision)
            .subquery()
        )
        newest: datetime | None = self._database.scalar(select(func.max(first.c.at)))
        return newest

    def measured(self) -> list[MeasuredEngine]:
        """Every engine that was calibrated, the newest calibration first."""
        costs = cost_profiles.c
        key = (costs.host, costs.device, costs.engine, costs.target_revision)
        last = func.max(costs.measured_at)
        query = (
            select(*key, last, func.array_agg(costs.batch.distinct()))
            .where(costs.drafter == "")
            .group_by(*key)
            .order_by(last.desc(), *key)
        )
        return [
            MeasuredEngine(host, device, engine, target, at, tuple(sorted(batches)))
            for host, device, engine, target, at, batches in self._database.rows(query)
        ]


class DraftStatus(StrEnum):
    """What a draft revision may be used for."""

    CANDIDATE = "candidate"  #: measured, not serving
    ACTIVE = "active"
    STALE = "stale"  #: its acceptance fell: only probes use it
    RETIRED = "retired"


#: No traffic is decoded with a draft of these.
UNFIT: Final = (DraftStatus.STALE, DraftStatus.RETIRED)


@dataclass(frozen=True, slots=True)
class DraftRevision:
    """One draft under one target."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: DraftStatus
    status_reason: str
    registered_at: datetime
    status_changed_at: datetime
    trained_for: str | None = None  #: the target it was trained for; None: not trained, or its files do not say
    parent_revision: str | None = None  #: the draft that training began with; None: it began anew
    trained_on: str | None = None
    figures: Mapping[str, Any] | None = None  #: measured on held-out text; None if never measured
    is_scorable: bool = False  #: one pass over a greedy text gives its counts


class DraftRegistry(Store):
    """The table of draft revisions."""

    def register(
        self,
        drafter: str,
        draft_revision: str,
        target_revision: str,
        *,
        is_scorable: bool = False,
        trained_for: str | None = None,
    ) -> None:
        """Register a draft that is served; a new one and a candidate become active, others keep their status."""
        statement = insert(draft_revisions).values(
            drafter=drafter,
            draft_revision=draft_revision,
            target_revision=target_revision,
            status=DraftStatus.ACTIVE,
            status_reason="registered by a worker",
            is_scorable=is_scorable,
            trained_for=trained_for,
        )
        promote = statement.on_conflict_do_update(
            constraint=draft_revisions.primary_key,
            set_={
                "status": DraftStatus.ACTIVE,
                "status_reason": "served by a worker",
                "status_changed_at": func.now(),
                "is_scorable": is_scorable,
            },
            where=draft_revisions.c.status == DraftStatus.CANDIDATE,
        )
        self._database.change(promote)

    def register_served(self, drafter: DrafterState, target_revision: str) -> None:
        """Register a drafter as a worker has loaded it."""
        self.register(
            drafter.name,
            drafter.revision,
            target_revision,
            is_scorable=drafter.is_scorable,
            trained_for=drafter.trained_for or None,
        )

    def register_trained(
        self,
        drafter: str,
        draft_revision: str,
        target_revision: str,
        *,
        trained_on: str,
        figures: Mapping[str, Any] | None,
        parent_revision: str | None = None,
    ) -> DraftStatus:
        """Register a draft that was trained for this target, as a candidate; a known draft keeps its status.

        `parent_revision` is that of the draft that training began with. `figures`: None of one whose passes were not
        timed. Returns the status.
        """
        facts = {
            "trained_for": target_revision,
            "parent_revision": parent_revision,
            "trained_on": trained_on,
            **({} if figures is None else {"figures": dict(figures)}),
        }
        statement = insert(draft_revisions).values(
            drafter=drafter,
            draft_revision=draft_revision,
            target_revision=target_revision,
            status=DraftStatus.CANDIDATE,
            status_reason="trained, not served yet",
            **facts,
        )
        statement = statement.on_conflict_do_update(constraint=draft_revisions.primary_key, set_=facts)
        return DraftStatus(self._database.scalar(statement.returning(draft_revisions.c.status)))

    def stale(self, target_revision: str) -> set[tuple[str, str]]:
        """The (drafter, draft revision) that may not serve this target: stale ones and retired ones."""
        drafts = draft_revisions.c
        query = select(drafts.drafter, drafts.draft_revision).where(
            drafts.target_revision == target_revision, drafts.status.in_(UNFIT)
        )
        return {(drafter, revision) for drafter, revision in self._database.rows(query)}

    def set_status(
        self, drafter: str, draft_revision: str, target_revision: str, status: DraftStatus, reason: str
    ) -> bool:
        """Change a draft's status; returns whether the draft exists and had another status."""
        drafts = draft_revisions.c
        statement = (
            update(draft_revisions)
            .where(
                drafts.drafter == drafter,
                drafts.draft_revision == draft_revision,
                drafts.target_revision == target_revision,
                drafts.status != status,
            )
            .values(status=status, status_reason=reason, status_changed_at=func.now())
        )
        return self._database.change(statement) == 1

    def retired(self) -> set[str]:
        """The drafters all of whose revisions are retired, by name: no worker opens them."""
        is_retired = func.bool_and(draft_revisions.c.status == DraftStatus.RETIRED)
        query = select(draft_revisions.c.drafter).group_by(draft_revisions.c.drafter).having(is_retired)
        return {drafter for (drafter,) in self._database.rows(query)}

    def set_retired(self, drafter: str, is_retired: bool) -> None:
        """Retire every revision of a drafter, or make the retired ones active again."""
        drafts, was_retired = draft_revisions.c, draft_revisions.c.status == DraftStatus.RETIRED
        status, done = (DraftStatus.RETIRED, "retired") if is_retired else (DraftStatus.ACTIVE, "restored")
        statement = update(draft_revisions).where(
            drafts.drafter == drafter, ~was_retired if is_retired else was_retired
        )
        reason = f"{done} by an operator"
        self._database.change(statement.values(status=status, status_reason=reason, status_changed_at=func.now()))

    def all(self) -> list[DraftRevision]:
        """Every draft known, by name, then by age."""
        drafts = draft_revisions.c
        # A worker of another target registers the draft anew; its training was registered with the target it was for.
        trained_for = func.max(drafts.trained_for).over(partition_by=(drafts.drafter, drafts.draft_revision))
        others = [column for column in drafts if column is not drafts.trained_for]
        query = select(*others, trained_for.label("trained_for")).order_by(
            drafts.drafter, drafts.registered_at, drafts.draft_revision, drafts.target_revision
        )
        return [of_row(DraftRevision, row, status=DraftStatus(row.status)) for row in self._database.rows(query)]
