"""`alphaloop job`, `wait` and `cancel` against real servers: where jobs are, and how they are waited for again."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alphaloop.client import Client as Sending
from alphaloop.engine import SamplingDefaults
from alphaloop.errors import BrokerUnavailable, UnknownName
from alphaloop.kafka.backlog import search, unfinished
from alphaloop.kafka.topics import CONTROL
from alphaloop.outcomes.reading import JobPlace, find_jobs
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import ended_among
from alphaloop.store.workers import WorkerStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli, Ran
from tests.fixtures.messages import batch_line
from tests.fixtures.postgres import count
from tests.fixtures.worker import WAIT_S, Client, everything, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


@pytest.fixture
def jobs_cli(stack_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Workers say at every turn what they do."""
    monkeypatch.setattr("worker.presence.EVERY_S", 0.0)
    return stack_cli


def jobs(*numbers: int, **fields: Any) -> bytes:
    return b"\n".join(
        json.dumps({"job_id": f"job-{n}", "task": "code", "prompt": f"tell story {n}", **fields}).encode()
        for n in numbers
    )


class Gate:
    """Stops the engine before its fourth step until it may go on, and before its first while `is_shut`."""

    def __init__(self, may_go_on: Callable[[], bool], *, is_shut: bool = False) -> None:
        self.is_shut = is_shut
        self._may_go_on = may_go_on
        self._num_steps = 0
        self.is_open = threading.Event()

    def __call__(self) -> None:
        self._num_steps += 1
        if self.is_shut:
            until(lambda: not self.is_shut, "the test lets the engine begin")
        if self._num_steps > 3 and not self.is_open.is_set():
            until(lambda: self.is_open.is_set() or self._may_go_on(), "the test lets the engine go on")
            self.is_open.set()


def said_tokens(database: Database) -> list[int]:
    """What the workers said last of the jobs that they decode: how many tokens each has."""
    return [num for seen in WorkerStore(database).seen() for num in seen.load.tokens.values()]


def place_of(settings: Settings, database: Database, job_id: str) -> JobPlace:
    (found,) = find_jobs(settings, database, [job_id])
    return found.place


def test_what_ended_behind_a_long_job_waits_no_more(
    jobs_cli: Cli, worker_settings: Settings, database: Database
) -> None:
    """Its offset is unfinished until that of the long one is."""
    texts = [jobs(0, max_tokens=64), *(jobs(n, max_tokens=1) for n in (1, 2))]
    Client(worker_settings).send("code", texts, partition=0)
    gate = Gate(lambda: False)
    with running_worker(worker_settings, FakeEngine(num_slots=2, before_step=gate)):
        until(lambda: len(ended_among(database, ["job-1", "job-2"])) == 2, "the short ones have ended")
        assert unfinished(worker_settings.kafka)["code"].num_messages == 3
        (told,) = jobs_cli("status", "--json").json["tasks"]
        assert (told["waiting"], told["jobs"]) == (0, {"running": 1, "succeeded": 2})
        gate.is_open.set()


def test_a_job_is_found_wherever_it_is(jobs_cli: Cli, worker_settings: Settings, database: Database) -> None:
    client = Client(worker_settings)
    assert jobs_cli("enqueue", "--file", "-", stdin=jobs(1, 2, 3)).code == 0
    client.send("code", [b'{"job_id": "wrong", "prompt": "p", "temperature": 9}'])
    (waiting,) = jobs_cli("job", "job-3", "--json").json
    assert (waiting["place"], waiting["topic"], waiting["num_before"]) == ("waiting", "jobs.code", waiting["offset"])
    waiting = {task: its for task, its in unfinished(worker_settings.kafka).items() if its.oldest_s is not None}
    assert {task: its.num_messages for task, its in waiting.items()} == {"code": 4}
    gate = Gate(lambda: False, is_shut=True)
    engine = FakeEngine(num_slots=1, before_step=gate)
    engine.sampling_defaults = SamplingDefaults({"temperature": 0.6})
    with running_worker(worker_settings, engine) as worker:
        # What it says before its fourth step stands as long as the gate is shut: by then it holds all three.
        until(lambda: worker.worker.leases.num_held == 3, "all three are claimed")
        gate.is_shut = False
        until(lambda: max(said_tokens(database), default=0) >= 3, "it has said how far it is")
        places = dict.fromkeys(("job-1", "job-2", "job-3"), JobPlace.UNKNOWN)

        def is_one_running() -> bool:
            places.update({one: place_of(worker_settings, database, one) for one in places})
            return list(places.values()).count(JobPlace.RUNNING) == 1 and JobPlace.WAITING not in places.values()

        until(is_one_running, "one job is decoded and the others are held")
        assert sorted(places.values()) == [JobPlace.HELD, JobPlace.HELD, JobPlace.RUNNING]
        (running,) = (one for one, place in places.items() if place is JobPlace.RUNNING)
        told = jobs_cli("job", running)
        assert "tokens so far" in told.out
        assert "its lease runs until" in told.out
        (as_json,) = jobs_cli("job", running, "--json").json
        assert as_json["num_tokens"] >= 3
        held = next(one for one, place in places.items() if place is JobPlace.HELD)
        assert "waits there for a free slot" in jobs_cli("job", held).out
        shown = jobs_cli("status")
        assert "1 running, slots: 1, " in shown.out
        assert "generation_config.json: temperature 0.6 (not used, jobs are greedy by default)" in shown.out
        (load,) = jobs_cli("status", "--json").json["workers"]
        assert (load["num_running"], load["num_held"], load["num_slots"]) == (1, 3, 1)
        gate.is_open.set()
        client.results(3)
        until(lambda: place_of(worker_settings, database, "wrong") is JobPlace.REFUSED, "the wrong one is refused")
        (refused,) = jobs_cli("job", "wrong", "--json").json
    assert (refused["error"]["code"], refused["error"]["field"]) == ("invalid_field", "temperature")
    ended = jobs_cli("job", "job-1", "nobody")
    assert ended.code == 1
    assert "job-1: ended succeeded at " in ended.out
    assert "nobody: unknown: no worker has seen it" in ended.out
    assert jobs_cli("status", "--json").json["workers"] == [], "a worker that has ended has left"


def test_a_batch_is_found_in_kafka_without_reading_further_than_asked(
    jobs_cli: Cli, worker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    Client(worker_settings)
    jobs_cli("enqueue", "--file", "-", "--batch-id", "monday", stdin=jobs(*range(8)))
    jobs_cli("enqueue", "--file", "-", stdin=jobs(8, 9))
    found = search(worker_settings.kafka, lambda _, batch_id: batch_id == "monday")
    assert {message.job_id for message in found} == {f"job-{n}" for n in range(8)}
    monkeypatch.setattr("alphaloop.kafka.backlog.SEARCH_S", 0.0)
    with pytest.raises(BrokerUnavailable, match="than can be read through in 0 s"):
        search(worker_settings.kafka, lambda job_id, _: job_id == "nobody")


def test_cancel_says_what_it_found_and_waits_for_the_answer(
    jobs_cli: Cli, worker_settings: Settings, database: Database
) -> None:
    Client(worker_settings)
    asked = threading.Event()
    gate = Gate(asked.is_set)
    with running_worker(worker_settings, FakeEngine(num_slots=1, before_step=gate)) as worker:
        leases = worker.worker.leases
        gate._may_go_on = lambda: len(leases.cancelled()) == 2
        jobs_cli("enqueue", "--file", "-", "--batch-id", "b", stdin=jobs(1, 2))

        def are_both_here() -> bool:
            found = find_jobs(worker_settings, database, ["job-1", "job-2"])
            return {one.place for one in found} == {JobPlace.RUNNING, JobPlace.HELD}

        until(are_both_here, "one job is decoded and the other one is held")
        ran = jobs_cli("cancel", "--batch-id", "b", "nobody", "--wait", "--timeout", WAIT_S, "--json")
        assert ran.code == 1, "one of them is unknown"
        found = {one["job_id"]: (one["place"], one.get("ended")) for one in ran.json}
        assert sorted(found.values()) == [("held", "cancelled"), ("running", "cancelled"), ("unknown", None)]
        again = jobs_cli("cancel", "job-1")
    assert again.code == 0
    assert "job-1: ended cancelled" in again.out
    assert "nothing to cancel" in again.err
    none = jobs_cli("cancel", "--batch-id", "nobody's")
    assert (none.code, "no batch nobody's: no worker has seen a job of it" in none.err) == (1, True)


def test_what_was_never_sent_is_cancelled_only_where_that_is_asked_for(
    jobs_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(worker_settings)
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(batch_line(name)) + "\n" for name in ("one", "two")), encoding="utf-8")
    with Sending(worker_settings) as sending, pytest.raises(UnknownName, match="job-1: none waits in Kafka"):
        sending.cancel("job-1")
    for command in (("cancel", "job-1"), ("cancel", "job-1", "job-2", "--for", "2d"), ("batch", "cancel", file)):
        assert jobs_cli(*command).code == 1
    with monkeypatch.context() as cut:
        cut.setattr("alphaloop.kafka.backlog.SEARCH_S", 0.0)
        jobs_cli("enqueue", "--file", "-", stdin=jobs(1))
        ran = jobs_cli("cancel", "job-2", "--even-if-unknown")
        assert (ran.code, "more messages wait in Kafka than can be read" in ran.err) == (1, True)
    assert everything(worker_settings.kafka, CONTROL) == []
    assert jobs_cli("cancel", "job-2", "--even-if-unknown", "--for", "1h").code == 0
    ran = jobs_cli("batch", "cancel", file, "--even-if-unknown", "--for", "30m")
    assert (ran.code, "2 were never sent, and are cancelled if they come until " in ran.err) == (0, True)
    until_s = [json.loads(one.value or b"")["until"] for one in everything(worker_settings.kafka, CONTROL)]
    assert len(until_s) == 3
    with running_worker(worker_settings, FakeEngine()):
        until(lambda: count(database, "cancellations") == 3, "all are written down")
        jobs_cli("enqueue", "--file", "-", stdin=jobs(2))
        assert jobs_cli("batch", "submit", file, "--task", "code").code == 0
        found = {result.job_id: result.status.value for result in client.results(4)}
    assert found.pop("job-1") == "succeeded", "its cancellation was not kept"
    assert set(found.values()) == {"cancelled"}


def test_a_queued_job_is_cancelled_before_a_worker_sees_it(
    jobs_cli: Cli, worker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    Client(worker_settings)
    jobs_cli("enqueue", "--file", "-", stdin=jobs(1))
    ran = jobs_cli("cancel", "job-1")
    assert ran.code == 0
    assert "job-1: waits in Kafka, first in its partition" in ran.out
    assert "asked to cancel 1 job;" in ran.err
    monkeypatch.setattr("alphaloop.client.Client.results", interrupted)
    stopped = jobs_cli("cancel", "job-1", "--wait")
    assert stopped.code == 130
    assert wait_again(stopped) == ["wait", "job-1"]


def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
    """In the place of a wait for outcomes: Ctrl-C."""
    raise KeyboardInterrupt
    yield


def wait_again(ran: Ran) -> list[str]:
    """The arguments of the command that is printed."""
    return shlex.split(ran.err.rsplit("Wait again: ", 1)[1])[1:]


def test_an_interrupted_wait_says_how_to_wait_again(
    jobs_cli: Cli, worker_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By ids, by the name of a batch, and by the file of results."""
    Client(worker_settings)
    ways = (["--wait"], ["--wait", "--batch-id", "a batch"], ["--output", tmp_path / "results.jsonl"])
    commands: dict[tuple[int, int], list[str]] = {}
    for number, extra in enumerate(ways):
        both = (2 * number, 2 * number + 1)
        with monkeypatch.context() as patched:
            patched.setattr("alphaloop.client.Client.results", interrupted)
            ran = jobs_cli("enqueue", "--file", "-", *extra, stdin=jobs(*both))
            commands[both] = wait_again(ran)
            stopped = jobs_cli(*commands[both])
        assert (ran.code, stopped.code) == (130, 130)
        assert "stopped waiting; 2 jobs go on. Wait again: " in ran.err
        assert wait_again(stopped) == commands[both]
        late = jobs_cli(*commands[both], "--timeout", "0.1")
        assert (late.code, "2 of 2 jobs" in late.err) == (1, True)
    with running_worker(worker_settings, FakeEngine(num_slots=2)):
        for both, command in commands.items():
            waited = jobs_cli(*command, "--json", "--output", tmp_path / "again.jsonl")
            assert waited.code == 0
            rows = [json.loads(line) for line in waited.out.splitlines()]
            assert {row["job_id"]: row["status"] for row in rows} == {f"job-{n}": "succeeded" for n in both}
            written = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
            assert sorted(rows, key=lambda row: row["job_id"]) == sorted(written, key=lambda row: row["job_id"])
        at_once = jobs_cli("wait", f"job-{both[1]}")
    assert at_once.out == f"{next(row['text'] for row in rows if row['job_id'] == f'job-{both[1]}')}\n"


def test_an_argument_that_is_not_utf8_is_told(jobs_cli: Cli) -> None:
    name = os.fsdecode(b"b\xe4d")
    for arguments in (["job"], ["wait"], ["cancel"], ["batch", "status"], ["dlq", "list", "--task"]):
        ran = jobs_cli(*arguments, name)
        assert ran.code in (0, 1)
        assert not ran.code or ran.err.startswith("error: ")


def test_standard_output_shows_what_its_encoding_lacks(jobs_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = "ä日🦜"

    def shown(encoding: str, *options: str) -> str:
        written = io.BytesIO()
        with io.TextIOWrapper(written, encoding=encoding, write_through=True) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            jobs_cli("job", job_id, *options)
            return written.getvalue().decode(encoding)

    assert shown("ascii").startswith("\\u00e4\\u65e5")
    assert shown("latin-1").startswith("ä\\u65e5")
    assert json.loads(shown("ascii", "--json"))[0]["job_id"] == job_id
