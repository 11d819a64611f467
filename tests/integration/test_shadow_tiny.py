"""What look-up is credited with on texts that others decoded is what it is counted with when it decodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import Generation, Sampling
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter
from engine.own import TransformersEngine
from engine.scoring import Shadows
from tests.fixtures.distributions import critical
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, finish, make_job

Build = Callable[..., TransformersEngine]
#: (most tokens, most branches, least probability)
KINDS: Final = {"chain": (4, 1, 0.1), "eager": (9, 1, 0.0), "tree": (7, 3, 0.02)}
NUM_TEXTS: Final = 200
#: Prompts that are admitted together are read alike in every run: they fit into the piece that a pass reads.
NUM_SLOTS: Final = 12
#: Look-up hits and misses in what the tiny model says to these; a few random prompts need not show both (1 run of 40).
TELLING: Final = ("cd one", "cd ab", "ab one", "one ab one", "ab cd ab")


@pytest.fixture(scope="module")
def engine(tiny_engine: Build, tiny_models: dict[str, Path]) -> TransformersEngine:
    """Each look-up twice, so that each can be scored on what its twin decodes; and a draft model. Scores every text."""
    twins = {
        name: LookupDrafter(name, LookupDrafterSettings(max_draft_tokens=k, num_branches=b, min_probability=p))
        for kind, (k, b, p) in KINDS.items()
        for name in (kind, f"{kind} twin")
    }
    small = draft_model("small", tiny_models["qwen2"], num_slots=NUM_SLOTS)
    engine = tiny_engine("llama", num_slots=NUM_SLOTS, drafters={**twins, "small": small})
    engine._shadows = Shadows(engine._drafters, clock=lambda: 0.0)
    return engine


def shadow(generation: Generation, drafter: str) -> AcceptanceCounts:
    (found,) = (one for one in generation.shadows if one.drafter == drafter)
    return found.counts


def prompts(rng: random.Random, num: int) -> list[str]:
    words = ["one", "two", "cd", "ab"]
    return [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(num)]


def test_a_greedy_vanilla_text_credits_each_drafter_with_the_counts_of_its_real_run(
    engine: TransformersEngine, rng: random.Random
) -> None:
    texts = [*TELLING, *prompts(rng, NUM_SLOTS - len(TELLING))]
    lengths = [60 if text in TELLING else rng.randint(1, 60) for text in texts]
    greedy = [Sampling(max_tokens=length, temperature=0.0) for length in lengths]
    jobs = [make_job(text, number) for number, text in enumerate(texts)]
    for decided in (VANILLA, decision("small", 3)):
        others = finish(engine, ((job, sampling, decided) for job, sampling in zip(jobs, greedy, strict=True)))
        for kind, (k, _, _) in KINDS.items():
            real = finish(
                engine, ((job, sampling, decision(kind, k)) for job, sampling in zip(jobs, greedy, strict=True))
            )
            for job in jobs:
                assert real[job.job_id].token_ids == others[job.job_id].token_ids
                assert shadow(others[job.job_id], kind) == real[job.job_id].counts
                assert kind not in {one.drafter for one in real[job.job_id].shadows}
            total = sum((one.counts for one in real.values()), AcceptanceCounts())
            assert 0 < total.num_accepted < total.num_trials, "both outcomes are seen"


def test_a_run_with_short_drafts_is_scored_with_the_longest(engine: TransformersEngine, rng: random.Random) -> None:
    k = KINDS["eager"][0]
    jobs = [make_job(prompt, number) for number, prompt in enumerate(prompts(rng, 8))]
    sampling = Sampling(max_tokens=rng.randint(20, 50), temperature=0.0)
    short, long = (
        finish(engine, ((job, sampling, decision("eager", length)) for job in jobs))
        for length in (rng.randint(1, 3), k)
    )
    for job in jobs:
        assert shadow(short[job.job_id], "eager") == long[job.job_id].counts


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.9, "top_p": 0.5, "repetition_penalty": 0.8},
        {"temperature": 0.8, "top_k": 3, "stop": ("o", "\n")},
    ],
)
def test_a_drafter_is_credited_on_its_twins_text_with_its_twins_counts(
    engine: TransformersEngine, rng: random.Random, sampling: dict[str, Any]
) -> None:
    # A real run's counts follow from its text alone, whatever was drawn.
    work = [
        (make_job(prompt, rng.randrange(2**40)), Sampling(max_tokens=rng.randint(1, 50), **sampling), kind)
        for kind in KINDS
        for prompt in prompts(rng, 8)
    ]
    finished = finish(engine, ((job, one, decision(kind, KINDS[kind][0])) for job, one, kind in work))
    for job, _, kind in work:
        generation = finished[job.job_id]
        assert shadow(generation, f"{kind} twin") == generation.counts


def test_sampled_vanilla_texts_credit_a_drafter_with_counts_distributed_as_its_own(
    engine: TransformersEngine, seed: int
) -> None:
    # Texts of three tokens repeat themselves as often as not.
    favoured = tuple((token, 60.0) for token in (100, 101, 102))
    sampling = Sampling(max_tokens=12, temperature=2.0, logit_bias=favoured)
    k = KINDS["tree"][0]
    credited, real = (
        Counter(
            (counts.num_trials, counts.num_accepted)
            for generation in finish(
                engine,
                ((make_job("ab ab", (seed * 2 + side) * NUM_TEXTS + n), sampling, decided) for n in range(NUM_TEXTS)),
            ).values()
            for counts in [shadow(generation, "tree") if decided is VANILLA else generation.counts]
        )
        for side, decided in enumerate((VANILLA, decision("tree", k)))
    )
    excess, num_cells = two_sample_excess(credited, real)
    assert num_cells >= 6, "the test needs a spread of counts"
    assert excess < 1, f"seed {seed}: {excess:.2f} of the critical value"


def two_sample_excess(one: Counter[tuple[int, int]], two: Counter[tuple[int, int]]) -> tuple[float, int]:
    """Pearson's statistic of homogeneity of two equally large samples over its critical value, and its cells.

    Cells with fewer than 10 in both together are pooled.
    """
    cells = [(one[seen], two[seen]) for seen in one | two if one[seen] + two[seen] >= 10]
    rest = (one.total() - sum(a for a, _ in cells), two.total() - sum(b for _, b in cells))
    cells += [rest] * (sum(rest) > 0)
    return sum((a - b) ** 2 / (a + b) for a, b in cells) / critical(len(cells) - 1), len(cells)
