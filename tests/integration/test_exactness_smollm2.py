"""Exactness on a real model in float32: look-up writes what vanilla writes, or first differs at a measured near-tie.

The prompts are text that is on every machine: the standard library's sources and docstrings.
"""

from __future__ import annotations

import heapq
import inspect
import json
import os
import shutil
import statistics
import string
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from alphaloop.messages import Origin, parse_job
from alphaloop.messages.job import Job
from alphaloop.policy import Decision
from alphaloop.settings.model import LookupDrafterSettings, ModelSettings, TargetSettings
from tests.fixtures.models import VANILLA, lookup_decision
from worker.engine import Generation, Sampling

if TYPE_CHECKING:
    from worker.decoding.engine import TransformersEngine

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PROMPTS: Final = 10
GREEDY: Final = Sampling(max_tokens=32, temperature=0.0)
# Logits that a wider pass may swap: float32 rounding over 30 layers moves a logit by some 1e-5 of its size (about 20).
NEAR_TIE: Final = 1e-3
FUNCTIONS: Final = (
    textwrap.dedent, textwrap.indent, textwrap.shorten, shutil.copyfile, shutil.which, heapq.merge, statistics.median,
    string.capwords, tempfile.mkdtemp, json.dumps, json.load, inspect.cleandoc,
)  # fmt: skip


def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)[:700]


def _doc(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "")[:600]


#: Task kinds, each as a body made of one function of the standard library.
KINDS: Final[dict[str, Callable[[Callable[..., Any]], dict[str, Any]]]] = {
    "complete": lambda f: {"prompt": _source(f)[: len(_source(f)) // 2]},
    "docstring": lambda f: _ask(f"Write a docstring for this Python function.\n\n{_source(f)}"),
    "summarise": lambda f: _ask(f"Summarise this text in one sentence.\n\n{_doc(f)}"),
    "copy": lambda f: _ask(f"Repeat this text word for word.\n\n{_doc(f)}"),
    "call": lambda f: _ask(f"Write one call of {f.__name__}{inspect.signature(f)} with example values."),
}


def _ask(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}]}


@pytest.fixture(scope="module")
def engine(smollm2_source: str) -> Iterator[TransformersEngine]:
    from worker.decoding.load import load_engine

    target = TargetSettings(source=smollm2_source, dtype="float32", device="cpu", num_threads=os.cpu_count())
    models = ModelSettings(target=target, drafters={"lookup": LookupDrafterSettings()})
    yield load_engine(models, num_slots=NUM_PROMPTS)
    torch.set_num_threads(1)


def decode(engine: TransformersEngine, jobs: list[Job], decision: Decision) -> list[Generation]:
    """All jobs at once, in their order."""
    engine.abandon()
    for job in jobs:
        engine.admit(engine.prepare(job, GREEDY), decision)
    finished: dict[str, Generation] = {}
    while engine.load().num_running:
        finished |= {generation.job_id: generation for generation in engine.step().finished}
    return [finished[job.job_id] for job in jobs]


def first_difference(engine: TransformersEngine, job: Job, vanilla: Generation, drafted: Generation) -> str | None:
    """A line about a near-tie at the first difference, None where the texts are equal; fails where it is no tie.

    The gap is measured by a plain pass without a cache over the text that both share.
    """
    if vanilla.token_ids == drafted.token_ids:
        return None
    place = next(
        i for i, pair in enumerate(zip(vanilla.token_ids, drafted.token_ids, strict=False)) if len(set(pair)) > 1
    )
    shared = [*engine.prepare(job, GREEDY).token_ids, *vanilla.token_ids[:place]]
    with torch.inference_mode():
        logits = engine._target.model(input_ids=torch.tensor([shared]), use_cache=False, logits_to_keep=1).logits[0, 0]
    best = float(logits.max())
    gaps = [best - float(logits[generation.token_ids[place]]) for generation in (vanilla, drafted)]
    line = f"{job.job_id} differs at token {place}: logits {gaps[0]:.1e} and {gaps[1]:.1e} below the best"
    assert max(gaps) < NEAR_TIE, line
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_look_up_writes_what_vanilla_writes(engine: TransformersEngine, kind: str) -> None:
    jobs = [
        parse_job(
            json.dumps(
                {"job_id": f"{kind}-{function.__name__}", "task": "code", "body": KINDS[kind](function)}
            ).encode(),
            Origin("test", "jobs.code", 0, i),
            task="code",
        )
        for i, function in enumerate(FUNCTIONS[:NUM_PROMPTS])
    ]
    vanilla = decode(engine, jobs, VANILLA)
    drafted = decode(engine, jobs, lookup_decision(5))
    assert sum(generation.counts.num_trials for generation in drafted) > 0
    assert all(not generation.counts.num_trials for generation in vanilla)
    near_ties = [
        line
        for job, one, two in zip(jobs, vanilla, drafted, strict=True)
        if (line := first_difference(engine, job, one, two))
    ]
    print(f"{kind}: {NUM_PROMPTS - len(near_ties)} of {NUM_PROMPTS} texts identical", *near_ties, sep="\n  ")


def test_vanilla_writes_the_argmax_of_the_models_own_plain_pass(engine: TransformersEngine) -> None:
    """Every token of a text is the best one under one pass over the whole text, without cache, mask or batch."""
    job = parse_job(b'{"prompt": "Name three colours of the rainbow."}', Origin("test", "jobs.qa", 0, 0), task="qa")
    (generation,) = decode(engine, [job], VANILLA)
    prompt = engine.prepare(job, GREEDY).token_ids
    with torch.inference_mode():
        logits = engine._target.model(
            input_ids=torch.tensor([[*prompt, *generation.token_ids]]), use_cache=False
        ).logits[0, len(prompt) - 1 : -1]
    gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(generation.token_ids)[:, None]).squeeze(1)
    assert float(gaps.max()) < NEAR_TIE
    assert generation.text.strip()
