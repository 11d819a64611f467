"""Real prompts as the jobs that every contestant gets: read from a folder, drawn by a seed, and how they are forced."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaloop.cli.demo import harvest
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.messages import Job, Mode, Origin, encode_job, parse_job
from alphaloop.settings.models import ModelSettings

MIN_TOKENS, MAX_TOKENS = 16, 192
#: A task of configs/tasks.toml without prompts in the folder: warm-up jobs are sent under its name.
WARM_UP_TASK = "docstring"
_HARVESTED = 24  #: prompts a task, where no folder is given


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt with its output limit."""

    job_id: str
    task: str
    prompt: str
    max_tokens: int

    def as_job(self, *, decoding: str = "auto") -> Job:
        """The job that `alphaloop enqueue` would make of the line; the prompt becomes one user message."""
        line: dict[str, Any] = {
            "job_id": self.job_id,
            "task": self.task,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "decoding": decoding,
        }
        return parse_job(json.dumps(line).encode(), Origin("benchmark", f"jobs.{self.task}", 0, 0), task=self.task)

    def encoded(self, *, decoding: str = "auto") -> bytes:
        """The message on Kafka."""
        return encode_job(self.as_job(decoding=decoding))


def without_prefix_cache(models: ModelSettings) -> ModelSettings:
    """The same models without a prefix cache: where prompts come again, every run reads them."""
    return models.model_copy(update={"target": models.target.model_copy(update={"max_prefix_cache_bytes": 0})})


def forced(drafter: str | None = None, num_draft_tokens: int = 0, *, revision: str = "benchmark") -> Decision:
    """A decision that the benchmark makes; vanilla without a drafter."""
    if drafter is None:
        return Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "benchmark")
    return Decision(Mode.SPECULATIVE, drafter, revision, num_draft_tokens, Reason.FORCED, "benchmark")


@dataclass(frozen=True, slots=True)
class Jobs:
    """What is sent in one run, in this order: warm-up and history are not measured."""

    warm_up: tuple[PromptJob, ...]
    history: tuple[PromptJob, ...]
    measured: tuple[PromptJob, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of all jobs, sorted."""
        return tuple(sorted({job.task for job in (*self.warm_up, *self.history, *self.measured)}))


def read_folder(folder: Path) -> dict[str, list[str]]:
    """The prompts of each TASK.jsonl by task. A prompt that two tasks hold stays with the first one.

    Raises ValueError where the folder has no such file, or a line has no prompt.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"expected TASK.jsonl files in {folder}, found none")
    seen: set[str] = set()
    prompts: dict[str, list[str]] = {}
    for file in files:
        found = prompts.setdefault(file.stem, [])
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            prompt = json.loads(line).get("prompt")
            if not isinstance(prompt, str):
                raise ValueError(f"{file.name}:{number}: expected a prompt")
            if prompt not in seen:
                seen.add(prompt)
                found.append(prompt)
    return prompts


def prompts_of(folder: Path | None, *, seed: int, max_characters: int) -> dict[str, list[str]]:
    """Prompts by task: those of a folder of TASK.jsonl files, else eight tasks from this Python's own sources.

    Tasks without a prompt that is short enough are left out. Raises ValueError where no task has one.
    """
    if folder is None:
        found = {t: list(p) for t, p in harvest(seed, num_traffic=_HARVESTED, num_probes=0).traffic.items()}
    else:
        found = read_folder(folder)
    fitting = {task: short for task, its in found.items() if (short := [p for p in its if len(p) <= max_characters])}
    if not fitting:
        raise ValueError(f"expected prompts of at most {max_characters} characters, found none")
    return fitting


def sample(prompts: Sequence[str], num: int, *, seed: int) -> list[str]:
    """`num` of them, or all there are, drawn by `seed`."""
    return random.Random(seed).sample(list(prompts), min(num, len(prompts)))


def shares(available: Mapping[str, int], num: int) -> dict[str, int]:
    """How many of `num` jobs each task gives: equal shares, and the rest from tasks that have prompts left.

    Raises ValueError where all tasks together have fewer than `num`.
    """
    if sum(available.values()) < num:
        raise ValueError(f"expected at least {num} different prompts, found {sum(available.values())}")
    taken = dict.fromkeys(available, 0)
    while (left := num - sum(taken.values())) > 0:
        open_tasks = sorted(task for task in available if taken[task] < available[task])
        share = max(1, left // len(open_tasks))
        for task in open_tasks[:left]:
            taken[task] += min(share, available[task] - taken[task])
    return taken


def draw_jobs(prompts: Mapping[str, Sequence[str]], *, num: int, num_history: int, num_warm_up: int, seed: int) -> Jobs:
    """Draw jobs with different prompts, spread over the tasks and mixed.

    Limits are uniform from MIN_TOKENS to MAX_TOKENS. Raises ValueError where there are too few prompts.
    """
    rng = random.Random(seed)
    mixed = {task: rng.sample(list(found), len(found)) for task, found in prompts.items()}

    def take(num_jobs: int) -> list[tuple[str, str]]:
        counts = shares({task: len(found) for task, found in mixed.items()}, num_jobs)
        taken = [(task, mixed[task].pop()) for task, count in counts.items() for _ in range(count)]
        rng.shuffle(taken)
        return taken

    def jobs(name: str, taken: Sequence[tuple[str, str]]) -> tuple[PromptJob, ...]:
        return tuple(
            PromptJob(f"{name}-{number:04d}", task, prompt, rng.randint(MIN_TOKENS, MAX_TOKENS))
            for number, (task, prompt) in enumerate(taken)
        )

    measured = jobs("job", take(num))
    history = jobs("history", take(num_history))
    warm_up = tuple(
        PromptJob(f"warm-up-{number:04d}", WARM_UP_TASK, prompt, MIN_TOKENS)
        for number, (_, prompt) in enumerate(take(num_warm_up))
    )
    return Jobs(warm_up, history, measured)
