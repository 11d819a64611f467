"""What each request of a vLLM server is drafted, over requests as vLLM's scheduler holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import ConfigError
from alphaloop.experiment.observe import Expected
from alphaloop.inside_vllm.drafting import (
    LookupDrafts,
    LookupSettings,
    Request,
    RequestDrafts,
    Trial,
    UnreadBlocks,
    Wish,
)
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter

MAX_TOKENS = 64
#: A text that repeats itself, so that there is something to look up.
REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7, 8]


@dataclass
class Params:
    """vLLM's sampling parameters, as far as drafts depend on them."""

    extra_args: dict[str, Any] | None = None
    temperature: float = 0.0


@dataclass
class Decoded(Request):
    """A request whose text is known beforehand; `length` tokens of it are there."""

    request_id: str
    whole: Sequence[int]
    num_prompt_tokens: int
    sampling_params: Params = field(default_factory=Params)
    spec_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.length = self.length or self.num_prompt_tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.whole[: self.length]


def request(
    name: str = "r", whole: Sequence[int] = REPEATING, num_prompt: int = 9, *, temperature: float = 0.0, **said: object
) -> Decoded:
    """One that says these things, by names without `alphaloop_`."""
    extra = {f"alphaloop_{what}": value for what, value in said.items()}
    return Decoded(name, whole, num_prompt, Params(extra, temperature))


def drafting(k: int = 4, **settings: Any) -> RequestDrafts:
    return RequestDrafts(k, MAX_TOKENS, **settings)


def with_lookup(*, k: int = 4, alone: bool = True, max_tokens: int = MAX_TOKENS, **settings: Any) -> RequestDrafts:
    return RequestDrafts(k, max_tokens, LookupDrafts(LookupSettings(**settings)), is_lookup_alone=alone)


def cut(subject: RequestDrafts, requests: Iterable[Decoded], *, proposed: int = 4) -> dict[str, int]:
    """How much is left of `proposed` tokens of the server's drafter, by request."""
    running = list(requests)
    shared = [-1] * proposed  # one list for all, as asynchronous scheduling has it
    for each in running:
        each.spec_token_ids = shared
    subject.choose(running, present=running)
    return {each.request_id: len(each.spec_token_ids) for each in running}


def test_each_request_has_drafts_of_the_length_that_it_asks_for() -> None:
    asked = {"none": 0, "two": 2, "more": 9}
    requests = [request(name, num_draft_tokens=k) for name, k in asked.items()]
    assert cut(drafting(), [*requests, request("unsaid")]) == {"none": 0, "two": 2, "more": 4, "unsaid": 4}
    assert cut(drafting(), requests, proposed=1) == {"none": 0, "two": 1, "more": 1}


@pytest.mark.parametrize(("asked", "num"), [([0, 0], 0), ([0, 2], 2), ([9, 1], 4), ([None, 0], 4), ([], 0)], ids=repr)
def test_a_step_drafts_as_much_as_its_longest_request_wants(asked: list[int | None], num: int) -> None:
    requests = [request(str(i), num_draft_tokens=k) for i, k in enumerate(asked)]
    assert drafting().num_to_draft(requests) == num
    # Medusa's heads propose their k and nothing else: it is cut afterwards.
    medusa = drafting(takes_fewer=False)
    assert medusa.num_to_draft(requests) == 4
    assert [*cut(medusa, requests).values()] == [4 if k is None else min(4, k) for k in asked]


def test_a_request_that_its_drafter_has_not_read_keeps_no_drafts_to_its_end() -> None:
    subject, missed, whole = drafting(), request("missed", num_draft_tokens=4), request("whole", num_draft_tokens=4)
    subject.misses_cache(missed)
    for _ in range(3):
        assert cut(subject, [missed, whole]) == {"missed": 0, "whole": 4}
    assert subject.num_to_draft([missed]) == 0
    subject.ended(missed)
    assert cut(subject, [request("missed", num_draft_tokens=4)]) == {"missed": 4}  # another request of that name


def test_what_vllm_has_in_place_of_drafts_after_a_step_without_its_drafter_is_dropped() -> None:
    subject = with_lookup(k=4, alone=False)
    subject.drafter_max_tokens = MAX_TOKENS
    model, looked_up = request("m"), request("l", drafter="lookup")
    assert not subject.leaves_out(MAX_TOKENS - 4)
    assert cut(subject, [model]) == {"m": 4}
    assert subject.leaves_out(MAX_TOKENS - 3)  # that many and k more are too long for the drafter
    assert cut(subject, [model]) == {"m": 0}
    assert subject.choose([model, looked_up]) == [looked_up]
    assert not subject.leaves_out(9)
    assert cut(subject, [model]) == {"m": 4}
    assert not drafting().leaves_out(MAX_TOKENS)  # Model Runner V2, whose drafters read every text


def test_look_up_drafts_where_a_model_would_have_missed_tokens() -> None:
    subject = with_lookup(alone=False)
    rising = request("r", drafter="lookup", num_draft_tokens=3)
    subject.misses_cache(rising)
    assert subject.choose([rising]) == [rising]
    assert len(subject.look_up(rising)) == 3


def test_on_a_platform_that_spoils_them_greedy_texts_have_no_drafts_beside_sampled_ones() -> None:
    greedy, sampled = request("greedy"), request("sampled", temperature=0.7)
    spoiling = drafting(spoils_beside_sampled=True)
    assert cut(spoiling, [greedy]) == {"greedy": 4}
    assert cut(spoiling, [greedy, sampled]) == {"greedy": 0, "sampled": 0}
    greedy.spec_token_ids = [1, 2]
    spoiling.choose([greedy], present=[greedy, sampled])  # one that waits and may begin in this step
    assert greedy.spec_token_ids == []
    # Its drafter goes on, so that its cache stays whole.
    assert spoiling.num_to_draft([greedy, sampled]) == 4
    assert cut(drafting(), [greedy, sampled]) == {"greedy": 4, "sampled": 4}


def test_control_drafts_nothing_and_the_drafter_reads_on() -> None:
    control = {"a"}
    subject = drafting(is_control=control.__contains__)
    on_trial, forced, vanilla = request("a"), request("f", num_draft_tokens=2), request("v", num_draft_tokens=0)
    assert cut(subject, [on_trial, forced, vanilla]) == {"a": 0, "f": 2, "v": 0}
    assert subject.num_to_draft([on_trial, vanilla]) == 1
    assert subject.runs_for_cache_only([on_trial, vanilla])
    assert subject.num_to_draft([on_trial, forced]) == 2
    assert not subject.runs_for_cache_only([on_trial, forced])
    assert not subject.runs_for_cache_only([vanilla])
    assert subject.treatment(on_trial) == 4
    control.clear()
    assert cut(subject, [on_trial]) == {"a": 4}


def ours(text: Sequence[int], k: int) -> list[int]:
    """What the worker's own look-up proposes after `text`."""
    return list(LookupDrafter("lookup", LookupDrafterSettings()).rereading(list(text), "")(k).tokens)


@given(st.lists(st.lists(st.integers(1, 4), min_size=4, max_size=MAX_TOKENS - 2), min_size=1, max_size=4), st.data())
def test_look_up_drafts_as_the_own_engines_does(wholes: list[list[int]], data: Any) -> None:
    subject = with_lookup(k=3)
    requests = [Decoded(f"r{i}", whole, data.draw(st.integers(1, len(whole) - 1))) for i, whole in enumerate(wholes)]
    for _ in range(6):
        for each in data.draw(st.lists(st.sampled_from(requests), max_size=4, unique_by=id)):
            each.length = min(len(each.whole), each.length + data.draw(st.integers(0, 3)))
            room = MAX_TOKENS - each.length - 1
            assert subject.look_up(each) == ours(each.all_token_ids, min(3, room))
    for each in requests:
        subject.ended(each)
    assert subject.lookup is not None
    assert len(subject.lookup) == 0


def test_a_draft_ends_where_the_context_ends() -> None:
    # 10 tokens stand there: two drafts and the token beyond them fill the context.
    assert with_lookup(max_tokens=13).look_up(request(num_prompt=10)) == [5, 6]


def test_one_server_has_look_up_and_a_model_by_request() -> None:
    subject = with_lookup(alone=False)
    looked_up, model, vanilla = request("l", drafter="lookup"), request("m"), request("v", num_draft_tokens=0)
    for each in (looked_up, model, vanilla):
        each.spec_token_ids = [7, 7, 7, 7]
    assert subject.choose([looked_up, model, vanilla]) == [looked_up]
    assert [each.spec_token_ids for each in (looked_up, model, vanilla)] == [[], [7, 7, 7, 7], []]
    assert subject.num_to_draft([looked_up, vanilla]) == 0  # the model rests
    assert subject.num_to_draft([looked_up, model]) == 4
    # A server without look-up drafts nothing for a request that asks for it: its counts would be another drafter's.
    assert cut(drafting(), [request("l", drafter="lookup")]) == {"l": 0}


def test_results_of_a_remembered_task_are_drafts_for_its_later_requests_only() -> None:
    subject = with_lookup(remember_tasks=("sql",))
    first = Decoded("first", [1, 2, 3, 40, 41, 42, 43, 44, 50], 3, Params({"alphaloop_task": "sql"}), length=8)
    subject.look_up(first)
    subject.ended(first)
    same, other = request("same", [9, 9, 40], 3, task="sql"), request("other", [9, 9, 40], 3, task="code")
    assert subject.look_up(same) == [41, 42]  # after 40, with probabilities of 1/3 and 1/9
    assert subject.look_up(other) == []
    assert subject.look_up(request("prompt", [9, 1, 2], 3, task="sql")) == []  # 3 stood after 1, 2 in a prompt only
    assert subject.look_up(request("late", [9, 44], 2, task="sql")) == []  # 50 was never put out


def test_what_a_request_says_is_read_without_ever_failing() -> None:
    assert Wish.of(None) == Wish.of(Params()) == Wish()
    said = {"alphaloop_task": "sql", "alphaloop_num_draft_tokens": 0, "alphaloop_drafter": "lookup"}
    assert Wish.of(Params(said)) == Wish(0, is_lookup=True, task="sql")
    assert Wish.of(Params({"alphaloop_num_draft_tokens": -3})).num_draft_tokens == 0
    trial = {"alphaloop_subject": "sql greedy", "alphaloop_treatment": "draft", "alphaloop_control_share": 0.1}
    expected = Expected(1.3, 1.1, 1.5, 1.25, 0.1)
    assert Wish.of(Params({**trial, "alphaloop_expected": list(expected)})) == Wish(
        trial=Trial("sql greedy", "draft", expected), control_share=0.1
    )
    for wrong in ([1], True, "7", 1.5, None, {}):
        nonsense = {"alphaloop_num_draft_tokens": wrong, "alphaloop_task": [wrong], "alphaloop_drafter": wrong}
        nonsense |= {"alphaloop_subject": wrong, "alphaloop_treatment": "draft", "alphaloop_expected": wrong}
        if wrong != "7":
            assert Wish.of(Params(nonsense)) == Wish()
        assert Wish.of(Params({**trial, "alphaloop_expected": [1.0, 1.0, 1.0, 1.0, wrong]})).trial in (
            Trial("sql greedy", "draft"),
            Trial("sql greedy", "draft", Expected(1.0, 1.0, 1.0, 1.0, 1.5)),
        )
    for wrong in ("1", True, 1.0, -0.1, float("inf"), float("nan"), None):
        assert Wish.of(Params({"alphaloop_control_share": wrong})).control_share is None


def test_the_settings_are_those_of_the_workers_look_up() -> None:
    assert LookupSettings().min_probability == LookupDrafterSettings().min_probability
    assert LookupSettings.read({}) is LookupSettings.read(None) is None
    section = {"alphaloop_lookup": {"remember_tasks": ["sql"], "min_probability": 0.2}}
    assert LookupSettings.read(section) == LookupSettings(min_probability=0.2, remember_tasks=("sql",))


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"max_draft_tokens": 3}, "max_draft_tokens"),
        ({"min_probability": 1}, "min_probability"),
        ({"min_probability": True}, "min_probability"),
        ({"min_probability": float("nan")}, "min_probability"),
        ({"remember_tasks": "sql"}, "remember_tasks"),
        ({"remember_tasks": [""]}, "remember_tasks"),
        (3, "an object"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(section: object, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        LookupSettings.read({"alphaloop_lookup": section})


def test_blocks_are_unread_from_where_the_drafter_rested_until_they_are_written_anew() -> None:
    blocks = UnreadBlocks(4)
    numbers = {0: 10, 1: 11, 2: 12}
    blocks.written(numbers.__getitem__, 0, 6, rested=False)  # a prompt of 6 tokens
    assert not blocks.holds_any([10, 11])
    blocks.written(numbers.__getitem__, 6, 1, rested=True)
    blocks.written(numbers.__getitem__, 7, 1, rested=False)  # the last token of that block
    assert not blocks.holds_any([10])
    assert blocks.holds_any([10, 11])
    blocks.written(numbers.__getitem__, 8, 2, rested=False)
    assert not blocks.holds_any([12])
    blocks.written({0: 11}.__getitem__, 0, 3, rested=False)  # another request, which got the block
    assert not blocks.holds_any([10, 11, 12])
