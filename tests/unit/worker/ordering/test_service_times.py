"""How long jobs take: by task, at today's load, no longer than their limit."""

from __future__ import annotations

import pytest

from worker.feed import LEAST_AHEAD, MOST_AHEAD, SOON_S, num_soon
from worker.ordering.service_times import MARGIN_SD, ServiceTimes


def served(*tokens: int, task: str = "code", token_s: float = 0.1, ahead_s: float = 0.0) -> ServiceTimes:
    """Times of jobs of these lengths."""
    times = ServiceTimes()
    for num_tokens in tokens:
        times.ended(task, num_tokens=num_tokens, wall_s=num_tokens * token_s, ahead_s=ahead_s)
    return times


def test_a_service_takes_the_wait_after_the_claim_and_the_text() -> None:
    assert served(100, 100, 100, ahead_s=2.0).expected_s("code", 4096) == pytest.approx(12.0)


def test_a_limit_bounds_the_text() -> None:
    assert served(100, 100).expected_s("code", 30) == pytest.approx(3.0)


def test_texts_are_expected_longer_where_lengths_vary() -> None:
    alike, varied = served(*[100] * 200), served(*[50, 150] * 100)
    assert alike.expected_s("code", 4096) == pytest.approx(10.0)
    assert varied.expected_s("code", 4096) == pytest.approx(10.0 + MARGIN_SD * 5.0, rel=0.02)


def test_a_new_task_has_the_times_of_all_and_with_none_nothing_is_late() -> None:
    assert served(100, task="rag").expected_s("code", 4096) == pytest.approx(10.0)
    assert ServiceTimes().expected_s("code", 4096) == 0.0


def test_times_follow_the_load() -> None:
    times = served(*[100] * 200)
    for _ in range(200):
        times.ended("code", num_tokens=100, wall_s=40.0, ahead_s=0.0)
    assert times.expected_s("code", 4096) == pytest.approx(40.0, rel=0.02)


def test_few_jobs_are_claimed_ahead_where_they_are_long() -> None:
    """With 8 slots and jobs of a minute one starts every 7.5 s, and jobs of a second fill what is claimed anyway."""
    assert num_soon(8, num_running=8, decode_s=60.0) == 1
    assert num_soon(8, num_running=2, decode_s=60.0) == 7, "free slots are filled at once"
    assert num_soon(8, num_running=8, decode_s=1.0) == 8 * SOON_S >= LEAST_AHEAD
    assert num_soon(8, num_running=0, decode_s=None) == MOST_AHEAD
