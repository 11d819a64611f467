"""The watermark against a naive model: never past an unfinished offset, never backwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.intake.watermark import Watermark


@given(st.sets(st.integers(0, 200), max_size=40), st.randoms(use_true_random=False))
def test_committable_is_the_oldest_unfinished(offsets: set[int], random) -> None:
    watermark, delivered, finished, committed = Watermark(), [], set(), -1
    waiting = sorted(offsets)
    while waiting or len(finished) < len(delivered):
        if waiting and random.random() < 0.5:
            offset = waiting.pop(0)
            assert watermark.deliver(offset)
            delivered.append(offset)
        elif unfinished := [offset for offset in delivered if offset not in finished]:
            offset = random.choice(unfinished)
            finished.add(offset)
            watermark.finish(offset)
        if not delivered:
            continue
        unfinished = [offset for offset in delivered if offset not in finished]
        expected = min(unfinished) if unfinished else delivered[-1] + 1
        assert watermark.committable == expected
        assert watermark.num_in_flight == len(unfinished)
        assert watermark.distance == delivered[-1] + 1 - expected
        assert expected >= committed
        committed = expected


def test_nothing_to_commit_before_the_first_delivery() -> None:
    watermark = Watermark()
    assert watermark.committable is None
    watermark.finish(7)
    assert watermark.committable is None


def test_a_repeat_is_not_delivered_twice() -> None:
    watermark = Watermark()
    assert watermark.deliver(5)
    assert not watermark.deliver(5)
    assert not watermark.deliver(4)
    watermark.finish(5)
    watermark.finish(5)
    assert watermark.committable == 6
    assert watermark.num_in_flight == 0


def test_holes_are_stepped_over() -> None:
    watermark = Watermark()
    for offset in (3, 9, 10):
        watermark.deliver(offset)
    watermark.finish(3)
    assert watermark.committable == 9
