"""The draft model's bookkeeping over a model whose logits are a function of everything its slot holds.

A slot that holds one wrong, missing or stale token gives other logits at once, so equality with a model that reads the
whole text anew shows that what was kept was right.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from alphaloop.engine import Sampling
from engine.drafters import draft_model
from engine.drafters.draft_model import CHUNK
from engine.proposal import Ask, Proposal
from engine.sampling import TokenChooser
from tests.fixtures.drafting import GREEDY, TOKENS, VOCABULARY, Model, ask, drafter, greedy, logits_behind, one
from tests.fixtures.enumeration import draw


def test_sequences_that_join_and_leave_get_the_drafts_of_their_own_text(rng: random.Random) -> None:
    model = Model()
    made = drafter(model)
    texts: dict[str, list[int]] = {}
    for number in range(60):
        if len(texts) < 8 and rng.random() < 0.5:
            texts[f"j{number}"] = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
            made.open(f"j{number}", texts[f"j{number}"], GREEDY, "code")
        asked = [job_id for job_id in texts if rng.random() < 0.8] or list(texts)
        rng.shuffle(asked)
        nums = [rng.randint(0, 10) for _ in asked]
        proposals = made.propose([ask(texts[j], num, job_id=j) for j, num in zip(asked, nums, strict=True)])
        for job_id, num, proposal in zip(asked, nums, proposals, strict=True):
            assert proposal.tokens == greedy(texts[job_id], min(num, 8))
            assert (proposal.parents, proposal.q) == (None, None)
            assert sorted(held.slot for held in made._held.values()) == list(range(len(texts)))
            kept = rng.randint(0, len(proposal.tokens))
            texts[job_id] += [*proposal.tokens[:kept], rng.randrange(VOCABULARY)]
        for job_id in list(texts):
            if rng.random() < 0.15:
                del texts[job_id]
                made.close(job_id)
    for job_id in texts:
        made.close(job_id)
    made.close("nobody")
    assert sorted(model.cache._free) == list(range(8))


def test_a_prompt_is_read_in_chunks_that_stall_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CHUNK", 10)
    model = Model()
    made = drafter(model)
    long, short = list(range(25)), [5, 6]
    for job_id, text in (("long", long), ("short", short)):
        made.open(job_id, text, GREEDY, "code")
    lengths = []
    for _ in range(3):
        first, second = made.propose([ask(long, 3, job_id="long"), ask(short, 3, job_id="short")])
        assert second.tokens == greedy(short, 3)
        lengths.append(len(first.tokens))
    assert lengths == [0, 0, 3]
    assert first.tokens == greedy(long, 3)
    assert max(width for widths in model.widths for width in widths.values()) == 10


def test_a_pass_that_fails_leaves_what_was_read(rng: random.Random) -> None:
    model = Model()
    made = drafter(model)
    text = [1, 2, 3]
    made.open("j", text, GREEDY, "code")
    for num_until_failure in (0, 1, 2, 3):
        model.num_until_failure = num_until_failure
        with pytest.raises(RuntimeError, match="out of memory"):
            made.propose([ask(text, 5)])
        model.num_until_failure = None
        text.append(rng.randrange(VOCABULARY))
        assert made.propose([ask(text, 5)])[0].tokens == greedy(text, 5)


def test_nothing_is_proposed_beyond_the_drafts_context() -> None:
    text = list(range(10))
    assert [len(one(drafter(Model(), context=n), text, 4).tokens) for n in (9, 10, 11, 13, 14)] == [0, 1, 2, 4, 4]


def test_nothing_is_proposed_behind_the_end_of_a_text() -> None:
    drafts = greedy([1, 2], 6)
    tokens = replace(TOKENS, end_tokens=frozenset({drafts[2]}))
    assert one(drafter(Model(), tokens), [1, 2], 6).tokens == drafts[: drafts.index(drafts[2]) + 1]


def test_of_a_long_prompt_the_first_tokens_and_the_last_are_read_and_the_text_goes_on_behind_them(
    rng: random.Random,
) -> None:
    model = Model()
    made = drafter(model, context=60, max_prompt=20)
    text = [rng.randrange(VOCABULARY - 1) for _ in range(200)]
    made.open("j", text, GREEDY, "code")
    read = [*text[:4], *text[-16:]]
    for _ in range(5):
        (proposal,) = made.propose([ask(text, 4)])
        assert proposal.tokens == greedy(read, len(proposal.tokens))
        kept = proposal.tokens[: rng.randrange(len(proposal.tokens) + 1)]
        for token in (*kept, rng.randrange(VOCABULARY - 1)):
            text.append(token)
            read.append(token)
    assert model.widths[0] == {0: 20}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("columns", [30, 40, 50], ids=["narrower", "as-wide", "wider"])
def test_ids_that_the_tokenizers_do_not_share_are_never_proposed(columns: int, temperature: float) -> None:
    tokens = replace(TOKENS, num_shared=25)
    text = [1, 2]
    proposal = one(drafter(Model(columns), tokens), text, 8, replace(GREEDY, temperature=temperature))
    assert len(proposal.tokens) == 8
    for place, token in enumerate(proposal.tokens):
        own = logits_behind([*text, *proposal.tokens[:place]], columns)[:25]
        if temperature == 0:
            assert token == int(own.argmax())
        else:
            q = dense(proposal)
            assert torch.allclose(q[place, :25], own.softmax(0), atol=1e-12)
            assert not q[place, 25:].any()


@pytest.mark.parametrize(
    "sampling", [GREEDY, replace(GREEDY, temperature=0.8), replace(GREEDY, temperature=0.8, seed=3)], ids=str
)
def test_a_head_that_was_cut_proposes_its_own_tokens(sampling: Sampling) -> None:
    ids = torch.tensor([3, 5, 8, 13, 21, 34, 39])
    proposal = one(drafter(Model(len(ids)), replace(TOKENS, num_shared=36, token_ids=ids)), [1, 2], 8, sampling)
    assert set(proposal.tokens) <= {3, 5, 8, 13, 21, 34}
    if sampling.temperature == 0:
        assert proposal.tokens[0] == int(ids[logits_behind([1, 2], 7)[:6].argmax()])
    if proposal.q is not None:
        q = dense(proposal)
        assert len(q) == 8
        assert proposal.q.probabilities.shape[1] == len(ids), "no column for what it never proposes"
        assert torch.allclose(q[0, ids[:6]], (logits_behind([1, 2], 7)[:6] / 0.8).softmax(0))
        assert torch.allclose(q.sum(1), torch.ones(8, dtype=torch.float64))


def dense(proposal: Proposal) -> Tensor:
    """What its tokens were drawn from, [n, vocabulary]."""
    assert proposal.q is not None
    return -proposal.q.taken_from(torch.zeros((len(proposal.q), VOCABULARY), dtype=torch.float64))


def sampled(**more: Any) -> Sampling:
    return replace(GREEDY, temperature=0.9, **more)


def test_drafts_are_drawn_from_the_distribution_that_is_stated(seed: int) -> None:
    kinds = [sampled(), sampled(top_p=0.8), sampled(top_p=0.8), sampled(top_k=5), sampled(repetition_penalty=1.5)]
    made = drafter(Model())
    texts = [[1, 2, number] for number in range(len(kinds))]
    names = [f"{seed}-{number}" for number in range(len(kinds))]
    asks = [ask(text, 6, kind, name) for text, kind, name in zip(texts, kinds, names, strict=True)]
    for name, text, kind in zip(names, texts, kinds, strict=True):
        made.open(name, text, kind, "code")
    for asked, proposal, kind in zip(asks, made.propose(asks), kinds, strict=True):
        q_of = dense(proposal)
        assert len(q_of) == 6
        again = TokenChooser(asked.job_id, kind, 3)
        for place, token in enumerate(proposal.tokens):
            before = proposal.tokens[:place]
            logits = logits_behind([*asked.text, *before])[None]
            q = again.probabilities(again.scores(logits, asked.text, [before]))[0]
            assert torch.equal(q_of[place], q)
            assert token == draw(q, again.uniforms(1, q.device)[0])


def test_a_job_with_a_seed_drafts_what_its_noise_says(seed: int) -> None:
    sampling = sampled(seed=seed, top_p=0.9)
    text = [4, 5, 6]
    proposal = one(drafter(Model()), text, 5, sampling)
    assert proposal.q is None
    choice = TokenChooser("other", sampling, 3)
    for place, token in enumerate(proposal.tokens):
        logits = logits_behind([*text, *proposal.tokens[:place]])[None]
        assert [token] == choice.tokens(logits, [len(text) + place])


@pytest.mark.parametrize("ids", [None, torch.arange(0, 40, 2)], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, sampled(), sampled(seed=2), replace(GREEDY, repetition_penalty=1.2)],
    ids=["greedy", "sampled", "seeded", "penalised"],
)
def test_a_draft_ends_behind_the_token_that_makes_it_improbable(
    seed: int, sampling: Sampling, ids: Tensor | None
) -> None:
    text = [seed % 7, 1, 2]
    tokens = replace(TOKENS, token_ids=ids)
    columns = VOCABULARY if ids is None else len(ids)
    whole = one(drafter(Model(columns), tokens), text, 8, sampling).tokens
    choice = TokenChooser("j", sampling, 3)
    probability, num = 1.0, 0
    while num < 8 and probability >= 0.3:
        logits = torch.full((1, VOCABULARY), -torch.inf, dtype=torch.float64)
        logits[0, slice(None) if ids is None else ids] = logits_behind([*text, *whole[:num]], columns)
        scores = choice.scores(logits, text, [whole[:num]])
        p = scores.softmax(-1) if choice.is_greedy else choice.probabilities(scores)
        probability *= float(p[0, whole[num]])
        num += 1
    assert one(drafter(Model(columns), tokens, min_probability=0.3), text, 8, sampling).tokens == whole[:num]


@pytest.mark.parametrize("sampling", [GREEDY, replace(GREEDY, repetition_penalty=1.3)], ids=["plain", "penalised"])
@pytest.mark.parametrize("num_branches", [2, 3])
def test_branches_are_the_next_likeliest_tokens_of_every_place(
    num_branches: int, sampling: Sampling, rng: random.Random
) -> None:
    made = drafter(Model(), num_branches=num_branches)
    text = [rng.randrange(VOCABULARY) for _ in range(4)]
    made.open("j", text, sampling, "code")
    for _ in range(12):
        num = rng.randint(1, 9)
        choice = TokenChooser("j", sampling, 4)
        (proposal,) = made.propose([Ask("j", text, num, choice)])
        assert len(proposal.tokens) == len(proposal.parents) <= min(num, 8)
        place, path, seen = -1, [], 0
        while seen < len(proposal.tokens):
            group = [i for i, parent in enumerate(proposal.parents) if parent == place]
            scores = choice.scores(logits_behind([*text, *path])[None], text, [path])[0]
            assert [proposal.tokens[i] for i in group] == scores.topk(len(group)).indices.tolist()
            assert group == list(range(seen, seen + len(group)))
            assert len(group) <= num_branches
            place, path, seen = group[0], [*path, proposal.tokens[group[0]]], seen + len(group)
        assert len(path) == -(-min(num, 8) // num_branches)
        # A branch may be what the target wants: then the chain behind its sibling is dropped.
        kept = rng.randrange(-1, len(proposal.tokens))
        accepted: list[int] = []
        while kept >= 0:
            accepted.insert(0, proposal.tokens[kept])
            kept = proposal.parents[kept]
        text += [*accepted, rng.randrange(VOCABULARY)]


def test_drafts_with_a_seed_have_no_branches() -> None:
    proposal = one(drafter(Model(), num_branches=3), [1, 2], 6, sampled(seed=1))
    assert (len(proposal.tokens), proposal.parents) == (6, None)


@pytest.mark.parametrize("sampling", [sampled(), sampled(top_k=5), sampled(top_k=2)], ids=["whole", "cut", "few"])
def test_siblings_of_a_sampled_draft_are_drawn_without_replacement(seed: int, sampling: Sampling) -> None:
    made, text = drafter(Model(), num_branches=3), [1, seed % 7]
    made.open("j", text, sampling, "code")
    (proposal,) = made.propose([ask(text, 6, sampling)])
    assert proposal.parents == ((-1, -1, -1, 0, 0, 0) if sampling.top_k != 2 else (-1, -1, 0, 0))
    again, q, path = TokenChooser("j", sampling, 2), dense(proposal), list[int]()
    for begin in (place for place, of in enumerate(proposal.parents) if of not in proposal.parents[:place]):
        scores = again.scores(logits_behind([*text, *path])[None], text, [path])
        left, uniforms = again.probabilities(scores)[0], again.uniforms(3, q.device)
        siblings = [place for place, of in enumerate(proposal.parents) if of == proposal.parents[begin]]
        for place, uniform in zip(siblings, uniforms, strict=False):
            assert torch.equal(q[place], again.probabilities(scores)[0])
            assert proposal.tokens[place] == draw(left, uniform)
            left[proposal.tokens[place]] = 0.0
        path.append(proposal.tokens[begin])


def test_what_it_read_of_a_text_before_its_first_draft_is_told(rng: random.Random) -> None:
    text = [rng.randrange(VOCABULARY) for _ in range(CHUNK + 30)]
    made = drafter(Model())
    made.open("other", [5, 6, 7], GREEDY, "code")
    made.open("j", text, GREEDY, "code")
    short, long = made.propose([ask([5, 6, 7], 3, job_id="other"), ask(text, 3)])
    assert (short.num_read, len(short.tokens)) == (3, 3)
    assert (long.num_read, long.tokens) == (CHUNK, ()), "the rest comes with the next round"
    (long,) = made.propose([ask(text, 3)])
    assert (long.num_read, len(long.tokens)) == (30, 3)
    text += [*long.tokens, rng.randrange(VOCABULARY)]
    (usual,) = made.propose([ask(text, 3)])
    assert usual.num_read == 0
