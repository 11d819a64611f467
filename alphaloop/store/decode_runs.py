"""The counts of a job: of its own run, and of other drafters on its text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid4

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.messages import Purpose


class CountSource(StrEnum):
    """How a row of evidence_rows was counted."""

    SHADOW = "shadow"  #: scored on a text that others decoded
    SCORED = "scored"  #: on the text of a control, which asked for it: a probe without decoding
    SHARED_WEIGHTS = "shared_weights"  #: in the rounds of a drafter of the same weights
    DRAFTED = "drafted"  #: of a drafter that decoded: of its rounds alone, or scored at its longest drafts


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """How a job was decoded and what it took; times in seconds, `decoded_at` aware."""

    key: EvidenceKey
    purpose: str
    mode: str
    num_draft_tokens: int
    reason: str
    device: str
    counts: AcceptanceCounts
    num_prompt_tokens: int
    num_tokens: int
    batch_size: int
    queue_s: float
    time_to_first_token_s: float | None
    wall_s: float
    device_s: float
    decoded_at: datetime
    #: By position, rounds that allowed it: k may change within a job. Empty: k never changed.
    chances: tuple[int, ...] = ()
    #: The same for jobs that were decided together; a job that was decided alone has its own.
    decode_batch_id: UUID = field(default_factory=uuid4)
    #: Whether the counts are those of the rounds. If not, a server did not tell, and they say only how many tokens the
    #: text has.
    is_counted: bool = True
    is_cut: bool = False  #: whether a limit ended the text

    @property
    def evidence(self) -> EvidenceSums:
        """What the run adds to the evidence of its key."""
        return EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
            is_cut=self.is_cut,
        )

    @property
    def is_evidence(self) -> bool:
        """Whether it is evidence. Controls are not: they repeat a probe's prompt without a draft."""
        return self.is_counted and self.purpose != Purpose.CONTROL


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """Counts of a drafter on a text that it did not decode, under its own key.

    They are evidence of acceptance like a run's (docs/concepts/drafters.md says why), but not of time. With `chances`,
    the counts are of parts of rounds.
    """

    key: EvidenceKey
    num_draft_tokens: int
    counts: AcceptanceCounts  #: of the text's beginning, where it is long
    num_prompt_tokens: int
    num_output_tokens: int  #: of the whole text
    decoded_at: datetime
    chances: tuple[int, ...] = ()  #: as a run's; empty: `num_draft_tokens` was allowed in every round
    is_drafted: bool = False  #: of rounds that the drafter had in the job itself
    #: Whether a limit ended the text, of the one row that counts for the job's length; None: another row does.
    is_cut: bool | None = None

    @property
    def evidence(self) -> EvidenceSums:
        """What it adds to the evidence of its key."""
        sums = EvidenceSums.of_job(
            self.counts,
            self.num_draft_tokens,
            self.decoded_at,
            self.counts.num_tokens,
            self.num_prompt_tokens,
            self.chances or None,
        )
        if self.is_cut is None:
            return replace(sums, output_tokens=0.0, prompt_tokens=0.0, texts=0.0, ends=0.0)
        return replace(sums, output_tokens=float(self.num_output_tokens), ends=0.0 if self.is_cut else 1.0)


@dataclass(frozen=True, slots=True)
class JobCounts:
    """All counts of a job; empty if it was not decoded."""

    job_id: str
    attempt: int
    run: DecodeRun | None = None
    shadows: tuple[ShadowRun, ...] = ()  #: of drafters that did not decode it as far as they could, each at most once

    def __post_init__(self) -> None:
        """A job's length counts once: in its run, else in the first of its shadows; that of a control never."""
        run = self.run
        if self.shadows and run is not None and run.purpose != Purpose.CONTROL and not self.is_run_evidence:
            first = replace(self.shadows[0], is_cut=run.is_cut)
            object.__setattr__(self, "shadows", (first, *self.shadows[1:]))

    @property
    def is_run_evidence(self) -> bool:
        """Whether the run's own counts are evidence: not a control's, nor those that a longer score includes."""
        run = self.run
        return run is not None and run.is_evidence and all(shadow.key != run.key for shadow in self.shadows)

    @property
    def evidence(self) -> list[tuple[EvidenceKey, EvidenceSums]]:
        """What the job adds to the evidence, by key: its run first, then its shadows."""
        shadows = [(shadow.key, shadow.evidence) for shadow in self.shadows]
        if self.run is not None and self.is_run_evidence:
            return [(self.run.key, self.run.evidence), *shadows]
        return shadows

    def source(self, shadow: ShadowRun) -> CountSource:
        """How one of `shadows` was counted."""
        if self.run is not None and self.run.purpose == Purpose.CONTROL:
            return CountSource.SCORED
        if shadow.is_drafted or (self.run is not None and shadow.key == self.run.key):
            return CountSource.DRAFTED
        return CountSource.SHARED_WEIGHTS if shadow.chances else CountSource.SHADOW
