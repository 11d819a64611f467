"""The intake over a scripted consumer: what is paused, what is committed, what survives a rebalance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from alphaloop.errors import BrokerError, FatalBrokerError
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.messages.headers import RetryHeaders
from tests.fixtures.publishing import NOW
from tests.fixtures.worker import until
from worker.intake.polling import MAX_LIST_S, Intake

P0, P1 = TopicPartition("jobs.code", 0), TopicPartition("jobs.code", 1)
Q0 = TopicPartition("jobs.sql", 0)
WAIT_S = 10.0


class ScriptedSource:
    """A consumer whose polls run what the test puts into `script`; every act is noted."""

    def __init__(self) -> None:
        self.script: SimpleQueue[object] = SimpleQueue()
        self.commits: list[dict[TopicPartition, int]] = []
        self.paused: set[TopicPartition] = set()
        self.changed = threading.Condition()
        self.subscribed: list[list[str]] = []
        self.refuse_commits = False
        self.has_joined = True
        self.unknown: set[str] = set()
        self.is_closed = False
        self.ids: dict[str, str] = {}
        self.gaps: dict[TopicPartition, int] = {}
        self.num_renewed = 0
        self._next: object = None

    def subscribe(self, patterns, *, on_assign, on_revoke, on_lost) -> None:
        self._note(lambda: self.subscribed.append(list(patterns)))
        self.on_assign, self.on_revoke, self.on_lost = on_assign, on_revoke, on_lost

    def knows(self, topics) -> bool:
        return not self.unknown & {*topics}

    def poll_many(self, limit: int, timeout_s: float) -> list[Record]:
        """The records that the script has now, up to an act, which the next poll runs."""
        records: list[Record] = []
        while len(records) < limit:
            try:
                act = self._next or self.script.get(timeout=0 if records else min(timeout_s, 0.01) or 0.001)
            except Empty:
                break
            self._next = None
            if isinstance(act, Record):
                records.append(act)
                continue
            if records:
                self._next = act
            elif callable(act):
                act()
            else:
                assert isinstance(act, Exception)
                raise act
            break
        return records

    def positions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Where the test says that offsets without a message end."""
        return {one: offset for one, offset in self.gaps.items() if one in partitions}

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._note(lambda: self.paused.update(partitions))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._note(lambda: self.paused.difference_update(partitions))

    def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.refuse_commits:
            raise BrokerError("rebalance in progress")
        self._note(lambda: self.commits.append(dict(offsets)))

    def note_ids(self, ids: Mapping[str, str]) -> None:
        self.ids = dict(ids)

    def renew_if_made_anew(self) -> None:
        """Call what a consumer calls that reads `P0` and `Q0`, if the topic of `P0` was made anew."""
        if self.ids.pop(P0.topic, None) is not None:
            self.on_lost([P0])
            self.on_revoke([Q0])
            self._note(lambda: setattr(self, "num_renewed", self.num_renewed + 1))

    def close(self) -> None:
        self._note(lambda: setattr(self, "is_closed", True))

    def _note(self, act) -> None:
        with self.changed:
            act()
            self.changed.notify_all()

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "the intake did not get there in time"

    def settle(self) -> None:
        """Return once everything put into the script so far has been polled."""
        done = threading.Event()
        self.script.put(done.set)
        assert done.wait(WAIT_S)


def record(partition: TopicPartition, offset: int, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record(partition.topic, partition.partition, offset, None, b"{}", headers, None)


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


def started(source: ScriptedSource, **given: Any) -> Intake:
    """An intake of a few small messages that commits at once, but for what is given."""
    given = {"first": ["^jobs"], "commit_interval_s": 0.0, "now": lambda: NOW, **given}
    limits = {"max_jobs": 4, "max_bytes": 1 << 20, "max_distance": 10, "most_message_bytes": 1 << 10}
    intake = Intake(source, **limits, **given)  # type: ignore[arg-type]
    intake.start()
    return intake


@pytest.fixture
def intake(source: ScriptedSource) -> Iterator[Intake]:
    intake = started(source)
    source.script.put(lambda: source.on_assign([P0, P1]))
    yield intake
    intake.close(WAIT_S)


def take_all(intake: Intake, count: int) -> list:
    """So many deliveries; a rebalance wakes who waits, so that one take may come back with none."""
    taken: list = []

    def are_all() -> bool:
        taken.extend(intake.take(count - len(taken), WAIT_S))
        return len(taken) == count

    until(are_all, f"{count} deliveries have come", WAIT_S)
    return taken


def test_offsets_without_a_message_are_committed_after_what_runs_before_them(
    source: ScriptedSource, intake: Intake
) -> None:
    source.gaps = {P1: 151}
    source.wait_for(lambda: {P1: 151} in source.commits)
    source.script.put(record(P0, 4))
    (running,) = take_all(intake, 1)
    source.gaps = {P0: 9, P1: 151}
    source.settle()
    assert all(commit.get(P0, 4) == 4 for commit in source.commits)
    intake.finish([running])
    source.wait_for(lambda: source.commits[-1] == {P0: 9})


def test_messages_of_headers_alone_fill_the_buffer(source: ScriptedSource, intake: Intake) -> None:
    source.script.put(record(P0, 0, headers=(("flood", b"x" * (1 << 20)),)))
    source.wait_for(lambda: source.paused == {P0, P1})
    take_all(intake, 1)
    source.wait_for(lambda: not source.paused)


def test_many_small_headers_fill_the_buffer(source: ScriptedSource, intake: Intake) -> None:
    source.script.put(record(P0, 0, headers=(("h", b""),) * 6_000))
    source.wait_for(lambda: source.paused == {P0, P1})


def test_a_log_that_goes_back_is_delivered_and_committed_again(
    source: ScriptedSource, intake: Intake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "worker.intake.partitions")
    for offset in range(3):
        source.script.put(record(P0, offset))
    lost, *others = take_all(intake, 3)
    intake.finish(others)
    source.script.put(record(P0, 0))
    source.script.put(record(P0, 1))
    first, second = take_all(intake, 2)
    assert [one.record.offset for one in (first, second)] == [0, 1]
    assert intake.is_current(lost), "a job of the old log is decoded to its end"
    intake.finish([lost])
    intake.finish([second])
    source.settle()
    source.settle()
    assert source.commits[-1] == {P0: 0}
    intake.finish([first])
    source.wait_for(lambda: source.commits[-1] == {P0: 2})
    assert [one.action for one in caplog.records if one.levelname == "WARNING"] == ["log_went_back"]  # type: ignore[attr-defined]


def test_one_stuck_job_pauses_its_partition_only(source: ScriptedSource, intake: Intake) -> None:
    source.script.put(record(P0, 0))
    take_all(intake, 1)
    for offset in range(1, 11):
        source.script.put(record(P0, offset))
        intake.finish(take_all(intake, 1))
    source.wait_for(lambda: source.paused == {P0})


def test_revoked_work_is_committed_and_its_buffer_dropped(source: ScriptedSource, intake: Intake) -> None:
    for offset in range(3):
        source.script.put(record(P0, offset))
    source.script.put(record(P1, 7))
    first, *_ = take_all(intake, 1)
    intake.finish([first])
    source.script.put(lambda: source.on_revoke([P0]))
    source.settle()
    assert {P0: 1}.items() <= {k: v for commit in source.commits for k, v in commit.items()}.items()
    assert not intake.is_current(first)
    assert [d.record.offset for d in take_all(intake, 1)] == [7]


def test_completions_of_an_earlier_assignment_are_void(source: ScriptedSource, intake: Intake) -> None:
    source.script.put(record(P0, 0))
    (old,) = take_all(intake, 1)
    source.script.put(lambda: source.on_revoke([P0]))
    source.script.put(lambda: source.on_assign([P0]))
    source.script.put(record(P0, 0))
    (new,) = take_all(intake, 1)
    intake.finish([old])
    source.settle()
    source.settle()
    assert intake.num_in_flight == 1
    intake.finish([new])
    source.wait_for(lambda: source.commits and source.commits[-1].get(P0) == 1)


def test_a_refused_commit_is_tried_again(source: ScriptedSource, intake: Intake) -> None:
    source.refuse_commits = True
    source.script.put(record(P0, 0))
    intake.finish(take_all(intake, 1))
    source.settle()
    assert source.commits == []
    source.refuse_commits = False
    source.wait_for(lambda: source.commits and source.commits[-1] == {P0: 1})


def test_a_fatal_error_reaches_the_worker(source: ScriptedSource, intake: Intake) -> None:
    source.script.put(FatalBrokerError("fenced"))
    source.wait_for(lambda: source.is_closed)
    with pytest.raises(FatalBrokerError):
        intake.take(1, WAIT_S)


def test_stopping_hands_out_nothing_more_but_goes_on_polling(source: ScriptedSource, intake: Intake) -> None:
    for offset in range(2):
        source.script.put(record(P0, offset))
    (first,) = take_all(intake, 1)
    source.settle()
    intake.stop_taking()
    source.wait_for(lambda: source.paused == {P0, P1})
    assert intake.take(1, 0.0) == []
    intake.finish([first])
    intake.close(WAIT_S)
    assert source.is_closed
    assert source.commits[-1] == {P0: 1}
    assert intake.poll_age_s < WAIT_S


R0 = TopicPartition("jobs.code.retry.10s", 0)


def test_a_retry_is_handed_out_when_it_is_due_and_nothing_else_waits_for_it(source: ScriptedSource) -> None:
    clock = [0.0]
    intake = started(source, clock=lambda: clock[0], now=lambda: datetime.fromtimestamp(clock[0], UTC))
    source.script.put(lambda: source.on_assign([P0, R0]))
    for offset, not_before_s in ((0, 10), (1, 9), (2, 12)):
        said = RetryHeaders("jobs.code.high", 2, 40 + offset, 7, 1000 * not_before_s, 1, "decode_failed")
        waiting = Record(R0.topic, 0, offset, b"key", b"job", tuple(said.headers([("x", b"y")])), None)
        source.script.put(waiting)
        source.script.put(record(P0, offset))
        (normal,) = take_all(intake, 1)
        assert normal.record.topic == P0.topic, "the others of this worker go on"
        if clock[0] < not_before_s:
            source.wait_for(lambda: source.paused == {R0})
            clock[0] = not_before_s - 0.5
            source.settle()
            assert intake.take(9, 0.0, is_high=True) == []
            clock[0] = not_before_s
        (retried,) = intake.take(9, WAIT_S, is_high=True)
        assert retried.record == Record("jobs.code.high", 2, 40 + offset, b"key", b"job", (("x", b"y"),), 7)
        assert retried.partition == R0
        source.wait_for(lambda: R0 not in source.paused)
        intake.finish([retried, normal])
        source.wait_for(lambda offset=offset: any(commit.get(R0) == offset + 1 for commit in source.commits))
    intake.close(WAIT_S)


def test_messages_of_a_retry_topic_that_came_together_wait_each_for_its_time(source: ScriptedSource) -> None:
    clock = [0.0]
    intake = started(source, clock=lambda: clock[0], now=lambda: datetime.fromtimestamp(clock[0], UTC))
    source.script.put(lambda: source.on_assign([P0, R0]))
    for offset, not_before_s in ((0, 10), (1, 5), (2, 12)):
        said = RetryHeaders("jobs.code", 0, 40 + offset, 7, 1000 * not_before_s, 1, "decode_failed")
        source.script.put(Record(R0.topic, 0, offset, b"key", b"job", tuple(said.headers(())), None))
    source.script.put(record(P0, 0))
    (normal,) = intake.take(9, WAIT_S)
    assert normal.record.topic == P0.topic
    came: list[tuple[float, int]] = []
    for clock[0] in (9.9, 10.0, 11.9, 12.0):
        source.settle()
        source.settle()  # what came due in the turn of the first one can be taken when that turn is over
        came += [(clock[0], delivery.record.offset) for delivery in intake.take(9, 0.0)]
    assert came == [(10.0, 40), (10.0, 41), (12.0, 42)], "the head is due first, and no other overtakes"
    source.wait_for(lambda: R0 not in source.paused)
    intake.close(WAIT_S)


def handing_over(source: ScriptedSource, hand_over_s: float) -> Intake:
    intake = started(source, commit_interval_s=3600.0, hand_over_s=hand_over_s)
    source.script.put(lambda: source.on_assign([P0, P1]))
    return intake


def test_jobs_that_outlast_the_rebalance_are_named_once(source: ScriptedSource) -> None:
    intake = handing_over(source, 0.05)
    for offset in range(2):
        source.script.put(record(P0, offset))
    done, running = take_all(intake, 2)
    intake.handing_over.owe([done, running])
    intake.finish([done])
    source.script.put(lambda: source.on_revoke([P0]))
    source.settle()
    assert source.commits == [{P0: 1}]
    assert (intake.handing_over.take_overdue(), intake.handing_over.take_overdue()) == ({running.key}, frozenset())
    intake.close(WAIT_S)


def test_of_a_topic_made_anew_nothing_is_committed_and_its_running_jobs_hold_up_nothing(source: ScriptedSource) -> None:
    intake = handing_over(source, 10 * WAIT_S)
    source.script.put(lambda: source.on_assign([Q0]))
    for partition, offset in ((P0, 0), (P0, 1), (Q0, 0), (Q0, 1)):
        source.script.put(record(partition, offset))
    ended, runs, other, unclaimed = take_all(intake, 4)
    intake.handing_over.owe([ended, runs, other])
    intake.finish([ended])
    intake.tell_topic_ids({P0.topic: "another"})
    until(lambda: not intake.is_current(other), "the partitions are given up")
    assert source.num_renewed == 0, "a running job of the other topic is waited for"
    intake.finish([other])
    source.wait_for(lambda: source.num_renewed == 1)
    assert source.commits == [{Q0: 1}]
    assert intake.handing_over.take_overdue() == frozenset()
    assert not any(map(intake.is_current, (runs, unclaimed)))
    intake.close(WAIT_S)


def test_partitions_come_back_unpaused_after_a_change_of_the_client_and_held_topics_stay_held(
    source: ScriptedSource, intake: Intake
) -> None:
    for offset in range(4):
        source.script.put(record(P0, offset))
    source.wait_for(lambda: source.paused == {P0, P1})
    intake.hold(Q0.topic)
    source.script.put(lambda: source.on_assign([Q0]))
    intake.tell_topic_ids({P0.topic: "another"})
    source.wait_for(lambda: source.num_renewed == 1)
    source.paused.clear()
    source.script.put(lambda: source.on_assign([P0, Q0]))
    source.wait_for(lambda: Q0 in source.paused)
    assert intake.topics == {P0.topic, Q0.topic}
    assert not intake.is_paused(P0)
    source.script.put(record(P0, 7))
    until(lambda: [one.record.offset for one in intake.take(1, WAIT_S)] == [7], "it is read again")


def test_a_worker_that_leaves_keeps_no_rebalance_waiting(source: ScriptedSource) -> None:
    intake = handing_over(source, 10 * WAIT_S)
    source.script.put(record(P0, 0))
    intake.handing_over.owe(take_all(intake, 1))
    number = intake.assignment_number
    source.script.put(lambda: source.on_revoke([P0]))
    until(lambda: intake.assignment_number > number, "the rebalance has begun")
    intake.close(WAIT_S)
    assert source.is_closed


def test_another_list_drops_a_topic_at_once_and_the_next_list_waits_until_it_has_left(source: ScriptedSource) -> None:
    intake = started(source)
    source.script.put(lambda: source.on_assign([P0, Q0]))
    source.script.put(record(P0, 0))
    source.script.put(record(Q0, 0))
    code, sql = sorted(take_all(intake, 2), key=lambda one: one.record.topic)
    intake.read_topics(["jobs.code", "jobs.sql"])
    source.wait_for(lambda: len(source.subscribed) == 2)
    before = intake.assignment_number
    intake.read_topics(["jobs.code"])
    intake.read_topics(["jobs.code", "jobs.sql"])
    source.wait_for(lambda: source.subscribed[2:] == [["jobs.code"]])
    source.settle()
    assert source.subscribed[3:] == [], "its partition has not left"
    assert intake.assignment_number > before, "who holds jobs looks again"
    assert (intake.is_current(code), intake.is_current(sql)) == (True, False)
    source.script.put(record(Q0, 1))
    (late,) = take_all(intake, 1)
    assert not intake.is_current(late)
    intake.finish([code])
    source.script.put(lambda: source.on_revoke([Q0]))
    source.wait_for(lambda: source.subscribed[3:] == [["jobs.code", "jobs.sql"]])
    source.script.put(lambda: source.on_assign([Q0]))
    source.script.put(record(Q0, 0))
    (again,) = take_all(intake, 1)
    assert intake.is_current(again)
    intake.close(WAIT_S)
    assert {one.get(Q0, 0) for one in source.commits} == {0}, "what was put aside is not finished"


def test_an_intake_may_have_nothing_to_read_for_a_while(source: ScriptedSource) -> None:
    intake = started(source, first=())
    source.settle()
    assert source.subscribed == []
    intake.read_topics([])
    intake.read_topics(["jobs.code"])
    source.wait_for(lambda: source.subscribed == [[], ["jobs.code"]])
    assert intake.listed == {"jobs.code"}
    intake.close(WAIT_S)


def test_a_second_list_waits_until_the_group_has_taken_the_member_in_but_not_for_ever(source: ScriptedSource) -> None:
    clock = [0.0]
    source.has_joined = False
    intake = started(source, first=["jobs.code"], clock=lambda: clock[0])
    intake.read_topics(["jobs.sql"])
    intake.read_topics(["jobs.code"])
    source.settle()
    source.settle()
    assert source.subscribed == [["jobs.code"]]
    source.has_joined = True
    source.wait_for(lambda: len(source.subscribed) == 3)
    source.has_joined = False
    intake.read_topics(["jobs.sql"])
    source.settle()
    assert len(source.subscribed) == 3
    clock[0] += MAX_LIST_S
    source.wait_for(lambda: source.subscribed[3:] == [["jobs.sql"]])
    source.has_joined, source.unknown = True, {"jobs.new"}
    intake.read_topics(["jobs.sql", "jobs.new"])
    source.settle()
    assert len(source.subscribed) == 4, "it waits for the broker to tell of the topic too"
    source.unknown = set()
    source.wait_for(lambda: source.subscribed[4:] == [["jobs.new", "jobs.sql"]])
    intake.close(WAIT_S)
