"""What a request asks of our classes inside vLLM: `SamplingParams.extra_args`, over HTTP `vllm_xargs`.

A value of another type counts as left out: an error here would end the server for all its requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TASK: Final = "alphaloop_task"
NUM_DRAFT_TOKENS: Final = "alphaloop_num_draft_tokens"
#: From this request on no request of the server has longer drafts; -1 ends that.
MAX_DRAFT_TOKENS: Final = "alphaloop_max_draft_tokens"
MAX_DRAFT_TOKENS_S: Final = "alphaloop_max_draft_tokens_s"  #: for how many seconds at most
_LONGEST_S: Final = 600.0
_USUAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client sent it."""

    request_id: str = ""  #: vLLM's; empty where no worker gives it
    task: str = ""  #: empty: its text is remembered for no task
    num_draft_tokens: int | None = None  #: most tokens proposed a round; 0: it decodes vanilla. None: as the server's k

    @classmethod
    def of(cls, request_id: str, extra: Mapping[str, Any] | None) -> Asked:
        """Read `extra_args`."""
        task = (extra or {}).get(TASK)
        return cls(request_id, task if isinstance(task, str) else "", asked_length(extra))


def asked_length(extra: Mapping[str, Any] | None) -> int | None:
    """The longest draft that a request wants, 0 and more; None where it leaves that to the server."""
    most = _whole(extra, NUM_DRAFT_TOKENS)
    return None if most is None else max(0, most)


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest draft of every request of a server, for a while: what a measurement asks for."""

    num_draft_tokens: int | None  #: None: no limit any more
    seconds: float  #: after which it ends by itself, because whoever asked may be dead

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Limit | None:
        """Read `extra_args`; None where a request changes nothing."""
        most = _whole(extra, MAX_DRAFT_TOKENS)
        if most is None:
            return None
        seconds = (extra or {}).get(MAX_DRAFT_TOKENS_S)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            seconds = _USUAL_S
        return cls(None if most < 0 else most, min(float(seconds), _LONGEST_S))


def _whole(extra: Mapping[str, Any] | None, name: str) -> int | None:
    value = (extra or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
