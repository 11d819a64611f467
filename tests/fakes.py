"""An engine without a model: honest counts, deterministic words, failures on demand."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    EngineIdentity,
    Generation,
    PreparedJob,
    Sampling,
    Step,
    TokenDelta,
)
from alphaloop.errors import DecodeFailed, InvalidField
from alphaloop.messages import Choice, Job
from benchmarks.pipeline.instant_engine import InstantEngine
from engine.prompts import fit_job
from engine.proposal import RoundCounts
from engine.text import TextStream
from tests.fixtures.answers import deltas_of

_TEXT: Final = """
    amber basil cedar delta ember fjord grove heath inlet jetty kelp larch meadow nectar
    opal pollen quartz reed slate thyme umber violet willow yarrow zephyr
"""
WORDS: Final = tuple(_TEXT.split())
END: Final = len(WORDS)


def decode_words(token_ids: Sequence[int]) -> str:
    """Text of the fake's tokens."""
    return "".join(f"{WORDS[token_id]} " for token_id in token_ids if token_id != END)


@dataclass(slots=True)
class _Running:
    prepared: PreparedJob
    drafter: DrafterState | None
    num_draft_tokens: int
    words: random.Random
    luck: random.Random
    text: TextStream
    num_words: int
    began: float
    output: list[int] = field(default_factory=list)
    counts: RoundCounts = field(default_factory=RoundCounts)
    reason: str | None = None
    first_token_s: float | None = None
    device_s: float = 0.0
    batch_size: int = 1
    num_deltas: int = 0

    @property
    def job(self) -> Job:
        """The job."""
        return self.prepared.job

    @property
    def job_id(self) -> str:
        """The job's."""
        return self.job.job_id

    @property
    def drafting(self) -> DrafterState | None:
        """Whom the next round belongs to: the first is the prefill."""
        return self.drafter if self.output and self.num_draft_tokens > 0 else None


class FakeEngine(InstantEngine):
    """`alphaloop.engine.Engine` whose text is a function of the prompt (and of the seed, when sampled).

    `acceptance[i]` is the probability that draft i + 1 of a round is accepted, the last one's for all behind it.
    `failing_steps` names steps, counted from 0, that raise DecodeFailed. `before_step` is called first in every step.
    A text ends by itself after as many words as one of `num_words`, both included.
    With a `slowness` steps report that many times what their shape is measured to take; without one, no parts at all.
    """

    def __init__(
        self,
        *,
        num_slots: int = 4,
        acceptance: Sequence[float] = (0.7,),
        context_length: int = 4096,
        failing_steps: Sequence[int] = (),
        before_step: Callable[[], None] | None = None,
        slowness: float | None = None,
        drafters: tuple[DrafterState, ...] = (DrafterState("lookup", "fake-1", 8),),
        num_words: tuple[int, int] = (24, 80),
    ) -> None:
        super().__init__(num_slots)
        self.identity = EngineIdentity(
            "fake-1", "fake", "000000000000", "float32", "no-device", context_length, "no-host"
        )
        self.drafters = drafters
        self.num_steps = 0
        self._acceptance = tuple(acceptance)
        self._failing, self._before_step = frozenset(failing_steps), before_step
        self._slowness, self._num_words = slowness, num_words

    @property
    def running(self) -> Sequence[str]:
        """The jobs in the engine now."""
        return [sequence.job_id for sequence in self._running]

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """A token a word."""
        if job.body.model not in (None, self.identity.target):
            raise InvalidField(f"expected {self.identity.target!r}", field="body.model")
        prompt = job.body.prompt or " ".join(message.text for message in job.body.messages or ())
        token_ids = tuple(_number("token", word) % 50_000 for word in prompt.split())
        return fit_job(job, token_ids, sampling, self.identity.context_length)

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a sequence in."""
        if not self.load().num_free:
            raise DecodeFailed("all slots are taken")
        drafter = self._drafter(decision.drafter)
        sampling = prepared.sampling
        chosen = (sampling.seed if sampling.seed is not None else prepared.job.job_id) if sampling.temperature else ""
        words = random.Random(_number(prepared.token_ids, sampling.temperature, chosen))
        self._running.append(
            _Running(
                prepared,
                drafter,
                decision.num_draft_tokens,
                words,
                random.Random(_number(0, prepared.job.job_id)),
                TextStream(decode_words, sampling.stop),
                words.randint(*self._num_words),
                time.perf_counter(),
            )
        )

    def redraft(self, job_id: str, drafter: str | None, num_draft_tokens: int) -> None:
        """Draft in another way from the next round on."""
        wanted = self._drafter(drafter)
        for sequence in self._running:
            if sequence.job_id == job_id:
                sequence.drafter, sequence.num_draft_tokens = wanted, num_draft_tokens

    def step(self) -> Step:
        """One round for every sequence; the first yields one token, as a prefill does."""
        began, number = time.perf_counter(), self.num_steps
        self.num_steps += 1
        if self._before_step:
            self._before_step()
        if number in self._failing:
            raise DecodeFailed(f"step {number} was told to fail")
        sequences, width, deltas = list(self._running), 0, []
        num_prefill_tokens = sum(len(s.prepared.token_ids) for s in sequences if not s.output)
        drafting = {s.job_id: s.drafting.name for s in sequences if s.drafting}
        drafters = {drafting.get(s.job_id) for s in sequences if s.output}
        proposed: dict[str, int] = {}
        num_before = {s.job_id: len(s.output) for s in sequences}
        for sequence in sequences:
            num_positions = self._round(sequence)
            width = max(width, num_positions)
            if num_positions > 1:
                proposed[sequence.job_id] = num_positions - 1
            if text := sequence.text.take_delta():
                deltas.append(TokenDelta(sequence.prepared.job.job_id, text, sequence.num_deltas))
                sequence.num_deltas += 1
        self._running = [sequence for sequence in sequences if sequence.reason is None]
        wall_s = time.perf_counter() - began
        for sequence in sequences:
            sequence.device_s += wall_s / len(sequences)
            sequence.batch_size = max(sequence.batch_size, len(sequences))
        finished = tuple(_generation(sequence) for sequence in sequences if sequence.reason)
        step = Step(
            finished,
            tuple(deltas),
            len(sequences),
            width,
            wall_s,
            num_prefill_tokens=num_prefill_tokens,
            tokens_by_job={s.job_id: len(s.output) - num_before[s.job_id] for s in sequences},
            proposed_by_job=proposed,
            drafting=tuple(drafting),
        )
        return step if self._slowness is None else self._timed(step, drafters, self._slowness)

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """A drafted token costs a hundredth of a round of the target."""
        return 0.1 * width if drafter else 10.0 + 0.1 * batch * width + 1e-4 * batch * context

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """A token of a prompt costs a tenth of a millisecond, and nothing to look-up."""
        return 0.001 if drafter else 0.1 * num_tokens

    def _timed(self, step: Step, drafters: set[str | None], slowness: float) -> Step:
        context = 256
        target_ms = slowness * self.measure_round_ms(None, step.batch, step.width, context, 1)
        (drafter,) = drafters if len(drafters) == 1 else (None,)
        draft_ms = slowness * self.measure_round_ms(drafter, step.batch, step.width, context, 1) if drafter else 0.0
        return replace(step, draft_s=draft_ms / 1000, verify_s=target_ms / 1000, context=context, drafter=drafter)

    def _round(self, sequence: _Running) -> int:
        max_tokens = sequence.prepared.sampling.max_tokens
        room = max_tokens - len(sequence.output) - 1
        drafter = sequence.drafting
        num_allowed = min(sequence.num_draft_tokens, drafter.max_draft_tokens) if drafter else 0
        num_proposed = min(num_allowed, room)
        num_accepted = 0
        while num_accepted < num_proposed and sequence.luck.random() < self._alpha(num_accepted):
            num_accepted += 1
        num_emitted = 0
        while num_emitted <= num_accepted and sequence.reason is None:
            num_emitted += 1
            token = sequence.words.randrange(END) if len(sequence.output) < sequence.num_words else END
            sequence.output.append(token)
            if token == END:
                sequence.text.finish()
                sequence.reason = "stop"
            elif sequence.text.push(token):
                sequence.reason = "stop"
            elif len(sequence.output) == max_tokens:
                sequence.reason = "stop" if sequence.text.finish() else "length"
        if drafter is None:
            sequence.counts.num_vanilla_rounds += 1
        else:
            sequence.counts.take_drafted(
                drafter,
                num_allowed,
                num_asked=num_proposed,
                num_proposed=num_proposed,
                num_accepted=num_accepted,
                num_emitted=num_emitted,
            )
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter() - sequence.began
        return num_proposed + 1

    def _drafter(self, name: str | None) -> DrafterState | None:
        if name is None:
            return None
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        raise DecodeFailed(f"no drafter {name!r}")

    def _alpha(self, position: int) -> float:
        return self._acceptance[min(position, len(self._acceptance) - 1)] if self._acceptance else 0.0


class VerboseEngine(FakeEngine):
    """The texts of jobs with this in their job_id are 200 times as long; without it, of all jobs."""

    def __init__(self, marked: str = "") -> None:
        super().__init__()
        self._marked = marked

    def step(self) -> Step:
        """One step, the texts of the jobs that ended with it made longer."""
        step = super().step()
        finished = (replace(one, text=one.text * (200 if self._marked in one.job_id else 1)) for one in step.finished)
        return replace(step, finished=tuple(finished))


class AnsweringEngine(FakeEngine):
    """A job whose prompt names one of `answers` gives that in place of its words, two pieces a step."""

    def __init__(self, answers: Mapping[str, Sequence[Choice]], *, failing_steps: Sequence[int] = ()) -> None:
        super().__init__(num_slots=16, num_words=(8, 16), failing_steps=failing_steps)
        self._answers = answers
        self._chosen: dict[str, tuple[Choice, ...]] = {}
        self._pieces: dict[str, list[TokenDelta]] = {}

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a sequence in, from the beginning of its answer."""
        super().admit(prepared, decision)
        job_id, body = prepared.job.job_id, prepared.job.body
        name = body.prompt or (body.messages[-1].content if body.messages else "")
        self._chosen[job_id] = tuple(self._answers.get(str(name), ()))
        self._pieces[job_id] = deltas_of(self._chosen[job_id], job_id)

    def step(self) -> Step:
        """One step, with pieces of the answers; the rest of an answer comes with its end."""
        step = super().step()
        deltas = [delta for delta in step.deltas if not self._chosen[delta.job_id]]
        ended = {one.job_id for one in step.finished}
        for job_id in step.tokens_by_job:
            pieces = self._pieces[job_id]
            num_now = len(pieces) if job_id in ended else 2
            deltas += pieces[:num_now]
            self._pieces[job_id] = pieces[num_now:]
        return replace(step, deltas=tuple(deltas), finished=tuple(map(self._answered, step.finished)))

    def _answered(self, generation: Generation) -> Generation:
        if not (choices := self._chosen[generation.job_id]):
            return generation
        first = choices[0]
        num_reasoning = sum(len((choice.said.reasoning or "").split()) for choice in choices)
        return replace(
            generation,
            text=first.said.content or "",
            choices=choices,
            num_reasoning_tokens=num_reasoning,
            finish_reason=first.finish_reason,
        )


def _generation(sequence: _Running) -> Generation:
    assert sequence.first_token_s is not None
    return Generation(
        job_id=sequence.prepared.job.job_id,
        text=sequence.text.text,
        token_ids=tuple(sequence.output),
        finish_reason="stop" if sequence.reason == "stop" else "length",
        num_prompt_tokens=len(sequence.prepared.token_ids),
        counts=sequence.counts.total,
        chances=sequence.counts.chances,
        drafted=sequence.counts.drafted,
        num_vanilla_rounds=sequence.counts.num_vanilla_rounds,
        time_to_first_token_s=sequence.first_token_s,
        wall_s=time.perf_counter() - sequence.began,
        device_s=sequence.device_s,
        batch_size=sequence.batch_size,
    )


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
