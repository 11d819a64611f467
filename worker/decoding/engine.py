"""The engine over transformers models: rounds in which every sequence reads what its slot lacks.

A round: drafters propose for the sequences that use them; one pass of the target reads the pending token and the drafts
of every running sequence, each as wide as its own proposal, and beside them the next piece of a prompt; each sequence
keeps its accepted drafts and the target's next token. Vanilla decoding is a round one token wide.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision
from alphaloop.errors import DecodeFailed, JobTooLarge, reason_of
from alphaloop.messages import Job
from worker.decoding import measuring
from worker.decoding.admitted import AdmittedSequences
from worker.decoding.device import is_out_of_memory
from worker.decoding.memory import available_bytes, pass_bytes
from worker.decoding.network.kv_shape import BLOCK
from worker.decoding.open_drafters import OpenDrafters
from worker.decoding.prompts import prepare_job
from worker.decoding.proposal import Drafter
from worker.decoding.rounds import Round
from worker.decoding.scoring import with_scores
from worker.decoding.sequence import Sequence
from worker.decoding.shadow import Shadows
from worker.decoding.target import Target
from worker.engine import (
    CacheMemory,
    DeviceMemory,
    EngineIdentity,
    Generation,
    Load,
    PreparedJob,
    Sampling,
    SamplingDefaults,
    Step,
)


class TransformersEngine:
    """`worker.engine.Engine` over a transformers model. Not thread-safe: one thread owns it."""

    def __init__(
        self, target: Target, drafters: Mapping[str, Drafter], *, num_slots: int, max_cache_bytes: int
    ) -> None:
        self._target = target
        self._drafters = dict(drafters)
        self._num_slots = num_slots
        self._max_cache_bytes = max_cache_bytes
        self._cache = target.model.new_cache(num_slots, max_bytes=max_cache_bytes)
        self._admitted = AdmittedSequences(self._cache, num_slots, max_cache_bytes)
        self._open_drafters = OpenDrafters(self._drafters, lambda: self._admitted.all)
        self._shadows = Shadows(self._drafters, failed=self._open_drafters.failed, ended=self._open_drafters.ended)

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""
        return self._target.identity

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """The drafters loaded here."""
        return tuple(drafter.state for drafter in self._drafters.values())

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model's generation config says."""
        return self._target.sampling_defaults

    @property
    def can_redraft(self) -> bool:
        """Whether a running sequence can change how it drafts."""
        return True

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Tokenize; raises PromptTooLong, JobTooLarge or InvalidField when the job cannot be decoded here."""
        target, identity = self._target, self._target.identity
        prepared = prepare_job(
            target.tokenizer,
            identity.target,
            identity.context_length,
            job,
            sampling,
            longest_token_chars=target.longest_token_chars,
            num_rows=target.model.num_rows,
            num_logits=target.model.vocabulary_size,
        )
        needed = self._admitted.num_bytes_alone(prepared)
        if needed > self._max_cache_bytes:
            raise JobTooLarge(
                f"expected at most {self._max_cache_bytes} bytes of keys and values, found {needed}: "
                f"({len(prepared.token_ids)} prompt tokens + {prepared.sampling.max_tokens} max_tokens) "
                f"in blocks, times {self._cache.shape.bytes_per_token} bytes a token",
                field="body.max_tokens",
                hint="lower max_tokens, or raise models.target.max_cache_bytes",
            )
        return prepared

    def has_room(self, prepared: PreparedJob) -> bool:
        """Whether a slot and the memory for the whole of this job are free beside what runs.

        Sequences that memory had no room for go on before any job is admitted.
        """
        return not self._admitted.parked and self._admitted.fits(prepared)

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a sequence in; the next steps read its prompt."""
        if not self._admitted.fits(prepared):
            raise DecodeFailed(f"no room for another of {self._num_slots} slots", hint="ask has_room() before admit()")
        drafter = self._open_drafters.state(decision.drafter)
        sequence = Sequence(prepared, self._target, self._admitted.acquire(prepared))
        sequence.redraft(drafter, decision.num_draft_tokens)
        self._shadows.begin(sequence)
        self._admitted.running.append(sequence)

    def redraft(self, job_id: str, drafter: str | None, num_draft_tokens: int) -> None:
        """From its next round on a sequence drafts with `drafter`, at most `num_draft_tokens` tokens a round.

        None closes its drafter, k = 0 pauses it, another drafter closes the one before. Where memory is short for
        opening a drafter, the sequence decodes vanilla until the next call. Nothing happens if the job is not here.
        Raises DecodeFailed for a drafter that is not loaded.
        """
        wanted = self._open_drafters.state(drafter)
        if (sequence := self._admitted.find(job_id)) is not None:
            self._open_drafters.redraft(sequence, wanted, num_draft_tokens)

    def step(self) -> Step:
        """One round for every admitted sequence. Raises DecodeFailed, after which `abandon` empties the engine.

        No job is lost where memory runs out. If a drafter took the last of it, that drafter's sequences decode vanilla
        until the next `redraft`. Otherwise half of the sequences leave their slots and go on later. Nor is a job lost
        where a drafter raises: see `open_drafters`.
        """
        began = time.perf_counter()
        self._admitted.unpark()
        self._open_drafters.open_due(self._admitted.running, self.memory)
        batch = list(self._admitted.running)
        round_ = Round(self._target, self._open_drafters, self._cache, batch)
        try:
            with torch.inference_mode():
                round_.run()
        except Exception as error:
            if is_out_of_memory(error) and len(batch) > 1:
                self._make_room(batch)
            else:
                raise DecodeFailed(f"a step over {len(batch)} sequences failed: {reason_of(error)}") from error
        deltas = tuple(delta for sequence in batch if (delta := sequence.take_delta()))
        finished = [sequence for sequence in batch if sequence.finish_reason]
        for sequence in finished:
            self._drop(sequence)
        self._admitted.close_gaps()
        wall_s = time.perf_counter() - began
        for sequence in batch:
            sequence.charge(wall_s / len(batch), len(batch))
        generations = [sequence.generation() for sequence in finished]
        # Not timed, because the cost of a round must not include scoring.
        scored = [
            self._scored(sequence, generation) for sequence, generation in zip(finished, generations, strict=True)
        ]
        for sequence in finished:
            self._open_drafters.finished(sequence)
        self._shadows.advance()
        shadow_s = time.perf_counter() - began - wall_s
        report = round_.report(tuple(scored), deltas, wall_s)
        return replace(report, shadow_s=shadow_s, drafter_failures=self._open_drafters.take_failures())

    def cancel(self, job_id: str) -> bool:
        """Drop a sequence between two steps; False if it is not here."""
        if (sequence := self._admitted.find(job_id)) is None:
            return False
        self._drop(sequence)
        self._admitted.close_gaps()
        self._shadows.cancel(sequence)
        self._open_drafters.finished(sequence)
        return True

    def abandon(self) -> None:
        """Drop every sequence, and the caches' memory with them."""
        self._admitted.clear()
        self._shadows.clear()
        self._open_drafters.clear()

    def wake(self) -> None:
        """A step waits for nothing."""

    def close(self) -> None:
        """Drop every sequence."""
        self.abandon()

    def load(self) -> Load:
        """How full the engine is."""
        return Load(len(self._admitted), self._num_slots)

    def memory(self) -> CacheMemory:
        """Memory for keys and values, as it is now. Reads each device's state: 0.3 ms for a CPU."""
        drafts, own = self._open_drafters.draft_models, self._target.device
        held: Counter[torch.device] = Counter({own: self._cache.num_bytes})
        for draft in drafts.values():
            held[draft.device] += draft.num_cache_bytes
        return CacheMemory(
            free=available_bytes(own),
            held=held.pop(own),
            target_limit=self._max_cache_bytes,
            target_per_token=self._cache.shape.bytes_per_token,
            drafts_per_token={name: draft.bytes_per_token for name, draft in drafts.items()},
            positions_at_once=BLOCK,
            per_row=pass_bytes(self._target.model.vocabulary_size, 1),
            elsewhere={str(device): DeviceMemory(available_bytes(device), of) for device, of in held.items()},
            device_of={name: str(draft.device) for name, draft in drafts.items() if draft.device != own},
        )

    def unserved(self, jobs: SequenceOf[PreparedJob]) -> Mapping[str, str]:
        """Draft models whose context ends within what they read of every prompt, and drafters that have ended.

        Sampling settings they serve all.
        """
        shortest = min((len(job.token_ids) for job in jobs), default=0)
        short = {
            name: f"prompts of {shortest} tokens, as it reads {draft.context_length}"
            for name, draft in self._open_drafters.draft_models.items()
            if draft.state.num_read(shortest) >= draft.context_length
        }
        return {**short, **self._open_drafters.ended}

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of one target pass of that shape, or of that drafter's proposal for it."""
        if drafter is None:
            return measuring.measure_target_ms(self._target, batch, width, context, num_samples)
        return measuring.measure_draft_ms(self._drafters[drafter], batch, width, context, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds in which the target, or that drafter, reads a prompt it has never seen."""
        if drafter is None:
            return measuring.measure_target_prefill_ms(self._target, num_tokens, num_samples)
        return measuring.measure_draft_prefill_ms(self._drafters[drafter], num_tokens, num_samples)

    def _scored(self, sequence: Sequence, generation: Generation) -> Generation:
        shadows = (*generation.shadows, *self._shadows.end(sequence))
        with_shadows = replace(generation, shadows=shadows)
        if sequence.to_score is None:
            return with_shadows
        usable = {name: one for name, one in self._drafters.items() if name not in self._open_drafters.ended}
        return with_scores(with_shadows, sequence.to_score, usable, self._open_drafters.failed)

    def _drop(self, sequence: Sequence) -> None:
        self._admitted.drop(sequence)
        self._open_drafters.close(sequence)

    def _make_room(self, batch: list[Sequence]) -> None:
        """Make the younger half of the sequences leave their slots, because memory ran out."""
        for model in (self._target.model, *(draft.model for draft in self._open_drafters.draft_models.values())):
            model.give_back()
        for sequence in batch:
            # A drafter's state is unknown after memory ran out: it is opened again, and reads the text again.
            self._open_drafters.close(sequence)
        half = (len(batch) + 1) // 2
        self._admitted.park(batch[half:], most_running=half)
        try:
            self._cache.trim()
        except Exception as error:  # the cache is empty then, and the texts are read again
            if not is_out_of_memory(error):
                raise
