"""Which prompts of a task's jobs become its probe set: as many of each length. Pure.

The task must have consented (`probes_from_traffic`), because a probe set keeps prompts for good.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from alphaloop.messages import Job, Purpose
from alphaloop.probe_sets import quarters, take_turns


def draw(jobs: Sequence[Job], num_prompts: int, seed: int) -> list[Mapping[str, Any]]:
    """The bodies of `num_prompts` different prompts of traffic, fewer where there are fewer.

    The quarters of the prompts by length take turns, each with prompts drawn by lot. The same jobs and seed draw the
    same.
    """
    bodies = {job.body.model_dump_json(): job.body for job in jobs if job.purpose is Purpose.TRAFFIC}
    strata = quarters(sorted(bodies, key=lambda body: (len(body), body)))
    rng = random.Random(seed)
    for stratum in strata:
        rng.shuffle(stratum)
    drawn = take_turns(strata)[:num_prompts]
    return [bodies[one].model_dump(mode="json", exclude_defaults=True, exclude_none=True) for one in drawn]
