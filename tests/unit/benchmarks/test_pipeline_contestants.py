"""What contestants are given, and what is refused of what they deliver."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaloop.messages import Origin, parse_job
from benchmarks.jobs import forced
from benchmarks.pipeline.contestants import PROGRAM, MissingPeer, ParallelConsumer, jdbc_url
from benchmarks.pipeline.instant_engine import TEXT, InstantEngine
from benchmarks.pipeline.our_worker import WorkerOrder, settings_of
from benchmarks.pipeline.topics import NUM_BYTES, NotDone, check_results, jobs
from worker.engine import Sampling


def test_messages_are_jobs_of_about_400_bytes_and_the_same_every_time() -> None:
    made = list(jobs(50, prefix="bulk"))
    assert made == list(jobs(50, prefix="bulk"))
    assert len({job_id for job_id, _ in made}) == 50
    for number, (job_id, value) in enumerate(made):
        assert NUM_BYTES <= len(value) <= NUM_BYTES + 10
        job = parse_job(value, Origin("cluster", "jobs.bulk", 0, number), task="bulk")
        assert (job.job_id, job.body.max_tokens) == (job_id, 1)


def test_the_engine_ends_each_admitted_job_with_one_token() -> None:
    engine = InstantEngine(num_slots=2)
    prepared = [
        engine.prepare(parse_job(value, Origin("cluster", "jobs.bulk", 0, 0), task="bulk"), Sampling(1, 0.0))
        for _, value in jobs(3, prefix="bulk")
    ]
    for each in prepared[:2]:
        assert engine.has_room(each)
        engine.admit(each, forced())
    assert not engine.has_room(prepared[2])
    step = engine.step()
    assert [generation.job_id for generation in step.finished] == ["bulk-0000000", "bulk-0000001"]
    for generation in step.finished:
        assert (generation.text, generation.counts.num_tokens, len(generation.token_ids)) == (TEXT, 1, 1)
        began, ended = engine.moments[generation.job_id]
        assert began <= ended
    assert engine.load().num_running == 0
    engine.admit(prepared[2], forced())
    assert engine.cancel("bulk-0000002")
    assert not engine.cancel("bulk-0000002")


def test_the_worker_gets_the_shipped_guarantees() -> None:
    order = WorkerOrder(
        bootstrap_servers="127.0.0.1:1",
        database_url="postgresql://a:b@127.0.0.1:1/c",
        group_id="g",
        task="bulk",
        num_partitions=8,
        num_slots=64,
    )
    settings = settings_of(WorkerOrder.model_validate_json(order.model_dump_json()))
    assert settings.worker.batch_size == 64
    assert settings.kafka.extra == {}
    assert settings.worker.model_dump(exclude={"batch_size", "max_buffered"}) == type(settings.worker)().model_dump(
        exclude={"batch_size", "max_buffered"}
    )


@pytest.mark.parametrize(("found", "words"), [(["a"], "1 of 2 results are missing"), (["a", "b", "x"], "1 belong")])
def test_a_missing_or_a_strange_result_ends_the_run(found: list[str], words: str) -> None:
    with pytest.raises(NotDone, match=words):
        check_results("ours", ["a", "b"], found)


def test_repeated_results_are_counted() -> None:
    assert check_results("ours", ["a", "b"], ["a", "b", "a"]) == 1


def test_a_peer_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingPeer, match=PROGRAM):
        ParallelConsumer(tmp_path, tmp_path, 16)


def test_a_peer_gets_the_address_of_its_database_as_its_driver_wants_it() -> None:
    found = jdbc_url("postgresql://me:secret@127.0.0.1:5/run_1")
    assert found == "jdbc:postgresql://127.0.0.1:5/run_1?user=me&password=secret"
