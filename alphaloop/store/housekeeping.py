"""Housekeeping: the daily partitions of tables that grow with every job, and the deletion of old rows.

Partitions are made ahead and dropped whole. There is no default partition, because its rows would block every later
partition. Rows of other tables are deleted in portions of one short transaction each.

Erasing takes the texts of jobs before their time, in Postgres and in the store of contents: of one job, of a segment,
or before a day. Drafts that are being trained with them are given up. What jobs counted stays: it holds no text. A
job's row stays too, so that its message is not decoded again when it is delivered again; its result says when its texts
were erased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, TextClause, text

from alphaloop.errors import ConfigError
from alphaloop.messages import Result
from alphaloop.store.api import Deed, write_down
from alphaloop.store.database import Database, Store
from alphaloop.store.refreshes import RefreshStore
from alphaloop.store.task_memory import ResultMemoryStore

#: Dropped together, so that the ledger has all rows of a day or none.
_PARTITIONED: Final = ("decode_runs", "evidence_rows", "switchback_slices", "decision_snapshots")


def ensure_ahead(database: Database, now: datetime, days_ahead: int) -> list[date]:
    """Make the partitions from the day of `now` to `days_ahead` days later; returns the days that were made."""
    today = utc_day(now)
    with database.begin() as connection:
        return ensure_days(connection, [today + timedelta(days=n) for n in range(days_ahead + 1)])


def drop_days_before(database: Database, day: date) -> list[date]:
    """Drop the partitions of days before `day`, rows and all; returns those days.

    Waits for the users of a table as long as the session may wait for a lock, then raises StoreBusy; the next run tries
    again.
    """
    return list(database.scalar(_DROP, {"before": day}))


def ensure_days(connection: Connection, days: Iterable[date]) -> list[date]:
    """Make the partitions of `days` that are missing, in the caller's transaction; returns the days that were made.

    The database's function does it, so that a worker needs no right to change the schema.
    """
    wanted = {"days": sorted(set(days)), "tables": list(_PARTITIONED)}
    if not connection.execute(_MISSING, wanted).first():
        return []
    return list(connection.execute(_MAKE, {"days": wanted["days"]}).scalar_one())


class KnownDays:
    """The days whose partitions one process has seen, so that it need not look for them in every transaction."""

    def __init__(self) -> None:
        self._days: set[date] = set()

    def ensure(self, connection: Connection, days: Set[date]) -> None:
        """As `ensure_days`. What this transaction makes is not known yet, because the transaction may still fail."""
        if (new := days - self._days) and not ensure_days(connection, new):
            self._days |= new

    def forget(self) -> None:
        """Look again: a partition may have been dropped, or the database restored."""
        self._days.clear()


def utc_day(at: datetime) -> date:
    """The day whose partition holds `at` (aware)."""
    return at.astimezone(UTC).date()


#: Rows of one transaction: some ten milliseconds.
CHUNK_ROWS: Final = 1000
#: Texts in a folder or an object store that are deleted between two looks at the time.
_CHUNK_TEXTS: Final = 50


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one call deleted; `is_all` is False where the time was up first."""

    num_rows: int
    is_all: bool


class RetentionStore:
    """Deletes old rows until none is left or the time is up."""

    def __init__(self, database: Database, *, chunk_rows: int = CHUNK_ROWS) -> None:
        self._database = database
        self._chunk_rows = chunk_rows

    def drop_jobs(self, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        """Delete jobs that ended before `before`, with their texts, and claims that no worker renewed since then.

        A job whose result Kafka has not acknowledged is kept. `time_is_up` is asked between two transactions.
        """
        given = {"since": datetime.min.replace(tzinfo=UTC), "before": before, "chunk": self._chunk_rows}

        def chunk() -> int:
            num_rows, last = self._database.one(_JOBS, given)
            # The next chunk does not pass over the remains of those before it.
            given["since"] = last
            return int(num_rows)

        return _dropped(chunk, self._chunk_rows, time_is_up)

    def drop_texts(self, before: datetime, time_is_up: Callable[[], bool], delete: Callable[[str], None]) -> Dropped:
        """Delete texts outside Postgres whose jobs are gone, each with `delete`, and then their rows.

        A text whose deletion was interrupted is deleted again. Raises whatever `delete` raises.
        """

        def chunk() -> int:
            urls = self._database.scalars(_TEXTS, {"before": before, "chunk": _CHUNK_TEXTS})
            for url in urls:
                delete(url)
            self._database.change(_FORGET_TEXTS, {"urls": urls})
            return len(urls)

        return _dropped(chunk, _CHUNK_TEXTS, time_is_up)

    def drop(self, table: str, before: datetime, time_is_up: Callable[[], bool]) -> Dropped:
        """Delete the rows of one of `TABLES` that belong to the time before `before`."""
        statement = text(
            f"DELETE FROM {table} WHERE ctid = ANY(ARRAY("  # noqa: S608 - a name of this module, no values
            f"SELECT ctid FROM {table} WHERE {_TOO_OLD[table]} LIMIT :chunk FOR UPDATE SKIP LOCKED))"
        )
        given = {"before": before, "chunk": self._chunk_rows}
        return _dropped(lambda: self._database.change(statement, given), self._chunk_rows, time_is_up)


def _dropped(chunk: Callable[[], int], full: int, time_is_up: Callable[[], bool]) -> Dropped:
    """Delete chunks until one is not `full`; `chunk` returns how many rows it deleted."""
    num_rows = 0
    while not time_is_up():
        num_deleted = chunk()
        num_rows += num_deleted
        if num_deleted < full:
            return Dropped(num_rows, is_all=True)
    return Dropped(num_rows, is_all=False)


_MAKE: Final = text("SELECT make_partitions(CAST(:days AS date[]))")
_DROP: Final = text("SELECT drop_partitions(CAST(:before AS date))")
# Read from the catalog, because to_regclass may answer from a cache without the partitions of another process.
_MISSING: Final = text("""
    SELECT day, parent FROM unnest(CAST(:days AS date[])) AS day, unnest(CAST(:tables AS text[])) AS parent
    WHERE NOT EXISTS (
        SELECT FROM pg_class
        WHERE relname = parent || '_' || to_char(day, 'YYYYMMDD') AND pg_table_is_visible(pg_class.oid)
    )
    ORDER BY day, parent
""")
# By the time of creation, because an index on the time of the end would make every outcome write to all indexes. What
# ended before a moment was created before it. A claim whose lease ended so long ago is of a job whose message is gone.
# A job whose result was never acknowledged stays. An array, because a join would read and sort all that is too old.
_JOBS: Final = text("""
    WITH old AS MATERIALIZED (
        SELECT job_id, created_at FROM jobs
        WHERE created_at >= :since AND created_at < :before
            AND (finished_at < :before OR (finished_at IS NULL AND lease_expires_at < :before))
            AND job_id <> ALL(ARRAY(SELECT unnest(job_ids) FROM outbox WHERE outbox.created_at < :before))
        ORDER BY created_at LIMIT :chunk FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM jobs WHERE job_id = ANY(ARRAY(SELECT job_id FROM old))
    )
    SELECT count(*), max(created_at) FROM old
""")
# A text may not go before its job, because a job that is delivered again is answered with the reference to it.
_TEXTS: Final = text("""
    SELECT url FROM stored_texts
    WHERE stored_at < :before AND NOT EXISTS (SELECT FROM jobs WHERE jobs.job_id = stored_texts.job_id)
    ORDER BY stored_at LIMIT :chunk
""")
_FORGET_TEXTS: Final = text("DELETE FROM stored_texts WHERE url = ANY(:urls)")
#: By table, which rows are too old. Every name is a table that grows with time and is not partitioned.
_TOO_OLD: Final = {
    # One of a job that still runs is still to be carried out.
    "cancellations": """
        requested_at < :before AND ends_at < :before AND NOT EXISTS (
            SELECT FROM jobs WHERE jobs.job_id = cancellations.job_id AND jobs.status = 'running'
        )""",
    # The last choice of a subject before `before` is what was in force then, unless nothing of its target is left.
    "decisions": """
        decided_at < :before AND (
            EXISTS (
                SELECT FROM decisions AS newer
                WHERE newer.task = decisions.task AND newer.target_revision = decisions.target_revision
                    AND newer.device = decisions.device AND newer.sampling_bucket = decisions.sampling_bucket
                    AND newer.id > decisions.id AND newer.decided_at < :before
            ) OR NOT EXISTS (
                SELECT FROM acceptance_state AS known
                WHERE known.task = decisions.task AND known.target_revision = decisions.target_revision
            )
        )""",
    "audit": "at < :before",
    # One that no scheduler could go on with is not kept for ever either.
    "api_batches": "expires_at < :before",
    "batches": "created_at < :before",
    "promised_ends": "promised_at < :before",
    "ended_batches": "ended_at < :before",
    "lacks": "closed_at < :before",
    "probe_runs": "scheduled_for < :before",
    "probe_texts": "decoded_at < :before",
    "expectation_pairs": "computed_at < :before",
    "incidents": "closed_at < :before",
    "notifications": "attempted_at < :before",
    "schedule_runs": "scheduled_for < :before",
    "reports": "created_at < :before",
    "redrives": "redriven_at < :before",
    "reusable_results": "decoded_at < :before",
    "reused_results": "reused_at < :before",
    # What was kept serves, and an erasure asks what it was trained with.
    "refreshes": "state IN ('rejected','failed','cancelled') AND changed_at < :before",
    # The newest acceptance of a level says which measurements the next ones are compared with.
    "drift_events": """
        closed_at < :before AND (
            accepted_at IS NULL OR EXISTS (
                SELECT FROM drift_events AS newer
                WHERE newer.task = drift_events.task AND newer.drafter = drift_events.drafter
                    AND newer.accepted_at > drift_events.accepted_at
            )
        )""",
    "acceptance_hourly": "bucket < :before",
    "acceptance_daily": "bucket < :before",
}
#: What `RetentionStore.drop` takes.
TABLES: Final = tuple(_TOO_OLD)


#: Jobs of one transaction, with the texts of each.
_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Erasure:
    """Whose texts: exactly one of the three is given."""

    job_ids: tuple[str, ...] | None = None  #: of one job: its own, then those that redrives have made of it
    segment: str | None = None
    before: datetime | None = None  #: of jobs that ended before it, and of prompts drawn before it
    retires_drafts: bool = False  #: whether drafts that were trained with their prompts are retired

    def __post_init__(self) -> None:
        if sum(choice is not None for choice in (self.job_ids, self.segment, self.before)) != 1:
            raise ConfigError("expected one of --job, --segment and --before, found none or several")

    @property
    def kind(self) -> str:
        """Which of the three it is."""
        return "before" if self.before is not None else "job" if self.job_ids is not None else "segment"

    @property
    def subject(self) -> str:
        """In words, for the audit."""
        drafts = ", with drafts" if self.retires_drafts else ""
        if self.before is not None:
            return f"before {self.before.isoformat()}{drafts}"
        return f"job {self.job_ids[0]}{drafts}" if self.job_ids is not None else f"segment {self.segment}{drafts}"


@dataclass(frozen=True, slots=True)
class Texts:
    """How many texts there are to erase, or were erased, by where they are kept."""

    #: Ended jobs with a text or the reference to one, the probes of erased prompts and copies of erased texts included.
    num_jobs: int
    num_remembered: int  #: results in the memory of tasks
    num_drawn_probes: int  #: prompts of probe sets that were drawn from traffic
    num_probe_texts: int  #: what probes of these prompts, and controls, generated
    num_stored_texts: int  #: texts outside Postgres
    num_api_files: int  #: files of the API, which the scheduler deletes within a minute
    num_refreshes: int  #: trainings of drafts, and trials, that hold a prompt of theirs: these end
    drafts: Sequence[str]  #: kept drafts that were trained with one of them
    num_running: int  #: jobs that have not ended: their texts are written later


class EraseStore(Store):
    """Counts and erases."""

    def knows(self, erasure: Erasure) -> bool:
        """Whether anything names the job or the segment; a moment is always known."""
        query = _statements(erasure, {"": _KNOWS})[""]
        return erasure.before is not None or bool(self._database.scalar(query, self._given(erasure)))

    def count(self, erasure: Erasure) -> Texts:
        """What `erase` would erase now."""
        return self._counted(erasure, self._given(erasure))

    def _counted(self, erasure: Erasure, given: Mapping[str, Any]) -> Texts:
        taught = _WHERE[erasure.kind]["taught"]
        num_refreshes, drafts = RefreshStore(self._database).count_erased(taught, given)
        counts = {name: self._database.scalar(query, given) for name, query in _statements(erasure, _COUNTS).items()}
        return Texts(**counts, num_refreshes=num_refreshes, drafts=drafts)

    def erase(self, erasure: Erasure, deed: Deed, delete_text: Callable[[str], object] | None, now: datetime) -> Texts:
        """Erase, written down in the audit first; returns what there was. A call that broke off is repeated.

        `delete_text` deletes what lies outside Postgres. Raises ConfigError where something does and it is None.
        """
        given = self._given(erasure)
        counts = self._counted(erasure, given)
        if counts.num_stored_texts and delete_text is None:
            raise ConfigError(
                f"{counts.num_stored_texts} texts lie outside the database, and claim_check.url is not set",
                hint="give the command the settings of the workers",
            )
        statements = _statements(erasure, _STEPS)
        write_down(self._database, deed)
        ResultMemoryStore(self._database).forget(_WHERE[erasure.kind]["remembered"], given)
        for name in ("api_files", "probe_texts", "probe_prompts", "empty_sets"):
            self._database.change(statements[name], given)
        self._erase_results(statements["results"], given, now)
        # Now that the texts are gone no job is answered with one of them any more: these are all.
        self._erase_results(statements["copies"], given, now)
        # Afterwards: a training that takes a job meanwhile sees that its text is gone, or is seen here.
        taught = _WHERE[erasure.kind]["taught"]
        RefreshStore(self._database).erase(taught, given, now, retires=erasure.retires_drafts)
        if delete_text is not None:
            for url in self._database.scalars(statements["stored_texts"], given):
                delete_text(url)
                self._database.change(_FORGET_URL, {"url": url})
        return counts

    def _given(self, erasure: Erasure) -> dict[str, Any]:
        given = {"job_ids": [*(erasure.job_ids or ())], "segment": erasure.segment, "before": erasure.before}
        return given | {"probes": self._database.scalars(_statements(erasure, {"": _PROBES})[""], given)}

    def _erase_results(self, query: TextClause, given: dict[str, Any], now: datetime) -> None:
        """Take the texts out of results, in the order of the jobs' ids."""
        last: str | None = ""
        while last is not None:
            with self._database.begin() as connection:
                rows = list(connection.execute(query, {**given, "last": last, "chunk": _CHUNK}))
                for row in rows:
                    changed = [
                        document and _without_text(document, now) for document in (row.outcome, row.refused_outcome)
                    ]
                    connection.execute(_PUT_BACK, {"job_id": row.job_id, "outcome": changed[0], "refused": changed[1]})
            last = rows[-1].job_id if len(rows) == _CHUNK else None


def _without_text(outcome: str, now: datetime) -> str:
    return Result.decode(outcome.encode()).without_texts().model_copy(update={"erased_at": now}).encode().decode()


def _statements(erasure: Erasure, queries: Mapping[str, str]) -> dict[str, TextClause]:
    return {name: text(query.format(**_WHERE[erasure.kind])) for name, query in queries.items()}


#: By selection, which rows of each kind.
_WHERE: Final = {
    "job": {
        "jobs": "jobs.job_id = ANY(:job_ids)",
        "copied": "reused.source_job_id = ANY(:job_ids)",
        "remembered": "job_id = ANY(:job_ids)",
        "taught": "prompts.job_id = ANY(:job_ids)",
        "drawn": "prompts.job_id = ANY(:job_ids)",
        "api_files": "false",
    },
    "segment": {
        "jobs": "jobs.segment = :segment",
        "copied": "reused.segment = :segment",
        "remembered": "segment = :segment",
        "taught": "prompts.segment = :segment",
        "drawn": "prompts.segment = :segment",
        "api_files": "key_name IN (SELECT name FROM api_keys WHERE segment = :segment)",
    },
    "before": {
        "jobs": "coalesce(jobs.finished_at, jobs.created_at) < :before",
        "copied": "reused.decoded_at < :before",
        "remembered": "recorded_at < :before",
        "taught": "prompts.ended_at < :before",
        "drawn": "sets.created_at < :before",
        "api_files": "created_at < :before",
    },
}
# All that is put into statements is written here; values are parameters.
#: Jobs that are selected, and the probes and controls that asked an erased prompt.
_CHOSEN: Final = "({jobs} OR jobs.job_id = ANY(:probes))"
#: Jobs that were answered with the text of one of them.
_COPIES: Final = "SELECT reused.job_id FROM reused_results AS reused WHERE {copied}"
#: `_without_text` writes the field; inside a text its quotes would be escaped.
_HAS_TEXT: Final = """jobs.outcome IS NOT NULL AND strpos(jobs.outcome::text, '"erased_at":') = 0"""
_DRAWN: Final = """
    SELECT prompts.task, prompts.version, prompts.position FROM probe_prompts AS prompts
    JOIN probe_sets AS sets USING (task, version) WHERE sets.source = 'traffic' AND {drawn}
"""
_PROBES: Final = f"SELECT job_id FROM probe_runs WHERE (task, probe_set, position) IN ({_DRAWN})"  # noqa: S608
_OF_CHOSEN: Final = (
    f"(job_id = ANY(:probes) OR job_id IN (SELECT jobs.job_id FROM jobs WHERE {{jobs}}) OR job_id IN ({_COPIES}))"  # noqa: S608
)
_KNOWS: Final = f"""
    SELECT EXISTS (SELECT FROM jobs WHERE {{jobs}}) OR EXISTS (SELECT FROM remembered_results WHERE {{remembered}})
        OR EXISTS (SELECT FROM refresh_prompts AS prompts WHERE {{taught}})
        OR EXISTS (SELECT FROM api_files WHERE {{api_files}}) OR EXISTS ({_DRAWN}) OR EXISTS ({_COPIES})
"""  # noqa: S608
_COUNTS: Final = {
    "num_jobs": f"SELECT count(*) FROM jobs WHERE ({_CHOSEN} OR job_id IN ({_COPIES})) AND {_HAS_TEXT}",  # noqa: S608
    "num_remembered": "SELECT count(*) FROM remembered_results WHERE forgotten_at IS NULL AND {remembered}",
    "num_drawn_probes": f"SELECT count(*) FROM ({_DRAWN}) AS drawn",  # noqa: S608
    "num_probe_texts": f"SELECT count(*) FROM probe_texts WHERE {_OF_CHOSEN}",  # noqa: S608
    "num_stored_texts": f"SELECT count(*) FROM stored_texts WHERE {_OF_CHOSEN}",  # noqa: S608
    "num_api_files": "SELECT count(*) FROM api_files WHERE expires_at > now() AND {api_files}",
    "num_running": "SELECT count(*) FROM jobs WHERE {jobs} AND jobs.status = 'running'",
}
_STEPS: Final = {
    "api_files": "UPDATE api_files SET expires_at = now() WHERE expires_at > now() AND {api_files}",
    "probe_texts": f"DELETE FROM probe_texts WHERE {_OF_CHOSEN}",  # noqa: S608
    "probe_prompts": f"DELETE FROM probe_prompts WHERE (task, version, position) IN ({_DRAWN})",  # noqa: S608
    "empty_sets": """
        DELETE FROM probe_sets WHERE source = 'traffic' AND NOT EXISTS (
            SELECT FROM probe_prompts AS prompts
            WHERE prompts.task = probe_sets.task AND prompts.version = probe_sets.version
        )""",
    "results": f"""
        SELECT job_id, outcome::text, refused_outcome::text FROM jobs
        WHERE jobs.job_id > :last AND {_CHOSEN} AND {_HAS_TEXT} ORDER BY jobs.job_id LIMIT :chunk FOR UPDATE
    """,  # noqa: S608
    "copies": f"""
        SELECT job_id, outcome::text, refused_outcome::text FROM jobs
        WHERE jobs.job_id > :last AND jobs.job_id IN ({_COPIES}) AND {_HAS_TEXT} ORDER BY jobs.job_id LIMIT :chunk
        FOR UPDATE
    """,  # noqa: S608
    "stored_texts": f"SELECT url FROM stored_texts WHERE {_OF_CHOSEN}",  # noqa: S608
}
_PUT_BACK: Final = text(
    "UPDATE jobs SET outcome = CAST(:outcome AS json), refused_outcome = CAST(:refused AS json) WHERE job_id = :job_id"
)
_FORGET_URL: Final = text("DELETE FROM stored_texts WHERE url = :url")
