"""Exactness on a real model in float32: look-up in a batch writes what vanilla writes alone, or first differs at a
measured near-tie. `python -m benchmarks.exactness` does the same over hundreds of prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Body, Job
from benchmarks.exactness import BATCH, NEAR_TIE, decode, first_difference
from benchmarks.jobs import forced
from engine.own import TransformersEngine

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY: Final = Sampling(max_tokens=20, temperature=0.0)
TICKET: Final = (
    "Ticket 4471. Opened by Mara Lindqvist, warehouse Trondheim, 3 March. The label printer at gate B prints every "
    "second label upside down since the update. Restarting the printer helps for about ten minutes. Gate A has the "
    "same printer and the old software, and prints well."
)
#: Of several kinds, so that look-up meets texts that repeat themselves, copies, lists, code, and plain answers.
PROMPTS: Final = {
    "completion": "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "repetition": "red, green, blue, red, green, blue, red, green, blue,",
    "copy": f"Repeat this word for word:\n\n{TICKET}",
    "extraction": f"Give the name, the place and the date in this ticket as JSON.\n\n{TICKET}",
    "summary": f"Summarise this ticket in one sentence.\n\n{TICKET}",
    "rewriting": f"Rewrite this ticket so that it is about gate C instead of gate B.\n\n{TICKET}",
    "sql": "Table parts(id, name, price). Write a query for the three dearest parts.",
    "question": "Why is the sky blue?",
}


@pytest.fixture(scope="module")
def engine(smollm2_engine: TransformersEngine) -> Iterator[TransformersEngine]:
    torch.set_num_threads(os.cpu_count() or 1)
    assert smollm2_engine.load().num_free == BATCH
    yield smollm2_engine
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference(smollm2_source: str) -> Any:
    from engine.models import load_weights

    return load_weights(smollm2_source, None, "float32", torch.device("cpu")).model


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    raw = ("completion", "repetition")
    bodies = {
        name: {"prompt": text} if name in raw else {"messages": [{"role": "user", "content": text}]}
        for name, text in PROMPTS.items()
    }
    return [Job(job_id=name, task="code", body=Body.model_validate(body)) for name, body in bodies.items()]


@pytest.fixture(scope="module")
def vanilla(engine: TransformersEngine, jobs: list[Job]) -> dict[str, Generation]:
    """Every text, decoded alone."""
    return {generation.job_id: generation for generation in decode(engine, jobs, GREEDY, forced(), batch=1)}


def test_look_up_in_a_batch_writes_what_vanilla_writes_alone(
    engine: TransformersEngine, reference: Any, jobs: list[Job], vanilla: dict[str, Generation]
) -> None:
    lookup = forced("lookup", 5)
    drafted = {generation.job_id: generation for generation in decode(engine, jobs, GREEDY, lookup, batch=BATCH)}
    assert set(vanilla) == set(drafted) == set(PROMPTS)
    assert all(not generation.counts.num_trials for generation in vanilla.values())
    assert sum(generation.counts.num_accepted for generation in drafted.values()) > 0
    assert max(generation.batch_size for generation in drafted.values()) == BATCH
    for job in jobs:
        prompt = engine.prepare(job, GREEDY).token_ids
        found = first_difference(
            reference, prompt, vanilla[job.job_id].token_ids, drafted[job.job_id].token_ids, job.job_id
        )
        print(f"{job.job_id}: {found or 'identical'}")
        assert found is None or found.is_near_tie


def test_vanilla_writes_the_argmax_of_the_models_own_plain_pass(
    engine: TransformersEngine, reference: Any, jobs: list[Job], vanilla: dict[str, Generation]
) -> None:
    """Every token of a text is the best one under one pass over the whole text, without cache, slots or batch."""
    for job in jobs[:2]:
        generation, prompt = vanilla[job.job_id], engine.prepare(job, GREEDY).token_ids
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*prompt, *generation.token_ids]]), use_cache=False).logits
        behind = logits[0, len(prompt) - 1 : -1]
        chosen = behind.gather(1, torch.tensor(generation.token_ids)[:, None]).squeeze(1)
        assert float((behind.max(dim=-1).values - chosen).max()) < NEAR_TIE
        assert generation.text.strip()
