"""Outcomes wait for their streams: how long, how many, and what never waits."""

from __future__ import annotations

from tests.fixtures.claimed import claimed_job, ended_job
from worker.recording import MOST_HELD, MOST_HELD_BYTES, MOST_HELD_S, EndedJob, UnsettledStreams
from worker.streams import ChunkMessage


class Holding:
    """Held outcomes with a clock and a hurry of the test's choice."""

    def __init__(self) -> None:
        self.now, self.is_hurried = 100.0, False
        self.streams = UnsettledStreams(is_hurried=lambda: self.is_hurried, clock=lambda: self.now)

    def pass_on(self, *ended: EndedJob) -> list[str]:
        return [one.claimed.job_id for one in self.streams.pass_on(ended)]


def streamed(job_id: str, *, num_bytes: int = 200, num_chunks: int = 1) -> tuple[EndedJob, list[ChunkMessage]]:
    """An ended job, and the chunks of its stream, none of them settled."""
    one = ended_job(claimed_job(job_id, stream=True), num_bytes=num_bytes)
    assert one.claimed.stream is not None
    return one, [one.claimed.stream.add("word ", created=0, model="target") for _ in range(num_chunks)]


def test_an_outcome_waits_until_every_chunk_is_settled_and_then_no_longer() -> None:
    one = Holding()
    ended, (first, second) = streamed("j1", num_chunks=2)
    assert one.pass_on(ended) == []
    first.settle(is_acknowledged=True)
    assert (one.pass_on(), len(one.streams), one.streams.num_bytes) == ([], 1, 200)
    second.settle(is_acknowledged=True)
    assert one.pass_on() == ["j1"]
    assert (one.streams.num_held, one.streams.num_bytes, len(one.streams)) == (0, 0, 1), "in hand"
    assert (one.pass_on(), len(one.streams)) == ([], 0)


def test_jobs_that_are_not_streamed_or_whose_streams_are_settled_pass_those_that_wait() -> None:
    one = Holding()
    waits, _ = streamed("waits")
    settled, (chunk,) = streamed("settled")
    chunk.settle(is_acknowledged=True)
    empty, _ = streamed("empty", num_chunks=0)
    plain = ended_job(claimed_job("plain"))
    assert sorted(one.pass_on(waits, plain, settled, empty)) == ["empty", "plain", "settled"]
    assert one.streams.num_held == 1


def test_an_outcome_waits_for_a_topic_that_is_away_only_so_long() -> None:
    one = Holding()
    early, late = streamed("early")[0], streamed("late")[0]
    one.pass_on(early)
    one.now += MOST_HELD_S / 2
    assert one.pass_on(late) == []
    one.now += MOST_HELD_S / 2
    assert one.pass_on() == ["early"]
    one.now += MOST_HELD_S / 2
    assert one.pass_on() == ["late"]


def test_in_a_hurry_nothing_waits() -> None:
    one = Holding()
    assert one.pass_on(streamed("j1")[0]) == []
    one.is_hurried = True
    assert sorted(one.pass_on(streamed("j2")[0])) == ["j1", "j2"]
    assert one.streams.num_held == 0


def test_what_is_held_is_bounded_in_count_and_in_bytes_and_the_oldest_goes_first() -> None:
    one = Holding()
    many = [streamed(f"j{number}")[0] for number in range(MOST_HELD + 2)]
    assert one.pass_on(*many) == ["j0", "j1"]
    assert one.streams.num_held == MOST_HELD
    large = Holding()
    halves = [streamed(f"j{number}", num_bytes=MOST_HELD_BYTES // 2)[0] for number in range(3)]
    assert large.pass_on(*halves) == ["j0"]
    assert large.streams.num_bytes == 2 * (MOST_HELD_BYTES // 2)
    alone = Holding()
    assert alone.pass_on(streamed("huge", num_bytes=2 * MOST_HELD_BYTES)[0]) == [], "one is held whatever its size"
