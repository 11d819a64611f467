"""The settings of the policy. configs/worker.toml sets them, docs/concepts/deciding.md explains each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """`[policy]` of the settings, as the pure policy takes it."""

    explore_share: float = 0.02  #: of all tokens, what exploration may be expected to cost
    #: share of speculating tasks' device time that switchback slices decode vanilla: the speed-up is measured so
    control_share: float = 0.02
    first_jobs: float = 8.0  #: first credit of a new task, in jobs
    min_jobs: float = 4.0  #: a drafter with fewer is cold
    min_speedup: float = 1.01  #: expected gain over vanilla below which speculation is not worth its risk
    switch_gain: float = 0.02  #: a rival that is expected to be so much faster is taken, however uncertain that is
    horizon_jobs: float = 300.0  #: jobs over which the result of a trial pays back
    change_jobs: float = 500.0  #: prior for the jobs between two changes of a task
    short_output_tokens: float = 20.0
    prior_alpha: float = 0.5  #: of a draft model that no task has used
    prior_spread: float = 1.0  #: standard deviation between tasks, in logits, before tasks were compared
