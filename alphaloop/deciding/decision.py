"""The question and the answer: what a batch is, and how it is decoded, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import Alternative, JobSize
from alphaloop.deciding.objective import Objective
from alphaloop.messages import Decoding, Mode, Purpose


class Reason(StrEnum):
    """Why a batch is decoded the way it is; one short word for tables, metrics and SQL."""

    FASTER = "faster"  #: the chosen alternative's expected goodput is above vanilla's
    ON_TARGET = "on_target"  #: it meets the task's time target, or the deadline, and faster ones are not sure to
    NOT_FASTER = "not_faster"  #: no alternative is expected to beat vanilla by the required margin
    UNCERTAIN = "uncertain"  #: a rival looks faster than what runs, but not beyond its noise
    NO_HISTORY = "no_history"  #: a cold task: decided by what other tasks, or nobody, say of the drafter
    NO_COSTS = "no_costs"  #: the calibration of this device is missing
    NO_DRAFTER = "no_drafter"  #: no drafter is configured, or the probe's is not here
    EXPLORING = "exploring"  #: from the exploration budget
    CONTROL = "control"  #: vanilla from the exploration budget, or a control job
    PROBE = "probe"  #: a probe measures the drafter it names
    FORCED = "forced"  #: the job, or its task's configuration, fixed the mode
    STALE_DRAFT = "stale_draft"  #: every drafter that could serve is flagged stale
    UNKNOWN_REVISION = "unknown_revision"  #: what cannot be told from another revision has no history
    CANNOT_SERVE = "cannot_serve"  #: no drafter can serve these sampling settings
    SWITCHED_OFF = "switched_off"  #: a prompt pattern for which an operator switched speculation off
    NO_MEMORY = "no_memory"  #: the draft's keys and values do not fit beside the target's
    FIRST_TOKENS = "first_tokens"  #: drafts would have to read the prompt before a stream's first token, and be late
    SHORT_OUTPUT = "short_output"  #: too few tokens to gain anything


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """The batch to decide for. `draw` is uniform on [0, 1) and comes from the worker's seeded generator."""

    task: str
    batch: int
    expected_tokens: float
    draw: float
    purpose: Purpose = Purpose.TRAFFIC
    decoding: Decoding = Decoding.AUTO
    probe_drafter: str | None = None
    probe_num_draft_tokens: int | None = None
    prompt_tokens: float | None = None  #: mean of the batch; None: prompts and their reading are left out
    objective: Objective = field(default_factory=Objective)
    control_jobs: float = 0.0  #: jobs decoded vanilla under this key, as they weigh now
    known_output_jobs: float = 0.0  #: jobs behind `expected_tokens`; 0: it is what the job asks for at most
    free_cache_bytes: int | None = None  #: left for drafts' keys and values; None: never short
    max_sequence_tokens: float | None = None  #: prompt and output of the longest job of the batch
    max_output_tokens: float | None = None  #: of the job that may put out most; None: not told
    cannot_serve: Mapping[str, str] = field(default_factory=dict)  #: drafter → which sampling setting it cannot serve
    switched_off: str | None = None  #: the operator's pattern that the prompts match
    now: datetime | None = None  #: when it is decided; None: re-checks of unused drafters go by jobs alone

    @property
    def size(self) -> JobSize | None:
        """A usual job of the batch."""
        return None if self.prompt_tokens is None else JobSize(self.prompt_tokens, self.expected_tokens)

    @property
    def num_tokens(self) -> float:
        """What the batch is expected to put out."""
        return self.batch * self.expected_tokens


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What is decoded with. Vanilla is no drafter and k = 0."""

    drafter: str | None = None
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How a batch is decoded, and why."""

    mode: Mode
    drafter: str | None
    draft_revision: str | None
    num_draft_tokens: int
    reason: Reason
    explanation: str
    alternatives: tuple[Alternative, ...] = ()
    num_draft_tokens_by_batch: tuple[int, ...] = ()  #: k while index + 1 sequences run; empty: always the same
    kept: DraftSetting | None = (
        None  #: the incumbent from now on: what would have been done without exploration and control
    )
    budget: ExplorationBudget | None = None  #: what is left after this batch; None: it was not touched

    def setting_at(self, num_running: int) -> DraftSetting:
        """How the job drafts while so many sequences run."""
        lengths = self.num_draft_tokens_by_batch
        if self.drafter is None or not lengths:
            return DraftSetting(self.drafter, self.num_draft_tokens)
        return DraftSetting(self.drafter, lengths[min(num_running, len(lengths)) - 1])
