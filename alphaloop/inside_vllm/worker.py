"""vLLM's worker, whose drafter rests in steps after which nobody wants a draft: `--worker-cls`. Needs vLLM's import.

Asked for 0 tokens, a drafter with a model of its own still reads the step's tokens, so that its cache stays whole
(vLLM 0.32, v1/spec_decode/llm_base_proposer.py, propose). Requests without drafts would pay for that pass. Here it is
left out, and the scheduler class keeps account of what the drafter has not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class RestingWorker(Worker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The platform's own worker of Model Runner V1, and one change after its model is loaded."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the model and the drafter, then let the drafter rest where it is asked for nothing."""
        super().load_model(*args, **options)
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, SpecDecodeBaseProposer):
            drafter.propose = _resting(drafter, drafter.propose)


def _resting(drafter: Any, propose: Callable[..., Any]) -> Callable[..., Any]:
    def proposed(num_speculative_tokens: int, **inputs: Any) -> Any:
        if num_speculative_tokens > 0:
            return propose(num_speculative_tokens=num_speculative_tokens, **inputs)
        drafter.num_speculative_tokens = 0
        drafter._last_draft_probs = None
        num_requests = inputs["common_attn_metadata"].batch_size()
        return inputs["target_token_ids"].new_empty((num_requests, 0)).long()

    return proposed
