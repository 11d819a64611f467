"""Shares: what a task was charged, and what its running jobs are expected to need."""

from __future__ import annotations

import pytest

from worker.admission import NUM_REMEMBERED_JOBS, DeviceShare


def test_real_seconds_take_the_place_of_expected_ones() -> None:
    share = DeviceShare()
    share.weight = 2.0
    share.admit(4.0)
    assert (share.virtual_s, share.finish_s) == (0.0, 2.0)
    share.charge(3.0)
    assert (share.virtual_s, share.finish_s) == (1.5, 2.0)
    share.charge(3.0)
    assert (share.virtual_s, share.finish_s) == (3.0, 3.0)


def test_what_a_job_did_not_need_is_forgotten_when_it_has_ended() -> None:
    share = DeviceShare()
    share.admit(10.0)
    share.charge(1.0)
    assert share.finish_s == 10.0
    share.observe(0)
    assert share.finish_s == 1.0


def test_a_steps_seconds_are_split_over_the_running_jobs() -> None:
    share = DeviceShare()
    for _ in range(4):
        share.admit(1.0)
    share.charge(8.0)
    share.observe(3)
    assert share.num_running == 3
    assert share.mean_job_s == pytest.approx(2.0)


def test_the_mean_follows_jobs_that_become_longer() -> None:
    share = DeviceShare()
    means_s = []
    for device_s in [1.0] * 200 + [3.0] * 200:
        share.admit(1.0)
        share.charge(device_s)
        share.observe(0)
        means_s.append(share.mean_job_s)
    assert means_s[199] == pytest.approx(1.0)
    assert means_s[200] == pytest.approx(1.0 + 2.0 / NUM_REMEMBERED_JOBS)
    assert means_s[399] == pytest.approx(3.0, rel=0.05)
