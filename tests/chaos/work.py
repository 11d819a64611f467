"""The jobs of a run: what is sent, and what has to become of each. A text is a function of its prompt."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from alphaloop.messages.topics import high_topic, jobs_topic

TASK: Final = "chat"
NUM_WORDS: Final = 4
#: How often a job may fail and be tried again.
NUM_RETRIES: Final = 2
#: In every prompt and in every text of the null engine, so that a search of the logs finds either.
PROMPT_MARK: Final = "zanzibar-prompt"
TEXT_MARK: Final = "zanzibar-text"
#: In the prompt of a job whose engine kills its process.
KILLER_MARK: Final = "this prompt kills its worker"
#: In the prompt of a job whose decode fails so many times; `num_failures` reads it.
_FAILING: Final = "this prompt fails {} times"
_FAILING_PATTERN: Final = re.compile(_FAILING.format("([0-9]+)"))
_ALWAYS: Final = 1_000_000

_STREAMED_SHARE: Final = 0.05
#: Of planted jobs, because the ends of their streams differ.
_PLANTED_STREAMED_SHARE: Final = 0.5
_HIGH_SHARE: Final = 0.1
_DEADLINE_SHARE: Final = 0.05
#: From the start of the run. A worker whose clock is an hour ahead would let such a job expire.
_DEADLINE: Final = timedelta(minutes=50)
#: From the start of the run: a worker whose clock is an hour behind would decode such a job.
_PAST: Final = timedelta(minutes=-30)
#: From the moment at which the job is sent, about.
_SOON_S: Final = 20.0


class Fate(StrEnum):
    """What has to become of a job."""

    SUCCEEDS = "succeeds"
    REFUSED = "refused"  #: planted poison: no job at all; it belongs in the dead-letter topic
    KILLS = "kills"  #: planted poison: every worker that decodes it dies
    FAILS = "fails"  #: planted poison: every decode of it fails
    FAILS_FIRST = "fails, then succeeds"  #: once or twice; it waits on a retry topic each time
    EXPIRES = "expires"  #: its deadline has passed when it is sent
    MAY_EXPIRE = "may expire"  #: its deadline comes soon
    IS_CANCELLED = "is cancelled"  #: right behind it; it may have ended before


_NAMES: Final = {
    Fate.SUCCEEDS: "null",
    Fate.KILLS: "killer",
    Fate.FAILS: "failing",
    Fate.FAILS_FIRST: "retried",
    Fate.EXPIRES: "expired",
    Fate.MAY_EXPIRE: "hurried",
    Fate.IS_CANCELLED: "cancelled",
}
_POISON: Final = frozenset({Fate.REFUSED, Fate.KILLS, Fate.FAILS})


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A message to send. `text` is the right one; None where no text is right."""

    job_id: str
    value: bytes
    fate: Fate
    text: str | None = None
    is_streamed: bool = False
    is_high: bool = False  #: sent to jobs.<task>.high
    deadline: datetime | None = None
    num_failures: int = 0  #: most that may be counted

    @property
    def is_dead_letter(self) -> bool:
        """Whether it belongs in the dead-letter topic."""
        return self.fate in _POISON

    @property
    def topic(self) -> str:
        """Where it is sent to."""
        return high_topic(TASK) if self.is_high else jobs_topic(TASK)


def num_failures(prompt: str) -> int:
    """How often the null engine fails to decode this prompt."""
    found = _FAILING_PATTERN.search(prompt)
    return int(found[1]) if found else 0


def text_of(prompt: str) -> str:
    """What the null engine answers to a prompt: NUM_WORDS words."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return " ".join([TEXT_MARK, *(digest[8 * number : 8 * number + 8] for number in range(NUM_WORDS - 1))])


def null_jobs(
    num_jobs: int, planted: Mapping[Fate, int], *, rng: random.Random, sending_s: float
) -> Iterator[PlannedJob]:
    """Jobs for the null engine, the planted ones at random places among them; sent over `sending_s` from now on."""
    fates = [fate for fate, number in planted.items() for _ in range(number)]
    places = dict(zip(rng.sample(range(num_jobs), len(fates)), fates, strict=True))
    now = datetime.now(UTC)
    for number in range(num_jobs):
        fate = places.get(number, Fate.SUCCEEDS)
        if fate is Fate.REFUSED:
            yield _refused(f"poison-{number:06d}", rng)
        else:
            yield _null_job(number, fate, now, number / num_jobs * sending_s, rng)


def _null_job(number: int, fate: Fate, now: datetime, sent_s: float, rng: random.Random) -> PlannedJob:
    prompt = f"{PROMPT_MARK} {number}: {rng.getrandbits(64):016x}"
    deadline, most_failures = None, 0
    match fate:
        case Fate.SUCCEEDS:
            deadline = now + _DEADLINE if rng.random() < _DEADLINE_SHARE else None
        case Fate.KILLS:
            prompt = f"{prompt} {KILLER_MARK}"
        case Fate.FAILS:
            prompt, most_failures = f"{prompt} {_FAILING.format(_ALWAYS)}", NUM_RETRIES
        case Fate.FAILS_FIRST:
            most_failures = rng.randint(1, NUM_RETRIES)
            prompt = f"{prompt} {_FAILING.format(most_failures)}"
        case Fate.EXPIRES:
            deadline = now + _PAST
        case Fate.MAY_EXPIRE:
            deadline = now + timedelta(seconds=sent_s + rng.uniform(0, _SOON_S))
    is_streamed = rng.random() < (_STREAMED_SHARE if fate is Fate.SUCCEEDS else _PLANTED_STREAMED_SHARE)
    extra: dict[str, object] = {"stream": True} if is_streamed else {}
    if deadline is not None:
        extra["deadline"] = deadline.isoformat()
    job_id = f"{_NAMES[fate]}-{number:06d}"
    return PlannedJob(
        job_id,
        json.dumps({"job_id": job_id, "prompt": prompt, "max_tokens": NUM_WORDS, **extra}).encode(),
        fate,
        text_of(prompt),
        is_streamed,
        is_high=rng.random() < _HIGH_SHARE,
        deadline=deadline,
        num_failures=most_failures,
    )


def _refused(job_id: str, rng: random.Random) -> PlannedJob:
    prompt = f"{PROMPT_MARK} {job_id}"
    values = (
        b'{"prompt": "' + prompt.encode(),  # ends in the middle
        prompt.encode(),  # no JSON
        b"\xff\xfe" + prompt.encode(),  # no UTF-8
        b"",
        json.dumps({"job_id": job_id, "prompt": prompt, "max_tokens": -1}).encode(),
        json.dumps({"job_id": job_id, "prompt": prompt, "temperature": "hot"}).encode(),
        json.dumps({"job_id": job_id, "messages": [{"role": prompt, "content": prompt}]}).encode(),
        json.dumps({"job_id": job_id, "prompt": prompt, "body": {"prompt": prompt}}).encode(),
    )
    return PlannedJob(job_id, rng.choice(values), Fate.REFUSED)


#: Of a job for the real engine.
_MAX_TOKENS: Final = 16
_TOPICS: Final = ("harbours", "parcels", "windows", "letters", "stations")
_WISHES: Final = ("List three facts about", "Write a haiku about", "Explain to a child", "Name two risks of")
#: They differ; jobs repeat them, because every one has to be decoded once more to know the right text.
_PROMPTS: Final = [f"{wish} {topic} ({PROMPT_MARK})." for wish in _WISHES for topic in _TOPICS]
#: float32, in which batches of every shape write the same text; a short context, so that slots stay small.
REAL_TARGET: Final = {"dtype": "float32", "context_length": 1024}


def real_jobs(num_jobs: int, texts: Sequence[str]) -> list[PlannedJob]:
    """Jobs over the prompts in turn; every fifth is streamed."""
    jobs = []
    for number in range(num_jobs):
        job_id, is_streamed = f"real-{number:04d}", number % 5 == 0
        body = {"prompt": _PROMPTS[number % len(_PROMPTS)], "max_tokens": _MAX_TOKENS, "stream": is_streamed}
        value = json.dumps({"job_id": job_id, **body}).encode()
        jobs.append(PlannedJob(job_id, value, Fate.SUCCEEDS, texts[number % len(_PROMPTS)], is_streamed))
    return jobs


def undisturbed_texts() -> list[str]:
    """What the target alone writes to each prompt, one job at a time. Loads the model: seconds, and a gigabyte."""
    from alphaloop.engine import Sampling
    from alphaloop.messages import Job
    from alphaloop.settings import load_settings
    from engine.own import load_engine
    from tests.fixtures.models import VANILLA, finish

    settings = load_settings(overrides={"models": {"target": REAL_TARGET}})
    engine, greedy = load_engine(settings.models, num_slots=1), Sampling(max_tokens=_MAX_TOKENS, temperature=0.0)
    asked = [{"job_id": f"alone-{number}", "task": "chat", "prompt": one} for number, one in enumerate(_PROMPTS)]
    jobs = [Job.model_validate(one) for one in asked]
    found = finish(engine, [(job, greedy, VANILLA) for job in jobs])
    return [found[job.job_id].text for job in jobs]
