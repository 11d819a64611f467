"""Two faults of an engine, injected from outside: the shipped engine is loaded, and what it gives is spoilt on its way.

`worn`: drafting slowly goes wrong on one task, with its use, and is sound again in a new process. The texts stay right,
because the target verifies every draft (vLLM #41838 was of this kind). `dropped`: texts of one task that were decoded
speculatively lack a token, from a certain job on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, PreparedJob, Sampling, Step
from alphaloop.messages import Mode
from engine.own import TransformersEngine
from engine.proposal import Ask, Proposal

#: A token that no draft means: the wrong one is the right one moved by this many places in the vocabulary.
_MOVED: Final = 1000


class Worn(BaseModel):
    """Drafts of `drafter` in `task` begin to be wrong after `sound` jobs of it; `wholly` jobs later, nearly all are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    drafter: str
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
        drafter = engine._drafters[faults.worn.drafter]
        _WornDrafter(engine, drafter, faults.worn, random.Random(faults.seed)).take_over()
    if faults.dropped is not None:
        _DroppingEngine(engine, faults.dropped).take_over()


@dataclass(slots=True)
class _WornDrafter:
    engine: Any
    drafter: Any
    fault: Worn
    rng: random.Random
    admitted: set[str] = field(default_factory=set)  #: jobs of the task, probes among them
    jobs: set[str] = field(default_factory=set)  #: of these, those that it ever drafted for

    def take_over(self) -> None:
        sound_admit = self.engine.admit
        sound_open, sound_propose = self.drafter.open, self.drafter.propose

        def admitted(prepared: PreparedJob, decision: Decision) -> None:
            # The task that a drafter is told is empty for a probe, from which it must not learn.
            if prepared.job.task == self.fault.task:
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
