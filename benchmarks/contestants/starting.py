"""Which processes decode against each other, and with which settings: every model is loaded once."""

from __future__ import annotations

import argparse
import json
from typing import Any

from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.contestants.process import Contestant


def start(target: str, draft: str | None, options: argparse.Namespace, wanted: set[str]) -> dict[str, Contestant]:
    """The contestants of `wanted` that this machine can run, by name, each with its model loaded."""
    drafters: dict[str, Any] = {"lookup": LookupDrafterSettings(max_draft_tokens=16)}
    if draft:
        drafters["draft"] = DraftModelDrafterSettings(source=draft, max_draft_tokens=16)
    settings = ModelSettings(
        target=TargetSettings(source=target, num_threads=options.threads, context_length=4096), drafters=drafters
    )
    vllm: dict[str, Any] = {"model": target, "max_model_len": 4096, "max_num_seqs": 16}
    made = {"ours": Contestant("ours", "ours", [settings.model_dump_json(), "16"])}
    if "transformers" in wanted and "transformers" in options.peer:
        made["transformers"] = Contestant(
            "transformers", "transformers_generate", [target, draft or "", str(options.threads)]
        )
    speculative: dict[str, Any] = {
        "vllm": None,
        "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "vllm-draft": {"method": "draft_model", "model": draft, "num_speculative_tokens": 3},
    }
    if options.vllm_python and "vllm" in options.peer:
        for name in sorted(wanted & speculative.keys()):
            more = {"speculative_config": speculative[name]} if speculative[name] else {}
            made[name] = Contestant(name, "vllm_generate", [json.dumps(vllm | more)], python=options.vllm_python)
            # One at a time: each compiles and measures itself while it loads.
            made[name].wait_until_ready()
    for name in ("ours", "transformers"):
        if name in made:
            made[name].wait_until_ready()
    return made
