"""The draft model's bookkeeping over a model whose logits are a function of everything its slot holds.

A slot that holds one wrong, missing or stale token gives other logits at once, so equality with a model that reads the
whole text anew shows that what was kept was right. tests/integration/test_draft_model_tiny.py has real models."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.fixtures.draft_slots import (
    GREEDY,
    TOKENS,
    VOCABULARY,
    Model,
    ask,
    drafter,
    greedy,
    one,
)
from worker.decoding.drafters import draft_model
from worker.decoding.drafters.draft_model import CHUNK


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
    assert sorted(model.cache.free) == list(range(8))


@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_only_what_is_new_is_read(num_accepted: int) -> None:
    model = Model()
    made = drafter(model)
    text = [1, 2, 3]
    proposal = one(made, text, 4)
    assert [sum(width.values()) for width in model.widths] == [3, 1, 1, 1]
    text += [*proposal.tokens[:num_accepted], (proposal.tokens[-1] + 1) % VOCABULARY]
    model.widths.clear()
    made.propose([ask(text, 4)])
    # The last draft was never read: where all were accepted it is read with the target's own token.
    assert [sum(width.values()) for width in model.widths] == [2 if num_accepted == 4 else 1, 1, 1, 1]


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


def test_where_nobody_waits_a_prompt_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CHUNK", 10)
    model = Model()
    text = list(range(25))
    assert one(drafter(model), text, 2).tokens == greedy(text, 2)
    assert [sum(width.values()) for width in model.widths] == [10, 10, 5, 1]


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


def test_nothing_is_remembered_once_all_is_forgotten() -> None:
    made = drafter(Model())
    one(made, [1, 2, 3], 4)
    made.clear()
    assert one(made, [7, 8], 4).tokens == greedy([7, 8], 4)


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
