"""Batches: one task and one decision each, tasks in turn, nobody waits for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages import Body, Decoding, Job, Purpose
from worker.engine import Sampling
from worker.jobs.batching import Batcher, BatchKey, batch_key


def key(task: str = "code", bucket: str = "greedy") -> BatchKey:
    return BatchKey(task, bucket, "auto", "traffic", "", 0)


def all_served(batcher: Batcher[int], now: float) -> list[BatchKey]:
    """The keys of all batches, in their order."""
    keys = []
    while taken := batcher.next(now):
        keys.append(taken[0])
    return keys


def test_a_full_group_goes_at_once_and_a_lone_job_waits() -> None:
    batcher: Batcher[str] = Batcher(batch_size=2, wait_s=1.0)
    batcher.add(key("code"), "a", priority=0, now=0.0)
    assert batcher.next(0.5) is None
    batcher.add(key("code"), "b", priority=0, now=0.6)
    assert batcher.next(0.6) == (key("code"), ["a", "b"])
    batcher.add(key("code"), "c", priority=0, now=0.7)
    assert batcher.next(1.0) is None
    assert batcher.next(1.7) == (key("code"), ["c"])
    assert batcher.next(9.9) is None


def test_tasks_take_turns_however_long_one_queue_is() -> None:
    batcher: Batcher[int] = Batcher(batch_size=1, wait_s=0.0)
    for i in range(50):
        batcher.add(key("code"), i, priority=0, now=0.0)
    for i in range(3):
        batcher.add(key("sql"), i, priority=0, now=1.0)
    tasks = [served.task for served in all_served(batcher, 2.0)]
    assert tasks[:6].count("sql") == 3
    assert Counter(tasks) == {"code": 50, "sql": 3}


def test_probes_and_controls_that_are_compared_follow_each_other() -> None:
    """Whoever came first; and neither of them is always the first to meet the machine."""
    batcher: Batcher[int] = Batcher(batch_size=2, wait_s=0.0)
    measured = {name: BatchKey("code", "greedy", "auto", name, "", 0) for name in ("probe", "control")}
    for i in range(8):
        batcher.add(key("sql"), i, priority=0, now=0.0)
        batcher.add(measured["probe"], i, priority=0, now=1.0)
        batcher.add(measured["control"], i, priority=0, now=2.0)
    served = [served.purpose for served in all_served(batcher, 3.0)]
    one, other = ["traffic", "control", "probe"], ["traffic", "probe", "control"]
    assert served == [*one, *other, *one, *other]


def test_a_flood_of_probes_takes_turns_like_any_other_task() -> None:
    batcher: Batcher[int] = Batcher(batch_size=1, wait_s=0.0)
    for i in range(50):
        batcher.add(BatchKey("code", "greedy", "auto", "probe", "lookup", 3), i, priority=0, now=0.0)
        batcher.add(BatchKey("code", "greedy", "auto", "probe", "draft", 3), i, priority=0, now=0.0)
    for i in range(3):
        batcher.add(key("sql"), i, priority=0, now=1.0)
    tasks = [served.task for served in all_served(batcher, 2.0)]
    assert tasks[:9].count("sql") == 3
    assert len(tasks) == 103


def test_priority_overtakes_within_a_group_only() -> None:
    batcher: Batcher[str] = Batcher(batch_size=2, wait_s=0.0)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        batcher.add(key(), name, priority=priority, now=0.0)
    assert batcher.next(0.0) == (key(), ["high", "first"])
    assert batcher.next(0.0) == (key(), ["second", "low"])


@given(st.lists(st.tuples(st.sampled_from(["code", "sql", "rag"]), st.integers(-3, 3)), max_size=60), st.integers(1, 7))
def test_every_job_leaves_once_in_batches_of_one_key(jobs: list[tuple[str, int]], batch_size: int) -> None:
    batcher: Batcher[tuple[int, str]] = Batcher(batch_size, wait_s=0.5)
    for number, (task, priority) in enumerate(jobs):
        batcher.add(key(task), (number, task), priority=priority, now=float(number) / 100)
    seen = []
    while taken := batcher.next(100.0):
        batch_of, batch = taken
        assert 1 <= len(batch) <= batch_size
        assert {task for _, task in batch} == {batch_of.task}
        seen += [number for number, _ in batch]
    assert sorted(seen) == list(range(len(jobs)))
    assert len(batcher) == 0


def test_discarded_jobs_are_returned_and_gone() -> None:
    batcher: Batcher[int] = Batcher(batch_size=4, wait_s=0.0)
    for i in range(6):
        batcher.add(key("code" if i % 2 else "sql"), i, priority=0, now=0.0)
    assert sorted(batcher.discard(lambda i: i >= 3)) == [3, 4, 5]
    assert len(batcher) == 3
    assert sorted(batcher.discard(lambda i: True)) == [0, 1, 2]
    assert batcher.next(1.0) is None


def test_what_must_not_share_a_decision_has_another_key() -> None:
    def of(**changes: object) -> BatchKey:
        fields = {"job_id": "j", "task": "code", "body": Body(prompt="x"), **changes}
        return batch_key(Job.model_construct(**fields), Sampling(max_tokens=8, temperature=float(changes.get("t", 0))))  # type: ignore[arg-type]

    plain = of()
    assert plain == of(custom_id="other", priority=3)
    assert (
        len({plain, of(t=0.7), of(decoding=Decoding.VANILLA), of(purpose=Purpose.CONTROL), of(probe_drafter="lookup")})
        == 5
    )
