"""The interface between the loop and an engine: `admit`, `redraft`, `step`, `load`, and what they take and return.

The code that uses this interface does not depend on the library that decodes, and an engine does not depend on Kafka or
Postgres. In an engine that owns a device, each `step` is one round of all sequences; sequences join and leave between
two steps. In an engine that sends jobs to servers, a `step` is what came from them since the step before;
such an engine `AsksServers` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, runtime_checkable

from alphaloop.acceptance import AcceptanceCounts, ProposerCounts, sampling_bucket
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.experiment.observe import Slice
from alphaloop.lookup import ViewOf
from alphaloop.measurements import UnansweredAlarm
from alphaloop.messages import Choice, Constraint, Job
from alphaloop.messages.capabilities import Feature
from alphaloop.messages.result import ChosenToken, FinishReason
from alphaloop.messages.stream import Part, ToolCallHead
from alphaloop.server_identity import EngineIdentity as EngineIdentity
from alphaloop.server_identity import Granularity
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import DrafterSettings
from alphaloop.wording import how_many

#: Jobs that wait for a server and take no slot, at most: each holds its prompt and a claim.
MOST_WAITING: Final = 256


class Engine(Protocol):
    """Decodes sequences, each with its own decision.

    What only an engine that owns a device can do has a default: an engine of servers inherits it.
    """

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """The drafters loaded here, never marked stale: staleness is in the store."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model says of sampling; nothing where a server has the model: every request has every setting."""
        return SamplingDefaults()

    @property
    def features(self) -> frozenset[Feature]:
        """What a job may ask for here, beside what every engine can do."""

    @property
    def can_redraft(self) -> bool:
        """Whether a running sequence can change how it drafts. If not, a job is decoded as it was admitted."""
        return False

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
        return

    def add_drafter(self, name: str, settings: DrafterSettings, revision: str | None = None) -> DrafterState:
        """Load a drafter beside the others, between two steps; jobs decided from now on may use it.

        Raises AlphaloopError where it is not of that `revision` (None: of any); where servers decode, because they load
        their drafts themselves; where it cannot draft for this target; where the device has no memory for it.
        """
        raise ConfigError("expected a target that the worker decodes itself: servers load their own drafts")

    def step(self) -> Step:
        """One round for every admitted sequence, or what servers sent since the last step.

        Raises DecodeFailed, after which `abandon` empties the engine, and EngineSick where nothing will mend it.
        """

    def use_memory(self, view_of: ViewOf) -> None:
        """Let drafters search earlier results, from the next job on. Servers have drafters of their own."""
        return

    def wake(self) -> None:
        """End the wait of `step`, because there is something else to do. Any thread may call it."""
        return

    def cancel(self, job_id: str) -> bool:
        """Drop a sequence between two steps; False if it is not here."""

    def abandon(self) -> None:
        """Drop every sequence."""

    def close(self) -> None:
        """Drop every sequence and every connection. The last call."""
        self.abandon()

    def load(self) -> Load:
        """How full the engine is."""

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        """Drafters that can propose nothing for any of `jobs`, each with what it cannot serve, in words.

        With no jobs, those that can propose nothing for any job, because they failed too often.
        """

    def memory(self) -> CacheMemory | None:
        """Memory for keys and values, as it is now; None where servers have the memory."""
        return None

    def loaded_models(self) -> LoadedModels:
        """The models in this process, read from their files, which takes seconds; none where servers have them."""
        return LoadedModels()

    def gpu_bytes(self) -> Mapping[str, int]:
        """By GPU, bytes taken since before the models were loaded; empty on a CPU and for servers."""
        return {}

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of one target pass of that shape, or of that drafter's proposal for it.

        Every sequence has `context` tokens before. Scratch sequences: whatever runs is not touched. A server's drafter
        is measured with its pass: see CostKind.SERVED.
        """

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds in which the target, or that drafter, reads a prompt it has never seen."""


@runtime_checkable
class AsksServers(Protocol):
    """What an engine that sends jobs to servers knows of these, beside what every engine does. Any thread may ask."""

    @property
    def measures_itself(self) -> bool:
        """Whether a server assigns the arms of the experiment, and reports slices with its replies."""

    @property
    def times_steps(self) -> bool:
        """Whether the only server reports the times of its steps, so that costs are known as on a device."""

    def unavailable(self) -> str | None:
        """Why nothing can be decoded now, in words: every server is away."""

    def endpoints(self) -> Sequence[EndpointStatus]:
        """How each server is."""

    def suspects(self) -> SuspectCounts:
        """Jobs that have to run alone at a server."""

    def doubt(self, alarms: Sequence[UnansweredAlarm]) -> None:
        """Use no drafter of `alarms` but for probes, until a later call leaves it out.

        The servers of a new alarm are asked again who they are: one with other weights is sent nothing any more.
        """


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that the engine can decode. Its prompt is tokenized, unless a server will do that."""

    job: Job
    token_ids: tuple[int, ...]  #: empty where only the server can tokenize
    sampling: Sampling
    is_pooled: bool = False  #: whether the job's segment has no evidence of its own
    num_estimated_tokens: int = 0  #: of a prompt that is not tokenized here
    features: frozenset[Feature] = frozenset()  #: what a server has to be able to do; empty of an own engine's job
    is_remembered: bool = False  #: whether the task's memory takes in its result
    reports_round_counts: bool = True  #: whether its result has counts of its rounds

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, estimated where it is not tokenized here."""
        return len(self.token_ids) or self.num_estimated_tokens

    @property
    def segment(self) -> str:
        """The segment whose evidence the job is decided from and adds to; empty: the task's jobs without one."""
        return "" if self.is_pooled else self.job.segment or ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings with every default filled in. What they mean: docs/reference/messages.md."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (token id, what is added to its score), each id once
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1  #: texts of the job; those after the first have seeds seed + i
    min_tokens: int = 0  #: before that many tokens no end token, stop token or stop string ends the text
    ignore_eos: bool = False  #: the model's end tokens are text
    bad_words: tuple[str, ...] = ()  #: never written
    allowed_token_ids: tuple[int, ...] = ()  #: no others are written; empty: all
    include_stop_str_in_output: bool = False  #: the stop string is part of the text
    skip_special_tokens: bool = True  #: special tokens are no part of the text
    num_logprobs: int | None = None  #: likeliest tokens with each token; 0: its own logprob alone; None: nothing
    constraint: Constraint | None = None  #: what the text has to match
    form_bucket: str = ""  #: which forms of jobs share evidence: of alphaloop.acceptance.form_bucket
    #: The prompt's last tokens, and those that will probably follow, which change no distribution; empty: not known.
    predicted: tuple[int, ...] = ()
    bucket: str = field(init=False, compare=False, repr=False)  #: which settings share evidence

    def __post_init__(self) -> None:
        bucket = sampling_bucket(
            self.temperature,
            is_cut=self.is_cut,
            is_reproducible=self.is_reproducible,
            is_adjusted=self.is_adjusted,
        )
        object.__setattr__(self, "bucket", bucket)

    @property
    def is_adjusted(self) -> bool:
        """Whether scores change before a token is chosen, all through the text: then evidence is kept apart.

        `min_tokens` is not meant: it bars the few end tokens for a while, which hardly moves the acceptance rate.
        """
        return bool(self.logit_bias or self.bad_words or self.allowed_token_ids or self.has_penalty)

    @property
    def has_penalty(self) -> bool:
        """Whether a token's score depends on how often it stands in the text."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_cut(self) -> bool:
        """Whether improbable tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_reproducible(self) -> bool:
        """Whether tokens are drawn so that the seed alone decides the text, however the job is decoded."""
        return self.seed is not None and self.temperature > 0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's generation_config.json says of sampling. Jobs take it only where the settings want that."""

    suggested: Mapping[str, float] = field(default_factory=dict)  #: by the names of TaskSettings
    unsupported: tuple[str, ...] = ()  #: fields that would change texts, and that are not followed here
    are_used: bool = False  #: models.target.use_generation_config

    def applied_to(self, task: TaskSettings) -> TaskSettings:
        """The task, with what the model suggests where the task's section says nothing."""
        if not self.are_used:
            return task
        return task.model_copy(
            update={name: value for name, value in self.suggested.items() if name not in task.model_fields_set}
        )

    def sentence(self) -> str:
        """For people; empty where the model says nothing of sampling."""
        parts = []
        if self.suggested:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.suggested.items())
            rule = "defaults of jobs whose task sets none" if self.are_used else "not used, jobs are greedy by default"
            parts.append(f"{shown} ({rule})")
        if self.unsupported:
            parts.append(f"not supported: {', '.join(self.unsupported)}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is."""

    num_running: int  #: admitted and not ended
    num_slots: int
    #: Running jobs that only some servers may decode and that wait for these. MOST_WAITING take no slot.
    waiting: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: of those that wait, jobs whose servers are all away
    #: Running jobs that wait because servers are kept free for other clients. Each keeps its slot.
    held: frozenset[str] = frozenset()

    @property
    def num_decoding(self) -> int:
        """Sequences that run and do not wait."""
        return self.num_running - len(self.waiting | self.held)

    @property
    def num_free(self) -> int:
        """Sequences that could be admitted now."""
        return max(0, self.num_slots - self.num_running + min(len(self.waiting), MOST_WAITING))


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
    num_prefix_cache_hits: int = 0  #: texts that began with a cached prefix
    num_prefix_cache_tokens: int = 0  #: tokens of prompts that were copied from the prefix cache
    prefix_cache_bytes: int = 0  #: of cached prefixes, after the step
    num_draft_prefill_tokens: int = 0  #: tokens of texts that draft models read before they could propose
    drafter: str | None = None  #: the one that proposed; None where none did or several
    #: The seconds of `draft_s`, by proposer; empty: all are those of `drafter`.
    draft_s_by_proposer: Mapping[str, float] = field(default_factory=dict)
    #: What each proposed in them; of one without, it was for all sequences of the step, up to its `width`.
    shape_by_proposer: Mapping[str, ProposalShape] = field(default_factory=dict)
    shadow_s: float = 0.0  #: beside it, scoring texts with drafters that do not decode them
    #: Tokens that each sequence put out in this step, by job_id: 0 for those whose prompts are still being read.
    tokens_by_job: Mapping[str, int] = field(default_factory=dict)
    #: Draft tokens that the target read, by job_id; sequences without a proposal are left out.
    proposed_by_job: Mapping[str, int] = field(default_factory=dict)
    #: Sequences that each job had in this step, where it had several (n > 1).
    sequences_by_job: Mapping[str, int] = field(default_factory=dict)
    #: Times that a drafter raised since the step before, by drafter. What it drafted went on vanilla.
    drafter_failures: Mapping[str, int] = field(default_factory=dict)
    drafting: tuple[str, ...] = ()  #: job ids of the sequences whose round belonged to a drafter, each once
    failed: tuple[FailedRequest, ...] = ()  #: jobs that are here no more, by their own fault; the others go on
    #: Jobs that are here no more, because their server went away when a part of their text was out. Each is decoded
    #: again, under a new attempt, so that readers of its stream can tell both texts apart.
    interrupted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProposalShape:
    """What a proposer did in a step."""

    batch: int  #: sequences that it was asked for
    width: int  #: tokens of its longest proposal, and the pending one
    num_read: int = 0  #: tokens of texts that it read before it could propose


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What one of a job's texts goes on with."""

    text: str
    part: Part = "content"  #: of tool_calls, `text` is a piece of arguments
    tool_call: ToolCallHead | None = None  #: of tool_calls: the call, as the generation's choices have it
    choice: int = 0  #: which of the job's texts
    #: If asked for, of tokens that came since the piece before, whose text may be there only with a later one.
    logprobs: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Text that one step added to a job."""

    job_id: str
    text: str
    index: int  #: 0 for the job's first delta
    choice: int = 0  #: which of the job's texts
    part: Part = "content"  #: as an `AnswerPiece` has it, and `tool_call` and `logprobs` too
    tool_call: ToolCallHead | None = None
    logprobs: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text, its counts and its times in seconds."""

    job_id: str
    text: str
    token_ids: tuple[int, ...]  #: empty where the server does not return them
    finish_reason: FinishReason
    num_prompt_tokens: int
    counts: AcceptanceCounts  #: of all rounds: those of `drafted`, and the vanilla ones
    time_to_first_token_s: float
    wall_s: float
    device_s: float  #: the job's share: each step's time divided by the sequences in it, and scoring a control
    batch_size: int  #: most sequences that shared a step with it
    chances: tuple[int, ...] = ()  #: by position, rounds in which it was asked for with all before it accepted
    #: Counts of drafters that did not decode this job but are scored for free; for a control, its `scored_drafters`.
    shadows: tuple[ShadowCounts, ...] = ()
    drafted: tuple[DrafterCounts, ...] = ()  #: of each drafter that had a round; they may change within a job
    num_vanilla_rounds: int = 0  #: rounds that belong to no drafter, the prefill's among them
    #: What each proposer offered inside the rounds, where not all was its drafter's own; no sum of `counts`.
    proposers: tuple[ProposerCounts, ...] = ()
    #: For a greedy probe or control, by token of its text; empty for others, and where the engine does not know.
    second_choices: tuple[SecondChoice, ...] = ()
    served: Served | None = None  #: where and how fast a server decoded it; None: this process did
    #: Where the answer says more than `text`: several texts, reasoning, calls of tools, logprobs. `text` is the first
    #: one's content, `token_ids` and `counts` are of all.
    choices: tuple[Choice, ...] = ()
    num_reasoning_tokens: int | None = None  #: of all texts; None where not known
    num_unparsed_calls: int = 0  #: pieces of its texts that begin like a call of a tool and are none: they stay text

    @property
    def is_counted(self) -> bool:
        """Whether `counts` are those of its rounds; if not, they say only how many tokens the text has."""
        return self.served is None or self.served.is_counted


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """The rounds of a job that belong to one drafter: those that allowed it at least one token, never the prefill."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int  #: the longest k that a round was allowed
    counts: AcceptanceCounts
    chances: tuple[int, ...]  #: by position, as a generation's


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """The counts that a drafter would have on a text that it did not decode, with one round for the prefill."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int
    counts: AcceptanceCounts
    chances: tuple[int, ...] = ()  #: by position, as a generation's; empty: as `num_draft_tokens` allowed
    is_whole: bool = True  #: whether the counts are of whole rounds over the whole text


@dataclass(frozen=True, slots=True)
class SecondChoice:
    """The target's second choice where it chose a token greedily, and how far its logit is below."""

    token_id: int
    gap: float


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server decoded a text, and how fast; costs are learned from it, because no server reports its passes."""

    endpoint: str  #: its name in the settings
    drafter: str | None  #: what drafts there; None: nothing does
    draft_revision: str  #: empty without a drafter
    num_draft_tokens: int  #: the k that decoded it; 0 without a drafter
    num_beside: float  #: our requests in flight at that endpoint while this one was, the mean, itself included
    num_rounds: int | None  #: passes of the target, the one that read the prompt included; None where not reported
    prefill_s: float | None  #: from the start of work to the first token; None where not known
    decode_s: float | None  #: from the first token to the last; None where not known
    queue_s: float | None = None  #: in the server's queue; None where not known
    request_s: float = 0.0  #: from its sending to the end of its reply
    granularity: Granularity = "rounds"  #: how finely the server reported what was drafted
    num_proposed: int = 0  #: draft tokens, as the server reported
    num_accepted: int = 0
    is_counted: bool = True  #: whether the job's counts are known; if not, they say only how many tokens it has
    slice_counts: SliceCounts | None = None  #: of all requests of the slice that this one ended
    load: ServerLoad | None = None  #: of the whole fleet meanwhile; None of a request that was no job's
    num_texts: int = 1  #: of the request
    slices: tuple[Slice, ...] = ()  #: that the server measured of its own rounds, of whatever requests
    steps: tuple[StepTimes, ...] = ()  #: of the server, with whatever requests

    def num_passes(self, num_tokens: int) -> int | None:
        """Passes of the target for a text of `num_tokens`; None where not even sums are reported.

        Each pass yields one token more than it accepts; the last one may have been cut. Several texts share passes, and
        no server reports how many.
        """
        if self.num_texts > 1:
            return None
        if self.num_rounds is not None:
            return self.num_rounds
        if self.drafter is None:
            return num_tokens
        return max(1, num_tokens - self.num_accepted) if self.num_proposed else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one shape that a server took, none of which read a prompt: the means over them."""

    batch: int  #: requests
    num_drafted: int  #: tokens that the server's drafter proposed for each of them; 0: none
    num_steps: int
    width: float  #: target positions a request
    context: float  #: tokens a request
    wall_s: float
    drafter_s: float  #: of it, the drafter's passes
    drafter: str | None = None  #: the server's own, by its name in the settings; None where it proposed nothing


EndpointState = Literal["up", "starting", "busy", "doubted", "down", "retired"]


@dataclass(frozen=True, slots=True)
class HeldRequests:
    """Requests that wait while an endpoint takes nothing new, for the sake of its other clients."""

    num: int
    reason: str

    @property
    def sentence(self) -> str:
        """`8 jobs held for others: 3 of 16 places are free, 4 stay free`."""
        return f"{how_many(self.num, 'job')} {self.reason}"


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """How an endpoint is, for metrics and `status`."""

    name: str
    drafter: str | None
    state: EndpointState
    num_in_flight: int
    limit: int  #: requests that it may have in flight now; 0 where it gets none
    since_s: float  #: seconds in that state of its circuit
    reason: str | None
    num_failed: Mapping[str, int]  #: requests that failed there, by the error's code
    num_undrafted: int | None = None  #: of those in flight, asked for without drafts; None where requests cannot ask
    is_obeying: bool = True  #: whether it does as requests ask, as far as is known
    num_others: float | None = None  #: requests of other clients there; None where it did not report them lately
    num_kept: int = 0  #: places that stay free for these
    held: HeldRequests | None = None  #: what waits for the sake of these

    @property
    def is_whole_load_known(self) -> bool:
        """Whether it reported lately how many requests of all clients it has."""
        return self.num_others is not None


@dataclass(frozen=True, slots=True)
class SuspectCounts:
    """Jobs that failed and have to run alone at a server, and what came of those before."""

    num_alone: int = 0  #: that wait for a server of their own, or have one
    num_killers: int = 0  #: that failed for good so far, because servers died with them


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests in flight while one was, the means: ours, and those of others as far as servers reported them."""

    num_beside: float  #: at its endpoint, itself included
    num_elsewhere: float  #: at all other endpoints of the fleet together
    is_whole: bool  #: whether every endpoint reported all its requests, all the time


@dataclass(frozen=True, slots=True)
class SliceCounts:
    """What a server's own counters moved by while some requests of one evidence key, and no others, ran there."""

    num_requests: int
    num_prompt_tokens: int  #: of all
    num_tokens: int  #: of all texts
    counts: AcceptanceCounts  #: all rounds after the prompts', and one for the prompts

    def num_passes(self, num_tokens: int) -> int:
        """Passes of the target for one of its texts, if each had as many tokens a round."""
        num_after = max(1, self.num_tokens - self.num_requests)
        return 1 + round((num_tokens - 1) * (self.counts.rounds - 1) / num_after)


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A job that a server refused or failed to decode while the server itself was well."""

    job_id: str
    error: AlphaloopError
    is_final: bool  #: whether the same request would fail for ever


#: Share of the memory that the models leave on the target's device for keys and values of target and drafts there: the
#: rest is for logits and all else.
CACHE_SHARE: Final = 0.5


def target_limit(left: int, target_per_token: int, drafts_per_token: int) -> int:
    """Most bytes that the target's keys and values may take where `models.target.max_cache_bytes` is not set.

    `left` is what the loaded models leave on the target's device, `drafts_per_token` is of the drafts there together.
    """
    return int(CACHE_SHARE * target_per_token / (target_per_token + drafts_per_token) * left)


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """What there is for keys and values, and what they take, in bytes."""

    free: int  #: of the target's device, as in `DeviceMemory`
    held: int  #: on the target's device, cached prefixes among them, which yield
    target_limit: int  #: most that the target's may hold; jobs that would need more wait
    target_per_token: int
    drafts_per_token: Mapping[str, int]  #: by drafter; none for those that keep none
    positions_at_once: int  #: tokens by which a slot grows
    per_row: int  #: of a pass, after the head: logits, and probabilities of sampled jobs
    elsewhere: Mapping[str, DeviceMemory] = field(default_factory=dict)  #: devices that hold drafts only, by name
    device_of: Mapping[str, str] = field(default_factory=dict)  #: by drafter, which of them; none: the target's device

    def of_target(self, num_slots: int, num_tokens: int) -> int:
        """What the target's keys and values take for `num_slots` sequences, the longest of `num_tokens`."""
        return min(self.target_limit, num_slots * self._in_blocks(num_tokens) * self.target_per_token)

    def of_draft(self, drafter: str, num_slots: int, num_tokens: int) -> int:
        """What that drafter's take for them."""
        return num_slots * self._in_blocks(num_tokens) * self.drafts_per_token.get(drafter, 0)

    def left_for_drafts(self, num_slots: int, num_tokens: int, width: int, *, device: str | None = None) -> int:
        """What is left on a device for drafts' keys and values; None: on the target's.

        There the target holds these sequences, and passes are `width` tokens wide:
        free + held - what the target's keys and values take - rows of a pass · bytes a row; below 0 where it is short.
        A device without the target keeps a row of each draft token until it is verified:
        free + held - rows · bytes a row.
        """
        memory = DeviceMemory(self.free, self.held) if device is None else self.elsewhere[device]
        of_target = self.of_target(num_slots, num_tokens) if device is None else 0
        return memory.free + memory.held - of_target - num_slots * width * self.per_row

    def left_elsewhere(self, num_slots: int, num_tokens: int, width: int) -> dict[str, int]:
        """The same for each drafter whose device is not the target's."""
        left = {device: self.left_for_drafts(num_slots, num_tokens, width, device=device) for device in self.elsewhere}
        return {drafter: left[device] for drafter, device in self.device_of.items()}

    def _in_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.positions_at_once) * self.positions_at_once


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    free: int  #: can still be taken before the device, or the container around this process, runs out
    held: int  #: by caches now; given back when nothing runs


Verdict = Literal["ok", "warning", "refused"]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of one check, of a draft against its target or of a server."""

    check: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The memory that a loaded model takes. A drafter without weights has none."""

    name: str  #: the drafter's; `target`
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_slot: int  #: of a sequence that fills the context
    device: str = ""  #: where it lies: `cuda:1`


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models that an engine has loaded, and how each draft model fits its target."""

    sizes: tuple[ModelSize, ...] = ()  #: the target's first
    warnings: Mapping[str, tuple[CheckFinding, ...]] = field(default_factory=dict)  #: by draft model


#: By dtype, of logits of about 20. In bfloat16, whose neighbours are .125 apart there, 14 of 40 texts of SmolLM2
#: parted, all within .126.
_TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}


def tolerance_of(dtype: str) -> float:
    """The largest gap of a near-tie; a dtype that is not known has bfloat16's."""
    return _TOLERANCE.get(dtype, _TOLERANCE["bfloat16"])
