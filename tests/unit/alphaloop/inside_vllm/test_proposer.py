"""Look-up as vLLM's drafter: rows as vLLM hands them over, drafts as our own look-up proposes them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import ConfigError
from alphaloop.inside_vllm.asked import Asked
from alphaloop.inside_vllm.proposer import (
    NOTHING_ASKED,
    WORKER,
    FollowedTexts,
    LookupProposer,
    ProposerSettings,
)
from alphaloop.lookup import SearchedText, SuffixIndex
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter

MAX_TOKENS = 64


def config(k: int = 4, *, worker: str = WORKER, max_model_len: int = MAX_TOKENS, **settings: object) -> SimpleNamespace:
    """The part of `VllmConfig` that the drafter reads."""
    return SimpleNamespace(
        additional_config={"alphaloop_lookup": settings},
        parallel_config=SimpleNamespace(worker_cls=worker),
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


@dataclass
class Request:
    """A request whose greedy text is known beforehand."""

    whole: Sequence[int]
    num_prompt: int
    asked: Asked = NOTHING_ASKED
    length: int = 0  #: of its text by now
    draft: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = self.num_prompt

    @property
    def text(self) -> list[int]:
        return list(self.whole[: self.length])

    @property
    def has_ended(self) -> bool:
        return self.length >= len(self.whole)

    def sample(self) -> list[int]:
        """What a pass over the text and its draft yields."""
        behind = self.whole[self.length :]
        accepted = 0
        while accepted < min(len(self.draft), len(behind) - 1) and self.draft[accepted] == behind[accepted]:
            accepted += 1
        return list(behind[: accepted + 1])


class Batch:
    """vLLM's persistent batch as its drafter sees it: `InputBatch` and `_bookkeeping_sync` of 0.32, without vLLM.

    Requests take the lowest free row; when rows fall free the last ones move down; a request that is interrupted leaves
    its row and comes back with all of its text. Rows keep what stood behind their end, as vLLM's do.
    """

    def __init__(self, drafter: LookupProposer, num_rows: int, *, tells: bool = True) -> None:
        self.drafter = drafter
        self.requests: dict[str, Request] = {}
        self.by_row: list[str] = []
        self._rows = np.zeros((num_rows, MAX_TOKENS), dtype=np.int32)
        if tells:
            drafter.ask(lambda: [self.requests[name].asked for name in self.by_row])

    def step(
        self, wanted: Sequence[str], reading: Sequence[str] = (), *, drafts: bool = True
    ) -> Mapping[str, list[int]]:
        """One pass over `wanted`, of which `reading` still read their prompts: the drafts by request.

        Without `drafts` the drafter is not asked, as where a text of the batch comes near the end of its context.
        """
        self._place(wanted)
        sampled: list[list[int]] = []
        for row, name in enumerate(self.by_row):
            request = self.requests[name]
            new = [] if name in reading else request.sample()
            self._rows[row, request.length : request.length + len(new)] = new
            request.length += len(new)
            sampled.append(new)
        for name in self.by_row:
            self.requests[name].draft = []
        if not drafts:
            return {}
        lengths = np.zeros(len(self._rows), dtype=np.int32)
        lengths[: len(self.by_row)] = [self.requests[name].length for name in self.by_row]
        proposed: Any = self.drafter.propose(sampled, lengths, self._rows, slot_mappings=None)
        assert len(proposed) == len(self.by_row)
        for name, draft in zip(self.by_row, proposed, strict=True):
            self.requests[name].draft = draft
        return dict(zip(self.by_row, proposed, strict=True))

    def _place(self, wanted: Sequence[str]) -> None:
        rows: list[str | None] = [name if name in wanted else None for name in self.by_row]
        for name in wanted:
            if name in rows:
                continue
            free = rows.index(None) if None in rows else len(rows)
            rows[free : free + 1] = [name]
            text = self.requests[name].text
            self._rows[free, : len(text)] = text
            self.requests[name].draft = []
        while None in rows:
            empty, last = rows.index(None), rows.pop()
            if last is not None:
                self._rows[empty] = self._rows[len(rows)]
                rows[empty] = last
        self.by_row = [name for name in rows if name is not None]


#: A text that repeats itself, so that there is something to look up.
REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7, 8]


def ours(text: list[int], k: int) -> list[int]:
    """What the worker's look-up proposes behind `text`."""
    return list(LookupDrafter("lookup", LookupDrafterSettings()).rereading(text, "")(k).tokens)


def test_a_prompt_that_is_still_read_gets_no_draft() -> None:
    batch = Batch(LookupProposer(config()), num_rows=2)
    batch.requests = {"a": Request(REPEATING, 8), "b": Request(REPEATING, 9)}
    assert batch.step(["a", "b"], reading=["b"])["b"] == []
    assert batch.step(["a", "b"])["b"] == ours(REPEATING[:10], 4) != []


def test_a_draft_ends_where_the_context_ends() -> None:
    batch = Batch(LookupProposer(config(k=4, max_model_len=13)), num_rows=1)
    batch.requests["a"] = Request(REPEATING, 9)
    # 10 tokens stand there: two drafts and the token beyond them fill the context.
    assert batch.step(["a"])["a"] == [5, 6]


def test_a_request_says_how_long_its_drafts_may_be() -> None:
    batch = Batch(LookupProposer(config(k=4)), num_rows=3)
    for name, most in {"none": 0, "two": 2, "more": 9}.items():
        batch.requests[name] = Request(REPEATING, 9, Asked(name, num_draft_tokens=most))
    drafts = batch.step(["none", "two", "more"])
    assert {name: len(draft) for name, draft in drafts.items()} == {"none": 0, "two": 2, "more": 4}


def test_results_of_a_remembered_task_are_drafts_for_its_later_requests_only() -> None:
    batch = Batch(LookupProposer(config(k=4, remember_tasks=["sql"])), num_rows=2)
    batch.requests["first"] = Request([1, 2, 3, 40, 41, 42, 43, 44], 3, Asked("first", "sql"))
    while not batch.requests["first"].has_ended:
        batch.step(["first"])
    for name, task in {"same": "sql", "other": "code"}.items():
        batch.requests[name] = Request([9, 9, 40, 41, 42, 43, 44], 2, Asked(name, task))
    drafts = batch.step(["same", "other"])
    assert drafts["same"] == [41, 42]  # behind 40, with probabilities of 1/3 and 1/9
    assert drafts["other"] == []


def test_prompts_are_never_remembered() -> None:
    batch = Batch(LookupProposer(config(k=4, remember_tasks=["sql"])), num_rows=2)
    batch.requests["first"] = Request([1, 2, 3, 40, 41, 50], 5, Asked("first", "sql"))
    batch.step(["first"])
    batch.requests["second"] = Request([9, 1, 2, 3], 3, Asked("second", "sql"))
    assert batch.step(["second"])["second"] == []


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[Request, list[bool]]]:
    tokens = st.integers(1, 4)
    requests = draw(st.lists(st.lists(tokens, min_size=4, max_size=MAX_TOKENS - 8), min_size=1, max_size=6))
    return [
        (
            Request(whole, draw(st.integers(1, len(whole) - 1)), Asked(f"r{i}", draw(st.sampled_from(["", "sql"])))),
            draw(st.lists(st.booleans(), min_size=4, max_size=12)),
        )
        for i, whole in enumerate(requests)
    ]


@given(schedules(), st.booleans(), st.sets(st.integers(0, 40)))
def test_rows_that_move_fall_free_and_come_back_are_followed(
    drawn: list[tuple[Request, list[bool]]], tells: bool, silent: set[int]
) -> None:
    batch = Batch(LookupProposer(config(k=3)), num_rows=len(drawn), tells=tells)
    batch.requests = {f"r{i}": Request(one.whole, one.num_prompt, one.asked) for i, (one, _) in enumerate(drawn)}
    for step in range(MAX_TOKENS * 4):
        open_now = [name for name, request in batch.requests.items() if not request.has_ended]
        if not open_now:
            break
        wanted = [name for name in open_now if (runs := drawn[int(name[1:])][1])[step % len(runs)] or step > 40]
        for name, draft in batch.step(wanted, drafts=step not in silent).items():
            assert draft == ours(batch.requests[name].text, min(3, MAX_TOKENS - batch.requests[name].length - 1))
    assert all(request.text == list(request.whole) for request in batch.requests.values())


def test_a_longer_conversation_goes_on_with_the_index_of_its_beginning_but_its_questions_are_not_remembered() -> None:
    batch = Batch(LookupProposer(config(k=4, remember_tasks=["sql"])), num_rows=1)
    batch.requests["first"] = Request([1, 2, 3, 40, 41], 3, Asked("first", "sql"))
    while not batch.requests["first"].has_ended:
        batch.step(["first"])
    batch.requests["second"] = Request([1, 2, 3, 40, 41, 50, 51, 60], 7, Asked("second", "sql"))
    batch.step(["second"])
    batch.requests["third"] = Request([9, 50, 51], 2, Asked("third", "sql"))
    assert batch.step(["third"])["third"] == []  # 60, a result, stands behind 51 in a prompt only


def test_no_more_texts_are_held_than_rows_and_none_of_a_request_that_ended() -> None:
    opened: list[Asked] = []

    def search(tokens: array[int], asked: Asked) -> SearchedText:
        opened.append(asked)
        return SearchedText(tokens, SuffixIndex(tokens, 1, 16), None)

    drafter = LookupProposer(config())
    drafter._texts = texts = FollowedTexts(search)
    batch = Batch(drafter, num_rows=3, tells=False)
    for name in "abc":
        batch.requests[name] = Request([ord(name), *REPEATING], 9)
    batch.step(["a", "b", "c"])
    assert len(texts) == 3
    batch.step(["c", "b"])  # a has ended: c moves into its row
    batch.step(["c", "b"])
    assert (len(texts), len(opened)) == (2, 3)
    batch.step([])
    assert len(texts) == 0


def test_two_requests_with_one_text_keep_their_own_tasks() -> None:
    batch = Batch(LookupProposer(config(k=4, remember_tasks=["sql"])), num_rows=2)
    batch.requests = {
        "a": Request([1, 2, 3, 40, 41, 42], 3, Asked("a", "code")),
        "b": Request([1, 2, 3, 40, 41, 42], 3, Asked("b", "sql")),
    }
    batch.step(["a", "b"])
    batch.step(["b"])  # b takes the row of a, in which its own text stood
    while not batch.requests["b"].has_ended:
        batch.step(["b"])
    batch.requests["c"] = Request([9, 40, 41, 42], 2, Asked("c", "sql"))
    assert batch.step(["c"])["c"] == [42]


def test_what_a_request_asks_is_read_without_ever_failing() -> None:
    assert Asked.of("r", None) == Asked("r")
    assert Asked.of("r", {"alphaloop_task": "sql", "alphaloop_num_draft_tokens": 0}) == Asked("r", "sql", 0)
    assert Asked.of("r", {"alphaloop_num_draft_tokens": -3}).num_draft_tokens == 0
    for wrong in ([1], True, "7", 1.5):
        assert Asked.of("", {"alphaloop_task": 7, "alphaloop_num_draft_tokens": wrong}) == NOTHING_ASKED


def test_the_settings_are_those_of_the_workers_look_up() -> None:
    of_worker = LookupDrafterSettings().model_dump()
    read = ProposerSettings.read({})
    for name in ("min_ngram", "min_probability"):
        assert getattr(read, name) == of_worker[name]
    given = {"alphaloop_lookup": {"remember_tasks": ["sql"], "min_probability": 0.2, "min_ngram": 2}}
    assert ProposerSettings.read(given) == ProposerSettings(min_ngram=2, min_probability=0.2, remember_tasks=("sql",))


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"max_draft_tokens": 3}, "max_draft_tokens"),
        ({"min_ngram": 0}, "min_ngram"),
        ({"min_ngram": 1.5}, "min_ngram"),
        ({"min_probability": 1}, "min_probability"),
        ({"min_probability": True}, "min_probability"),
        ({"remember_tasks": "sql"}, "remember_tasks"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(settings: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        LookupProposer(config(**settings))
    with pytest.raises(ConfigError, match="an object"):
        ProposerSettings.read({"alphaloop_lookup": 3})


def test_memory_needs_the_worker_that_tells_tasks() -> None:
    with pytest.raises(ConfigError, match="--worker-cls"):
        LookupProposer(config(worker="vllm.v1.worker.cpu_worker.CPUWorker", remember_tasks=["sql"]))
    LookupProposer(config(worker="vllm.v1.worker.cpu_worker.CPUWorker"))
