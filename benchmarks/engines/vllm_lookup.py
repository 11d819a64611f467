"""vLLM's server with look-up of alphaloop as its drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from alphaloop.inside_vllm.proposer import KEY, WORKER
from benchmarks.contestants.process import REPOSITORY
from benchmarks.engines.server import ENVIRONMENT, Server, vllm

PROPOSER: Final = "alphaloop.inside_vllm.proposer.LookupProposer"
NUM_DRAFT_TOKENS: Final = 4  #: as vllm-ngram's


def lookup(k: int = NUM_DRAFT_TOKENS, proposer: str = PROPOSER) -> dict[str, Any]:
    """vLLM's --speculative-config of look-up."""
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": k}


def vllm_lookup(
    name: str,
    python: str,
    model: str,
    port: int,
    *,
    k: int = NUM_DRAFT_TOKENS,
    remember_tasks: Sequence[str] = (),
    proposer: str = PROPOSER,
    dtype: str = "bfloat16",
    max_requests: int = 8,
) -> Server:
    """The server; it looks things up in earlier results of `remember_tasks` too."""
    server = vllm(name, python, model, port, speculative=lookup(k, proposer), dtype=dtype, max_requests=max_requests)
    settings = {KEY: {"remember_tasks": list(remember_tasks)}}
    return replace(
        server,
        command=(*server.command, "--worker-cls", WORKER, "--additional-config", json.dumps(settings)),
        drafter="lookup_memory" if remember_tasks else "lookup",
        environment={**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
    )
