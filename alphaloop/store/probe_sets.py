"""The versions of each task's probe set."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.probes import ProbePrompt, ProbeSet, ProbeSource
from alphaloop.store.database import Database
from alphaloop.tables import probe_prompts, probe_sets


@dataclass(frozen=True, slots=True)
class ProbeSetVersion:
    """One version of a task's probe set."""

    task: str
    version: str
    num_prompts: int
    num_draft_tokens: int
    source: ProbeSource
    is_active: bool
    created_at: datetime


class ProbeSetStore:
    """Keeps every version, because runs of an earlier one are still compared; of each task at most one is in use."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, probe_set: ProbeSet, now: datetime) -> None:
        """Put a set in use in place of the one before. A version that is known already comes back as it was."""
        sets = probe_sets.c
        new = {
            "task": probe_set.task,
            "version": probe_set.version,
            "num_draft_tokens": probe_set.num_draft_tokens,
            "source": probe_set.source.value,
            "is_active": True,
            "created_at": now,
        }
        prompts = [
            {
                "task": probe_set.task,
                "version": probe_set.version,
                "position": position,
                "prompt_id": prompt.prompt_id,
                "body": dict(prompt.body),
            }
            for position, prompt in probe_set.prompts.items()
        ]
        with self._database.begin() as connection:
            connection.execute(
                update(probe_sets)
                .where(sets.task == probe_set.task, sets.version != probe_set.version)
                .values(is_active=False)
            )
            connection.execute(
                insert(probe_sets)
                .values(new)
                .on_conflict_do_update(index_elements=[sets.task, sets.version], set_={"is_active": True})
            )
            connection.execute(insert(probe_prompts).on_conflict_do_nothing(), prompts)

    def retire(self, task: str) -> bool:
        """Probe the task no more; False when it had no set in use."""
        sets = probe_sets.c
        with self._database.begin() as connection:
            changed = connection.execute(
                update(probe_sets).where(sets.task == task, sets.is_active).values(is_active=False)
            )
            return changed.rowcount > 0

    def active(self) -> dict[str, ProbeSet]:
        """The set in use of each task that has one."""
        return {found.task: found for found in self._read(probe_sets.c.is_active)}

    def get(self, task: str, version: str) -> ProbeSet | None:
        """One version; None where there is none of that name."""
        found = self._read(and_(probe_sets.c.task == task, probe_sets.c.version == version))
        return found[0] if found else None

    def versions(self, task: str | None = None) -> list[ProbeSetVersion]:
        """Every version, of all tasks or of one; by task, the newest first."""
        sets, prompts = probe_sets.c, probe_prompts.c
        query = (
            select(
                sets.task,
                sets.version,
                func.count(prompts.position),
                sets.num_draft_tokens,
                sets.source,
                sets.is_active,
                sets.created_at,
            )
            .outerjoin(probe_prompts, and_(prompts.task == sets.task, prompts.version == sets.version))
            .group_by(sets.task, sets.version)
            .order_by(sets.task, sets.created_at.desc(), sets.version)
        )
        if task is not None:
            query = query.where(sets.task == task)
        with self._database.begin() as connection:
            return [
                ProbeSetVersion(name, version, number, k, ProbeSource(source), is_active, at)
                for name, version, number, k, source, is_active, at in connection.execute(query)
            ]

    def _read(self, wanted: ColumnElement[bool]) -> list[ProbeSet]:
        sets, prompts = probe_sets.c, probe_prompts.c
        query = (
            select(
                sets.task,
                sets.version,
                sets.num_draft_tokens,
                sets.source,
                prompts.position,
                prompts.prompt_id,
                prompts.body,
            )
            .join(probe_prompts, and_(prompts.task == sets.task, prompts.version == sets.version))
            .where(wanted)
            .order_by(sets.task, sets.version, prompts.position)
        )
        with self._database.begin() as connection:
            rows = connection.execute(query).all()
        return [
            ProbeSet(
                task,
                version,
                k,
                {row.position: ProbePrompt(row.prompt_id, row.body) for row in of_set},
                ProbeSource(source),
            )
            for (task, version, k, source), of_set in groupby(
                rows, key=lambda row: (row.task, row.version, row.num_draft_tokens, row.source)
            )
        ]
