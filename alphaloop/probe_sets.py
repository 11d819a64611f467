"""Probe sets: the fixed prompts of a task, how long an answer they ask for, and the k at which they are measured.

A set is never changed. Other prompts, another output limit or another k make another version. Runs of two versions are
compared over the prompts that both have, which `prompt_id` tells, as far as they were measured at the same k.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

_NUM_ID_CHARS: Final = 16


class ProbeSource(StrEnum):
    """Where the prompts of a set come from."""

    FILE = "file"  #: a person chose them
    TRAFFIC = "traffic"  #: drawn from jobs, with the task's consent


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One prompt of a set. `body` is the body of its jobs in OpenAI's form; `prompt_id` is a hash of it."""

    prompt_id: str
    body: Mapping[str, Any]


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
    source: ProbeSource = ProbeSource.FILE,
) -> ProbeSet:
    """The set that asks these prompts greedily for at most `max_tokens` tokens. The same arguments give the same set.

    A prompt that occurs twice is kept once, because it would be measured twice for nothing. Raises ValueError without
    any prompt.
    """
    if not bodies:
        raise ValueError(f"a probe set of {task} without a prompt")
    asked = (
        {name: value for name, value in body.items() if name not in ("stream", "seed")}
        | {"temperature": 0.0, "max_tokens": max_tokens}
        for body in bodies
    )
    by_id = {_hash(body): body for body in asked}
    prompts = {i: ProbePrompt(prompt_id, body) for i, (prompt_id, body) in enumerate(by_id.items())}
    return ProbeSet(task, _hash([num_draft_tokens, *by_id]), num_draft_tokens, prompts, source)


def _hash(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_NUM_ID_CHARS]
