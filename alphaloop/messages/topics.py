"""The names of the topics of jobs. Pure.

`jobs.<task>` has the jobs of a task, `jobs.<task>.high` those that go before them, `jobs.<task>.retry.<delay>` those
that failed and wait to be tried again, and `jobs.<task>.dlq` the dead letters of all of these.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_TASK: Final = r"[a-z0-9][a-z0-9_-]*"
_HIGH: Final = ".high"
_DLQ: Final = ".dlq"
_MOST_TOPICS: Final = 1024  #: whose names are remembered, because each message asks again
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}

#: Exactly the topics that workers read; a task has no dot, so .dlq stays out.
JOBS_PATTERN: Final = rf"^jobs\.{_TASK}(\.high|\.retry\.[0-9]+[smh])?$"

_JOBS: Final = re.compile(rf"jobs\.({_TASK})(?:\.high)?")
_RETRY: Final = re.compile(rf"jobs\.({_TASK})\.retry\.([0-9]+)([smh])")


def jobs_topic(task: str) -> str:
    """The topic of a task's jobs."""
    return f"jobs.{task}"


def high_topic(task: str) -> str:
    """The topic of a task's jobs that go before its others."""
    return jobs_topic(task) + _HIGH


def retry_topic(task: str, delay_s: int) -> str:
    """The topic of a task's jobs that are tried again after `delay_s` seconds, with the delay in its largest unit."""
    unit = next(unit for unit in ("h", "m", "s") if delay_s % _UNITS_S[unit] == 0)
    return f"{jobs_topic(task)}.retry.{delay_s // _UNITS_S[unit]}{unit}"


def dlq_topic(topic: str) -> str:
    """The dead-letter topic of `topic`; all topics of a task share one."""
    task = task_read_from(topic)
    return f"{topic if task is None else jobs_topic(task)}{_DLQ}"


def task_read_from(topic: str) -> str | None:
    """The task of a topic that workers read jobs from, a retry topic included; None for every other topic."""
    match = _JOBS.fullmatch(topic) or _RETRY.fullmatch(topic)
    return match[1] if match else None


def task_of_failures(topic: str) -> str | None:
    """The task of a retry or dead-letter topic; None for every other topic."""
    source = topic.removesuffix(_DLQ)
    return task_read_from(source) if source != topic or _RETRY.fullmatch(topic) else None


@lru_cache(maxsize=_MOST_TOPICS)
def task_of(topic: str) -> str | None:
    """The task of a topic to which jobs are sent; None for every other topic, dead letters and retries included."""
    match = _JOBS.fullmatch(topic)
    return match[1] if match else None


def is_high(topic: str) -> bool:
    """Whether the jobs of this topic go before others of their task."""
    return topic.endswith(_HIGH)


@lru_cache(maxsize=_MOST_TOPICS)
def retry_delay_s(topic: str) -> int | None:
    """The delay of a retry topic in seconds; None for every other topic."""
    match = _RETRY.fullmatch(topic)
    return int(match[2]) * _UNITS_S[match[3]] if match else None
