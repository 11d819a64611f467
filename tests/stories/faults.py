"""Two faults of an engine, injected from outside: the shipped engine is loaded, and what it gives is spoilt on its way.

`worn`: drafting slowly goes wrong with its use, on one task or on all, and is sound again in a new process. The texts
stay right, because the target verifies every draft (vLLM #41838 was of this kind). `dropped`: texts of one task that
were decoded speculatively lack a token, from a certain job on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Generation, PreparedJob, Sampling, Step
from alphaloop.messages import Mode
from alphaloop.settings.models import DrafterSettings
from engine.own import TransformersEngine
from engine.proposal import Ask, Proposal

log = logging.getLogger(__name__)

#: The action that a worker logs with its first wrong draft, and the field with the time of it.
WORN_ACTION, WORN_AT = "drafter_worn", "at"
#: A token that no draft means: the wrong one is the right one moved by this many places in the vocabulary.
_MOVED: Final = 1000


class Worn(BaseModel):
    """Drafts of `drafter` in `task` begin to be wrong after `sound` jobs of it; `wholly` jobs later, nearly all are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str | None  #: None: every task
    drafter: str  #: loaded with the engine, or later
    sound: int = Field(ge=0)
    wholly: int = Field(ge=1)
    most: float = Field(0.9, gt=0, le=1)  #: the share of wrong proposals in the end


class Dropped(BaseModel):
    """Every speculative text of `task` lacks its token number `place`, after `sound` right ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    sound: int = Field(ge=0)
    place: int = Field(4, ge=0)


class Faults(BaseModel):
    """The faults of one worker process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    worn: Worn | None = None
    dropped: Dropped | None = None


def inject(engine: TransformersEngine, faults: Faults) -> None:
    """Spoil an engine. Everything that the faults do not name goes through untouched."""
    if faults.worn is not None:
        _wear(engine, faults.worn, random.Random(faults.seed))
    if faults.dropped is not None:
        _DroppingEngine(engine, faults.dropped).take_over()


def _wear(engine: Any, fault: Worn, rng: random.Random) -> None:
    """Spoil the drafter as soon as it is loaded."""
    sound_add = engine.add_drafter

    def added(name: str, settings: DrafterSettings, revision: str | None = None) -> DrafterState:
        state: DrafterState = sound_add(name, settings, revision)
        if name == fault.drafter:
            _WornDrafter(engine, engine._drafters[name], fault, rng).take_over()
        return state

    engine.add_drafter = added
    if fault.drafter in engine._drafters:
        _WornDrafter(engine, engine._drafters[fault.drafter], fault, rng).take_over()


@dataclass(slots=True)
class _WornDrafter:
    engine: Any
    drafter: Any
    fault: Worn
    rng: random.Random
    admitted: set[str] = field(default_factory=set)  #: jobs of the task, probes among them
    jobs: set[str] = field(default_factory=set)  #: of these, those that it ever drafted for
    is_worn: bool = False  #: whether a draft was wrong yet

    def take_over(self) -> None:
        sound_admit = self.engine.admit
        sound_open, sound_propose = self.drafter.open, self.drafter.propose

        def admitted(prepared: PreparedJob, decision: Decision) -> None:
            # The task that a drafter is told is empty for a probe, from which it must not learn.
            if self.fault.task in (None, prepared.job.task):
                self.admitted.add(prepared.job.job_id)
            sound_admit(prepared, decision)

        def opened(job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
            if job_id in self.admitted:
                self.jobs.add(job_id)
            sound_open(job_id, text, sampling, task, segment)

        def proposed(asks: Sequence[Ask]) -> list[Proposal]:
            found = sound_propose(asks)
            return [self._spoilt(one) if ask.job_id in self.jobs else one for ask, one in zip(asks, found, strict=True)]

        self.engine.admit, self.drafter.open, self.drafter.propose = admitted, opened, proposed

    def _spoilt(self, proposal: Proposal) -> Proposal:
        if not proposal.tokens:
            return proposal
        gone_wrong = (len(self.jobs) - self.fault.sound) / self.fault.wholly
        if self.rng.random() >= min(gone_wrong, 1.0) * self.fault.most:
            return proposal
        if not self.is_worn:
            self.is_worn = True
            facts = {"action": WORN_ACTION, "drafter": self.fault.drafter, WORN_AT: datetime.now(UTC).isoformat()}
            log.warning("drafts begin to be wrong", extra=facts)
        first, *others = proposal.tokens
        wrong = first - _MOVED if first >= _MOVED else first + _MOVED
        return replace(proposal, tokens=(wrong, *others))


@dataclass(slots=True)
class _DroppingEngine:
    engine: Any
    fault: Dropped
    num_ended: int = 0

    def take_over(self) -> None:
        sound_admit, sound_step = self.engine.admit, self.engine.step
        speculative: set[str] = set()

        def admitted(prepared: PreparedJob, decision: Decision) -> None:
            if prepared.job.task == self.fault.task and decision.mode is Mode.SPECULATIVE:
                speculative.add(prepared.job.job_id)
            sound_admit(prepared, decision)

        def stepped() -> Step:
            step: Step = sound_step()
            return replace(
                step,
                finished=tuple(self._without(one) if one.job_id in speculative else one for one in step.finished),
            )

        self.engine.admit, self.engine.step = admitted, stepped

    def _without(self, generation: Generation) -> Generation:
        self.num_ended += 1
        place = self.fault.place
        if self.num_ended <= self.fault.sound or len(generation.token_ids) <= place:
            return generation
        kept = (*generation.token_ids[:place], *generation.token_ids[place + 1 :])
        choices = generation.second_choices
        text = self.engine._target.tokenizer.decode(kept, skip_special_tokens=True)
        return replace(generation, token_ids=kept, text=text, second_choices=(*choices[:place], *choices[place + 1 :]))
