"""Whatever comes in whatever order, a slice's counts are those of its own requests, all of one key."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from worker.engine import SliceCounts
from worker.servers.counter_slices import Answered, CounterSlices, Due, SliceKey
from worker.servers.counters import Counters

K = 2


def key(task: str = "code", *, segment: str = "", bucket: str = "greedy", purpose: str = "traffic") -> SliceKey:
    return SliceKey(task, segment, bucket, purpose)


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
    slices: CounterSlices = field(default_factory=lambda: CounterSlices(K))
    ours: list[Asked] = field(default_factory=list)
    others: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)  #: answered, and not counted in full
    due: list[tuple[Due, tuple[Asked, ...]]] = field(default_factory=list)
    since_idle: list[Asked] = field(default_factory=list)  #: of ours, those of the slice that runs
    counters: Counters = field(default_factory=lambda: Counters(0, 0, 0, 0, (0,) * K))
    num_told: int = 0

    def request(self, task: str) -> Asked:
        rounds = [self.rng.randint(0, K) for _ in range(self.rng.randint(0, 4))]
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
            now.num_draft_tokens + K * len(done),
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
        answered = None if fails else Answered(asked.num_prompt_tokens, asked.num_tokens)
        if fails and self.rng.random() < 0.5:
            self.count(asked, self.rng.randint(0, 2), is_ended=self.rng.random() < 0.5)
        elif self.rng.random() < 0.3:
            self.late.append(asked)
        else:
            self.count(asked, len(asked.rounds), is_ended=True)
        if due := self.slices.ended(answered):
            self.due.append((due, tuple(self.since_idle)))

    def read(self) -> None:
        due, its = self.due.pop(self.rng.randrange(len(self.due)))
        found = self.slices.read(due, self.reading())
        if found is not None:
            self.num_told += 1
            check(found, its)

    def step(self, tasks: str, strangers: float) -> None:
        """Something happens."""
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
            self.counters = Counters(0, 0, 0, 0, (0,) * K)
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
    assert counts.accepts == (tuple(sum(one > i for one in rounds) for i in range(K)) if rounds else ())
    assert counts.trials == ((len(rounds), *counts.accepts[:-1]) if rounds else ())


@pytest.mark.parametrize("tasks", ["a", "ab", "abc"])
@pytest.mark.parametrize("strangers", [0.0, 0.3])
def test_no_key_is_credited_with_counts_of_another_and_none_of_strangers(tasks: str, strangers: float) -> None:
    """Random orders of 60 events each: tasks, failures, late counts, late readings, strangers, new starts."""
    num_told = 0
    for seed in range(1000):
        world = World(Random(seed))
        for _ in range(60):
            world.step(tasks, strangers)
        num_told += world.num_told
    assert num_told > 20  # the test shows nothing where nothing is told


def settled(slices: CounterSlices, counters: Counters = Counters(0, 0, 0, 0, (0, 0))) -> None:  # noqa: B008
    """One request of no interest, and a reading behind it."""
    slices.began(key("before"))
    due = slices.ended(None)
    assert due is not None
    assert due.since is None
    assert slices.read(due, counters) is None


def run(slices: CounterSlices, keys: list[SliceKey], num_prompt_tokens: int = 5) -> Due | None:
    for one in keys:
        slices.began(one)
    dues = [slices.ended(Answered(num_prompt_tokens, 4)) for _ in keys]
    assert dues[:-1] == [None] * (len(keys) - 1), "only the last leaves the server idle"
    return dues[-1]


def test_requests_that_ran_together_are_one_slice_and_the_reading_begins_the_next() -> None:
    slices = CounterSlices(K)
    settled(slices)
    first = run(slices, [key(), key(), key()])
    assert first is not None
    after = Counters(3, 12, 6, 12, (2, 1))
    found = slices.read(first, after)
    assert found is not None
    assert (found.num_requests, found.num_tokens, found.counts.accepts) == (3, 12, (2, 1))
    second = run(slices, [key("sql")])
    assert second is not None
    assert second.since == after


@pytest.mark.parametrize(
    "other", [key("sql"), key(segment="gold"), key(bucket="t<=1"), key(purpose="probe")], ids=lambda one: one.task
)
def test_another_key_ends_the_slice_without_a_word(other: SliceKey) -> None:
    slices = CounterSlices(K)
    settled(slices)
    due = run(slices, [key(), other, key()])
    assert due is not None
    assert due.since is None


def test_prompts_of_two_buckets_are_no_slice() -> None:
    slices = CounterSlices(K)
    settled(slices)
    slices.began(key())
    slices.began(key())
    assert slices.ended(Answered(5, 4)) is None
    due = slices.ended(Answered(999, 4))
    assert due is not None
    assert due.since is None


def test_a_reading_into_which_another_request_came_is_not_used() -> None:
    slices = CounterSlices(K)
    settled(slices)
    due = run(slices, [key()])
    assert due is not None
    slices.began(key())
    assert not slices.is_early(due, Counters(0, 0, 0, 0, (0, 0)))
    assert slices.read(due, Counters(1, 4, 2, 4, (1, 0))) is None
    behind = slices.ended(Answered(5, 4))
    assert behind is not None
    assert behind.since is None, "where the slice begins is not known"
