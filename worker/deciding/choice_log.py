"""The database's log of choices, as a decision session writes it."""

from __future__ import annotations

import logging

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.incumbents import IncumbentKey
from alphaloop.errors import StoreError
from alphaloop.store.decisions import DecisionLog
from worker.background import Write
from worker.engine import EngineIdentity

log = logging.getLogger(__name__)


class StoredChoices:
    """A `ChoiceLog` for one engine. A log that cannot be written does not stop decoding.

    `write` does the writing or queues it; a queued choice counts as logged, because the queue tries again. `prepare`
    may run in another thread than the session's.
    """

    def __init__(
        self,
        changes: DecisionLog,
        identity: EngineIdentity,
        owner: str,
        *,
        write: Write = lambda what, act: act(),
    ) -> None:
        self._changes, self._identity, self._owner = changes, identity, owner
        self._write = write
        self._prepared: dict[tuple[str, str], DraftSetting | None] = {}

    def prepare(self, task: str, sampling_bucket: str) -> None:
        """Read what `last_choice` will be asked for. May raise StoreError."""
        self._prepared[task, sampling_bucket] = self._read(task, sampling_bucket)

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The last choice in the log. Without `prepare` it is read now, which may raise StoreError."""
        subject = task, sampling_bucket
        return self._prepared.pop(subject) if subject in self._prepared else self._read(*subject)

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Log the choice; False if the database is away."""
        identity = self._identity
        subject = key.task, identity.target_revision, identity.device, key.sampling_bucket
        try:
            self._write(
                "change of choice",
                lambda: self._changes.record_change(*subject, key.load, decision, self._owner),
            )
        except StoreError as error:
            log.warning("change of choice not logged: %s", error.message, extra={"action": "choice_not_logged"})
            return False
        return True

    def _read(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        identity = self._identity
        return self._changes.last_choice(task, identity.target_revision, identity.device, sampling_bucket)
