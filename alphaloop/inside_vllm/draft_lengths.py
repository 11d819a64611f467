"""How many draft tokens each request of a vLLM server has in a step. Without vLLM: its objects come as arguments.

    before a step   `trim`: the drafts that wait in `Request.spec_token_ids` are cut to what their request asked for
    in the step     `of_step`: how many tokens the drafter proposes after it; the longest wish among the step's requests

vLLM proposes one number of tokens for all requests of a step. What a request did not ask for is cut before vLLM
verifies it, so texts stay exact, and vLLM's counters are those of what was verified. A step of 0 tokens costs a
drafter with a cache of its own one pass over the new tokens: vLLM keeps its cache whole with it
(v1/spec_decode/llm_base_proposer.py: propose), so drafts may begin again at any step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from alphaloop.inside_vllm.asked import Limit, asked_length

#: Below this temperature vLLM takes the likeliest token (vllm/sampling_params.py).
GREEDY_BELOW: Final = 1e-5
#: Methods whose proposals may be shorter than the server's k. vLLM's others end the server then (Medusa, suffix), or
#: cut what was proposed in parallel in another shape. vllm/v1/spec_decode, 0.32.
TAKE_FEWER: Final = frozenset({"ngram", "draft_model", "eagle", "eagle3", "mtp"})


class VllmRequest(Protocol):
    """The members of vLLM's `Request` that count here."""

    request_id: str
    sampling_params: Any
    spec_token_ids: list[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """How this server drafts; none of it changes while it runs."""

    num_draft_tokens: int  #: the server's k
    takes_fewer: bool  #: its drafter can propose fewer than k
    has_cache: bool  #: its drafter has keys and values of its own
    context: int | None  #: tokens; a step with a text too long for it leaves the drafter out. None: no step does
    keeps_apart: bool  #: nothing is drafted beside sampled requests

    @classmethod
    def of(cls, config: Any, num_draft_tokens: int, *, is_v2: bool, is_cpu: bool) -> Drafting:
        """From a `VllmConfig` with or without a drafter.

        vLLM's CPU build verifies greedy drafts wrongly beside sampled requests: docs/decisions/0024-look-up-in-vllm.md.
        """
        speculative = config.speculative_config
        context = config.model_config.max_model_len
        draft_config = getattr(speculative, "draft_model_config", None)
        if draft_config is not None and draft_config.max_model_len is not None:
            context = draft_config.max_model_len
        return cls(
            num_draft_tokens,
            takes_fewer=_takes_fewer(speculative) and config.parallel_config.data_parallel_size == 1,
            has_cache=speculative is not None and speculative.uses_draft_kv_cache(),
            context=None if is_v2 else context,
            keeps_apart=is_cpu,
        )


def _takes_fewer(speculative: Any) -> bool:
    """Step 3.5's MTP layers have a cache each, which only their own step fills."""
    return (
        speculative is not None
        and speculative.method in TAKE_FEWER
        and not speculative.parallel_drafting
        and not speculative.use_step3p5_mtp()
    )


@dataclass(slots=True)
class DraftLengths:
    """One server's. Its scheduler calls it from one thread."""

    drafting: Drafting
    clock: Callable[[], float] = time.monotonic
    _limit: int | None = None
    _limit_ends: float = 0.0
    _was_left_out: bool = False  #: the drafter did not read the last step
    _missed: set[str] = field(default_factory=set)  #: requests whose tokens the drafter's cache lacks

    def take(self, request: VllmRequest) -> None:
        """A new request, which may limit the drafts of all: from the next step on, before its own first one."""
        if (limit := Limit.of(_extra(request))) is not None:
            self._limit = limit.num_draft_tokens
            self._limit_ends = self.clock() + limit.seconds

    def trim(self, running: Iterable[VllmRequest], may_start: Iterable[VllmRequest]) -> None:
        """Cut the drafts that wait for the next step. `may_start`: requests that may join it."""
        running = list(running)
        drafts_nothing = self._was_left_out or (
            self.drafting.keeps_apart and (any(map(is_sampled, running)) or any(map(is_sampled, may_start)))
        )
        limit = self._limit_now()
        for request in running:
            most = 0 if drafts_nothing else self._most(request, limit)
            if len(request.spec_token_ids) > most:
                # vLLM may share one list of placeholders among requests.
                request.spec_token_ids = request.spec_token_ids[:most]

    def of_step(self, vllms: int, scheduled: Mapping[str, int], requests: Mapping[str, VllmRequest]) -> int:
        """How many tokens the drafter shall propose after this step, at most `vllms`.

        `scheduled` are the step's tokens by request, before vLLM counts them as computed.
        """
        batch = [requests[name] for name in scheduled]
        self._was_left_out = self._leaves_drafter_out(batch, scheduled)
        if self._was_left_out:
            if self.drafting.has_cache:
                self._missed &= requests.keys()
                self._missed |= scheduled.keys()
            return 0
        if not self.drafting.takes_fewer:
            return vllms
        if self.drafting.keeps_apart and any(map(is_sampled, batch)):
            return 0
        limit = self._limit_now()
        return min(vllms, max((self._most(request, limit) for request in batch), default=0))

    def _most(self, request: VllmRequest, limit: int | None) -> int:
        if request.request_id in self._missed:
            return 0
        wanted = asked_length(_extra(request))
        most = self.drafting.num_draft_tokens
        for bound in (wanted, limit):
            if bound is not None:
                most = min(most, bound)
        return most

    def _limit_now(self) -> int | None:
        if self._limit is not None and self.clock() >= self._limit_ends:
            self._limit = None
        return self._limit

    def _leaves_drafter_out(self, batch: Iterable[VllmRequest], scheduled: Mapping[str, int]) -> bool:
        """Whether a text of the step comes so near the end of the context that vLLM does not run the drafter at all.

        vLLM then hands out k zeros as the draft of every request (v1/worker/gpu_model_runner.py:
        _input_fits_in_drafter, 0.32).
        """
        if self.drafting.context is None:
            return False
        longest = self.drafting.context - self.drafting.num_draft_tokens
        return any(request.num_computed_tokens + scheduled[request.request_id] > longest for request in batch)


def is_sampled(request: VllmRequest) -> bool:
    """Whether its tokens are drawn; a request of a pooling model is not."""
    params = request.sampling_params
    return params is not None and bool(params.temperature >= GREEDY_BELOW)


def _extra(request: VllmRequest) -> Mapping[str, Any] | None:
    return request.sampling_params.extra_args if request.sampling_params is not None else None
