"""The prompts of a new probe set: from a file, or from the jobs that lie in Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from alphaloop.cli.screen import note
from alphaloop.cli.sending import report_wrong
from alphaloop.errors import AlphaloopError, ConfigError, MessageError
from alphaloop.files import reading
from alphaloop.job_lines import BadLine, JobReader
from alphaloop.letters.reading import read_letters
from alphaloop.messages import Job, Origin, parse_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import Settings


def read_file(settings: Settings, file: Path, task: str) -> list[Job]:
    """Every prompt of a JSONL file, or an error: a set with a prompt missing would be another set."""
    with reading(file, say=note) as source:
        items = list(JobReader(settings, task=task).read(source.lines, source.name))
    wrong = [item for item in items if isinstance(item, BadLine)]
    jobs = [item.job for item in items if not isinstance(item, BadLine)]
    report_wrong(wrong)
    if strangers := {job.task for job in jobs} - {task}:
        raise AlphaloopError(f"expected prompts of {task}, found some of {', '.join(sorted(strangers))}")
    if wrong or not jobs:
        raise AlphaloopError(f"nothing was registered: {len(wrong)} wrong lines, {len(jobs)} good ones")
    return jobs


def read_traffic(settings: Settings, task: str, newest: int) -> Iterator[Job]:
    """The newest jobs of a task, so many of each partition. Raises ConfigError without the task's consent.

    Messages that are no jobs are passed over.
    """
    if task not in settings.tasks:
        raise ConfigError(f"expected one of the tasks {', '.join(sorted(settings.tasks))}, found {task}")
    if not settings.tasks[task].probes_from_traffic:
        raise ConfigError(
            f"tasks.{task}.probes_from_traffic: expected true, found false",
            hint="set it if prompts of this task may be stored and decoded again; else register a file of prompts",
        )
    topic = jobs_topic(task)
    for letter in read_letters(settings.kafka, [topic], newest=newest):
        record = letter.record
        with suppress(MessageError):
            yield parse_job(record.value, Origin("", topic, record.partition, record.offset), task=task)


def bodies_of(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """The bodies as they are stored, in OpenAI's form."""
    return [job.body.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for job in jobs]
