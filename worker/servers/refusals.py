"""How a server's failures become alphaloop's errors.

A server's own words may quote the prompt, so no message of ours repeats them: it says the status, and the server's name
for the error where that is a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

from pydantic import ValidationError

from alphaloop.errors import (
    AlphaloopError,
    ModelNotServed,
    PromptTooLong,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerUnavailable,
)
from worker.servers.forms import Failure, Refusal

_TOO_LONG_NAMES: Final = frozenset({"exceed_context_size_error", "context_length_exceeded"})  # llama.cpp, OpenAI
#: vLLM, SGLang and TensorRT-LLM have no name for it.
_TOO_LONG_WORDS: Final = re.compile(
    r"(maximum|model's) context length|maximum model length|max_model_len|max_seq_len|max_num_tokens", re.IGNORECASE
)
_MODEL_NAMES: Final = frozenset({"model_not_found"})
_MODEL_WORDS: Final = re.compile(r"\bmodel\b.*(does not exist|not found)", re.IGNORECASE | re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LOGIN_HINT: Final = "check the key that this endpoint is given"
_FULL_WORDS: Final = re.compile(r"queue is full", re.IGNORECASE)  # SGLang, with 503
_BUSY_HINT: Final = "send fewer requests at once, or raise the server's limit"
_AWAY: Final = frozenset({408, 425, 502, 503, 504})


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> AlphaloopError:
    """The error of a reply that is not 200."""
    failure = _failure(content)
    said = _said(status, failure)
    wait_s = retry_after_s(headers)
    if status == 429 or (status == 503 and wait_s is not None):
        return ServerBusy(said, retry_after_s=wait_s, hint=_BUSY_HINT)
    if status in (401, 403, 407):
        return ServerLoginRefused(said, hint=_LOGIN_HINT)
    if 300 <= status < 400:
        return RequestRefused(said, hint="give the address that this one leads to: redirects are not followed")
    return of_failure(status, failure)


def of_failure(status: int, failure: Failure) -> AlphaloopError:
    """The error that a server names in its own words."""
    said, words = _said(status, failure), failure.message or ""
    if status == 429 or (status == 503 and _FULL_WORDS.search(words)):
        return ServerBusy(said, retry_after_s=None, hint=_BUSY_HINT)
    if status in _AWAY:
        return ServerUnavailable(said)
    names = {str(name) for name in (failure.type, failure.code) if name is not None}
    if status < 500 and (names & _TOO_LONG_NAMES or _TOO_LONG_WORDS.search(words)):
        sizes = (
            f"expected at most {failure.n_ctx} tokens, found a prompt of {failure.n_prompt_tokens}"
            if failure.n_ctx and failure.n_prompt_tokens
            else "prompt and output do not fit the server's context"
        )
        return PromptTooLong(sizes, field="body", hint="shorten the prompt, or serve a model with a longer context")
    if status < 500 and (names & _MODEL_NAMES or (status in (400, 404) and _MODEL_WORDS.search(words))):
        return ModelNotServed(said, hint="ask for the name that the server lists at /v1/models")
    if status == 404:
        return RequestRefused(said, hint="is the address the server's, and does it end in /v1?")
    return ServerFailed(said) if status >= 500 else RequestRefused(said)


def of_piece(failure: Failure | str) -> AlphaloopError:
    """The error that stands in place of a text in a reply of status 200; servers put the status into `code`."""
    found = Failure(message=failure) if isinstance(failure, str) else failure
    status = found.code if isinstance(found.code, int) and 400 <= found.code < 600 else 500
    return of_failure(status, found)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait; None where it does not say.

    A date is read against the server's own `Date`, since the clocks of two machines may differ.
    """
    asked = headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit() and len(asked) < 8:
        return float(asked)
    try:
        until, now = parsedate_to_datetime(asked), parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def _failure(content: bytes) -> Failure:
    try:
        found = Refusal.model_validate_json(content)
    except ValidationError:
        return Failure()
    if isinstance(found.error, Failure):
        return found.error
    words = found.error or found.message or (found.detail if isinstance(found.detail, str) else None)
    return Failure(message=words, type=found.type, code=found.code)


def _said(status: int, failure: Failure) -> str:
    """The status, and what the server names: the kind of the error, and the field at fault."""
    kind = next((name for name in (failure.type, failure.code) if _is_name(name)), None)
    names = [str(name) for name in (kind, failure.param) if _is_name(name)]
    return f"the server answered {status} ({': '.join(names)})" if names else f"the server answered {status}"


def _is_name(found: int | str | None) -> bool:
    return isinstance(found, str) and _NAME.fullmatch(found) is not None
