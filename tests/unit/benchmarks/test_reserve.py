"""The schedule of online requests, and what is shown of their times beside a batch."""

from __future__ import annotations

from argparse import Namespace
from random import Random

import pytest

from benchmarks.engines.reserve import ALONE, NO_RESERVE, Played, draw_schedule, summary

OPTIONS = Namespace(seconds=3000.0, burst_rate=3.0, valley_rate=0.3)


def test_a_schedule_has_bursts_and_valleys_and_is_the_same_for_a_seed() -> None:
    arrivals = draw_schedule(["one", "two"], OPTIONS, Random(7))
    assert arrivals == draw_schedule(["one", "two"], OPTIONS, Random(7))
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < OPTIONS.seconds
    # A third of the time is a burst: valleys take 10 s in the mean and bursts 5 s.
    assert len(times) / OPTIONS.seconds == pytest.approx((2 * 0.3 + 3.0) / 3, rel=0.15)


def test_times_are_shown_over_those_of_an_idle_server_and_tokens_over_those_of_a_full_one() -> None:
    alone = Played([0.1, 0.1], [0.4, 0.4], 0, 0, 10.0)
    full = Played([1.0, 1.0], [2.0, 2.0], 0, 3000, 10.0)
    reserved = Played([0.2, 0.2], [0.6, 0.6], 1, 2400, 10.0)
    found = summary({ALONE: alone, NO_RESERVE: full, "reserve 0.25": reserved})
    row = found["contestants"]["reserve 0.25"]
    assert (row["first_token_s_p95"], row["first_token_s_p95_over_alone"]) == (0.2, 2.0)
    assert row["end_to_end_s_p50_over_alone"] == 1.5
    assert (row["batch_tokens_per_s"], row["batch_share_kept"]) == (240.0, 0.8)
    assert found["num_failed"] == 1
