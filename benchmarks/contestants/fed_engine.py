"""alphaloop's engine, fed with a whole list of jobs: a free slot is refilled before the next step.

Requests name what is wanted: `tokens` of prompts, `decode`, or `near_ties` between two texts of a job.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contestants.answering import Run, serve
from benchmarks.whole.jobs import PromptJob
from benchmarks.whole.near_ties import Reference, explain
from benchmarks.whole.product import FedEngine


def load() -> Run:
    """The engine of the configs folder argv[1] with argv[2] slots."""
    engine = FedEngine(Path(sys.argv[1]), num_slots=int(sys.argv[2]))
    return lambda request: ANSWERS[request["what"]](engine, request)


def _tokens(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    prepared = engine.prepare(_jobs(request))
    return {
        "engine": engine.name,
        "folder": str(engine.model_folder()),
        "context_length": engine.context_length,
        "prompts": [list(one.token_ids) for one in prepared],
        "max_tokens": [one.sampling.max_tokens for one in prepared],
    }


def _decode(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    decisions = {job_id: None if given is None else tuple(given) for job_id, given in request["decisions"].items()}
    return asdict(engine.run(engine.prepare(_jobs(request)), decisions))


def _near_ties(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    loaded = engine.reference()
    reference = Reference(loaded.model, loaded.tokenizer, engine.end_tokens(loaded))
    jobs = _jobs(request)
    found = []
    for job, prepared, token_ids, text in zip(
        jobs, engine.prepare(jobs), request["token_ids"], request["texts"], strict=True
    ):
        found.append(asdict(explain(job.job_id, reference, prepared.token_ids, token_ids, text)))
    return {"differences": found}


def _jobs(request: dict[str, Any]) -> list[PromptJob]:
    return [PromptJob(**fields) for fields in request["jobs"]]


ANSWERS = {"tokens": _tokens, "decode": _decode, "near_ties": _near_ties}

if __name__ == "__main__":
    serve(load)
