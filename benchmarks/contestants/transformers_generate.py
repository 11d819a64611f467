"""transformers' `generate`. Modes: vanilla, lookup:K (prompt look-up), assisted:K (constant), assisted:dynamic."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.contestants.answering import Run, serve
from worker import decoding as _  # noqa: F401  # the same waiting threads as ours


def load() -> Run:
    """The model in folder argv[1], and in argv[2] the assistant, if any."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(sys.argv[3]))
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        for folder in sys.argv[1:3]
        if folder
    ]
    for loaded in models:
        loaded.eval()
    model = models[0]
    pad = AutoTokenizer.from_pretrained(sys.argv[1]).pad_token_id or 0
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
            assistant = models[1]
            # Otherwise `heuristic` starts where the call before it ended.
            assistant.generation_config.num_assistant_tokens = 5 if k == "dynamic" else int(k)
            assistant.generation_config.num_assistant_tokens_schedule = "heuristic" if k == "dynamic" else "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.4 if k == "dynamic" else 0.0
            more["assistant_model"] = assistant
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


if __name__ == "__main__":
    serve(load)
