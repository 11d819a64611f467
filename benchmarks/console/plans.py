"""The tasks of a made-up system, and the machines that serve them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

HOST, DEVICE, ENGINE = "gpu-node-1", "NVIDIA H100 80GB HBM3", "transformers-5.23.0/bfloat16"
TARGET_NAME: Final = "SmolLM2-1.7B-Instruct"
DRAFTER: Final = "lookup"
TARGET, DRAFT = (hashlib.sha256(name).hexdigest()[:40] for name in (b"target", b"draft"))
WORKERS: Final = ("gpu-node-1-4711-9f1c22ab", "gpu-node-2-4712-03be91d0")
RUNNING: Final = 6
#: Of one sequence, without speculation.
ROUND_S: Final = 0.02
#: How long ago the acceptance of a task fell.
FALLEN_FOR: Final = timedelta(hours=2, minutes=40)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A task: its acceptance, whether it speculates, and how many times faster that is."""

    task: str
    alpha: float
    speculates: bool
    tokens_per_round: float
    alpha_lately: float | None = None  #: since the drift that findings.py tells of

    def alpha_at(self, age: timedelta) -> float:
        """Of jobs that were decoded so long ago."""
        return self.alpha_lately if self.alpha_lately is not None and age < FALLEN_FOR else self.alpha


def plans(num_tasks: int) -> list[TaskPlan]:
    """The tasks of the pictures, and as many others as are asked for."""
    named = [
        TaskPlan("code", 0.74, True, 2.6, 0.63),
        TaskPlan("summarization", 0.62, True, 2.1),
        TaskPlan("sql", 0.81, True, 3.1),
        TaskPlan("translation", 0.31, False, 1.3),
        TaskPlan("question_answering", 0.44, True, 1.55),
        TaskPlan("creative_writing", 0.18, False, 1.2),
    ]
    rng = random.Random(num_tasks)
    others = [
        TaskPlan(f"customer-{number:04d}", alpha := rng.uniform(0.1, 0.9), alpha > 0.4, 1 + 2 * alpha)
        for number in range(num_tasks - len(named))
    ]
    return (named + others)[:num_tasks]
