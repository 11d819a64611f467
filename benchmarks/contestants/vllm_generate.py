"""vLLM's offline engine, one speculative configuration a process. Runs in vLLM's own environment."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from benchmarks.contestants.answering import Run, serve


def load() -> Run:
    """argv[1]: what goes to `vllm.LLM`, as JSON. `max_tokens` of a request may be a list, one a prompt."""
    # A gigabyte of keys and values is plenty here, and it must fit beside the other contestants.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": "bfloat16",
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.3,
    } | json.loads(sys.argv[1])
    llm = LLM(**settings)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        limits = request["max_tokens"]
        if isinstance(limits, int):
            limits = [limits] * len(request["prompts"])
        sampling = [
            SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=not request["stop_at_end"], detokenize=False)
            for limit in limits
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        if settings["enable_prefix_caching"]:
            # A request must not find its prompts in the cache because an earlier request had them.
            llm.reset_prefix_cache()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    return run


if __name__ == "__main__":
    serve(load)
