"""vLLM's worker, which hands the drafter what each request asked for: `--worker-cls`. Needs vLLM to be imported.

A `custom_class` drafter is handed rows of tokens and no requests (vLLM 0.32, v1/worker/gpu_model_runner.py, line 4780).
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from alphaloop.inside_vllm.asked import Asked
from alphaloop.inside_vllm.proposer import LookupProposer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class LookupWorker(Worker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The platform's own worker, and one call after its model is loaded."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the model and the drafter, then let the drafter ask."""
        super().load_model(*args, **options)
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, LookupProposer):
            drafter.ask(self._asked_by_row)

    def _asked_by_row(self) -> list[Asked]:
        requests = self.model_runner.requests
        # The batch is looked up anew each time: vLLM replaces it when the key-value cache is set up.
        return [_asked(name, requests[name]) for name in self.model_runner.input_batch.req_ids]


def _asked(request_id: str, request: Any) -> Asked:
    return Asked.of(request_id, request.sampling_params.extra_args if request.sampling_params else None)
