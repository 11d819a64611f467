"""Refreshes: drafters that are trained anew, from the wish to the end, and the jobs that they were trained with.

A refresh waits, a trainer takes it with a lease, its candidate is on trial beside the parent, and it ends. A trainer
that dies is followed by the next one after its lease. Each taking has a number, the attempt, and what a trainer writes
holds only while its attempt is the newest and the refresh is still open: so no trainer writes over another, or over a
cancellation or an erasure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from alphaloop.errors import ConfigError
from alphaloop.store.database import Store, of_row
from alphaloop.tables import refreshes

#: Trainings that may break off before a refresh fails: a dataset or a device that kills every trainer is given up.
MAX_ATTEMPTS: Final = 5
#: A refresh that no trainer has taken for so long has none: one that is idle takes it within seconds.
TRAINER_MISSED_AFTER: Final = timedelta(minutes=1)


class RefreshReason(StrEnum):
    """Why a drafter is trained anew."""

    BY_HAND = "by_hand"
    NEW_TARGET = "new_target"  #: a worker serves a target that it was not trained for
    DRAFT_STALE = "draft_stale"


class RefreshState(StrEnum):
    """How far a refresh is."""

    WAITING = "waiting"  #: for a trainer
    TRAINING = "training"
    TRIAL = "trial"  #: the candidate decodes beside its parent
    KEPT = "kept"
    REJECTED = "rejected"  #: judged, and nowhere better than its parent
    FAILED = "failed"  #: training broke off, or texts that it held were erased
    CANCELLED = "cancelled"  #: by an operator


#: A drafter has one of them for each target at most.
OPEN: Final = (RefreshState.WAITING, RefreshState.TRAINING, RefreshState.TRIAL)


@dataclass(frozen=True, slots=True)
class Refresh:
    """One row."""

    id: int
    drafter: str  #: the parent's name
    target_revision: str
    parent_draft_revision: str
    reason: RefreshReason
    state: RefreshState
    attempt: int  #: how often a trainer took it
    lease_owner: str | None
    lease_expires_at: datetime | None  #: of a waiting row: no trainer takes it before
    device_s: float  #: how long trainers had it, over all attempts
    figures: Mapping[str, Any] | None  #: parent and candidate on held-out texts
    sentence: str  #: why it is in this state; may be empty
    candidate_name: str | None
    candidate_revision: str | None
    location: str | None  #: address of the folder of the candidate's files
    opened_at: datetime
    changed_at: datetime  #: when its state changed, or its lease was renewed, last
    num_erased: int = 0  #: jobs that it was trained with and whose texts were erased since

    @property
    def parent(self) -> tuple[str, str, str]:
        """Drafter, draft revision and target revision of what is trained anew."""
        return self.drafter, self.parent_draft_revision, self.target_revision

    @property
    def is_open(self) -> bool:
        """Whether anything may still come of it."""
        return self.state in OPEN


class RefreshStore(Store):
    """The tables of refreshes and of their prompts. `now` is the database's time (`DatabaseClock`)."""

    def open(self, drafter: str, target_revision: str, parent: str, reason: RefreshReason, now: datetime) -> Refresh:
        """A refresh that waits for a trainer. Raises ConfigError where one of the drafter and target is open."""
        given = {"drafter": drafter, "target_revision": target_revision, "parent": parent, "reason": reason, "now": now}
        row = self._database.row(_OPEN, given)
        if row is not None:
            return _refresh(row)
        raise ConfigError(
            f"expected no open refresh of {drafter} for the target {target_revision}, found one",
            hint=f"alphaloop draft refresh {drafter} --status shows it, --cancel ends it",
        )

    def lease(self, owner: str, now: datetime, lease_s: float) -> Refresh | None:
        """Take the oldest refresh that waits, or whose trainer died, as a new attempt; None where there is none.

        A refresh that has had its MAX_ATTEMPTS fails.
        """
        given = {"owner": owner, "now": now, "expires_at": now + timedelta(seconds=lease_s)}
        with self._database.begin() as connection:
            connection.execute(_GIVE_UP, {"now": now, "max_attempts": MAX_ATTEMPTS})
            row = connection.execute(_LEASE, given).first()
        return None if row is None else _refresh(row)

    def renew(self, refresh_id: int, attempt: int, owner: str, now: datetime, lease_s: float) -> bool:
        """Keep the lease, and count the seconds since the last renewal; whether the attempt still holds."""
        given = {"id": refresh_id, "attempt": attempt, "owner": owner, "now": now}
        return self._database.change(_RENEW, {**given, "expires_at": now + timedelta(seconds=lease_s)}) == 1

    def release(self, refresh_id: int, attempt: int, *, sentence: str, not_before: datetime) -> bool:
        """Let it wait again until `not_before`, because this attempt could not go on; whether the attempt held."""
        given = {"id": refresh_id, "attempt": attempt, "sentence": sentence, "not_before": not_before}
        return self._database.change(_RELEASE, given) == 1

    def prompts(self, refresh_id: int, attempt: int, prompts: Sequence[tuple[str, str, bool]]) -> frozenset[str] | None:
        """Write down which jobs it trains with, in place of those written before; None if the attempt does not hold.

        Args:
            prompts: (job_id, prompt_id, is_held_out) of each.

        Returns:
            The ids of the jobs that it may train with: those that have ended and whose texts are not erased. An erasure
            waits for this call, or this call for it, so that none is missed.
        """
        job_ids, prompt_ids, held_out = [list(column) for column in zip(*prompts, strict=True)] or ([], [], [])
        with self._database.begin() as connection:
            if connection.execute(_HOLDS, {"id": refresh_id, "attempt": attempt}).first() is None:
                return None
            connection.execute(_FORGET_PROMPTS, {"id": refresh_id})
            given = {"id": refresh_id, "job_ids": job_ids, "prompt_ids": prompt_ids, "held_out": held_out}
            return frozenset(connection.execute(_TAKE_PROMPTS, given).scalars())

    def trial(
        self,
        refresh_id: int,
        attempt: int,
        *,
        name: str,
        revision: str,
        location: str,
        figures: Mapping[str, Any],
        sentence: str,
        state: RefreshState = RefreshState.TRIAL,
    ) -> bool:
        """The candidate's files are at `location`, and workers try it; whether the attempt still held.

        `state` is `kept` where no worker can try it.
        """
        given = {"id": refresh_id, "attempt": attempt, "name": name, "revision": revision, "location": location}
        facts = {"figures": dict(figures), "sentence": sentence, "state": state}
        return self._database.change(_TRIAL, given | facts) == 1

    def say(self, refresh_id: int, attempt: int, sentence: str) -> bool:
        """Say why the candidate on trial drafts nothing; whether it is on trial."""
        given = {"id": refresh_id, "attempt": attempt, "sentence": sentence}
        return self._database.change(_SAY, given) == 1

    def end(
        self,
        refresh_id: int,
        attempt: int,
        state: RefreshState,
        *,
        sentence: str,
        figures: Mapping[str, Any] | None = None,
    ) -> bool:
        """End it, from training or from trial; without `figures` they stay. Returns whether the attempt still held."""
        given = {"id": refresh_id, "attempt": attempt, "state": state, "sentence": sentence}
        with self._database.begin() as connection:
            ended = connection.execute(_END, {**given, "figures": figures and dict(figures)}).rowcount == 1
            if ended:
                connection.execute(_RETIRE_ENDED, {"ids": [refresh_id]})
        return ended

    def count_erased(self, which: str, given: Mapping[str, Any]) -> tuple[int, Sequence[str]]:
        """How many refreshes `erase` would end, and the kept candidates that were trained with such a job, by name."""
        num_open = self._database.scalar(text(_NUM_HOLDING.format(which=which)), given)
        return int(num_open), self._database.scalars(text(_TRAINED_WITH.format(which=which)), given)

    def erase(self, which: str, given: Mapping[str, Any], now: datetime, *, retires: bool) -> None:
        """End every refresh with a job for whose prompts a condition in SQL holds, and note that they were erased.

        With `retires` no worker uses candidates that were trained with such a job any more.
        """
        with self._database.begin() as connection:
            connection.execute(text(_NOTE_ERASED.format(which=which)), {**given, "now": now})
            ended = connection.execute(text(_END_HOLDING.format(which=which)), {**given, "now": now}).scalars()
            connection.execute(_RETIRE_ENDED, {"ids": list(ended)})
            if retires:
                connection.execute(text(_RETIRE.format(which=which)), given)

    def cancel(self, drafter: str, now: datetime) -> Sequence[Refresh]:
        """End every open refresh of a drafter; returns them as they are now."""
        with self._database.begin() as connection:
            cancelled = [_refresh(row) for row in connection.execute(_CANCEL, {"drafter": drafter, "now": now})]
            connection.execute(_RETIRE_ENDED, {"ids": [refresh.id for refresh in cancelled]})
        return cancelled

    def of(self, drafter: str) -> Sequence[Refresh]:
        """Every refresh of a drafter, the newest first."""
        return self._read("refreshes.drafter = :drafter", {"drafter": drafter})

    def all(self, since: datetime | None = None) -> Sequence[Refresh]:
        """Every refresh, or those that are open or changed since a moment; the newest first."""
        if since is None:
            return self._read("true", {})
        return self._read(f"({_IS_OPEN} OR changed_at >= :since)", {"since": since})

    def trials(self, target_revision: str) -> Sequence[Refresh]:
        """Those of a target whose candidates workers load: on trial or kept, and not retired; the newest first."""
        return self._read(_IS_LOADED, {"target_revision": target_revision})

    def num_jobs(self, refresh: Refresh, until: datetime) -> int:
        """Jobs of traffic that its target decoded since the refresh was changed last: since its trial began."""
        given = {"target_revision": refresh.target_revision, "since": refresh.changed_at, "until": until}
        return int(self._database.scalar(_NUM_JOBS, given))

    def device_s_since(self, since: datetime) -> float:
        """Seconds that trainers had refreshes which changed since a moment."""
        return float(self._database.scalar(_DEVICE_S, {"since": since}))

    def _read(self, which: str, given: Mapping[str, Any]) -> list[Refresh]:
        query = text(f"{_ROWS} WHERE {which} ORDER BY id DESC")
        return [_refresh(row) for row in self._database.rows(query.columns(figures=JSONB), given)]


def is_trainer_missing(refresh: Refresh, others: Iterable[Refresh], now: datetime) -> bool:
    """Whether it waits, no trainer has taken it for a while, and none is busy with another of the open refreshes."""
    free_since = max(filter(None, (refresh.changed_at, refresh.lease_expires_at)))
    return (
        refresh.state is RefreshState.WAITING
        and now - free_since > TRAINER_MISSED_AFTER
        and not any(
            other.state is RefreshState.TRAINING and other.lease_expires_at is not None and other.lease_expires_at > now
            for other in others
        )
    )


def _refresh(row: Any) -> Refresh:
    return of_row(Refresh, row, reason=RefreshReason(row.reason), state=RefreshState(row.state))


_NAMES: Final = ", ".join(f"refreshes.{column.name}" for column in refreshes.columns)
_NUM_ERASED: Final = """(
    SELECT count(*) FROM refresh_prompts AS prompts
    WHERE prompts.refresh_id = refreshes.id AND NOT prompts.is_held_out AND prompts.erased_at IS NOT NULL
) AS num_erased"""
_WHOLE: Final = f"{_NAMES}, {_NUM_ERASED}"
_ROWS: Final = f"SELECT {_WHOLE} FROM refreshes"  # noqa: S608 - names of columns, no values
_IS_OPEN: Final = "state IN ('waiting','training','trial')"
_IS_LOADED: Final = """
    state IN ('trial','kept') AND target_revision = :target_revision AND NOT EXISTS (
        SELECT FROM draft_revisions AS registered
        WHERE registered.drafter = candidate_name AND registered.draft_revision = candidate_revision
            AND registered.target_revision = refreshes.target_revision AND registered.status = 'retired'
    )"""
#: The newest attempt, while the refresh is open and no trainer came after.
_ATTEMPT: Final = "id = :id AND attempt = :attempt"
_OPEN: Final = text(f"""
    INSERT INTO refreshes (drafter, target_revision, parent_draft_revision, reason, opened_at, changed_at)
    VALUES (:drafter, :target_revision, :parent, :reason, :now, :now)
    ON CONFLICT (drafter, target_revision) WHERE {_IS_OPEN} DO NOTHING RETURNING {_WHOLE}
""")  # noqa: S608 - names of columns, no values
_GIVE_UP: Final = text("""
    UPDATE refreshes SET state = 'failed', changed_at = :now, lease_owner = NULL, lease_expires_at = NULL,
        sentence = 'training broke off ' || attempt || ' times' || CASE sentence WHEN '' THEN '' ELSE ', at last: '
            || sentence END
    WHERE attempt >= :max_attempts AND (state = 'waiting' OR (state = 'training' AND lease_expires_at <= :now))
""")
_LEASE: Final = text(f"""
    UPDATE refreshes SET state = 'training', attempt = attempt + 1, lease_owner = :owner,
        lease_expires_at = :expires_at, sentence = '', changed_at = :now
    WHERE id = (
        SELECT id FROM refreshes
        WHERE state IN ('waiting','training') AND (lease_expires_at IS NULL OR lease_expires_at <= :now)
        ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    RETURNING {_WHOLE}
""")  # noqa: S608 - names of columns, no values
_RENEW: Final = text(f"""
    UPDATE refreshes SET lease_expires_at = :expires_at, changed_at = :now,
        device_s = device_s + greatest(0, extract(epoch FROM :now - changed_at))
    WHERE {_ATTEMPT} AND state = 'training' AND lease_owner = :owner
""")  # noqa: S608 - names of columns, no values
_RELEASE: Final = text(f"""
    UPDATE refreshes SET state = 'waiting', lease_owner = NULL, lease_expires_at = :not_before, sentence = :sentence,
        changed_at = now()
    WHERE {_ATTEMPT} AND state = 'training'
""")  # noqa: S608 - names of columns, no values
_HOLDS: Final = text(f"""
    SELECT id FROM refreshes WHERE {_ATTEMPT} AND state = 'training' FOR UPDATE
""")  # noqa: S608 - names of columns, no values
_FORGET_PROMPTS: Final = text("DELETE FROM refresh_prompts WHERE refresh_id = :id")
# Jobs are locked in the order in which an erasure locks them.
_TAKE_PROMPTS: Final = text("""
    WITH known AS MATERIALIZED (
        SELECT jobs.job_id, jobs.segment, jobs.finished_at AS ended_at FROM jobs
        WHERE jobs.job_id = ANY(:job_ids) AND strpos(jobs.outcome::text, '"erased_at":') = 0
        ORDER BY jobs.job_id FOR SHARE
    )
    INSERT INTO refresh_prompts (refresh_id, job_id, prompt_id, is_held_out, segment, ended_at)
    SELECT :id, known.job_id, given.prompt_id, given.is_held_out, known.segment, known.ended_at
    FROM unnest(CAST(:job_ids AS text[]), CAST(:prompt_ids AS text[]), CAST(:held_out AS boolean[]))
        AS given(job_id, prompt_id, is_held_out) JOIN known USING (job_id)
    ON CONFLICT DO NOTHING RETURNING job_id
""")
_TRIAL: Final = text(f"""
    UPDATE refreshes SET state = :state, candidate_name = :name, candidate_revision = :revision, location = :location,
        figures = :figures, sentence = :sentence, lease_owner = NULL, lease_expires_at = NULL, changed_at = now()
    WHERE {_ATTEMPT} AND state = 'training'
""").bindparams(bindparam("figures", type_=JSONB))  # noqa: S608 - names of columns, no values
_SAY: Final = text(f"UPDATE refreshes SET sentence = :sentence WHERE {_ATTEMPT} AND state = 'trial'")  # noqa: S608
_END: Final = text(f"""
    UPDATE refreshes SET state = :state, sentence = :sentence, figures = coalesce(:figures, figures),
        lease_owner = NULL, lease_expires_at = NULL, changed_at = now()
    WHERE {_ATTEMPT} AND state IN ('training','trial')
""").bindparams(bindparam("figures", type_=JSONB(none_as_null=True)))  # noqa: S608 - names of columns, no values
_CANCEL: Final = text(f"""
    UPDATE refreshes SET state = 'cancelled', sentence = 'cancelled by an operator', lease_owner = NULL,
        lease_expires_at = NULL, changed_at = :now
    WHERE drafter = :drafter AND {_IS_OPEN} RETURNING {_WHOLE}
""")  # noqa: S608 - names of columns, no values
#: A candidate drafts no more when its refresh has ended otherwise than kept.
_RETIRE_ENDED: Final = text("""
    UPDATE draft_revisions SET status = 'retired', status_changed_at = now(), status_reason = refreshes.sentence
    FROM refreshes
    WHERE refreshes.id = ANY(:ids) AND refreshes.state <> 'kept' AND draft_revisions.status <> 'retired'
        AND (draft_revisions.drafter, draft_revisions.draft_revision, draft_revisions.target_revision)
            = (refreshes.candidate_name, refreshes.candidate_revision, refreshes.target_revision)
""")
_NUM_JOBS: Final = text("""
    SELECT count(*) FROM decode_runs
    WHERE purpose = 'traffic' AND target_revision = :target_revision AND decoded_at > :since AND decoded_at <= :until
""")
_DEVICE_S: Final = text("SELECT coalesce(sum(device_s), 0) FROM refreshes WHERE changed_at >= :since")
#: For an erasure. `which` is a condition about `prompts`; none holds a value. What is judged on a job and open ends.
_HOLDING: Final = "id IN (SELECT prompts.refresh_id FROM refresh_prompts AS prompts WHERE {which})"
_TAUGHT: Final = """EXISTS (
    SELECT FROM refresh_prompts AS prompts
    WHERE prompts.refresh_id = refreshes.id AND NOT prompts.is_held_out AND {which}
)"""
_NUM_HOLDING: Final = f"SELECT count(*) FROM refreshes WHERE {_IS_OPEN} AND {_HOLDING}"  # noqa: S608
_TRAINED_WITH: Final = f"""
    SELECT candidate_name FROM refreshes WHERE state = 'kept' AND {_TAUGHT} AND NOT EXISTS (
        SELECT FROM draft_revisions AS registered
        WHERE (registered.drafter, registered.draft_revision) = (candidate_name, candidate_revision)
            AND registered.status = 'retired'
    ) ORDER BY candidate_name
"""  # noqa: S608
_NOTE_ERASED: Final = "UPDATE refresh_prompts AS prompts SET erased_at = :now WHERE erased_at IS NULL AND {which}"
_END_HOLDING: Final = f"""
    UPDATE refreshes SET state = 'failed', sentence = 'texts of its jobs were erased', lease_owner = NULL,
        lease_expires_at = NULL, changed_at = :now
    WHERE {_IS_OPEN} AND {_HOLDING} RETURNING id
"""  # noqa: S608
_RETIRE: Final = f"""
    UPDATE draft_revisions SET status = 'retired', status_changed_at = now(),
        status_reason = 'the texts of jobs that it was trained with were erased'
    WHERE status <> 'retired' AND EXISTS (
        SELECT FROM refreshes
        WHERE (candidate_name, candidate_revision) = (draft_revisions.drafter, draft_revisions.draft_revision)
            AND {_TAUGHT}
    )
"""  # noqa: S608
