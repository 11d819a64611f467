"""The worker in front of vLLM's server beside vLLM's offline engine: the same prompts, the same requests at once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants.process import Contestant
from benchmarks.engines.closed_loop import ClosedLoop
from benchmarks.engines.server import MODEL_NAME, Server, read_json
from benchmarks.whole.jobs import PromptJob


@dataclass(frozen=True, slots=True)
class InFront:
    """Tokens a second of one round, both ways."""

    worker_tokens_per_s: float
    offline_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Of the worker to vLLM alone."""
        return self.worker_tokens_per_s / self.offline_tokens_per_s


def offline_engine(server: Server, python: str, model: str, dtype: str) -> Contestant:
    """vLLM's own `LLM`, with the settings of the server; its process inherits this one's cores and environment."""
    settings = {
        "model": model,
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_seqs": server.max_requests,
        "enforce_eager": True,
    }
    return Contestant("vllm-offline", "vllm_generate", [json.dumps(settings)], python=python)


def token_ids(server: Server, jobs: Sequence[PromptJob]) -> list[list[int]]:
    """The prompts as the server tokenizes its chats."""
    root = server.url.removesuffix("/v1")
    found = []
    for job in jobs:
        said = [{"role": "user", "content": job.prompt}]
        found.append(read_json(f"{root}/tokenize", {"model": MODEL_NAME, "messages": said})["tokens"])
    return found


def play(loop: ClosedLoop, offline: Contestant, server: Server, jobs: Sequence[PromptJob], *, first: bool) -> InFront:
    """One round; `first`: whether the worker goes first. All its jobs are sent at once, to the vanilla endpoint."""
    tokens = token_ids(server, jobs)

    def of_worker() -> float:
        played = loop.play(jobs, decoding="vanilla", load=len(jobs))
        return played.num_tokens / played.seconds

    def of_offline() -> float:
        began = time.monotonic()
        answer = offline.ask(tokens, [job.max_tokens for job in jobs], "vanilla", stop_at_end=True)
        return sum(len(found) for found in answer["tokens"]) / (time.monotonic() - began)

    if first:
        ours = of_worker()
        return InFront(ours, of_offline())
    theirs = of_offline()
    return InFront(of_worker(), theirs)
