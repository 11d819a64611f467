"""What is sent in the night: jobs of three tasks by a seed, two batches in the evening, and their prompts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.week.world import Stream

#: Jobs of the first drain are one batch, because jobs without a batch would count as arrivals of a second.
WARM_UP: Final = "warm-up"
LEAST_TOKENS: Final = 8
MOST_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Evening:
    """When a batch comes and is due, as shares of the night."""

    comes: float
    due: float


#: `share` is of the jobs. Dated jobs have the highest priority, in whose band slack decides: priorities age in real
#: minutes, of which a night of minutes has too few.
CHAT: Final = Stream("chat", 0.2, 24, 0.4, 0.0, (10.0, 30.0), is_high=True, priority=100)
CODE: Final = Stream("code", 0.2, 40, 0.4, 0.0, (15.0, 120.0), priority=100)
CODE_BATCH: Final = Stream("code", 0.15, 40, 0.4, 0.0, None, segment="batch", priority=100)
RAG: Final = Stream("rag", 0.15, 32, 0.5, 0.0, (20.0, 180.0), priority=100)
RAG_BATCH: Final = Stream("rag", 0.1, 32, 0.5, 0.0, None, segment="batch", priority=100)
UNDATED: Final = Stream("rag", 0.2, 32, 0.5, 0.0, None, priority=-100)
STREAMS: Final = (CHAT, CODE, CODE_BATCH, RAG, RAG_BATCH, UNDATED)
BATCHES: Final[Mapping[Stream, Evening]] = {CODE_BATCH: Evening(0.12, 0.6), RAG_BATCH: Evening(0.2, 0.85)}
TASKS: Final = tuple(sorted({stream.task for stream in STREAMS}))
HIGH_TASKS: Final = tuple(sorted({stream.task for stream in STREAMS if stream.is_high}))


def name_of(stream: Stream) -> str:
    """As tables have it."""
    batch = " batch" if stream in BATCHES else ""
    return f"{stream.task}{batch}" if stream in BATCHES or stream.deadline_s else f"{stream.task} undated"


@dataclass(frozen=True, slots=True)
class Planned:
    """A job of the night before it is sent."""

    job_id: str
    stream: Stream
    at_s: float  #: after the begin of the night; in the first drain 0
    within_s: float  #: from then to its deadline; inf: none
    max_tokens: int
    batch_id: str | None = None


def draw_warm_up(num_jobs: int, seed: int) -> list[Planned]:
    """The jobs of the first drain: the night's mix at once, without deadlines."""
    rng = np.random.default_rng([seed, 0])
    shares = np.array([stream.share for stream in STREAMS])
    drawn = rng.choice(len(STREAMS), num_jobs, p=shares / shares.sum())
    return [
        Planned(f"warm-up-{number:04d}", STREAMS[index], 0.0, math.inf, _length(STREAMS[index], rng), WARM_UP)
        for number, index in enumerate(drawn)
    ]


def draw_night(*, rate: float, length_s: float, seed: int) -> list[Planned]:
    """Jobs in the order of their arrival: `rate` a second in the mean over `length_s`."""
    rng = np.random.default_rng([seed, 1])
    drawn: list[tuple[float, Stream, float, str | None]] = []
    for stream in STREAMS:
        num_jobs = int(rng.poisson(rate * stream.share * length_s))
        if (evening := BATCHES.get(stream)) is not None:
            at_s, within_s = evening.comes * length_s, (evening.due - evening.comes) * length_s
            drawn += [(at_s, stream, within_s, f"{stream.task}-batch")] * num_jobs
        else:
            drawn += [(at_s, stream, _within_s(stream, rng), None) for at_s in _arrivals(num_jobs, length_s, rng)]
    drawn.sort(key=lambda job: job[0])
    return [
        Planned(f"night-{number:05d}", stream, at_s, within_s, _length(stream, rng), batch_id)
        for number, (at_s, stream, within_s, batch_id) in enumerate(drawn)
    ]


def _length(stream: Stream, rng: np.random.Generator) -> int:
    return int(np.clip(rng.lognormal(math.log(stream.tokens), stream.spread), LEAST_TOKENS, MOST_TOKENS))


def _within_s(stream: Stream, rng: np.random.Generator) -> float:
    if stream.deadline_s is None:
        return math.inf
    low, high = stream.deadline_s
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _arrivals(num_jobs: int, length_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Four times as many in the evening and in the morning as in the middle of the night."""
    while num_jobs:
        at_s = rng.uniform(0, length_s)
        if rng.random() < (1 + 0.6 * math.cos(2 * math.pi * at_s / length_s)) / 1.6:
            num_jobs -= 1
            yield at_s


def numbered(jobs: Sequence[Planned], prompts: Mapping[str, Sequence[str]], seed: int) -> dict[str, str]:
    """A prompt for each job by its id, drawn from its task's.

    A number begins each, so that no two begin alike: jobs that share a beginning overtake others.
    """
    rng = np.random.default_rng([seed, 2])
    drawn: dict[str, str] = {}
    for number, job in enumerate(jobs):
        of_task = prompts[job.stream.task]
        drawn[job.job_id] = f"Request {number}. {of_task[int(rng.integers(len(of_task)))]}"
    return drawn


def made_prompts(seed: int, num: int = 60) -> dict[str, list[str]]:
    """Prompts for whoever has none: a question, a function to write, and a passage with a question."""
    rng = np.random.default_rng([seed, 3])

    def some(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    def passage() -> str:
        told = [
            f"In {rng.integers(1900, 2020)} the {some(_PLACES)} {some(_DEEDS)} the {some(_THINGS)}." for _ in range(24)
        ]
        return " ".join(told)

    return {
        "chat": [f"What is a good way to learn about a {some(_THINGS)} in a {some(_PLACES)}?" for _ in range(num)],
        "code": [
            f"Write a Python function that counts how often each {some(_THINGS)} occurs in a list of {some(_PLACES)}s."
            for _ in range(num)
        ],
        "rag": [
            f"{passage()}\n\nWhich {some(_PLACES)} {some(_DEEDS)} a {some(_THINGS)}, and when?" for _ in range(num)
        ],
    }


_PLACES: Final = ("harbour", "library", "museum", "railway", "school", "theatre", "village", "workshop")
_DEEDS: Final = ("bought", "lost", "moved", "painted", "repaired", "sold")
_THINGS: Final = ("bell", "boat", "book", "bridge", "clock", "garden", "map", "piano", "statue", "tower")
