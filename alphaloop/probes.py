"""Probes: the fixed prompts of a task, how long an answer they ask for, the k of their measurement, and their texts.

A probe set is never changed. Other prompts, another output limit or another k make another version. Runs of two
versions are compared over the prompts that both have, by `prompt_id`, as far as they were measured at the
same k."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise, zip_longest
from typing import Any, Final

from alphaloop.messages import Job, Purpose

DEFAULT_K: Final = 3  #: of a probe set; a drafter with shorter drafts is measured at its longest
DEFAULT_MAX_TOKENS: Final = 48  #: output limit of its prompts
_NUM_ID_CHARS: Final = 16
_BESIDE_SHARE: Final = 0.25


class ProbeSource(StrEnum):
    """Where the prompts of a set come from."""

    FILE = "file"  #: a person chose them
    TRAFFIC = "traffic"  #: drawn from jobs, with the task's consent


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One prompt of a set. `body` is the body of its jobs in OpenAI's form; `prompt_id` is a hash of it."""

    prompt_id: str
    body: Mapping[str, Any]
    job_id: str | None = None  #: of the job that it was drawn from
    segment: str | None = None  #: of that job


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """The probe set of a task; `prompts` by position, from 0."""

    task: str
    version: str
    num_draft_tokens: int  #: k of its probes, whatever k is in force
    prompts: Mapping[int, ProbePrompt]
    source: ProbeSource = ProbeSource.FILE


def new_probe_set(
    task: str,
    bodies: Sequence[Mapping[str, Any]],
    *,
    num_draft_tokens: int,
    max_tokens: int,
    drawn_from: Sequence[Job] = (),
) -> ProbeSet:
    """The set that asks these prompts greedily for at most `max_tokens` tokens. The same prompts give the same version.

    `drawn_from` has the job of each prompt that was drawn from traffic.

    A prompt that occurs twice is kept once, because it would be measured twice for nothing. The prompts are put into an
    order in which the quarters by length take turns, because a run sends the first ones only: they are short ones and
    long ones alike. Raises ValueError without any prompt.
    """
    if not bodies:
        raise ValueError(f"a probe set of {task} without a prompt")
    asked = [_asked(body, max_tokens) for body in bodies]
    by_id = {_hash(body): body for body in asked}
    origins = {_hash(body): (job.job_id, job.segment) for body, job in zip(asked, drawn_from, strict=False)}
    by_length = sorted(by_id, key=lambda prompt_id: (len(_canonical(by_id[prompt_id])), prompt_id))
    ordered = _take_turns(_quarters(by_length))
    prompts = {
        i: ProbePrompt(prompt_id, by_id[prompt_id], *origins.get(prompt_id, ())) for i, prompt_id in enumerate(ordered)
    }
    source = ProbeSource.TRAFFIC if drawn_from else ProbeSource.FILE
    return ProbeSet(task, _hash([num_draft_tokens, *ordered]), num_draft_tokens, prompts, source)


def draw_prompts(jobs: Sequence[Job], num_prompts: int, seed: int) -> list[Job]:
    """Jobs of traffic with `num_prompts` different prompts, fewer where there are fewer.

    The task must have consented (`probes_from_traffic`), because a probe set keeps prompts for good.
    The quarters of the prompts by length take turns, each with prompts drawn by lot. The same jobs and seed draw the
    same.
    """
    bodies = {job.body.model_dump_json(): job for job in jobs if job.purpose is Purpose.TRAFFIC}
    strata = _quarters(sorted(bodies, key=lambda body: (len(body), body)))
    rng = random.Random(seed)
    for stratum in strata:
        rng.shuffle(stratum)
    return [bodies[body] for body in _take_turns(strata)[:num_prompts]]


def prompt_id_of(body: Mapping[str, Any], max_tokens: int) -> str:
    """The id of a prompt in a probe set whose prompts are asked for at most `max_tokens` tokens."""
    return _hash(_asked(body, max_tokens))


def _asked(body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in ("stream", "seed")}
    return kept | {"temperature": 0.0, "max_tokens": max_tokens}


def _quarters(ordered: Sequence[str]) -> list[list[str]]:
    """Four parts of equal size, as nearly as can be."""
    cuts = [len(ordered) * part // 4 for part in range(5)]
    return [list(ordered[begin:end]) for begin, end in pairwise(cuts)]


def _take_turns(parts: Sequence[Sequence[str]]) -> list[str]:
    """The first of each part, then the second of each, until all are taken."""
    return [member for turn in zip_longest(*parts) for member in turn if member is not None]


def _hash(value: object) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:_NUM_ID_CHARS]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ProbeText:
    """The tokens that a probe or control generated greedily.

    `second_ids` and `gaps` are the target's second choice at each token and how far its logit lies below the first;
    empty where the engine does not report it. Rounding may swap two choices whose gap is at most `near_tie`.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    max_tokens: int
    near_tie: float
    second_ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedText:
    """A text and what decoded it. `num_tokens` is what its counts say. Vanilla has an empty drafter and revision."""

    job_id: str
    task: str
    drafter: str
    draft_revision: str
    target_revision: str
    engine: str
    num_tokens: int
    text: ProbeText


def is_beside_sampled(job_id: str) -> bool:
    """Whether a server decodes this probe beside a sampled request of its prompt, which must not change its text."""
    return hashlib.sha256(job_id.encode()).digest()[0] < 256 * _BESIDE_SHARE


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt decoded vanilla and with a drafter."""

    control: DecodedText
    probe: DecodedText

    @property
    def is_comparable(self) -> bool:
        """Whether the same target and engine decoded both, so that they promise the same text."""
        return (self.control.target_revision, self.control.engine) == (self.probe.target_revision, self.probe.engine)

    @property
    def is_equal(self) -> bool:
        """Whether the tokens are the same."""
        return self.control.text.token_ids == self.probe.text.token_ids


@dataclass(frozen=True, slots=True)
class TaskTraffic:
    """Traffic of a task in one hour, or in one day that is long over: jobs, and device time in seconds."""

    task: str
    start: datetime
    num_jobs: int
    device_s: float
