"""What a request asks of the drafter, in OpenAI's form: `"vllm_xargs": {"alphaloop_task": "sql"}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TASK: Final = "alphaloop_task"
NUM_DRAFT_TOKENS: Final = "alphaloop_num_draft_tokens"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client sent it."""

    request_id: str = ""  #: vLLM's; empty where nothing tells it
    task: str = ""  #: empty: its text is remembered for no task
    num_draft_tokens: int | None = None  #: most tokens proposed a round; 0: it decodes vanilla. None: as the server's k

    @classmethod
    def of(cls, request_id: str, extra: Mapping[str, Any] | None) -> Asked:
        """Read `SamplingParams.extra_args`.

        A value of another type counts as left out: an error here would end the server for all its requests.
        """
        extra = extra or {}
        task, most = extra.get(TASK), extra.get(NUM_DRAFT_TOKENS)
        return cls(
            request_id,
            task if isinstance(task, str) else "",
            max(0, most) if isinstance(most, int) and not isinstance(most, bool) else None,
        )


NOTHING_ASKED: Final = Asked()
