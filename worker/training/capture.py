"""The prompts that a refresh trains and judges with: jobs that lie in Kafka, of tasks that consent to it.

Nothing is kept of them but the folder of the refresh, which goes when the refresh ends. A prompt that a probe set has
is left out, because a probe measures what no drafter has seen. Whether a prompt is held out follows from its hash, so
the same prompt is on the same side in every refresh: a draft is never judged on what its parent was trained with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from alphaloop.client.arrivals import everything_on
from alphaloop.errors import AlphaloopError, MessageError
from alphaloop.files import replace_file
from alphaloop.kafka.topics import cluster_id, topic_lister
from alphaloop.messages import Job, Origin, Purpose, parse_job
from alphaloop.messages.topics import high_topic, jobs_topic
from alphaloop.probes import DEFAULT_MAX_TOKENS, prompt_id_of
from alphaloop.settings import Settings

#: The newest jobs of each partition that are read.
NEWEST: Final = 2000
#: Prompts of one refresh: the target writes a text for each, and texts take most of the time.
MAX_PROMPTS: Final = 400
_HELD_OUT_EVERY: Final = 5


class TooFewPrompts(AlphaloopError):
    """Too few prompts to train and judge with."""


@dataclass(frozen=True, slots=True)
class TakenPrompt:
    """The prompt of a job."""

    job_id: str
    prompt_id: str
    task: str
    body: dict[str, Any]

    @property
    def is_held_out(self) -> bool:
        """A fifth is, by hash."""
        return int(self.prompt_id, 16) % _HELD_OUT_EVERY == 0


def take_prompts(settings: Settings, probe_prompts: Collection[str]) -> list[TakenPrompt]:
    """At most MAX_PROMPTS different prompts, as many of each task, in the order of their hashes.

    `probe_prompts` has the ids that are left out. An id follows from how many tokens a probe asks for too: those of
    the default and of every probe that lies beside the jobs are tried. Raises ConfigError for no task that consents,
    BrokerError.
    """
    jobs = list(_traffic(settings))
    lengths = {DEFAULT_MAX_TOKENS} | {
        job.body.max_tokens for job in jobs if job.purpose is not Purpose.TRAFFIC and job.body.max_tokens is not None
    }
    by_task: defaultdict[str, dict[str, TakenPrompt]] = defaultdict(dict)
    for job in jobs:
        if job.purpose is not Purpose.TRAFFIC or job.body_ref is not None:
            continue
        if job.body.model not in (None, settings.models.target.name):
            continue
        body = job.body.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        if any(prompt_id_of(body, length) in probe_prompts for length in lengths):
            continue
        taken = _taken(job.job_id, job.task, body)
        by_task[job.task][taken.prompt_id] = taken
    ordered = [[prompts[each] for each in sorted(prompts)] for _, prompts in sorted(by_task.items())]
    return [prompt for turn in zip_longest(*ordered) for prompt in turn if prompt is not None][:MAX_PROMPTS]


def refuse_few(prompts: Sequence[TakenPrompt], min_texts: int) -> None:
    """Raise TooFewPrompts for fewer than `min_texts`, and where none is held out or none is not."""
    num_held_out = sum(prompt.is_held_out for prompt in prompts)
    if len(prompts) < min_texts or not 0 < num_held_out < len(prompts):
        raise TooFewPrompts(
            f"too few prompts: expected {min_texts} of tasks with train_from_traffic, some of them held out, found "
            f"{len(prompts)}, {num_held_out} of them held out"
        )


def write_prompts(prompts: Iterable[TakenPrompt], file: Path) -> None:
    """As JSON lines that `alphaloop enqueue` takes."""
    lines = (json.dumps({"job_id": p.job_id, "task": p.task, "body": p.body}) for p in prompts)
    replace_file(file, "".join(f"{line}\n" for line in lines), mode=0o600)


def read_taken(file: Path) -> list[TakenPrompt]:
    """What `write_prompts` wrote."""
    jobs = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [_taken(job["job_id"], job["task"], job["body"]) for job in jobs]


def _taken(job_id: str, task: str, body: dict[str, Any]) -> TakenPrompt:
    return TakenPrompt(job_id, prompt_id_of(body, DEFAULT_MAX_TOKENS), task, body)


def _traffic(settings: Settings) -> Iterator[Job]:
    """The newest jobs of the tasks that consent, probes included; messages that are no jobs are passed over."""
    target, bindings = settings.models.target.name, settings.bindings
    tasks = {
        topic: name
        for name, task in settings.tasks.items()
        if task.train_from_traffic and bindings.is_of(target, name)
        for topic in (jobs_topic(name), high_topic(name))
    }
    if not tasks:
        raise TooFewPrompts(
            "too few prompts: no task of this target has train_from_traffic = true",
            hint="set it for tasks whose prompts drafts may be trained with",
        )
    cluster = cluster_id(settings.kafka)
    for topic in sorted(tasks.keys() & set(topic_lister(settings.kafka)())):
        for record in everything_on(settings.kafka, [topic], newest=NEWEST):
            with suppress(MessageError):
                yield parse_job(
                    record.value, Origin(cluster, topic, record.partition, record.offset), task=tasks[topic]
                )
