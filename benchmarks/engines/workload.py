"""The workload: blocks of one task and one load, tasks in turn, load 1, then 8, then 1 again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

from alphaloop.demo_prompts import harvest
from benchmarks.whole.jobs import PromptJob, read_folder

LOADS: Final = (1, 8, 1)
_HARVESTED: Final = 24  #: prompts a task, where no folder is given


@dataclass(frozen=True, slots=True)
class Block:
    """Jobs of one task that are sent one behind the other, `load` of them under way at a time."""

    number: int
    task: str
    load: int
    prompts: tuple[str, ...]

    def jobs(self, played_as: str, *, max_tokens: int) -> list[PromptJob]:
        """The same prompts for every policy, under names of its own."""
        return [
            PromptJob(f"{played_as}-{self.number:04d}-{place:03d}", self.task, prompt, max_tokens)
            for place, prompt in enumerate(self.prompts)
        ]


def read_prompts(folder: Path | None, *, seed: int, max_characters: int) -> dict[str, list[str]]:
    """Prompts by task: those of a folder of TASK.jsonl files, else eight tasks from this Python's own sources.

    Tasks without a prompt that is short enough are left out. Raises ValueError where no task has one.
    """
    if folder is None:
        found = {t: list(p) for t, p in harvest(seed, num_traffic=_HARVESTED, num_probes=0).traffic.items()}
    else:
        found = read_folder(folder)
    short = {task: [one for one in prompts if len(one) <= max_characters] for task, prompts in found.items()}
    fitting = {task: prompts for task, prompts in short.items() if prompts}
    if not fitting:
        raise ValueError(f"expected prompts of at most {max_characters} characters, found none")
    return fitting


def draw_blocks(
    prompts: Mapping[str, Sequence[str]], *, num_blocks: int, jobs_each: Mapping[int, int], seed: int
) -> list[Block]:
    """`num_blocks` of each phase. A prompt comes again when all of its task were used."""
    rng = random.Random(seed)
    sources = {task: cycle(rng.sample(list(found), len(found))) for task, found in sorted(prompts.items())}
    tasks = cycle(sorted(sources))
    blocks: list[Block] = []
    for load in LOADS:
        for _ in range(num_blocks):
            task = next(tasks)
            taken = tuple(next(sources[task]) for _ in range(jobs_each[load]))
            blocks.append(Block(len(blocks), task, load, taken))
    return blocks
