"""vLLM's worker, whose drafter rests in steps after which nobody wants a draft: `--worker-cls`. Needs vLLM's import.

Asked for 0 tokens, a drafter with a model of its own still reads the step's tokens, so that its cache stays whole
(vLLM 0.32, v1/spec_decode/llm_base_proposer.py, propose). Requests without drafts would pay for that pass. Here it is
left out, and the scheduler class keeps account of what the drafter has not read.

What it takes is timed, for the costs of drafts and for control rounds (`measuring.py`). With an accelerator the
device's own clock times it: that is read, and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from alphaloop.inside_vllm import DRAFTER_TIME

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class RestingWorker(Worker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The platform's own worker of Model Runner V1, whose drafter may rest and is timed."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the model and the drafter, then let the drafter rest where it is asked for nothing."""
        super().load_model(*args, **options)
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, SpecDecodeBaseProposer):
            self._timed = _HostTimed() if current_platform.is_cpu() else _DeviceTimed()
            drafter.propose = _resting(drafter, drafter.propose, self._timed)

    def sample_tokens(self, *args: Any, **options: Any) -> Any:
        """The runner's own, with what the drafter took: its tokens for each request, and its seconds."""
        output = super().sample_tokens(*args, **options)
        timed = getattr(self, "_timed", None)
        if timed is not None and output is not None and (last := timed.last()) is not None:
            setattr(output, DRAFTER_TIME, last)
        return output


class _HostTimed:
    """Times calls whose work is done when they return."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def call(self, num_tokens: int, propose: Callable[[], Any]) -> Any:
        began = perf_counter()
        proposed = propose()
        self._last = num_tokens, perf_counter() - began
        return proposed

    def last(self) -> tuple[int, float] | None:
        """Tokens and seconds of the last call; None before the first."""
        return self._last


class _DeviceTimed:
    """Times work that an accelerator does later, by events in its stream."""

    def __init__(self) -> None:
        self._running: tuple[int, torch.Event, torch.Event] | None = None
        self._last: tuple[int, float] | None = None

    def call(self, num_tokens: int, propose: Callable[[], Any]) -> Any:
        first, last = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        first.record()
        proposed = propose()
        last.record()
        self._running = num_tokens, first, last
        return proposed

    def last(self) -> tuple[int, float] | None:
        """Tokens and seconds of the last call whose work is done; None before the first."""
        if self._running is not None:
            num_tokens, first, last = self._running
            if last.query():
                self._last, self._running = (num_tokens, first.elapsed_time(last) / 1000), None
        return self._last


def _resting(drafter: Any, propose: Callable[..., Any], timed: _HostTimed | _DeviceTimed) -> Callable[..., Any]:
    def proposed(num_speculative_tokens: int, **inputs: Any) -> Any:
        if num_speculative_tokens > 0:
            drafts = partial(propose, num_speculative_tokens=num_speculative_tokens, **inputs)
            return timed.call(num_speculative_tokens, drafts)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = None
        num_requests = inputs["common_attn_metadata"].batch_size()
        return inputs["target_token_ids"].new_empty((num_requests, 0)).long()

    return proposed
