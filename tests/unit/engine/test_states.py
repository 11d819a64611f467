"""Hidden states that drafters are handed: those of transformers' own forward, at the positions that they name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from engine.network.passes import WIDEST_SHARED, Read
from engine.proposal import NOTHING, Ask, Drafter, Proposal
from engine.states import FINAL, KeptStates
from tests.fixtures.drafting import language_model
from tests.fixtures.models import FAMILIES, NUM_TOKENS, VANILLA, decision, finish, make_job

TAPS: Final = (0, 1, FINAL)
TOLERANCE: Final = 1e-3  #: of states of size 40: transformers computes norms and rotations in float32


class Own:
    """The states of a text by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.inference_mode()
    def states(self, text: Sequence[int]) -> dict[int, Tensor]:
        """[len(text), hidden], by tap."""
        found: Any = self._model(input_ids=torch.tensor([list(text)]), output_hidden_states=True)
        return {tap: found.hidden_states[tap][0] for tap in TAPS}


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_gives_the_models_own_states_in_the_order_of_its_reads(
    tiny_models: dict[str, Path], family: str, rng: random.Random
) -> None:
    model, own = language_model(tiny_models[family]), Own(tiny_models[family])
    cache = model.new_cache(4)
    texts = {cache.acquire(): [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(4)}
    for slot, text in texts.items():
        model.prefill(cache, slot, text)
    for _ in range(4):
        slots = rng.sample(sorted(texts), 3)
        reads = []
        for slot in slots:
            num = rng.choice((1, 3, WIDEST_SHARED + 5))
            tokens = [rng.randrange(NUM_TOKENS) for _ in range(num)]
            reads.append(Read(slot, tokens, num_logits=rng.choice((0, 1, num))))
        logits, states = model.read_tapped(cache, reads, TAPS)
        kept = {tap: x.clone() for tap, x in states.items()}
        assert torch.equal(logits, model.read(cache, reads))
        assert all(torch.equal(kept[tap], x) for tap, x in states.items()), "another pass leaves them"
        behind = [own.states([*texts[read.slot], *read.token_ids]) for read in reads]
        for tap in TAPS:
            nums = [read.num_logits if tap == FINAL else len(read.token_ids) for read in reads]
            expected = torch.cat([x[tap][len(x[tap]) - num :] for x, num in zip(behind, nums, strict=True)])
            assert states[tap].shape == expected.shape
            assert not len(expected) or float((states[tap] - expected).abs().max()) < TOLERANCE
        for read in reads:
            texts[read.slot] = [*texts[read.slot], *read.token_ids]
            cache.lengths[read.slot] += len(read.token_ids)


class Spy(Drafter):
    """Proposes right tokens, wrong ones and trees, and keeps every state that it is handed."""

    taps = TAPS

    def __init__(self, rng: random.Random) -> None:
        self.state = DrafterState("spy", "test", 4)
        self.truths: dict[str, list[int]] = {}
        self.seen: dict[str, list[tuple[int, int, dict[int, Tensor]]]] = {}
        self._rng = rng

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        self.seen[job_id] = []

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Proposal:
        if ask.states is not None:
            assert ask.states.end == len(ask.text) - 1
            self.seen[ask.job_id].append((ask.states.first, ask.states.end, dict(ask.states.by_tap)))
        rest = self.truths.get(ask.job_id, [])[len(ask.text) :][: ask.num_tokens - 1]
        wrong = self._rng.randrange(NUM_TOKENS)
        kind = self._rng.choice(("nothing", "chain", "tree"))
        if kind == "nothing":
            return NOTHING
        if kind == "chain":
            return Proposal((*rest, wrong))
        # A wrong sibling before the right path.
        return Proposal((wrong, *rest), (-1, *(-1 if place == 0 else place for place in range(len(rest)))))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_drafter_is_handed_the_states_of_every_position_that_was_accepted(
    tiny_engine: Callable[..., Any], tiny_models: dict[str, Path], family: str, rng: random.Random
) -> None:
    spy, own = Spy(rng), Own(tiny_models[family])
    engine = tiny_engine(family, num_slots=4, drafters={"spy": spy})
    jobs = [make_job(f"{rng.randrange(10**9)}" * (1 + 3 * number), number) for number in range(5)]
    sampling = Sampling(max_tokens=24, temperature=0.0)
    plain = finish(engine, ((job, sampling, VANILLA) for job in jobs))
    prompts = {job.job_id: list(engine.prepare(job, sampling).token_ids) for job in jobs}
    spy.truths = {job_id: [*prompts[job_id], *one.token_ids] for job_id, one in plain.items()}
    drafted = finish(engine, ((job, sampling, decision("spy", 4)) for job in jobs))
    assert {one: its.token_ids for one, its in drafted.items()} == {one: its.token_ids for one, its in plain.items()}
    assert sum(its.counts.num_accepted for its in drafted.values()) > 0
    for job_id, pieces in spy.seen.items():
        right, end = own.states(spy.truths[job_id]), 0
        assert pieces, "nothing was handed over"
        for first, until, by_tap in pieces:
            assert (first, until) == (first if end == 0 else end, first + len(by_tap[0]))
            end = until
            for tap, rows in by_tap.items():
                expected = right[tap][until - 1 : until] if tap == FINAL else right[tap][first:until]
                assert float((rows - expected).abs().max()) < TOLERANCE
        # Nothing was copied where nobody begins alike.
        assert pieces[0][0] == 0 or len(prompts[job_id]) > 8


def test_states_behind_a_gap_begin_anew_and_are_handed_out_once() -> None:
    kept, row = KeptStates(), torch.ones(2, 3)
    kept.add(0, 2, {1: row})
    kept.add(2, 2, {1: 2 * row, FINAL: row[:1]})
    states = kept.take()
    assert states is not None
    assert (states.first, states.end) == (0, 4)
    assert states.of((1, 1)).shape == (4, 6)
    kept.add(7, 2, {1: row})
    states = kept.take()
    assert states is not None
    assert (states.first, states.end) == (7, 9)
    assert FINAL not in states.by_tap, "no logits were wanted there"
    assert kept.take() is None
