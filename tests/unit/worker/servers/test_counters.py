"""What the counters of a server say, and that a slice counts its own requests, in whatever order they come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts
from alphaloop.engine import SliceCounts
from alphaloop.errors import ReplyInvalid
from tests.fixtures.inference_server import MetricsPage
from worker.servers.counters import Counters, CounterSlices, SliceEnd, SliceKey, counts_between

K = 4
START = Counters(5, 300, 40, 160, (20, 10, 5, 1))
#: Three texts of twelve rounds, none of which was cut: 12 rounds, 10 of them with drafts, and 7 tokens accepted.
END = Counters(8, 300 + 3 + 12 + 7, 50, 200, (24, 12, 6, 1))


def between(before: Counters = START, after: Counters = END) -> AcceptanceCounts | None:
    return counts_between(before, after, 3, 22, K)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, K)), min_size=1, max_size=12), st.integers(1, 3))
def test_they_are_the_rounds_that_were_played(played: list[tuple[bool, int]], num_requests: int) -> None:
    """Each round drafts k tokens or none; a text's first token is of the round that reads its prompt."""
    counts, page = PREFILL, MetricsPage()
    for drafts, accepted in played:
        proposed, taken = (K, accepted) if drafts else (0, 0)
        counts = counts.with_round(proposed, taken, num_emitted=taken + 1)
    before = Counters.of_page(page.text())
    page.add(counts.num_tokens - 1 + num_requests, counts)
    page.num_requests = num_requests
    found = counts_between(before, Counters.of_page(page.text()), num_requests, page.num_tokens, K)
    assert found == (counts if sum(counts.proposed) else AcceptanceCounts(counts.rounds, counts.rounds))


def test_tokens_that_were_cut_at_the_end_are_censored() -> None:
    counts = counts_between(START, replace(END, num_tokens=318), 3, 18, K)
    assert (counts.rounds, counts.num_empty_rounds, counts.num_cropped, counts.num_tokens) == (11, 1, 2, 16)
    assert counts_between(START, replace(END, num_tokens=303), 3, 3, 1) is None  # more than a round for each text


@given(st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), min_size=1, max_size=12))
def test_of_ragged_drafts_all_but_the_trials_is_exact(played: list[tuple[int, int]]) -> None:
    counts, page = PREFILL, MetricsPage()
    for proposed, accepted in played:
        counts = counts.with_round(proposed, min(proposed, accepted), num_emitted=min(proposed, accepted) + 1)
    before = Counters.of_page(page.text())
    page.add(counts.num_tokens, counts)
    found = counts_between(before, Counters.of_page(page.text()), 1, page.num_tokens, K)
    padding = (0,) * (K - len(counts.accepts))
    assert (found.rounds, found.num_empty_rounds, found.num_tokens) == (
        counts.rounds,
        counts.num_empty_rounds,
        counts.num_tokens,
    )
    assert sum(found.proposed) == sum(counts.proposed)
    assert found.accepts == ((*counts.accepts, *padding) if counts.num_trials else ())


def test_drafts_shorter_than_k_are_taken_to_lack_the_last_positions() -> None:
    counts = between(after=replace(END, num_draft_tokens=190))
    assert counts == AcceptanceCounts(13, 3, 0, (10, 10, 10, 0), (10, 4, 2, 0), (4, 2, 1, 0))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (START, replace(END, num_requests=9)),  # another's request
        (START, replace(END, num_requests=7)),
        (START, replace(END, num_tokens=323)),
        (START, replace(END, num_present=1)),  # one that still runs
        (replace(START, num_present=1), END),  # one that ran at the beginning
        (START, Counters(3, 22, 10, 40, (4, 2, 1, 0))),  # a new server that has done as much
        (START, replace(END, num_drafts=39)),  # a new one whose other counters happen to fit
        (START, replace(END, accepts=(24, 12, 4, 1))),
        (START, replace(END, accepts=(24, 12, 6))),  # a server with another k
        (START, replace(END, num_draft_tokens=201)),  # more than k a round
        (START, replace(END, num_draft_tokens=172)),  # fewer than were accepted
        (START, replace(END, accepts=(22, 14, 6, 1))),  # later positions accept no more than earlier ones
    ],
)
def test_whatever_else_the_server_did_nothing_is_known(before: Counters, after: Counters) -> None:
    assert between(before, after) is None


def test_a_reading_before_the_server_has_counted_is_early() -> None:
    slices, due = CounterSlices(K), SliceEnd(None, START, num_requests=3, num_tokens=22)
    assert not slices.is_early(due, END)
    for early in (replace(END, num_requests=7), replace(END, num_tokens=321), replace(END, num_present=1)):
        assert slices.is_early(due, early)
    assert not slices.is_early(due, replace(END, num_requests=9)), "no later reading takes another's request away"


def test_counters_of_all_engines_are_one() -> None:
    page = MetricsPage(num_requests=3, num_tokens=50, num_drafts=9, num_draft_tokens=36, accepts=[4, 3, 2, 1])
    one = page.text(num_present=2)
    both = one + one.replace('engine="0"', 'engine="1"')
    assert Counters.of_page(one) == Counters(3, 50, 9, 36, (4, 3, 2, 1), 2)
    assert Counters.of_page(both) == Counters(6, 100, 18, 72, (8, 6, 4, 2), 4)


#: As build 11549 wrote it: after its start, and after a text of 48 tokens in whose four drafts 5 of 11 were accepted.
LLAMA_STARTED = """
llamacpp:tokens_predicted_total 5
llamacpp:spec_decode_num_draft_tokens_total 0
llamacpp:spec_decode_num_accepted_tokens_total 0
llamacpp:spec_decode_num_drafts_total 0
llamacpp:requests_processing 0
llamacpp:requests_deferred 0
"""
LLAMA_DRAFTED = """
llamacpp:tokens_predicted_total 53
llamacpp:spec_decode_num_draft_tokens_total 11
llamacpp:spec_decode_num_accepted_tokens_total 5
llamacpp:spec_decode_num_drafts_total 4
llamacpp:requests_processing 0
llamacpp:requests_deferred 0
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 1
"""


def test_llama_cpps_counters_say_what_each_position_accepted() -> None:
    before, after = (Counters.of_page(page, "llama_cpp", 3) for page in (LLAMA_STARTED, LLAMA_DRAFTED))
    counts = counts_between(before, after, 1, 48, 3)
    assert counts == AcceptanceCounts(43, 39, 0, (4, 4, 3), (4, 2, 2), (2, 2, 1))
    assert counts_between(before, after, 1, 47, 3) is None, "another's token"
    assert not CounterSlices(3).is_early(SliceEnd(None, before, num_requests=1, num_tokens=48), after)
    assert CounterSlices(3).is_early(SliceEnd(None, before, num_requests=1, num_tokens=48), before)


def test_a_llama_cpp_without_counters_of_drafts_is_invalid() -> None:
    with pytest.raises(ReplyInvalid, match="spec_decode_num_drafts_total"):
        Counters.of_page("llamacpp:tokens_predicted_total 5\n", "llama_cpp", 3)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>not found</html>",
        MetricsPage().text().replace("vllm:request_success_total", "vllm:request_success"),
        MetricsPage().text().replace('position="0"', 'position="first"'),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " three"),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " NaN"),
        MetricsPage(num_drafts=3).text().replace(" 3.0", " +Inf"),
    ],
)
def test_a_page_that_lacks_a_counter_is_invalid(page: str) -> None:
    with pytest.raises(ReplyInvalid):
        Counters.of_page(page)


SLICE_K = 2


def key(task: str = "code", *, segment: str = "", bucket: str = "greedy", purpose: str = "traffic") -> SliceKey:
    return task, segment, bucket, purpose


@dataclass(eq=False)
class Asked:
    """A request: what the server counts of it in all, and how much of that it has counted."""

    key: SliceKey
    num_prompt_tokens: int
    rounds: list[int]  #: tokens accepted in each; all draft k
    num_counted: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 + sum(1 + accepted for accepted in self.rounds)


@dataclass
class World:
    """A server with requests of ours and of others. It may count a request a moment after its answer."""

    rng: Random
    slices: CounterSlices = field(default_factory=lambda: CounterSlices(SLICE_K))
    ours: list[Asked] = field(default_factory=list)
    others: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)  #: answered, and not counted in full
    due: list[tuple[SliceEnd, tuple[Asked, ...]]] = field(default_factory=list)
    since_idle: list[Asked] = field(default_factory=list)  #: of ours, those of the slice that runs
    counters: Counters = field(default_factory=lambda: Counters(0, 0, 0, 0, (0,) * SLICE_K))
    num_told: int = 0

    def request(self, task: str) -> Asked:
        rounds = [self.rng.randint(0, SLICE_K) for _ in range(self.rng.randint(0, 4))]
        return Asked(key(task), self.rng.choice((5, 5, 5, 999)), rounds)

    def count(self, asked: Asked, num_rounds: int, *, is_ended: bool) -> None:
        """The server counts so many more of its rounds, and its end."""
        now, done = self.counters, asked.rounds[asked.num_counted : asked.num_counted + num_rounds]
        is_first = asked.num_counted == 0 and not getattr(asked, "has_first", False)
        asked.has_first = True  # type: ignore[attr-defined]
        asked.num_counted += len(done)
        self.counters = Counters(
            now.num_requests + is_ended,
            now.num_tokens + is_first + sum(1 + accepted for accepted in done),
            now.num_drafts + len(done),
            now.num_draft_tokens + SLICE_K * len(done),
            tuple(there + sum(accepted > i for accepted in done) for i, there in enumerate(now.accepts)),
        )

    def reading(self) -> Counters:
        now, num = self.counters, len(self.ours) + len(self.others) + len(self.late)
        return Counters(now.num_requests, now.num_tokens, now.num_drafts, now.num_draft_tokens, now.accepts, num)

    def begin(self, task: str) -> None:
        asked = self.request(task)
        if not self.ours:
            self.since_idle = []
        self.slices.began(asked.key)
        self.ours.append(asked)
        self.since_idle.append(asked)

    def end(self, *, fails: bool) -> None:
        asked = self.ours.pop(self.rng.randrange(len(self.ours)))
        answered = (0, 0) if fails else (asked.num_prompt_tokens, asked.num_tokens)
        if fails and self.rng.random() < 0.5:
            self.count(asked, self.rng.randint(0, 2), is_ended=self.rng.random() < 0.5)
        elif self.rng.random() < 0.3:
            self.late.append(asked)
        else:
            self.count(asked, len(asked.rounds), is_ended=True)
        if due := self.slices.ended(*answered):
            self.due.append((due, tuple(self.since_idle)))

    def read(self) -> None:
        due, its = self.due.pop(self.rng.randrange(len(self.due)))
        found = self.slices.read(due, self.reading())
        if found is not None:
            self.num_told += 1
            check(found, its)

    def step(self, tasks: str, strangers: float) -> None:
        match self.rng.choice("bbbeeeeerrrlo"):
            case "b" if len(self.ours) < 4:
                self.begin(self.rng.choice(tasks))
            case "e" if self.ours:
                self.end(fails=self.rng.random() < 0.1)
            case "r" if self.due:
                self.read()
            case "l" if self.late:
                asked = self.late.pop()
                self.count(asked, len(asked.rounds), is_ended=True)
            case "o" if self.rng.random() < strangers:
                self.stranger()
            case _:
                for asked in [*self.ours, *self.others]:
                    self.count(asked, 1, is_ended=False)

    def stranger(self) -> None:
        """Another's request begins, goes on or ends; or the server is started again."""
        if self.rng.random() < 0.1:
            self.counters = Counters(0, 0, 0, 0, (0,) * SLICE_K)
        elif self.others and self.rng.random() < 0.5:
            asked = self.others.pop()
            self.count(asked, len(asked.rounds), is_ended=True)
        else:
            self.others.append(self.request("another's"))


def check(found: SliceCounts, its: tuple[Asked, ...]) -> None:
    """The slice has the counts of its requests, and they are of one key."""
    assert len({asked.key for asked in its}) == 1
    assert len({asked.num_prompt_tokens > 256 for asked in its}) == 1
    rounds = [accepted for asked in its for accepted in asked.rounds]
    counts = found.counts
    assert (found.num_requests, found.num_tokens) == (len(its), sum(asked.num_tokens for asked in its))
    assert found.num_prompt_tokens == sum(asked.num_prompt_tokens for asked in its)
    assert (counts.rounds, counts.num_empty_rounds, counts.num_cropped) == (1 + len(rounds), 1, 0)
    assert counts.accepts == (tuple(sum(one > i for one in rounds) for i in range(SLICE_K)) if rounds else ())
    assert counts.trials == ((len(rounds), *counts.accepts[:-1]) if rounds else ())


@pytest.mark.parametrize("tasks", ["a", "ab", "abc"])
@pytest.mark.parametrize("strangers", [0.0, 0.3])
def test_no_key_is_credited_with_counts_of_another_and_none_of_strangers(tasks: str, strangers: float) -> None:
    """Random orders of 60 events each: tasks, failures, late counts, late readings, strangers, new starts."""
    num_told = 0
    for seed in range(400):
        world = World(Random(seed))
        for _ in range(60):
            world.step(tasks, strangers)
        num_told += world.num_told
    assert num_told > 20  # the test shows nothing where nothing is told


@pytest.mark.parametrize(
    "other", [key("sql"), key(segment="gold"), key(bucket="t<=1"), key(purpose="probe")], ids=lambda one: one[0]
)
def test_another_key_ends_the_slice_without_a_word(other: SliceKey) -> None:
    slices = CounterSlices(SLICE_K)
    slices.began(key("before"))
    due = slices.ended()
    assert due.since is None
    assert slices.read(due, Counters(0, 0, 0, 0, (0, 0))) is None
    for one in (key(), other, key()):
        slices.began(one)
    *early, due = [slices.ended(5, 4) for _ in range(3)]
    assert early == [None, None], "only the last leaves the server idle"
    assert due.since is None
