"""The engine over transformers: prefill, then rounds shared by all running sequences.

A round: every sequence's drafts are laid side by side with the token its cache lacks, padded to the widest; one pass
of the target reads them; each row keeps its accepted drafts and the target's next token. Vanilla is a round of width 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from alphaloop.errors import DecodeFailed
from alphaloop.goodput import DrafterState
from alphaloop.messages import Job
from alphaloop.policy import Decision
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.measuring import (
    measure_draft_ms,
    measure_draft_prefill_ms,
    measure_target_ms,
    measure_target_prefill_ms,
)
from worker.decoding.prompts import prepare_job
from worker.decoding.sampling import probabilities, uniforms
from worker.decoding.sequence import Sequence
from worker.decoding.target import Target
from worker.decoding.verify import Verdict, verify_deterministic, verify_greedy
from worker.engine import EngineIdentity, Load, PreparedJob, Sampling, Step


class TransformersEngine:
    """`worker.engine.Engine` over a transformers model. Not thread-safe: one thread owns it."""

    def __init__(self, target: Target, drafters: Mapping[str, LookupDrafter], *, num_slots: int) -> None:
        self._target = target
        self._drafters = dict(drafters)
        self._num_slots = num_slots
        self._cache = target.new_cache(num_slots)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""
        return self._target.identity

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """The drafters loaded here."""
        return tuple(drafter.state for drafter in self._drafters.values())

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Tokenize; raises PromptTooLong or InvalidField when the job cannot be decoded here."""
        identity = self._target.identity
        return prepare_job(self._target.tokenizer, identity.target, identity.context_length, job, sampling)

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a sequence in; its prompt is read by the next step."""
        if not self.load().num_free:
            raise DecodeFailed(f"all {self._num_slots} slots are taken", hint="look at load() before admit()")
        drafter = None
        if decision.drafter is not None:
            if decision.drafter not in self._drafters:
                raise DecodeFailed(f"expected a drafter of {sorted(self._drafters)}, found {decision.drafter!r}")
            drafter = self._drafters[decision.drafter]
        slot = self._cache.acquire()
        self._waiting.append(Sequence(prepared, self._target, slot, drafter, decision.num_draft_tokens))

    def step(self) -> Step:
        """One round for every admitted sequence: a new one's is its prefill, the others share a pass."""
        began = time.perf_counter()
        newcomers, runners = self._waiting, list(self._running)
        self._waiting, self._running = [], [*runners, *newcomers]
        try:
            with torch.inference_mode():
                width = self._round(runners) if runners else 0
                for sequence in newcomers:
                    width = max(width, self._prefill(sequence, len(newcomers) + len(runners)))
        except Exception as error:  # whatever it is, it must not end the worker
            raise DecodeFailed(f"a step over {len(self._running)} sequences failed: {error}") from error
        deltas = tuple(delta for sequence in self._running if (delta := sequence.take_delta()))
        finished = [sequence for sequence in self._running if sequence.finish_reason]
        for sequence in finished:
            self._drop(sequence)
        return Step(
            finished=tuple(sequence.generation() for sequence in finished),
            deltas=deltas,
            batch=len(newcomers) + len(runners),
            width=width,
            wall_s=time.perf_counter() - began,
        )

    def cancel(self, job_id: str) -> bool:
        """Drop a sequence between two steps; False if it is not here."""
        for sequence in [*self._waiting, *self._running]:
            if sequence.job_id == job_id:
                self._drop(sequence)
                return True
        return False

    def abandon(self) -> None:
        """Drop every sequence, and the cache's memory with them."""
        self._waiting, self._running = [], []
        self._cache.clear()

    def load(self) -> Load:
        """How full the engine is."""
        return Load(len(self._waiting) + len(self._running), self._num_slots)

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of one target pass of that shape, or of that drafter's proposal for it."""
        if drafter is None:
            return measure_target_ms(self._target, batch, width, context, num_samples)
        return measure_draft_ms(self._drafters[drafter], batch, width, context, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds in which the target, or that drafter, reads a prompt it has never seen."""
        if drafter is None:
            return measure_target_prefill_ms(self._target, num_tokens, num_samples)
        return measure_draft_prefill_ms(self._drafters[drafter], num_tokens, num_samples)

    def _prefill(self, sequence: Sequence, batch: int) -> int:
        began = time.perf_counter()
        logits = self._target.prefill(self._cache, sequence.slot, sequence.prompt)
        (verdict,) = _verify([sequence], logits[:, None], _no_drafts(logits), [0])
        sequence.take([verdict.next_token], 0)
        sequence.charge(time.perf_counter() - began, batch)
        return len(sequence.prompt)

    def _round(self, runners: list[Sequence]) -> int:
        began = time.perf_counter()
        drafts = [sequence.propose() for sequence in runners]
        width = 1 + max(map(len, drafts))
        columns = [
            [sequence.output[-1], *draft, *[0] * (width - 1 - len(draft))]
            for sequence, draft in zip(runners, drafts, strict=True)
        ]
        token_ids = torch.tensor(columns, device=self._target.device)
        logits = self._target.logits(self._cache, [sequence.slot for sequence in runners], token_ids)
        verdicts = _verify(runners, logits, token_ids[:, 1:], [len(draft) for draft in drafts])
        for sequence, draft, verdict in zip(runners, drafts, verdicts, strict=True):
            self._cache.lengths[sequence.slot] += verdict.num_accepted + 1
            sequence.take([*draft[: verdict.num_accepted], verdict.next_token], len(draft))
        seconds = time.perf_counter() - began
        for sequence in runners:
            sequence.charge(seconds / len(runners), len(runners))
        return width

    def _drop(self, sequence: Sequence) -> None:
        (self._waiting if sequence in self._waiting else self._running).remove(sequence)
        self._cache.release(sequence.slot)


def _verify(runners: list[Sequence], logits: Tensor, drafts: Tensor, num_proposed: list[int]) -> list[Verdict]:
    """One verdict a row of `logits` [batch, width, vocabulary] and `drafts` [batch, width - 1]."""
    verdicts = verify_greedy(_best_tokens(logits), drafts, torch.tensor(num_proposed, device=drafts.device))
    for row, sequence in enumerate(runners):
        if sequence.generator is not None:
            k = num_proposed[row]
            p = probabilities(logits[row, : k + 1], sequence.sampling)
            verdicts[row] = verify_deterministic(p, drafts[row, :k], uniforms(sequence.generator, k + 1, p.device))
    return verdicts


def _no_drafts(logits: Tensor) -> Tensor:
    return torch.empty((len(logits), 0), dtype=torch.long, device=logits.device)


def _best_tokens(logits: Tensor) -> Tensor:
    """The argmax of each position; raises RuntimeError where logits are not finite, as nothing sampled from them is."""
    values, tokens = logits.max(dim=-1)
    if not bool(values.isfinite().all()):
        raise RuntimeError("the target returned logits that are not finite")
    return tokens
