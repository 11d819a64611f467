"""The decision and its context: what is known of the jobs, how they are decoded, and why.

The incumbent is the setting that was chosen last for jobs of one kind. It stays until there is a reason to change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import Alternative, JobSize
from alphaloop.deciding.job_facts import Objective, Subject
from alphaloop.deciding.posterior import Posterior
from alphaloop.experiment.observe import Expected
from alphaloop.messages import Decoding, Mode


class Reason(StrEnum):
    """Why a job is decoded the way it is; one short word for tables, metrics and SQL."""

    FASTER = "faster"  #: the chosen alternative's expected goodput is above vanilla's
    ON_TARGET = "on_target"  #: it meets the time target or the deadline; faster alternatives are less sure to
    NOT_FASTER = "not_faster"  #: no alternative is expected to beat vanilla by the required margin
    UNCERTAIN = "uncertain"  #: a rival is expected to be faster than the incumbent, but not beyond the noise
    NO_HISTORY = "no_history"  #: a cold task: decided by the evidence of other tasks, or by the prior alone
    NO_COSTS = "no_costs"  #: the calibration of this device is missing
    NO_DRAFTER = "no_drafter"  #: no drafter is configured, or this worker lacks the probe's drafter
    EXPLORING = "exploring"  #: from the exploration budget
    CONTROL = "control"  #: a control job, or a request to a server that is control of the experiment: decoded vanilla
    PROBE = "probe"  #: a probe measures the drafter it names
    FORCED = "forced"  #: the job, or its task's configuration, fixed the mode
    STALE_DRAFT = "stale_draft"  #: every drafter that could serve is flagged stale
    UNKNOWN_REVISION = "unknown_revision"  #: the drafter has no revision under which to keep evidence
    CANNOT_SERVE = "cannot_serve"  #: no drafter can serve these sampling settings
    SWITCHED_OFF = "switched_off"  #: a prompt pattern for which an operator switched speculation off
    NO_MEMORY = "no_memory"  #: the draft's keys and values do not fit beside the target's
    FIRST_TOKENS = "first_tokens"  #: reading the prompt for drafts would delay a stream's first token too long
    SHORT_OUTPUT = "short_output"  #: too few tokens to gain anything
    UNDECIDED = "undecided"  #: deciding itself failed, so the job is decoded vanilla: a bug, please report it


def reason_said(reason: str, expected_low: float | None) -> str:
    """The reason as screens, results and rows have it: `faster` is said of what was measured.

    The policy's is an expectation, and not a sure one where its lower bound `expected_low` is not above 1.
    """
    if reason != Reason.FASTER:
        return reason
    return "not_surely_faster" if expected_low is not None and expected_low <= 1 else "expected_faster"


#: Decisions that were free to speculate.
_FREE: Final = frozenset({Reason.FASTER, Reason.ON_TARGET, Reason.NO_HISTORY, Reason.UNCERTAIN, Reason.NOT_FASTER})
#: Decisions for these reasons do not say what the policy would choose for the task's jobs.
NOT_A_CHOICE: Final = frozenset(
    {
        Reason.EXPLORING,
        Reason.CONTROL,
        Reason.PROBE,
        Reason.FORCED,
        # These depend on the jobs that were decided together.
        Reason.SWITCHED_OFF,
        Reason.NO_MEMORY,
        Reason.FIRST_TOKENS,
        Reason.CANNOT_SERVE,
        Reason.UNDECIDED,
    }
)


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """What a decision knows of its jobs, beside the evidence and the costs."""

    subject: Subject
    num_running: int  #: sequences that will share a round, these jobs included; costs depend on it
    num_jobs: int  #: jobs that the decision is about; budgets and exploration count them
    expected_tokens: float  #: of a job's output
    decoding: Decoding = Decoding.AUTO  #: the subject's, else that of its task's rules
    prompt_tokens: float | None = None  #: mean over the jobs; None: prompts and the time to read them are left out
    objective: Objective = field(default_factory=Objective)
    known_output_jobs: float = 0.0  #: jobs that `expected_tokens` is learned from; 0: it is the jobs' own limit
    free_cache_bytes: int | None = None  #: left for drafts' keys and values beside the target; None: never short
    free_elsewhere: Mapping[str, int] = field(default_factory=dict)  #: drafter → the same on a device of its own
    max_sequence_tokens: float | None = None  #: prompt and output of the longest of the jobs
    max_output_tokens: float | None = None  #: the largest output limit of the jobs; None: not known
    cannot_serve: Mapping[str, str] = field(default_factory=dict)  #: drafter → which sampling setting it cannot serve
    now: datetime | None = None  #: when it is decided; None: re-checks of unused drafters go by jobs alone

    @property
    def size(self) -> JobSize | None:
        """The size of a typical job; None without prompt lengths."""
        return None if self.prompt_tokens is None else JobSize(self.prompt_tokens, self.expected_tokens)

    @property
    def num_tokens(self) -> float:
        """Expected output tokens of all the jobs together."""
        return self.num_jobs * self.expected_tokens


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """A drafter and a draft length. Vanilla is no drafter and k = 0."""

    drafter: str | None = None
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How a job is decoded, and why."""

    mode: Mode
    drafter: str | None
    draft_revision: str | None
    num_draft_tokens: int
    reason: Reason
    explanation: str
    alternatives: tuple[Alternative, ...] = ()
    #: The setting while index + 1 sequences run, the last one for more; besides vanilla they name one drafter.
    #: Empty: `setting`, however many run.
    settings_by_running: tuple[DraftSetting, ...] = ()
    kept: DraftSetting | None = None  #: the incumbent from now on; while exploring, what was not tried but chosen
    budget: ExplorationBudget | None = None  #: what is left after these jobs; None: the budget was not touched
    #: By drafter, where the draft length may follow what else runs (draft_lengths.py); None: it may not.
    posteriors: Mapping[str, Posterior] | None = field(default=None, compare=False, repr=False)

    @property
    def setting(self) -> DraftSetting:
        """How the job drafts while as many sequences run as were expected."""
        return DraftSetting(self.drafter, self.num_draft_tokens)

    @property
    def was_free(self) -> bool:
        """Whether the policy was free to speculate. Only such jobs take part in the experiment."""
        return self.reason in _FREE

    @property
    def chosen(self) -> Alternative | None:
        """`setting` as it was weighed; None where nothing was."""
        return next((way for way in self.alternatives if way[:2] == (self.drafter, self.num_draft_tokens)), None)

    @property
    def expected(self) -> Expected | None:
        """The speed-up that `setting` promises; None where nothing was weighed."""
        return self.chosen.expected if self.chosen else None

    @property
    def reason_said(self) -> str:
        """The reason as screens, results, metrics and rows have it."""
        return reason_said(self.reason, self.chosen.speedup_low if self.chosen else None)

    def setting_while(self, num_running: int) -> DraftSetting:
        """How the job drafts in a round that `num_running` sequences share, at least one."""
        by_running = self.settings_by_running
        return by_running[min(num_running, len(by_running)) - 1] if by_running else self.setting


#: Incumbents held in memory. Beyond this number all are dropped and read from the log again.
_MAX_HELD: Final = 50_000


class IncumbentKey(NamedTuple):
    """Jobs that share an incumbent."""

    task: str
    sampling_bucket: str
    prompt_bucket: str
    load: int  #: running sequences, rounded up to a power of two
    form_bucket: str = ""

    @classmethod
    def of(
        cls, task: str, sampling_bucket: str, prompt_bucket: str, num_running: int, form_bucket: str = ""
    ) -> IncumbentKey:
        """The key of jobs that share a round of `num_running` sequences, at least one."""
        return cls(task, sampling_bucket, prompt_bucket, 1 << (num_running - 1).bit_length(), form_bucket)


class ChoiceLog(Protocol):
    """Where changes of a choice are written, so that a new process goes on with the last one."""

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The choice that was logged last; None where there is none. May raise StoreError."""

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Log a choice that changed; False if it could not be written, and the next decision is to try again."""


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
