"""The engines of others: PEER ARGUMENT…; PEER is transformers, or vllm, which runs in an environment of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from benchmarks.contestants.process import Run, serve


def transformers_generate(target: str, assistant: str, num_threads: str) -> Run:
    """transformers' `generate`, with the folder of an assistant, if any.

    Modes: vanilla, lookup:K (prompt look-up), assisted:K (constant), assisted:dynamic.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import engine as _  # noqa: F401  # the same waiting threads as ours

    torch.set_num_threads(int(num_threads))
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        for folder in (target, assistant)
        if folder
    ]
    for loaded in models:
        loaded.eval()
    model = models[0]
    pad = AutoTokenizer.from_pretrained(target).pad_token_id or 0
    end = model.generation_config.eos_token_id
    # The folder's sampling settings would only warn beside greedy decoding.
    for name in ("temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    model.generation_config.repetition_penalty = 1.0

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts = request["prompts"]
        longest = max(map(len, prompts))
        token_ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        more: dict[str, Any] = {}
        method, _separator, k = request["mode"].partition(":")
        if method == "lookup":
            more["prompt_lookup_num_tokens"] = int(k)
        elif method == "assisted":
            helper = models[1]
            # Otherwise `heuristic` starts where the call before it ended.
            helper.generation_config.num_assistant_tokens = 5 if k == "dynamic" else int(k)
            helper.generation_config.num_assistant_tokens_schedule = "heuristic" if k == "dynamic" else "constant"
            helper.generation_config.assistant_confidence_threshold = 0.4 if k == "dynamic" else 0.0
            more["assistant_model"] = helper
        with torch.inference_mode():
            output = model.generate(
                token_ids,
                attention_mask=mask,
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                eos_token_id=end if request["stop_at_end"] else None,
                pad_token_id=pad,
                **more,
            )
        return {"tokens": [row[longest:].tolist() for row in output]}

    return run


def vllm_generate(given: str) -> Run:
    """vLLM's offline engine; `given` goes to `vllm.LLM`, as JSON. `max_tokens` may be a list, one a prompt.

    `schemas` of a request are JSON Schemas that its texts have to match, one a prompt. Where it keeps statistics, an
    answer has `num_accepted`, the draft tokens that were accepted.
    """
    # A gigabyte of keys and values is plenty here, and it must fit beside the other contestants.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {
        "dtype": "bfloat16",
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.3,
    } | json.loads(given)
    llm = LLM(**settings)
    accepted = [0]  # by the counter of its whole life

    def run(request: dict[str, Any]) -> dict[str, Any]:
        limits = request["max_tokens"]
        if isinstance(limits, int):
            limits = [limits] * len(request["prompts"])
        schemas = request.get("schemas") or [None] * len(limits)
        sampling = [
            SamplingParams(
                max_tokens=limit,
                temperature=0.0,
                ignore_eos=not request["stop_at_end"],
                detokenize=False,
                structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            )
            for limit, schema in zip(limits, schemas, strict=True)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        if settings["enable_prefix_caching"]:
            # A request must not find its prompts in the cache because an earlier request had them.
            llm.reset_prefix_cache()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answer: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
        if not settings["disable_log_stats"]:
            before = accepted[0]
            accepted[0] = sum(
                one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens"
            )
            answer["num_accepted"] = accepted[0] - before
        return answer

    return run


if __name__ == "__main__":
    serve(lambda: (vllm_generate if sys.argv[1] == "vllm" else transformers_generate)(*sys.argv[2:]))
