"""alphaloop's engine. Modes: vanilla, or DRAFTER:K."""

from __future__ import annotations

import json
import sys
from typing import Any

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Job, Mode, Origin, parse_job
from alphaloop.settings.models import ModelSettings
from benchmarks.contestants.answering import Run, serve
from worker import decoding as _  # noqa: F401  # before torch: it settles how threads wait
from worker.engine import Generation, PreparedJob, Sampling


def load() -> Run:
    """The engine of the settings in argv[1]."""
    from worker.decoding.engine import load_engine

    settings = ModelSettings.model_validate(json.loads(sys.argv[1]))
    engine = load_engine(settings, num_slots=int(sys.argv[2]))
    end_tokens = engine._target.end_tokens

    def run(request: dict[str, Any]) -> dict[str, Any]:
        engine._target.end_tokens = end_tokens if request["stop_at_end"] else frozenset()
        decision = _decision(request["mode"])
        sampling = Sampling(max_tokens=request["max_tokens"], temperature=0.0)
        jobs = [_job(number) for number in range(len(request["prompts"]))]
        for job, prompt in zip(jobs, request["prompts"], strict=True):
            engine.admit(PreparedJob(job, tuple(prompt), sampling), decision)
        finished: dict[str, Generation] = {}
        draft_s = verify_s = overhead_s = 0.0
        while engine.load().num_running:
            step = engine.step()
            finished |= {generation.job_id: generation for generation in step.finished}
            draft_s, verify_s, overhead_s = (
                draft_s + step.draft_s,
                verify_s + step.verify_s,
                overhead_s + step.overhead_s,
            )
        in_order = [finished[job.job_id] for job in jobs]
        return {
            "tokens": [generation.token_ids for generation in in_order],
            "rounds": sum(generation.counts.rounds for generation in in_order),
            "accepts": sum(generation.counts.num_accepted for generation in in_order),
            "trials": sum(generation.counts.num_trials for generation in in_order),
            "draft_s": draft_s,
            "verify_s": verify_s,
            "overhead_s": overhead_s,
        }

    return run


def _job(number: int) -> Job:
    """A job to carry a prompt that is tokenized already."""
    return parse_job(b'{"task": "code", "prompt": "x"}', Origin("benchmark", "jobs.code", 0, number), task="code")


def _decision(mode: str) -> Decision:
    if mode == "vanilla":
        return Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "benchmark")
    drafter, k = mode.split(":")
    return Decision(Mode.SPECULATIVE, drafter, "benchmark", int(k), Reason.FORCED, "benchmark")


if __name__ == "__main__":
    serve(load)
