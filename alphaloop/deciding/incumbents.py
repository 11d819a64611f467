"""Incumbents: the setting that was chosen last for jobs of one kind. It stays until there is a reason to change it."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from alphaloop.deciding.decision import NOT_A_CHOICE, Decision, DraftSetting

#: Incumbents held in memory. Beyond this number all are dropped and read from the log again.
_MAX_HELD: Final = 50_000


class IncumbentKey(NamedTuple):
    """Jobs that share an incumbent."""

    task: str
    sampling_bucket: str
    prompt_bucket: str
    load: int  #: running sequences, rounded up to a power of two

    @classmethod
    def of(cls, task: str, sampling_bucket: str, prompt_bucket: str, num_running: int) -> IncumbentKey:
        """The key of jobs that share a round with so many sequences, at least one."""
        return cls(task, sampling_bucket, prompt_bucket, 1 << (num_running - 1).bit_length())


class ChoiceLog(Protocol):
    """Where changes of a choice are written, so that a new process goes on with the last one."""

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The choice that was logged last; None where there is none. May raise StoreError."""

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Log a choice that changed; False if it could not be written, and the next decision is to try again."""


class ChoicesInMemory:
    """A log for `explain`, `replay` and the simulator."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], DraftSetting] = {}

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The choice that was recorded last."""
        return self._last.get((task, sampling_bucket))

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Keep the choice."""
        self._last[key.task, key.sampling_bucket] = decision.setting
        return True


class Incumbents:
    """The incumbents by key. A new session begins with the choice that was logged last for the task.

    A choice is logged when it, or its reason, differs from the last decision with the same key.
    """

    def __init__(self, log: ChoiceLog) -> None:
        self._log = log
        self._kept: dict[IncumbentKey, DraftSetting] = {}
        self._logged: dict[IncumbentKey, tuple[DraftSetting, str]] = {}
        self._begun_with: dict[tuple[str, str], DraftSetting | None] = {}

    def of(self, key: IncumbentKey) -> DraftSetting | None:
        """The incumbent; None where nothing was chosen so far. May raise StoreError."""
        if key in self._kept:
            return self._kept[key]
        subject = key.task, key.sampling_bucket
        if subject not in self._begun_with:
            self._begun_with[subject] = self._log.last_choice(*subject)
        return self._begun_with[subject]

    def keep(self, key: IncumbentKey, decision: Decision) -> None:
        """Make the decision's choice the incumbent, and log it if it changed."""
        if len(self._kept) > _MAX_HELD:
            self._kept.clear()
            self._logged.clear()
        if decision.kept is not None:
            self._kept[key] = decision.kept
        now = decision.setting, decision.reason.value
        if decision.reason in NOT_A_CHOICE or self._logged.get(key) == now:
            return
        if self._log.record(key, decision):
            self._logged[key] = now
