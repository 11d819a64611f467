"""The interface between the loop and an engine: `admit`, `redraft`, `step`, `load`.

The code that uses this interface does not depend on the library that decodes, and an engine does not depend on Kafka or
Postgres. Of an engine that owns a device, each `step` is one round of all sequences; sequences join and leave between
two steps. Of an engine that sends jobs to servers, a `step` is what came from them since the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision
from alphaloop.engine_identity import EngineIdentity as EngineIdentity
from alphaloop.messages import Job
from worker.measuring_device import MeasuringDevice
from worker.sampling import Sampling as Sampling
from worker.sampling import SamplingDefaults
from worker.served import FailedRequest, Served
from worker.servers.fleet_member import EndpointStatus, SuspectCounts

#: Jobs that wait for a server and take no slot, at most: each holds its prompt and a claim.
MOST_WAITING: Final = 256


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that the engine can decode. Its prompt is tokenized, unless a server will do that."""

    job: Job
    token_ids: tuple[int, ...]  #: empty where only the server can tokenize
    sampling: Sampling
    is_pooled: bool = False  #: whether the job's segment has no evidence of its own
    num_estimated_tokens: int = 0  #: of a prompt that is not tokenized here

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, estimated where it is not tokenized here."""
        return len(self.token_ids) or self.num_estimated_tokens

    @property
    def segment(self) -> str:
        """The segment whose evidence the job is decided from and adds to; empty: the task's jobs without one."""
        return "" if self.is_pooled else self.job.segment or ""


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """The counts that a drafter would have on a text that it did not decode, with one round for the prefill."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int
    counts: AcceptanceCounts
    chances: tuple[int, ...] = ()  #: by position, as a generation's; empty: as `num_draft_tokens` allowed


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """The rounds of a job that belong to one drafter: those that allowed it at least one token, never the prefill."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int  #: the longest k that a round was allowed
    counts: AcceptanceCounts
    chances: tuple[int, ...]  #: by position, as a generation's


@dataclass(frozen=True, slots=True)
class SecondChoice:
    """The target's second choice where it chose a token greedily, and how far its logit lies behind."""

    token_id: int
    gap: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text, its counts and its times in seconds."""

    job_id: str
    text: str
    token_ids: tuple[int, ...]  #: empty where the server does not tell
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    counts: AcceptanceCounts  #: of all rounds: those of `drafted`, and the vanilla ones
    time_to_first_token_s: float
    wall_s: float
    device_s: float  #: the job's share: each step's time divided by the sequences in it, and scoring a control
    batch_size: int  #: most sequences that shared a step with it
    chances: tuple[int, ...] = ()  #: by position, rounds in which it was asked for with all before it accepted
    #: Of drafters that did not decode it and can be scored for nothing; of a control, of its `scored_drafters`.
    shadows: tuple[ShadowCounts, ...] = ()
    drafted: tuple[DrafterCounts, ...] = ()  #: of each drafter that had a round; they may change within a job
    num_vanilla_rounds: int = 0  #: rounds that belong to no drafter, the prefill's among them
    #: Of a greedy probe or control, by token of its text; empty for others, and where the engine does not tell.
    second_choices: tuple[SecondChoice, ...] = ()
    served: Served | None = None  #: where and how fast a server decoded it; None: this process did

    @property
    def is_counted(self) -> bool:
        """Whether `counts` are those of its rounds; if not, they say only how many tokens the text has."""
        return self.served is None or self.served.is_counted


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Text that one step added to a job."""

    job_id: str
    text: str
    index: int  #: 0 for the job's first delta


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did."""

    finished: tuple[Generation, ...]
    deltas: tuple[TokenDelta, ...]
    batch: int  #: sequences in the step
    width: int  #: target positions a sequence, the widest
    wall_s: float
    draft_s: float = 0.0  #: of it, proposing
    verify_s: float = 0.0  #: of it, the target's pass and its verification
    overhead_s: float = 0.0  #: of it, the rest of the rounds: text, counts, book-keeping
    num_positions: int = 0  #: target positions of the round's pass, all sequences together; 0: batch · width
    context: int = 0  #: tokens a sequence that the pass could look back on, the mean
    num_prefill_tokens: int = 0  #: tokens of prompts read in this step
    num_draft_prefill_tokens: int = 0  #: tokens of texts that draft models read before they could propose
    drafter: str | None = None  #: the one that proposed; None where none did or several
    shadow_s: float = 0.0  #: beside it, scoring texts with drafters that do not decode them
    #: Tokens that each sequence put out in this step, by job_id: 0 for those whose prompts are still being read.
    tokens_by_job: Mapping[str, int] = field(default_factory=dict)
    #: Draft tokens that the target read, by job_id; sequences without a proposal are left out.
    proposed_by_job: Mapping[str, int] = field(default_factory=dict)
    #: Times that a drafter raised since the step before, by drafter. What it drafted went on vanilla.
    drafter_failures: Mapping[str, int] = field(default_factory=dict)
    drafting: tuple[str, ...] = ()  #: job ids of the sequences whose round belonged to a drafter
    failed: tuple[FailedRequest, ...] = ()  #: jobs that are here no more, by their own fault; the others go on
    #: Jobs that are here no more, because their server went away when a part of their text was out. Each is decoded
    #: again, under a new attempt, so that readers of its stream can tell both texts apart.
    interrupted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is."""

    num_running: int  #: admitted and not ended
    num_slots: int
    #: Of those that run, jobs that only some servers may decode and that wait for these. MOST_WAITING take no slot.
    waiting: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: of those that wait, jobs whose servers are all away

    @property
    def num_decoding(self) -> int:
        """Sequences that run and do not wait."""
        return self.num_running - len(self.waiting)

    @property
    def num_free(self) -> int:
        """Sequences that could be admitted now."""
        return max(0, self.num_slots - self.num_running + min(len(self.waiting), MOST_WAITING))


class Engine(MeasuringDevice, Protocol):
    """Decodes sequences, each with its own decision."""

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """The drafters loaded here, never marked stale: staleness is in the store."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model says of sampling; nothing where a server has the model."""

    @property
    def can_redraft(self) -> bool:
        """Whether a running sequence can change how it drafts. If not, a job is decoded as it was admitted."""

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Tokenize; raises PromptTooLong, JobTooLarge or InvalidField when the job can never be decoded here."""

    def has_room(self, prepared: PreparedJob) -> bool:
        """Whether the job could be admitted now: a slot is free, and the memory for all it may come to need."""

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a sequence in; the caller has asked `has_room`."""

    def redraft(self, job_id: str, drafter: str | None, num_draft_tokens: int) -> None:
        """From its next round on the sequence drafts with `drafter`, at most `num_draft_tokens` tokens a round.

        The distribution of its text stays the same. `None` is vanilla and closes the drafter; k = 0 pauses the drafter,
        which keeps the tokens it has read and its memory. Another drafter closes the one before. Where the device has
        no memory for a drafter that has to be opened, the sequence decodes vanilla until the next call. Nothing happens
        if the job is not here (it may have ended), or where `can_redraft` is false.

        Raises DecodeFailed for a drafter that is not loaded.
        """

    def step(self) -> Step:
        """One round for every admitted sequence, or what servers sent since the last step.

        Raises DecodeFailed, after which `abandon` empties the engine, and EngineSick where nothing will mend it.
        """

    def wake(self) -> None:
        """End the wait of `step`, because there is something else to do. Any thread may call it."""

    def cancel(self, job_id: str) -> bool:
        """Drop a sequence between two steps; False if it is not here."""

    def abandon(self) -> None:
        """Drop every sequence."""

    def close(self) -> None:
        """Drop every sequence and every connection. The last call."""

    def load(self) -> Load:
        """How full the engine is."""

    def unavailable(self) -> str | None:
        """Why nothing can be decoded now, in words: every server is away. Any thread may call it."""

    def endpoints(self) -> Sequence[EndpointStatus]:
        """How each server is; none where this process decodes. Any thread may call it."""

    def suspects(self) -> SuspectCounts:
        """Jobs that have to run alone at a server; none where this process decodes. Any thread may call it."""

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        """Drafters that can propose nothing for any of `jobs`, each with what it cannot serve, in words.

        With no jobs, those that can propose nothing for any job, because they failed too often.
        """
