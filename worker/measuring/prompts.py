"""The user's own prompts: from a file of JSON lines to jobs that the engine has tokenized.

A line is read by the contract of the queue (alphaloop.job_lines) with three exceptions, because these prompts may have
been written for another system: the task may be missing or unknown, `model` is ignored, and so are the fields that say
when or how a job is decoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from alphaloop.commands import MeasureOrder
from alphaloop.errors import ConfigError, MessageError
from alphaloop.files import reading
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.messages import Purpose
from alphaloop.settings import Settings, TaskSettings
from worker.engine import Engine, PreparedJob
from worker.intake.validation import sampling_of

MIN_PROMPTS: Final = 10
FEW_PROMPTS: Final = 30
#: From here on a file is traffic, not a sample of it.
MAX_FILE_BYTES: Final = 256 << 20
NO_TASK: Final = "prompts"
NUM_SHOWN: Final = 10


def read_lines(order: MeasureOrder, settings: Settings, say: Callable[[str], object] | None = None) -> list[JobLine]:
    """Every job of the order's file, `-` being standard input. Raises ConfigError with the first wrong lines."""
    task, file = order.task, order.prompts
    if task is not None and settings.tasks and task not in settings.tasks:
        raise ConfigError(f"--task: expected one of {', '.join(sorted(settings.tasks))}, found {task!r}")
    given = {"max_tokens": order.max_tokens, "temperature": order.temperature}
    overrides = Overrides(
        # Whatever model a line was written for, the configured target is what is measured.
        body={"model": None, **{name: value for name, value in given.items() if value is not None}},
        # Not traffic: a drafter that remembers earlier results would find each text in the one before.
        top={"purpose": Purpose.PROBE.value, "deadline": None, "decoding": "auto"},
    )
    reader = JobReader(settings.model_copy(update={"tasks": {}}), task=task or NO_TASK, overrides=overrides)
    with reading(file, max_bytes=MAX_FILE_BYTES, say=say) as source:
        items = list(reader.read(source.lines, source.name))
    if wrong := [item for item in items if isinstance(item, BadLine)]:
        raise _refusal([(bad.where, bad.error) for bad in wrong], len(items))
    return [item for item in items if isinstance(item, JobLine)]


def draw(lines: Sequence[JobLine], at_most: int, rng: random.Random) -> tuple[list[JobLine], list[str]]:
    """Distinct prompts, `at_most` of them at random, and what a person should know of it. Raises ConfigError.

    The same body twice is one prompt: bounds rest on prompts being independent of each other.
    """
    distinct = list({line.job.body.model_dump_json(): line for line in reversed(lines)}.values())[::-1]
    notes = []
    if len(distinct) < len(lines):
        notes.append(f"lines that repeat an earlier prompt, left out: {len(lines) - len(distinct)}")
    if len(distinct) < MIN_PROMPTS:
        raise ConfigError(
            f"expected at least {MIN_PROMPTS} different prompts, found {len(distinct)}",
            hint="30 to 100 of the prompts that you serve tell whether speculation pays for them",
        )
    if len(distinct) > at_most:
        notes.append(f"{at_most} of {len(distinct)} prompts, drawn at random; --num takes more")
        distinct = rng.sample(distinct, at_most)
    elif len(distinct) < FEW_PROMPTS:
        notes.append(f"{len(distinct)} prompts leave wide bounds; 30 to 100 tell more")
    return distinct, notes


def prepare(lines: Sequence[JobLine], engine: Engine, tasks: Mapping[str, TaskSettings]) -> list[PreparedJob]:
    """Every job tokenized, with its task's settings where it says nothing itself. Raises ConfigError."""
    prepared: list[PreparedJob] = []
    wrong: list[tuple[str, MessageError]] = []
    for number, line in enumerate(lines):
        # Draws follow from the job_id, so it must not change from run to run.
        job = line.job.model_copy(update={"job_id": f"measured-{number}"})
        try:
            task = engine.sampling_defaults.applied_to(tasks.get(job.task, TaskSettings()))
            prepared.append(engine.prepare(job, sampling_of(job, task)))
        except MessageError as error:
            error.field = line.named_in_line(error.field)
            wrong.append((line.where, error))
    if wrong:
        raise _refusal(wrong, len(lines))
    return prepared


def _refusal(wrong: Iterable[tuple[str, MessageError]], num_lines: int) -> ConfigError:
    problems = [
        f"{where}: {error.field}: {error.message}" if error.field else f"{where}: {error.message}"
        for where, error in wrong
    ]
    shown = "\n  ".join(problems[:NUM_SHOWN])
    more = f"\n  and {len(problems) - NUM_SHOWN} more" if len(problems) > NUM_SHOWN else ""
    return ConfigError(
        f"{len(problems)} of {num_lines} prompts cannot be measured:\n  {shown}{more}",
        hint='a line is {"prompt": …}, a job, or a line of an OpenAI batch file; see docs/guides/enqueue.md',
    )
