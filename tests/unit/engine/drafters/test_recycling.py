"""What the target said before is proposed again, and what a text becomes does not depend on it."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from alphaloop.engine import Sampling
from alphaloop.settings.models import RecyclingDrafterSettings
from engine.drafters.recycling import MOST_KNOWN, RecyclingDrafter
from engine.measuring import measure_draft_ms
from engine.proposal import NOTHING, Ask, Proposal
from engine.states import NUM_SAID, SAID, States
from tests.fixtures.drafting import GREEDY, ask
from tests.fixtures.enumeration import Draft, Language, by_tree, enumerate_round, l1
from tests.fixtures.models import Reference, drafted_alike, make_job

Text = tuple[int, ...]
END: Final = 9


def made(num_branches: int = 3) -> RecyclingDrafter:
    return RecyclingDrafter("again", RecyclingDrafterSettings(num_branches=num_branches), {END})


def asking(text: list[int], num: int, said: Sequence[Sequence[int]]) -> Ask:
    found = ask(text, num)
    states = States(0, len(text) - 1, {SAID: torch.tensor(said)}) if said else None
    return Ask(found.job_id, found.text, num, found.choice, states=states)


def proposed(drafter: RecyclingDrafter, last: int, num: int, *said: Sequence[int]) -> Proposal:
    (found,) = drafter.propose([asking([0, last], num, said)])
    return found


def test_what_followed_a_token_is_proposed_behind_it_and_its_followers_behind_that() -> None:
    drafter = made()
    drafter.open("j", [0], GREEDY, "code")
    assert proposed(drafter, 1, 4) == NOTHING
    assert proposed(drafter, 3, 4, (1, 2, 5, 6), (2, 3, 4, 7)) == NOTHING, "nothing was said of token 3"
    found = proposed(drafter, 1, 4)
    assert (found.tokens, found.parents) == ((2, 3, 5, 4), (-1, 0, -1, 0)), "likely paths before unlikely ones"
    assert proposed(drafter, 1, 1).tokens == (2,)
    # What was said later of the same token counts.
    assert proposed(drafter, 1, 2, (1, 8, 2, 5)).tokens == (8, 2)
    assert len(proposed(drafter, 2, 7, (3, 2, 1, 1), (4, 4, 4, 4)).tokens) == 7


def test_a_text_knows_what_was_said_in_it_alone_and_forgets_it() -> None:
    drafter = made()
    drafter.open("j", [0], GREEDY, "code")
    assert proposed(drafter, 1, 1, (1, 2, 5)).tokens == (2,)
    drafter.open("other", [0], GREEDY, "code")
    assert drafter.propose([ask([0, 1], 4, job_id="other")]) == [NOTHING]
    drafter.close("j")
    drafter.close("j")
    drafter.open("j", [0], GREEDY, "code")
    assert proposed(drafter, 1, 1) == NOTHING
    drafter.clear()
    assert not drafter._known


def test_branches_are_a_setting_and_nothing_follows_an_end() -> None:
    chain = made(num_branches=1)
    chain.open("j", [0], GREEDY, "code")
    found = proposed(chain, 1, 5, (1, 2, 3), (2, END, 3), (END, 4, 5))
    assert (found.tokens, found.parents) == ((2, END), (-1, 0))
    assert chain.state.revision != made().state.revision


def test_what_is_known_of_a_text_is_bounded_and_the_latest_stays() -> None:
    drafter = made()
    drafter.open("j", [0], GREEDY, "code")
    for token in range(MOST_KNOWN + 10):
        proposed(drafter, 0, 1, (token + 10, 1, 2), (10, 3, 4))
    assert len(drafter._known["j"]) == MOST_KNOWN
    assert proposed(drafter, 10, 1).tokens == (3,), "said again in every round"
    assert proposed(drafter, 11, 1) == NOTHING


@pytest.mark.parametrize("num", [1, 3, 7])
def test_what_is_timed_has_as_many_tokens_as_are_asked_for(num: int) -> None:
    drafter = made()
    for text in ([5], [1, 2, 3, 4, 5, 6, 7, 8]):
        drafter.open("j", text, GREEDY, "")
        (found,) = drafter.propose([replace(ask(text, num), is_timed=True)])
        assert len(found.tokens) == num
        drafter.close("j")
    assert measure_draft_ms(drafter, 2, 1 + num, 40, 1) > 0


class Behind(Language):
    """A language behind a beginning."""

    def __init__(self, language: Language, begun: Text) -> None:
        super().__init__("", language.vocabulary)
        self._language, self._begun = language, begun

    def behind(self, prefix: Text) -> Tensor:
        return self._language.behind((*self._begun, *prefix))


@pytest.mark.parametrize("num_branches", [1, 2])
def test_sampled_texts_have_the_targets_distribution_to_the_last_bit(
    seed: int, rng: random.Random, num_branches: int
) -> None:
    """All rounds of a text, exactly: what is proposed follows from drafts that earlier rounds rejected."""
    target, length = Language(f"target {seed}", 3), 5
    found: Counter[Text] = Counter()
    accepted: Counter[int] = Counter()

    def go_on(text: Text, weight: float, drafter: RecyclingDrafter, said: Sequence[Sequence[int]]) -> None:
        if len(text) >= length:
            found[text[:length]] += weight
            return
        drafter = copy.deepcopy(drafter)
        (proposal,) = drafter.propose([asking(list(text), 2, said)])
        parents = proposal.parents or ()
        draft = Draft(1.0, proposal.tokens, parents, torch.empty((0, 3), dtype=torch.float64))
        rows = [(token, path) for token, path in zip((text[-1], *proposal.tokens), proposal.paths, strict=True)]
        said = [(token, *target.behind((*text, *path)).argsort(descending=True).tolist()) for token, path in rows]
        round_ = enumerate_round(Behind(target, text), [draft], by_tree, rng)
        if proposal.tokens:
            accepted.update(round_.accepts)
        for begun, part in round_.begun.items():
            go_on((*text, *begun), weight * part, drafter, said)

    drafter = made(num_branches)
    drafter.open("j", [0], GREEDY, "code")
    for token, p in enumerate(target.behind(()).tolist()):
        go_on((token,), p, drafter, [])
    assert l1(dict(found), target.texts(length)) < 1e-12
    assert accepted[0] > 0
    assert accepted[1] + accepted[2] > 0


class Watched:
    """Compares what the target said with a model of its own, behind every token of the round before."""

    def __init__(self, inner: Any, reference: Reference) -> None:
        self.inner, self.reference = inner, reference
        self.before: dict[str, tuple[list[int], Proposal]] = {}
        self.num_rejected = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found: list[Proposal] = self.inner.propose(asks)
        for one, proposal in zip(asks, found, strict=True):
            if one.job_id in self.before:
                assert one.states is not None
                self.compare(one, one.states.by_tap[SAID].tolist())
            self.before[one.job_id] = list(one.text), proposal
        return found

    def compare(self, one: Ask, said: list[list[int]]) -> None:
        text, proposal = self.before[one.job_id]
        assert [token for token, *_ in said] == [text[-1], *proposal.tokens]
        for path, (_, *likeliest) in zip(proposal.paths, said, strict=True):
            logits = self.reference.logits([*text, *path])[-1]
            assert likeliest == logits.topk(NUM_SAID).indices.tolist()
            self.num_rejected += list(path) != one.text[len(text) :][: len(path)]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_is_handed_over_is_what_the_target_says_also_behind_rejected_drafts(
    tiny_engine: Callable[..., Any], references: Callable[[str], Reference], family: str
) -> None:
    engine = tiny_engine(family, num_slots=3)
    watched = Watched(
        RecyclingDrafter("again", RecyclingDrafterSettings(), engine._target.end_tokens), references(family)
    )
    engine._drafters["again"] = watched
    jobs = [make_job(f"{'abc'[number] * 5} = {number}" * (1 + 9 * number), number) for number in range(3)]
    sampling = Sampling(max_tokens=40, temperature=0.0, logit_bias=((0, -1000.0),))
    drafted_alike(engine, jobs, sampling, "again", 5)
    assert watched.num_rejected > 0
