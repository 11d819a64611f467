"""What a block's batches leave as evidence: `EvidenceSums.of_job` of all their jobs, added up, a block at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from alphaloop.deciding.evidence import EvidenceSums
from benchmarks.policy.rounds import Counts
from benchmarks.policy.stream import Block


@dataclass(frozen=True, slots=True)
class BlockEvidence:
    """Sums by batch, by name: all rules that ask share them."""

    num_jobs: int
    numbers: dict[str, list[float]]
    by_position: dict[str, list[list[float]]]

    @classmethod
    def of(cls, block: Block, counts: Counts, num_draft_tokens: int) -> BlockEvidence:
        """The evidence of every batch at this draft length."""
        tokens = block.needed.astype(np.float64)
        prompts = np.array([cell.prompt_tokens for cell in block.cells], dtype=np.float64)[block.cell_of]
        rounds, accepts, trials = (x.astype(np.float64) for x in (counts.rounds, counts.accepts, counts.trials))
        # Rounds accepted through the position before; a run of k has that chance at each of its positions.
        chances = np.concatenate([rounds[..., None], accepts], axis=-1)[..., :num_draft_tokens]
        chances = np.maximum(chances, trials)
        numbers = {
            "rounds": rounds,
            "offered": rounds - counts.empty,
            "tokens": tokens - 1,
            "output_tokens": tokens,
            "output_tokens_sq": tokens**2,
            "prompt_tokens": np.broadcast_to(prompts[:, None], tokens.shape),
            "texts": np.ones_like(tokens),
            "ends": np.ones_like(tokens),
        }
        by_position = {
            "proposed": counts.proposed,
            "chances": chances,
            "trials": trials,
            "accepts": accepts,
            "trials_w2": trials**2,
            "accepts_w2": accepts**2,
            "accepts_trials_w2": accepts * trials,
            "chances_w2": chances**2,
            "accepts_chances_w2": accepts * chances,
        }
        return cls(
            block.shape[1],
            {name: values.sum(axis=1).tolist() for name, values in numbers.items()},
            {name: values.sum(axis=1).astype(np.float64).tolist() for name, values in by_position.items()},
        )

    def batch(self, index: int, now: datetime) -> EvidenceSums:
        """Of one batch, decoded now."""
        sums: dict[str, Any] = {name: values[index] for name, values in self.numbers.items()}
        sums |= {name: tuple(values[index]) for name, values in self.by_position.items()}
        return EvidenceSums(now, jobs=float(self.num_jobs), jobs_w2=float(self.num_jobs), **sums)
