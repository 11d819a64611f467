"""The high lane of a task goes first, and its normal lane always gets its share."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.simulated import lane
from worker.admission import NORMAL_SHARE, AdmissionQueue

seeded = settings(derandomize=True, deadline=None, max_examples=30)


def queue_of(num_normal: int, num_high: int) -> AdmissionQueue[str]:
    """Normal jobs that came first, and high ones of which none has a priority."""
    queue: AdmissionQueue[str] = AdmissionQueue(num_slots=4)
    for number in range(num_normal):
        queue.add(lane("code"), f"normal-{number}", priority=100, num_bytes=10, now=0.0)
    for number in range(num_high):
        queue.add(lane("code"), f"high-{number}", priority=-100, num_bytes=1, now=50.0, is_high=True)
    return queue


def test_high_jobs_go_before_earlier_ones_whatever_their_priorities() -> None:
    queue = queue_of(num_normal=3, num_high=3)
    assert queue.load(is_high=True) == (3, 3)
    assert [name for _, name in queue.next(9, running={})] == [
        *(f"high-{number}" for number in range(3)),
        *(f"normal-{number}" for number in range(3)),
    ]
    assert queue.load(is_high=True) == queue.load(is_high=False) == (0, 0)


@seeded
@given(st.integers(0, 2**32))
def test_however_high_jobs_come_no_normal_job_starves(seed: int) -> None:
    """Of any starts while both lanes wait, the normal lane has its share to within one."""
    rng, queue = Random(seed), queue_of(num_normal=40, num_high=1)
    num_starts = num_normal = number = 0
    while queue.load(is_high=False)[0]:
        for _ in range(rng.randint(0, 9)):
            number += 1
            queue.add(lane("code"), f"high-later-{number}", priority=0, num_bytes=1, now=1.0, is_high=True)
        if not queue.load(is_high=True)[0]:
            continue
        for _, name in queue.next(1, running={}):
            num_starts += 1
            num_normal += name.startswith("normal")
            assert num_normal > num_starts * NORMAL_SHARE - 1 - 1e-6
