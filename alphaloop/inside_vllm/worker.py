"""vLLM's worker, whose drafter rests in steps after which nobody wants a draft: `--worker-cls`. Needs vLLM's import.

Asked for 0 tokens, a drafter with a model of its own still reads the step's tokens, so that its cache stays whole
(vLLM 0.32, v1/spec_decode/llm_base_proposer.py, propose). Requests without drafts would pay for that pass. Here it is
left out, and the scheduler class keeps account of what the drafter has not read.

A pass for one token is timed, because control rounds of the experiment have one that a server without speculation
would not have (`measuring.py`). With an accelerator its own clock times it: that is read, and has not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from alphaloop.inside_vllm import DRAFTER_S

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
        """The runner's own, with the seconds of the drafter's last pass for one token."""
        output = super().sample_tokens(*args, **options)
        timed = getattr(self, "_timed", None)
        if timed is not None and output is not None and (seconds := timed.seconds()) is not None:
            setattr(output, DRAFTER_S, seconds)
        return output


class _HostTimed:
    """Times calls whose work is done when they return."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def call(self, propose: Callable[[], Any]) -> Any:
        began = perf_counter()
        proposed = propose()
        self._seconds = perf_counter() - began
        return proposed

    def seconds(self) -> float | None:
        """Of the last call; None before the first."""
        return self._seconds


class _DeviceTimed:
    """Times work that an accelerator does later, by events in its stream."""

    def __init__(self) -> None:
        self._running: tuple[torch.Event, torch.Event] | None = None
        self._seconds: float | None = None

    def call(self, propose: Callable[[], Any]) -> Any:
        first, last = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        first.record()
        proposed = propose()
        last.record()
        self._running = first, last
        return proposed

    def seconds(self) -> float | None:
        """Of the last call whose work is done; None before the first."""
        if self._running is not None and self._running[1].query():
            self._seconds = self._running[0].elapsed_time(self._running[1]) / 1000
            self._running = None
        return self._seconds


def _resting(drafter: Any, propose: Callable[..., Any], timed: _HostTimed | _DeviceTimed) -> Callable[..., Any]:
    def proposed(num_speculative_tokens: int, **inputs: Any) -> Any:
        if num_speculative_tokens == 1:
            return timed.call(lambda: propose(num_speculative_tokens=1, **inputs))
        if num_speculative_tokens > 0:
            return propose(num_speculative_tokens=num_speculative_tokens, **inputs)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = None
        num_requests = inputs["common_attn_metadata"].batch_size()
        return inputs["target_token_ids"].new_empty((num_requests, 0)).long()

    return proposed
