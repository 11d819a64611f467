"""What waits for a database or another thread: writes in the background, bounded queues, and what is repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.errors import BrokerUnavailable, DeliveryFailed, StoreError, StoreUnavailable
from tests.fixtures.publishing import InstantEvent
from worker import background as retry
from worker.background import BackgroundWrites, BoundedQueue, Retry


def test_while_the_database_is_away_writes_wait_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    pauses: list[float] = []
    is_away = True

    def write(name: str) -> None:
        if is_away and name == "second":
            raise StoreUnavailable
        done.append(name)

    background = BackgroundWrites(pauses.append)
    for name in ("first", "second", "third"):
        background.put(name, lambda name=name: write(name))
    background.turn(0.01)
    assert (done, len(background), pauses) == (["first"], 2, [0.01])
    assert "second: not written yet" in caplog.text
    is_away = False
    background.turn(0.0)
    assert done == ["first", "second", "third"]


def test_a_write_that_postgres_refuses_is_logged_and_the_next_one_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def refuse() -> None:
        raise StoreError("no such table")

    background = BackgroundWrites(lambda seconds: None)
    background.put("costs", refuse)
    background.put("choice", lambda: done.append("choice"))
    background.turn(0.0)
    assert done == ["choice"]
    assert "costs: not written: no such table" in caplog.text


def test_too_many_writes_that_wait_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    background = BackgroundWrites(lambda seconds: None)
    for number in range(1001):
        background.put("a number", lambda number=number: done.append(number))
    assert "too many writes wait" in caplog.text
    background.turn(0.0)
    assert done == list(range(1000))


WAIT_S = 10.0


class Asked:
    """Whether to give up; tells when a full queue made its producer ask."""

    def __init__(self) -> None:
        self.is_waiting, self.gives_up = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.is_waiting.set()
        return self.gives_up.is_set()


def queue_of(
    items: Sequence[str] = (),
    *,
    max_items: int = 4,
    max_bytes: int = 100,
    give_up: Callable[[], bool] = lambda: False,
) -> BoundedQueue[str]:
    """A queue of texts, each of as many bytes as it has letters."""
    queue: BoundedQueue[str] = BoundedQueue(max_items=max_items, max_bytes=max_bytes, num_bytes_of=len, give_up=give_up)
    queue.put(items)
    return queue


@contextmanager
def putting(queue: BoundedQueue[str], items: Sequence[str], asked: Asked) -> Iterator[Future[None]]:
    """The put of another thread, which waits for room."""
    with ThreadPoolExecutor(1) as pool:
        try:
            put = pool.submit(queue.put, items)
            assert asked.is_waiting.wait(WAIT_S)
            yield put
        finally:
            asked.gives_up.set()


@pytest.mark.parametrize(
    ("max_items", "max_bytes", "held", "too_many"),
    [(2, 100, ["a", "b"], "c"), (9, 10, ["aaaaa", "bbbb"], "cc"), (9, 10, ["a" * 50], "b")],
    ids=["count", "bytes", "behind an oversized item"],
)
def test_what_does_not_fit_waits_for_a_take(max_items: int, max_bytes: int, held: list[str], too_many: str) -> None:
    queue = queue_of(held, max_items=max_items, max_bytes=max_bytes, give_up=(asked := Asked()))
    with putting(queue, [too_many], asked) as put:
        assert len(queue) == len(held)
        assert queue.take(len(held), 0.0) == held
        put.result(WAIT_S)
    assert queue.take(9, 0.0) == [too_many]


def test_who_gives_up_adds_the_rest_at_once() -> None:
    queue = queue_of(["a"], max_items=1, give_up=(asked := Asked()))
    with putting(queue, ["b", "c"], asked) as put:
        asked.gives_up.set()
        put.result(WAIT_S)
    assert queue.take(9, 0.0) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("tell", "expected"),
    [(BoundedQueue.wake, []), (lambda queue: queue.put(["a"]), ["a"])],
    ids=["a wake", "a put"],
)
def test_a_waiting_take_returns_when_there_is_news(
    tell: Callable[[BoundedQueue[str]], None], expected: list[str]
) -> None:
    queue = queue_of()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(queue.take, 9, 2 * WAIT_S)
        tell(queue)
        assert taken.result(WAIT_S) == expected


def test_a_wake_before_the_take_is_not_lost_and_counts_once() -> None:
    queue = queue_of()
    queue.wake()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(queue.take, 9, 2 * WAIT_S).result(WAIT_S) == []
    assert queue.take(9, 0.0) == []


SIZES = st.integers(0, 7)
ACTS = st.one_of(
    st.tuples(st.just("put"), st.lists(SIZES, max_size=3)),
    st.tuples(st.just("take"), st.integers(1, 4), st.none() | st.integers(0, 12)),
    st.tuples(st.just("put_back")),
    st.tuples(st.just("take_all")),
)


@given(acts=st.lists(ACTS, max_size=40), max_items=st.integers(1, 5), max_bytes=st.integers(1, 12))
def test_it_is_a_list_that_never_grows_past_its_bounds(acts: list, max_items: int, max_bytes: int) -> None:
    """One thread drives it: what would wait is left out, as a producer that found no room would still be waiting."""
    queue = queue_of(max_items=max_items, max_bytes=max_bytes)
    expected: list[str] = []
    taken: list[str] = []
    num_in_hand = 0
    for name, *given_to in acts:
        if name == "put":
            for size in given_to[0]:
                num_bytes = sum(map(len, expected))
                if not expected or (len(expected) < max_items and num_bytes + size <= max_bytes):
                    queue.put(["x" * size])
                    expected.append("x" * size)
                    assert len(expected) == 1 or sum(map(len, expected)) <= max_bytes
                    assert len(expected) <= max_items
        elif name == "take":
            limit, most = given_to
            num_fitting = 1
            while most is not None and num_fitting < limit and sum(map(len, expected[: num_fitting + 1])) <= most:
                num_fitting += 1
            taken = expected[: limit if most is None else num_fitting]
            assert queue.take(limit, 0.0, max_bytes=most) == taken
            expected, num_in_hand = expected[len(taken) :], len(taken)
        elif name == "put_back":
            queue.put_back(taken)
            expected, taken = taken + expected, []
        else:
            assert queue.take_all() == expected
            expected, taken, num_in_hand = [], [], len(expected)
        num_bytes = sum(map(len, expected))
        assert (len(queue), queue.num_bytes) == (len(expected), num_bytes)
        assert queue.num_unsettled == len(expected) + num_in_hand, "what was taken counts until the next take"
        is_full = bool(expected) and num_bytes >= max_bytes
        assert queue.num_free == (0 if is_full else max(0, max_items - len(expected)))


@pytest.mark.parametrize("error", [StoreUnavailable, BrokerUnavailable, DeliveryFailed])
def test_a_missing_server_is_waited_for(error: type[Exception]) -> None:
    hurry, failures = InstantEvent(), [error()] * 9

    def act() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert Retry(hurry).until_done("record", act) == "done"
    assert len(hurry.waits) == 9
    assert hurry.waits == sorted(hurry.waits)
    assert hurry.waits[-1] == retry.LONGEST_WAIT_S


def test_for_a_while_a_hurry_changes_nothing_and_the_limit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry, seconds = threading.Event(), [0.0]
    hurry.set()
    calls = []

    def pause(for_s: float) -> None:
        seconds[0] += for_s

    def act() -> None:
        calls.append(seconds[0])
        raise StoreUnavailable

    monkeypatch.setattr("worker.background.time", SimpleNamespace(sleep=pause, monotonic=lambda: seconds[0]))
    with pytest.raises(StoreUnavailable):
        Retry(hurry).for_a_while("release", act, 5.0)
    assert calls[-2] < 5.0 <= calls[-1]
    assert len(calls) > 3
