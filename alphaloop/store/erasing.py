"""Erasing the texts of jobs, in Postgres and in the store of contents: of one job, of a segment, or before a day.

What jobs counted stays: it holds no text. A job's row stays too, so that its message is not decoded again when it is
delivered again; its result says when its texts were erased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import TextClause, text

from alphaloop.errors import ConfigError
from alphaloop.messages import Result
from alphaloop.store.api import Deed, write_down
from alphaloop.store.database import Store
from alphaloop.store.task_memory import ResultMemoryStore

#: Jobs of one transaction, with the texts of each.
_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Erasure:
    """Whose texts: exactly one of the three is given."""

    job_id: str | None = None
    segment: str | None = None
    before: datetime | None = None  #: of jobs that ended before it, and of prompts drawn before it

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.job_id, self.segment, self.before)) != 1:
            raise ConfigError("expected one of --job, --segment and --before, found none or several")

    @property
    def kind(self) -> str:
        """Which of the three it is."""
        return "before" if self.before is not None else "job" if self.job_id is not None else "segment"

    @property
    def subject(self) -> str:
        """In words, for the audit."""
        if self.before is not None:
            return f"before {self.before.isoformat()}"
        return f"job {self.job_id}" if self.job_id is not None else f"segment {self.segment}"


@dataclass(frozen=True, slots=True)
class Texts:
    """How many texts there are to erase, or were erased, by where they are kept."""

    num_jobs: int  #: ended jobs with a text or the reference to one, the probes of erased prompts among them
    num_remembered: int  #: results in the memory of tasks
    num_drawn_probes: int  #: prompts of probe sets that were drawn from traffic
    num_probe_texts: int  #: what probes of these prompts, and controls, generated
    num_stored_texts: int  #: texts outside Postgres
    num_api_files: int  #: files of the API, which the scheduler deletes within a minute
    num_running: int  #: jobs that have not ended: their texts are written later


class EraseStore(Store):
    """Counts and erases."""

    def count(self, erasure: Erasure) -> Texts:
        """What `erase` would erase now."""
        return self._counted(erasure, self._given(erasure))

    def _counted(self, erasure: Erasure, given: Mapping[str, Any]) -> Texts:
        return Texts(
            **{name: self._database.scalar(query, given) for name, query in _statements(erasure, _COUNTS).items()}
        )

    def erase(self, erasure: Erasure, deed: Deed, delete_text: Callable[[str], object] | None, now: datetime) -> Texts:
        """Erase, written down in the audit first; returns what there was. A call that broke off is repeated.

        `delete_text` deletes what lies outside Postgres. Raises ConfigError where something does and it is None.
        """
        given = self._given(erasure)
        found = self._counted(erasure, given)
        if found.num_stored_texts and delete_text is None:
            raise ConfigError(
                f"{found.num_stored_texts} texts lie outside the database, and claim_check.url is not set",
                hint="give the command the settings of the workers",
            )
        statements = _statements(erasure, _STEPS)
        write_down(self._database, deed)
        ResultMemoryStore(self._database).forget(_WHERE[erasure.kind]["remembered"], given)
        for name in ("api_files", "probe_texts", "probe_prompts", "empty_sets"):
            self._database.change(statements[name], given)
        self._erase_results(statements["results"], given, now)
        if delete_text is not None:
            for url in self._database.scalars(statements["stored_texts"], given):
                delete_text(url)
                self._database.change(_FORGET_URL, {"url": url})
        return found

    def _given(self, erasure: Erasure) -> dict[str, Any]:
        given = {"job_id": erasure.job_id, "segment": erasure.segment, "before": erasure.before}
        return given | {"probes": self._database.scalars(_statements(erasure, {"": _PROBES})[""], given)}

    def _erase_results(self, query: TextClause, given: dict[str, Any], now: datetime) -> None:
        """Take the texts out of results, in the order of the jobs' ids."""
        last: str | None = ""
        while last is not None:
            with self._database.begin() as connection:
                rows = list(connection.execute(query, {**given, "last": last, "chunk": _CHUNK}))
                for row in rows:
                    changed = [one and _without_text(one, now) for one in (row.outcome, row.refused_outcome)]
                    connection.execute(_PUT_BACK, {"job_id": row.job_id, "outcome": changed[0], "refused": changed[1]})
            last = rows[-1].job_id if len(rows) == _CHUNK else None


def _without_text(outcome: str, now: datetime) -> str:
    fields = {"text": None, "choices": (), "text_ref": None, "choices_ref": None, "erased_at": now}
    return Result.decode(outcome.encode()).model_copy(update=fields).encode().decode()


def _statements(erasure: Erasure, queries: Mapping[str, str]) -> dict[str, TextClause]:
    return {name: text(query.format(**_WHERE[erasure.kind])) for name, query in queries.items()}


#: By selection, which rows of each kind. A drawn prompt that does not name its job was drawn by an earlier release: it
#: may be anybody's, and a set is drawn again in a second.
_WHERE: Final = {
    "job": {
        "jobs": "jobs.job_id = :job_id",
        "remembered": "job_id = :job_id",
        "drawn": "(prompts.job_id = :job_id OR prompts.job_id IS NULL)",
        "api_files": "false",
    },
    "segment": {
        "jobs": "jobs.segment = :segment",
        "remembered": "segment = :segment",
        "drawn": "(prompts.segment = :segment OR prompts.job_id IS NULL)",
        "api_files": "key_name IN (SELECT name FROM api_keys WHERE segment = :segment)",
    },
    "before": {
        "jobs": "coalesce(jobs.finished_at, jobs.created_at) < :before",
        "remembered": "recorded_at < :before",
        "drawn": "sets.created_at < :before",
        "api_files": "created_at < :before",
    },
}
# All that is put into statements is written here; values are parameters.
#: Jobs that are selected, and the probes and controls that asked an erased prompt.
_CHOSEN: Final = "({jobs} OR jobs.job_id = ANY(:probes))"
#: `_without_text` writes the field; inside a text its quotes would be escaped.
_HAS_TEXT: Final = """jobs.outcome IS NOT NULL AND strpos(jobs.outcome::text, '"erased_at":') = 0"""
_DRAWN: Final = """
    SELECT prompts.task, prompts.version, prompts.position FROM probe_prompts AS prompts
    JOIN probe_sets AS sets USING (task, version) WHERE sets.source = 'traffic' AND {drawn}
"""
_PROBES: Final = f"SELECT job_id FROM probe_runs WHERE (task, probe_set, position) IN ({_DRAWN})"  # noqa: S608
_OF_CHOSEN: Final = "(job_id = ANY(:probes) OR job_id IN (SELECT jobs.job_id FROM jobs WHERE {jobs}))"
_COUNTS: Final = {
    "num_jobs": f"SELECT count(*) FROM jobs WHERE {_CHOSEN} AND {_HAS_TEXT}",  # noqa: S608
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
    "stored_texts": f"SELECT url FROM stored_texts WHERE {_OF_CHOSEN}",  # noqa: S608
}
_PUT_BACK: Final = text(
    "UPDATE jobs SET outcome = CAST(:outcome AS json), refused_outcome = CAST(:refused AS json) WHERE job_id = :job_id"
)
_FORGET_URL: Final = text("DELETE FROM stored_texts WHERE url = :url")
