"""Fields that no job has. A misspelt one would be decoded with another setting than its sender asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from alphaloop.errors import InvalidField
from alphaloop.messages.body import UNSUPPORTED, Body
from alphaloop.messages.job import Job

#: Fields of OpenAI's requests, and of clients of vLLM, that change nothing in the text of a job.
HARMLESS: Final = (
    "function_call",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "tool_choice",
    "user",
)

_IN_BODY: Final = frozenset(Body.model_fields) | {"max_completion_tokens"} | frozenset(UNSUPPORTED)
_OF_A_JOB: Final = _IN_BODY | frozenset(Job.model_fields)
#: Columns of data sets are often called like these.
_BESIDE_PROMPT: Final = _IN_BODY - {"model", "messages", "prompt", "suffix", "echo", "n"}
#: A name that may be repeated: another one may be prompt text.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
#: Of difflib: `tempreature` and `temperature` have .91, `task_id` and `task` .73.
_ALIKE: Final = 0.8
#: Columns beside a prompt that are compared: each new name takes 90 µs, and a message may have thousands.
_MOST_COMPARED: Final = 64


def refuse_unknown(fields: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Refuse a field of the body that does not exist, unless it is null or `ignored` names it.

    Beside a prompt, where data sets have columns of their own, only a name is refused that is almost one of the body's.
    Raises InvalidField.
    """
    body = fields.get("body")
    if isinstance(body, dict):
        for name in _unknown(body, ignored):
            raise _refusal(name, _nearest(name, _IN_BODY), within="body.")
    if fields.keys() <= _OF_A_JOB:
        return
    for name in islice(_unknown(fields, ignored), _MOST_COMPARED):
        if (nearest := _nearest(name, _BESIDE_PROMPT)) is not None:
            raise _refusal(name, nearest, within="")


def _unknown(fields: Mapping[str, Any], ignored: Collection[str]) -> Collection[str]:
    if fields.keys() <= _IN_BODY:
        return ()
    return [
        name for name, value in fields.items() if name not in _IN_BODY and name not in ignored and value is not None
    ]


@lru_cache(maxsize=4096)  # jobs of a producer have the same names
def _nearest(name: str, known: frozenset[str]) -> str | None:
    found = get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def _refusal(name: str, nearest: str | None, *, within: str) -> InvalidField:
    is_shown = _NAME.fullmatch(name) is not None
    found = repr(name) if is_shown else "a name of other characters"
    return InvalidField(
        f"expected {nearest}, found {found}, which is no field of a job"
        if nearest
        else f"expected a field of a job, found {found}",
        field=f"{within}{name}" if is_shown else within.rstrip(".") or None,
        hint="correct it, leave it out, or name it in worker.ignored_body_fields",
    )
