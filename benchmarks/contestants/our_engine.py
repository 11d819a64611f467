"""alphaloop's engine without a worker, fed with a whole list of jobs: SETTINGS NUM_SLOTS.

A free slot is refilled before the next step. Requests name what is wanted: `tokens` of prompts, `decode`, or
`near_ties` between two texts of a job; without a name they are those of every contestant. The engine is known as
`load_engine` and `alphaloop.engine.Engine`; torch is imported when it is loaded.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import engine as _engine  # noqa: F401  # before torch: it settles how threads wait
from alphaloop.engine import Generation, PreparedJob, Sampling, Step
from alphaloop.messages import Job
from alphaloop.settings.models import ModelSettings
from benchmarks.contestants.process import Run, serve
from benchmarks.jobs import PromptJob, forced, without_prefix_cache
from benchmarks.whole.near_ties import Reference, explain


def load(settings: str, num_slots: str) -> Run:
    """The engine of these settings, as JSON."""
    engine = FedEngine(ModelSettings.model_validate_json(settings), num_slots=int(num_slots))
    return lambda request: _ANSWERS[request.get("what", "generate")](engine, request)


@dataclass(slots=True)
class FedRun:
    """What the engine did with jobs that it was fed directly."""

    seconds: float = 0.0  #: from the first admission to the last text; prompts were tokenized before
    generations: dict[str, Generation] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  #: code of the error, by job_id
    num_steps: int = 0  #: while jobs waited
    num_sequence_steps: int = 0  #: of them, sequences added up
    decode_s: float = 0.0  #: of all, steps that read no prompt

    @property
    def num_tokens(self) -> int:
        """Sum over all texts."""
        return sum(len(one.token_ids) for one in self.generations.values())


class FedEngine:
    """The engine of the settings, without cached prefixes. A free slot is refilled before the next step."""

    def __init__(self, settings: ModelSettings, *, num_slots: int) -> None:
        from engine.own import load_engine

        self._target = settings.target
        self._engine = load_engine(without_prefix_cache(settings), num_slots=num_slots)
        self._end_tokens = self._engine._target.end_tokens
        gc.collect()
        gc.freeze()  # as the worker does

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.identity.context_length

    @property
    def name(self) -> str:
        """Library, version and dtype."""
        return self._engine.identity.engine

    @property
    def tokenizer(self) -> Any:
        """As the target gives it."""
        return self._engine._target.tokenizer

    @property
    def grammars(self) -> Any:
        """As the target gives it."""
        return self._engine._target.grammars

    @property
    def num_slots(self) -> int:
        """Texts that it decodes together."""
        return self._engine.load().num_slots

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Tokenize and compile as the worker does.

        Raises PromptTooLong for a prompt that leaves no room for an output, InvalidField.
        """
        return self._engine.prepare(job, sampling)

    def run(
        self,
        prepared: Sequence[PreparedJob],
        decisions: Mapping[str, tuple[str, int] | None],
        *,
        stop_at_end: bool = True,
        after_step: Callable[[Step], object] = lambda step: None,
    ) -> FedRun:
        """Decode all jobs. `decisions` gives drafter and k by job_id; None is vanilla."""
        self._engine._target.end_tokens = self._end_tokens if stop_at_end else frozenset()
        waiting = deque((one, forced(*(decisions[one.job.job_id] or ()))) for one in prepared)
        run = FedRun()
        began = time.perf_counter()
        while waiting or self._engine.load().num_running:
            while waiting and self._engine.has_room(waiting[0][0]):
                self._engine.admit(*waiting.popleft())
            step = self._engine.step()
            after_step(step)
            if waiting:
                run.num_steps += 1
                run.num_sequence_steps += step.batch
            run.decode_s += 0.0 if step.num_prefill_tokens else step.wall_s
            run.generations |= {one.job_id: one for one in step.finished}
            run.failed |= {one.job_id: one.error.code for one in step.failed}
        run.seconds = time.perf_counter() - began
        return run

    def model_folder(self) -> Path:
        """The model as files that vLLM can read."""
        return Path(self._weights(self._target.dtype).folder)

    def reference(self) -> Any:
        """The target in float32 as transformers runs it, with its tokenizer: `model`, `tokenizer`."""
        return self._weights("float32")

    def end_tokens(self, reference: Any) -> frozenset[int]:
        """Every token that ends a text."""
        from engine.models import end_tokens

        return end_tokens(reference.model, reference.tokenizer)

    def _weights(self, dtype: str) -> Any:
        from engine.device import find_device
        from engine.models import load_weights

        return load_weights(self._target.source, self._target.revision, dtype, find_device("cpu"))


def _generate(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    """Prompts that are tokenized already. Modes: vanilla, or DRAFTER:K."""
    drafter, _, k = request["mode"].partition(":")
    sampling = Sampling(max_tokens=request["max_tokens"], temperature=0.0)
    prepared = [
        PreparedJob(PromptJob(str(number), "code", "x", sampling.max_tokens).as_job(), tuple(prompt), sampling)
        for number, prompt in enumerate(request["prompts"])
    ]
    decisions = {one.job.job_id: None if drafter == "vanilla" else (drafter, int(k)) for one in prepared}
    found = engine.run(prepared, decisions, stop_at_end=request["stop_at_end"])
    return {"tokens": [found.generations[one.job.job_id].token_ids for one in prepared]}


def _tokens(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    prepared = _prepared(engine, _jobs(request))
    return {
        "engine": engine.name,
        "folder": str(engine.model_folder()),
        "context_length": engine.context_length,
        "prompts": [list(one.token_ids) for one in prepared],
        "max_tokens": [one.sampling.max_tokens for one in prepared],
    }


def _decode(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    decisions = {job_id: None if given is None else tuple(given) for job_id, given in request["decisions"].items()}
    run = engine.run(_prepared(engine, _jobs(request)), decisions)
    return {
        "seconds": run.seconds,
        "texts": {job_id: one.text for job_id, one in run.generations.items()},
        "token_ids": {job_id: one.token_ids for job_id, one in run.generations.items()},
        "num_steps": run.num_steps,
        "num_sequence_steps": run.num_sequence_steps,
    }


def _near_ties(engine: FedEngine, request: dict[str, Any]) -> dict[str, Any]:
    loaded = engine.reference()
    reference = Reference(loaded.model, loaded.tokenizer, engine.end_tokens(loaded))
    jobs = _jobs(request)
    found = []
    for job, prepared, token_ids, text in zip(
        jobs, _prepared(engine, jobs), request["token_ids"], request["texts"], strict=True
    ):
        found.append(asdict(explain(job.job_id, reference, prepared.token_ids, token_ids, text)))
    return {"differences": found}


def _prepared(engine: FedEngine, jobs: Sequence[PromptJob]) -> list[PreparedJob]:
    return [engine.prepare(job.as_job(), Sampling(max_tokens=job.max_tokens, temperature=0.0)) for job in jobs]


def _jobs(request: dict[str, Any]) -> list[PromptJob]:
    return [PromptJob(**fields) for fields in request["jobs"]]


_ANSWERS = {"generate": _generate, "tokens": _tokens, "decode": _decode, "near_ties": _near_ties}


if __name__ == "__main__":
    serve(lambda: load(*sys.argv[1:]))
