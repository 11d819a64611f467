"""The jobs and the probe sets of a story, made of its prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, cycle

from alphaloop.messages import Body, Job
from alphaloop.probes import new_probe_set
from alphaloop.store.probes import ProbeSetStore
from tests.stories.prompts import StoryPrompts
from tests.stories.size import Size


@dataclass(frozen=True, slots=True)
class Asking:
    """Makes jobs, each under a name of its own."""

    seed: int
    size: Size
    _numbers: Iterator[int] = field(default_factory=count)

    def jobs(self, traffic: Mapping[str, Iterator[str]], numbers: Mapping[str, int]) -> list[Job]:
        """So many jobs of each task, in an order of the seed."""
        jobs = [
            Job(
                job_id=f"story-{self.seed}-{next(self._numbers):05d}",
                task=task,
                body=Body.model_validate(_body(next(traffic[task]), self.size.max_tokens)),
            )
            for task, number in numbers.items()
            for _ in range(number)
        ]
        random.Random(f"{self.seed} {jobs[0].job_id}").shuffle(jobs)
        return jobs

    def register_probes(self, store: ProbeSetStore, prompts: StoryPrompts, tasks: Sequence[str]) -> None:
        """A probe set of each of these tasks."""
        for task in tasks:
            bodies = [_body(prompt, self.size.probe_tokens) for prompt in prompts.probes[task]]
            made = new_probe_set(task, bodies, num_draft_tokens=3, max_tokens=self.size.probe_tokens)
            store.register(made, datetime.now(UTC))

    def endless(self, prompts: Sequence[str]) -> Iterator[str]:
        """The prompts in an order of the seed, and again when all were given."""
        return cycle(random.Random(self.seed).sample(list(prompts), len(prompts)))


def _body(prompt: str, max_tokens: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0.0}
