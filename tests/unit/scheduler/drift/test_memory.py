"""A memory of the drift test: as JSON, what is refused, and what it says."""

from __future__ import annotations

import random

import pytest

from alphaloop.errors import StoreError
from scheduler.counts import subject_of
from scheduler.drift.memory import ALPHA_MARGIN
from scheduler.drift.watching import WITHOUT_SEGMENT, State, TrafficVerdict, WatchedStream, verdicts
from tests.fixtures.drift import STREAM, watched_jobs
from tests.unit.scheduler.drift.test_fold import RUN_LENGTH, STEP, watched


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("memory", "sums"), [1.0, 2.0]),
        (("memory", "sums"), ["a", "b", "c"]),
        (("memory", "sums"), [float("nan")] * 3),
        (("memory", "current", "first"), None),
        (("memory", "current"), 3),
        (("draft_lengths",), ["three"]),
        (("draft_lengths",), list(range(17))),
        (("segments",), None),
    ],
)
def test_a_damaged_memory_is_refused(rng: random.Random, path: tuple[str, ...], value: object) -> None:
    document = part = watched(watched_jobs(rng, [0.7] * 200)).document()
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(StoreError, match="memory of a drift test"):
        WatchedStream.of(document)


def told(stream: WatchedStream) -> dict[str, TrafficVerdict]:
    return {verdict.segment: verdict for verdict in verdicts(subject_of(STREAM), stream)}


def test_while_it_learns_it_says_too_little(rng: random.Random) -> None:
    verdict = told(watched(watched_jobs(rng, [0.7] * 20)))[""]
    assert (verdict.state, verdict.change, verdict.num_jobs_before) == (State.TOO_LITTLE, None, 20)


def test_steady_needs_enough_jobs(rng: random.Random) -> None:
    few, many = (told(watched(watched_jobs(rng, [0.7] * num, step=STEP)))[""] for num in (60, 900))
    assert few.state is State.TOO_LITTLE
    assert many.state is State.STEADY
    assert -ALPHA_MARGIN <= many.change.low <= many.change.high <= ALPHA_MARGIN


@pytest.mark.parametrize(("after", "state"), [(0.45, State.FELL), (0.9, State.ROSE)])
def test_the_change_is_that_of_the_later_jobs(rng: random.Random, after: float, state: State) -> None:
    verdict = told(watched(watched_jobs(rng, [0.7] * 300 + [after] * 200, step=STEP)))[""]
    assert verdict.state is state
    assert verdict.change.low < after - 0.7 < verdict.change.high
    assert verdict.changed_after <= verdict.changed_before


def test_a_shift_of_the_mix_leaves_each_segment_steady(rng: random.Random) -> None:
    stream = WatchedStream()
    for number in range(700):
        is_easy = rng.random() < (0.8 if number < 400 else 0.1)
        (job,) = watched_jobs(
            rng, [0.85 if is_easy else 0.45], first=number, step=STEP, segment="easy" if is_easy else ""
        )
        stream.add([job], RUN_LENGTH)
    found = told(stream)
    assert found[""].state is State.FELL
    for name in ("easy", WITHOUT_SEGMENT):
        assert found[name].state is not State.FELL
        change = found[name].change
        assert change.low < 0 < change.high
