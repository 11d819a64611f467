"""Several drafters in one round: who is asked, what stands in the tree, and what a source that fails does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from pydantic import ValidationError

from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed
from alphaloop.settings.models import HybridDrafterSettings, LookupDrafterSettings, ModelSettings
from engine.drafters.hybrid import HybridDrafter, merged
from engine.drafters.lookup import LookupDrafter
from engine.measuring import measure_draft_ms, measure_draft_prefill_ms
from engine.own import TransformersEngine
from engine.proposal import Ask, DraftDistributions, Drafter, Proposal
from tests.fixtures.drafting import GREEDY, Model, ask, draft_model, drafter, greedy
from tests.fixtures.models import decision, make_job, steps

Build = Callable[..., TransformersEngine]
SWITCH: Final = HybridDrafterSettings(sources=("lookup", "small"))
TREE: Final = HybridDrafterSettings(sources=("lookup", "small"), rule="tree", most_tokens={"lookup": 3})
#: Ends with three tokens that stood before, so that look-up is sure; and one that is new.
REPEATING: Final = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
NEW: Final = [1, 2, 3, 4, 5, 6, 7]


def hybrid(settings: HybridDrafterSettings = SWITCH, **sources: Drafter) -> HybridDrafter:
    lookup = LookupDrafter("lookup", LookupDrafterSettings(max_draft_tokens=8))
    return HybridDrafter("hybrid", settings, {"lookup": lookup, "small": drafter(Model()), **sources})


def proposed(made: HybridDrafter, text: list[int], num: int = 4, sampling: Sampling = GREEDY) -> Proposal:
    made.open("j", text, sampling, "code")
    (proposal,) = made.propose([ask(text, num, sampling)])
    made.close("j")
    return proposal


def test_a_switch_asks_look_up_where_it_is_sure_and_else_the_draft_model() -> None:
    sure, unsure = proposed(hybrid(), REPEATING), proposed(hybrid(), NEW)
    assert (sure.tokens, sure.proposers) == ((4, 5, 6, 7), ("lookup",) * 4)
    assert (unsure.tokens, unsure.proposers) == (greedy(NEW, 4), ("small",) * 4)


def test_what_a_switch_chooses_does_not_depend_on_the_length_asked_for(rng: random.Random) -> None:
    """Or alpha would move with k."""
    made = hybrid()
    for _ in range(40):
        text = [rng.randrange(4) for _ in range(rng.randint(4, 12))]
        whole = proposed(made, text, 8)
        for num in (1, 2, 5):
            short = proposed(made, text, num)
            assert short.tokens == whole.tokens[:num]
            assert short.proposers == whole.proposers[:num]


def test_an_unlikely_guess_is_taken_where_the_last_source_has_none() -> None:
    made = hybrid(small=drafter(Model(), context=3))
    text = [9, 1, 2, 3, 4, 5, 3]  # a match of one token: probability 1/3
    assert (proposed(made, text).proposers or ("",))[0] == "lookup"


def test_a_tree_holds_both_and_what_they_share_once() -> None:
    proposal = proposed(hybrid(TREE), REPEATING, 8)
    small = greedy(REPEATING, 5)
    assert proposal.tokens[:3] == (4, 5, 6)
    assert (proposal.parents or ())[:4] == (-1, 0, 1, -1)
    assert proposal.tokens[3:] == small
    assert proposal.proposers == ("lookup",) * 3 + ("small",) * 5
    assert len(proposed(hybrid(TREE), REPEATING, 4).tokens) == 4


def test_what_a_drawn_chain_was_drawn_from_goes_along(seed: int) -> None:
    sampled = replace(GREEDY, temperature=0.9)
    proposal = proposed(hybrid(TREE), [*REPEATING, 1, 2, 3], 8, sampled)
    assert proposal.q is not None
    assert len(proposal.q) == 5
    assert proposal.proposers[:5] == ("small",) * 5
    assert "lookup" in proposal.proposers


class Asked(Drafter):
    """A source that keeps what it was asked."""

    def __init__(self) -> None:
        self.state = replace(drafter(Model()).state, name="small")
        self.asks: list[Ask] = []

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.asks += asks
        return [Proposal((1,)) for _ in asks]


@pytest.mark.parametrize("settings", [SWITCH, TREE], ids=["switch", "tree"])
def test_sources_get_the_asks_as_they_came(settings: HybridDrafterSettings) -> None:
    small = Asked()
    made = hybrid(settings, small=small)
    given = ask(list(NEW), 4)
    made.open("j", given.text, GREEDY, "code")
    made.propose([given])
    assert [replace(one, num_tokens=4) for one in small.asks] == [given]


@pytest.mark.parametrize("settings", [SWITCH, TREE], ids=["switch", "tree"])
def test_a_source_that_reads_the_targets_states_gets_those_of_every_round(settings: HybridDrafterSettings) -> None:
    """Look-up is sure, or fills the round: nothing is asked of the other source, which would lose its place."""
    small = Asked()
    made = hybrid(settings, small=small)
    given = ask(list(REPEATING), 3)
    made.open("j", given.text, GREEDY, "code")
    (before,) = made.propose([given])
    assert small.asks == []
    small.taps = (0,)  # type: ignore[attr-defined]
    assert [one.tokens for one in made.propose([given])] == [before.tokens]
    assert small.asks == [replace(given, num_tokens=0)]


@pytest.mark.parametrize("settings", [SWITCH, TREE], ids=["switch", "tree"])
def test_the_slowest_round_is_what_is_timed(settings: HybridDrafterSettings) -> None:
    """On a text in which look-up always finds something, the draft model is read all the same."""
    model = Model()
    made = hybrid(settings, small=drafter(model))
    assert measure_draft_ms(made, 2, 3, 40, 1) > 0
    assert sum(map(len, model.widths)) >= 8, "two sequences, two tokens, two rounds"
    model.widths.clear()
    assert measure_draft_prefill_ms(made, 40, 1) > 0
    assert sum(sum(width.values()) for width in model.widths) >= 40
    assert not made._sources["lookup"]._open  # type: ignore[attr-defined]


def test_the_revision_says_what_is_asked_and_by_which_rule() -> None:
    revisions = {
        hybrid(settings).state.revision
        for settings in (
            SWITCH,
            TREE,
            replace_settings(SWITCH, min_probability=0.7),
            replace_settings(TREE, most_tokens={}),
        )
    }
    assert len(revisions) == 4
    other = LookupDrafter("lookup", LookupDrafterSettings(min_probability=0.2))
    assert hybrid(lookup=other).state.revision not in revisions
    assert hybrid(replace_settings(SWITCH, max_draft_tokens=3)).state.revision in revisions, (
        "the longest is no part of it"
    )


def replace_settings(settings: HybridDrafterSettings, **changed: Any) -> HybridDrafterSettings:
    return settings.model_copy(update=changed)


def test_a_tree_is_no_drafter_that_one_pass_over_a_text_scores() -> None:
    assert not hybrid().state.is_scorable
    assert not hybrid().state.is_scored


@pytest.mark.parametrize("method", ["open", "propose", "close"])
@pytest.mark.parametrize("settings", [SWITCH, TREE], ids=["switch", "tree"])
@pytest.mark.parametrize("error", [RuntimeError("a prompt's own words"), MemoryError()], ids=repr)
def test_a_source_that_raises_is_the_hybrids_failure_and_nothing_stays_held(
    settings: HybridDrafterSettings, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hybrid(settings)
    lookup, small = made._sources["lookup"], made._sources["small"]

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(small, method, fail)
    with pytest.raises(type(error)):
        proposed(made, NEW)
    with suppress(type(error)):
        made.close("j")
    assert not lookup._open  # type: ignore[attr-defined]
    assert method == "close" or not small._held  # type: ignore[attr-defined]


def test_an_answer_that_is_no_proposal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hybrid()
    monkeypatch.setattr(made._sources["small"], "propose", lambda asks: [])
    with pytest.raises(DecodeFailed):
        proposed(made, NEW)


@pytest.mark.parametrize("rule", ["switch", "tree"])
def test_rounds_are_counted_and_timed_by_source(tiny_engine: Build, tiny_models: dict[str, Path], rule: Any) -> None:
    """That the texts stay the target's: the matrix."""
    engine = tiny_engine(num_slots=4)
    small = draft_model("small", tiny_models["llama"], num_slots=4)
    settings = HybridDrafterSettings(sources=("lookup", "small"), rule=rule, most_tokens={"lookup": 2})
    made = HybridDrafter("hybrid", settings, {"lookup": engine._drafters["lookup"], "small": small})
    engine._drafters |= {"small": small, "hybrid": made}
    work = [(make_job("ab cd " * (3 * n + 1), n), GREEDY, decision("hybrid", 5)) for n in range(8)]
    done = list(steps(engine, work))
    for text in (text for step in done for text in step.finished):
        assert [counts.drafter for counts in text.drafted] == ["hybrid"]
        assert {counts.proposer for counts in text.proposers} <= {"lookup", "small"}
    assert len(small._cache._free) == 4
    drafted = [step for step in done if step.draft_s_by_proposer]
    assert all(step.draft_s_by_proposer.keys() <= {"hybrid", "lookup", "small"} for step in drafted)
    assert all(step.shape_by_proposer.keys() == step.draft_s_by_proposer.keys() for step in drafted)
    assert any("small" in step.draft_s_by_proposer for step in drafted)
    assert engine.memory().drafts_per_token["small"] == small.bytes_per_token


def drafters(**hybrid: Any) -> dict[str, Any]:
    return {
        "drafters": {
            "lookup": {},
            "memory": {"method": "lookup", "min_probability": 0.2},
            "small": {"method": "draft_model", "source": "/small"},
            "far": {"method": "draft_model", "source": "/small", "device": "cuda:1"},
            "heads": {"method": "eagle3", "source": "/heads"},
            "hybrid": {"method": "hybrid", **hybrid},
        }
    }


def test_settings_that_can_be_followed() -> None:
    made = ModelSettings.model_validate(drafters(sources=["lookup", "small"], rule="tree", most_tokens={"small": 4}))
    state = made.drafter_state("hybrid", "r")
    assert (state.max_draft_tokens, state.is_mixed, state.is_scorable) == (8, True, False)
    assert state.sources == ("lookup", "small")
    ModelSettings.model_validate(drafters(sources=["memory", "lookup"]))
    ModelSettings.model_validate(drafters(sources=["heads", "small"], rule="tree"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sources": ["lookup", "nobody"]}, r"models\.drafters\.hybrid\.sources: .* found nobody"),
        ({"sources": ["lookup", "hybrid"]}, "no hybrids"),
        ({"sources": ["lookup", "lookup"]}, "each once"),
        ({"sources": ["lookup"]}, "at least 2"),
        ({"sources": ["small", "lookup"]}, "expected look-up drafters before the last source of a switch"),
        ({"sources": ["lookup", "small"], "most_tokens": {"memory": 2}}, "most_tokens: expected names of its sources"),
        ({"sources": ["small", "far"], "rule": "tree"}, "expected one device, found auto, cuda:1"),
        ({"sources": ["heads", "far"], "rule": "tree"}, "heads are on the target's"),
    ],
)
def test_settings_that_cannot(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSettings.model_validate(drafters(**given))


def said(tokens: tuple[int, ...], parents: tuple[int, ...] | None, by: str, **more: object) -> Proposal:
    return Proposal(tokens, parents, proposers=(by,) * len(tokens), **more)  # type: ignore[arg-type]


def test_common_beginnings_stand_once_under_the_first() -> None:
    tree = merged([said((5, 6), None, "a"), said((5, 7, 8), None, "b"), said((9,), None, "c")], 9)
    assert (tree.tokens, tree.parents) == ((5, 6, 7, 8, 9), (-1, 0, 0, 2, -1))
    assert tree.proposers == ("a", "a", "b", "b", "c")


def test_what_goes_beyond_the_wanted_tokens_is_cut_with_what_hangs_on_it() -> None:
    tree = merged([said((5, 6), None, "a"), said((5, 7, 8), None, "b")], 3)
    assert (tree.tokens, tree.parents) == ((5, 6, 7), (-1, 0, 0))


def test_a_second_proposal_that_goes_on_with_the_first_is_a_chain() -> None:
    tree = merged([said((5,), None, "a"), said((5, 7), None, "b"), Proposal(num_read=3)], 4)
    assert (tree.tokens, tree.parents, tree.num_read) == ((5, 7), None, 3)
    assert merged([], 4).tokens == ()


def test_the_drawn_draft_comes_first_and_a_second_one_is_left_out() -> None:
    q = DraftDistributions(torch.full((2, 10), 0.1, dtype=torch.float64))
    tree = merged([said((1, 2), None, "a"), said((1, 3), None, "b", q=q), said((4, 5), None, "c", q=q)], 9)
    assert (tree.tokens, tree.parents, tree.proposers) == ((1, 3, 2), (-1, 0, 0), ("b", "b", "a"))
    assert tree.q is q
    alone = merged([said((1, 3), None, "b", q=q)], 9)
    assert (alone.tokens, alone.parents, alone.q) == ((1, 3), None, q)
