"""A simulated round as an engine's step, and the true speed-up of simulated rounds."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.policy.slot_round import SlotRound
from worker.engine import Step


@dataclass(slots=True)
class Truth:
    """Sequence-milliseconds of a subject's treatment rounds, and of vanilla rounds for the same tokens there."""

    vanilla_ms: float = 0.0
    treatment_ms: float = 0.0

    def add(self, other: Truth) -> None:
        """Of other rounds too."""
        self.vanilla_ms += other.vanilla_ms
        self.treatment_ms += other.treatment_ms

    @property
    def speedup(self) -> float:
        """What the experiment is to find."""
        return self.vanilla_ms / self.treatment_ms


def step_of(done: SlotRound) -> Step:
    """The round as an engine tells it. Prompts are told of, so the costs leave the round out as a worker's do."""
    num_running, draft_ms = len(done.running), done.draft_ms + done.draft_read_ms
    widest = max(one.setting.num_draft_tokens for one in done.running)
    return Step(
        finished=(),
        deltas=(),
        batch=num_running,
        width=widest + 1,
        wall_s=done.ms / 1000,
        draft_s=draft_ms / 1000,
        verify_s=(done.ms - draft_ms) / 1000,
        num_positions=num_running + sum(done.num_offered),
        context=round(mean_context(done)),
        num_prefill_tokens=done.num_read,
        num_draft_prefill_tokens=done.num_draft_read,
        tokens_by_job={str(one.job.number): n for one, n in zip(done.running, done.num_tokens, strict=True)},
        proposed_by_job={str(one.job.number): n for one, n in zip(done.running, done.num_offered, strict=True) if n},
        drafter=next(iter(done.drafters)) if len(done.drafters) == 1 else None,
    )


def mean_context(done: SlotRound) -> float:
    """Tokens of context a sequence."""
    tokens = [one.job.cell.prompt_tokens + one.job.needed - one.left for one in done.running]
    return sum(tokens) / len(tokens)
