"""How much a run of the stories sends. The defaults are the least with which each cause can be shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Jobs by part, and what a text may be long."""

    num_probes: int = 10  #: prompts of a task's probe set
    probe_tokens: int = 24
    max_tokens: int = 24
    before: int = 16  #: jobs of the drafted task under the first target
    settled: int = 110  #: jobs of the changed task, before it changes
    changed: int = 80  #: tales
    busy: int = 110  #: jobs of the busiest task, before it wears
    worn: int = 120  #: jobs of it while it does
    healed: int = 100  #: jobs of it after the restart
    others: int = 8  #: jobs of each other task beside them
    target_steps: int = 16  #: training steps that make the first target
    target_rate: float = 2e-4
