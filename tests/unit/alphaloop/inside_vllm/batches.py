"""vLLM's persistent batch as its drafter sees it, without vLLM: `InputBatch` and `_bookkeeping_sync` of 0.32.

Requests take the lowest free row; when rows fall free the last ones move down; a request that is interrupted leaves its
row and comes back with all of its text. Rows keep what stood behind their end, as vLLM's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from alphaloop.inside_vllm.proposer import NOTHING_ASKED, WORKER, Asked, LookupProposer

MAX_TOKENS = 64


def config(k: int = 4, *, worker: str = WORKER, max_model_len: int = MAX_TOKENS, **settings: object) -> SimpleNamespace:
    """The part of `VllmConfig` that the drafter reads."""
    return SimpleNamespace(
        additional_config={"alphaloop_lookup": settings},
        parallel_config=SimpleNamespace(worker_cls=worker),
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


@dataclass
class Request:
    """A request whose greedy text is known beforehand."""

    whole: Sequence[int]
    num_prompt: int
    asked: Asked = NOTHING_ASKED
    length: int = 0  #: of its text by now
    draft: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = self.num_prompt

    @property
    def text(self) -> list[int]:
        return list(self.whole[: self.length])

    @property
    def has_ended(self) -> bool:
        return self.length >= len(self.whole)

    def sample(self) -> list[int]:
        """What a pass over the text and its draft yields."""
        behind = self.whole[self.length :]
        accepted = 0
        while accepted < min(len(self.draft), len(behind) - 1) and self.draft[accepted] == behind[accepted]:
            accepted += 1
        return list(behind[: accepted + 1])


class Batch:
    """The rows, and the steps of a drafter over them."""

    def __init__(self, drafter: LookupProposer, num_rows: int, *, tells: bool = True) -> None:
        self.drafter = drafter
        self.requests: dict[str, Request] = {}
        self.by_row: list[str] = []
        self._rows = np.zeros((num_rows, MAX_TOKENS), dtype=np.int32)
        if tells:
            drafter.ask(lambda: [self.requests[name].asked for name in self.by_row])

    def step(
        self, wanted: Sequence[str], reading: Sequence[str] = (), *, drafts: bool = True
    ) -> Mapping[str, list[int]]:
        """One pass over `wanted`, of which `reading` still read their prompts: the drafts by request.

        Without `drafts` the drafter is not asked, as where a text of the batch comes near the end of its context.
        """
        self._place(wanted)
        sampled: list[list[int]] = []
        for row, name in enumerate(self.by_row):
            request = self.requests[name]
            new = [] if name in reading else request.sample()
            self._rows[row, request.length : request.length + len(new)] = new
            request.length += len(new)
            sampled.append(new)
        for name in self.by_row:
            self.requests[name].draft = []
        if not drafts:
            return {}
        lengths = np.zeros(len(self._rows), dtype=np.int32)
        lengths[: len(self.by_row)] = [self.requests[name].length for name in self.by_row]
        proposed: Any = self.drafter.propose(sampled, lengths, self._rows, slot_mappings=None)
        assert len(proposed) == len(self.by_row)
        for name, draft in zip(self.by_row, proposed, strict=True):
            self.requests[name].draft = draft
        return dict(zip(self.by_row, proposed, strict=True))

    def _place(self, wanted: Sequence[str]) -> None:
        rows: list[str | None] = [name if name in wanted else None for name in self.by_row]
        for name in wanted:
            if name in rows:
                continue
            free = rows.index(None) if None in rows else len(rows)
            rows[free : free + 1] = [name]
            text = self.requests[name].text
            self._rows[free, : len(text)] = text
            self.requests[name].draft = []
        while None in rows:
            empty, last = rows.index(None), rows.pop()
            if last is not None:
                self._rows[empty] = self._rows[len(rows)]
                rows[empty] = last
        self.by_row = [name for name in rows if name is not None]
