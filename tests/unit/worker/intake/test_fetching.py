"""Prompts that lie elsewhere: read beside the feed, a bounded number at once, and none lost to a store that is away."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import MessageError
from alphaloop.messages import ContentReference
from alphaloop.settings import ClaimCheckSettings, TaskSettings
from tests.fixtures.publishing import delivery, validation
from tests.fixtures.worker import until
from worker.background import Retry
from worker.intake.partitions import Delivery
from worker.intake.validation import NUM_AT_ONCE, Fetching, ReadyJob


class Contents:
    """A folder that answers only while its gate is open, and counts who reads at once."""

    def __init__(self, folder: Path) -> None:
        self.store = ContentStore.of(ClaimCheckSettings(url=str(folder)))
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self.num_reading = self.most_reading = 0

    def read(self, reference: ContentReference) -> bytes:
        with self._lock:
            self.num_reading += 1
            self.most_reading = max(self.most_reading, self.num_reading)
        self.gate.wait(10)
        with self._lock:
            self.num_reading -= 1
        return self.store.read(reference)


class Feeding:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.contents = Contents(folder)
        tasks = {"code": TaskSettings(vanilla_patterns=("*",))}
        self.hurry, self.num_wakes = threading.Event(), 0
        self.fetching = Fetching(
            self.contents,  # type: ignore[arg-type]
            validation(tasks=tasks, check_reference=self.contents.store.check),
            retry=Retry(self.hurry),
            wake=self._woken,
        )
        self.ready: list[ReadyJob] = []
        self.refused: list[tuple[Delivery, MessageError]] = []

    def send(self, name: str, content: bytes = b'{"prompt": "hello there"}') -> ContentReference:
        reference = self.contents.store.write(name, content)
        fields = {"job_id": name, "body_ref": reference.model_dump(), "max_tokens": 4}
        assert self.fetching.read(delivery(name, value=json.dumps(fields).encode()), self.refused) is None
        return reference

    def turn(self, room_bytes: int = 1 << 20) -> None:
        ready, refused = self.fetching.take(room_bytes)
        self.ready += ready
        self.refused += refused

    def until_empty(self) -> None:
        def is_empty() -> bool:
            self.turn()
            return not len(self.fetching)

        until(is_empty, "every prompt has come", 30)

    def _woken(self) -> None:
        self.num_wakes += 1


@pytest.fixture
def feeding(tmp_path: Path) -> Feeding:
    return Feeding(tmp_path / "contents")


def test_prompts_come_and_the_feed_is_woken_and_never_waits(feeding: Feeding) -> None:
    feeding.contents.gate.clear()
    for number in range(5):
        feeding.send(f"job-{number}")
    feeding.turn()
    assert (feeding.ready, len(feeding.fetching)) == ([], 5)
    feeding.contents.gate.set()
    feeding.until_empty()
    assert {job.job.job_id for job in feeding.ready} == {f"job-{number}" for number in range(5)}
    assert {len(job.prepared.token_ids) for job in feeding.ready} == {2}
    until(lambda: feeding.num_wakes == 5, "the feed was woken for each, which follows the prompt")
    assert feeding.contents.most_reading <= NUM_AT_ONCE


def test_a_job_takes_the_room_of_its_prompt(feeding: Feeding) -> None:
    reference = feeding.send("large", json.dumps({"prompt": "x" * 50_000}).encode())
    feeding.until_empty()
    assert feeding.ready[0].num_bytes > reference.num_bytes
    feeding.send("later")
    feeding.turn(room_bytes=0)
    assert (feeding.contents.num_reading, len(feeding.fetching)) == (0, 1)


def test_a_missing_prompt_is_the_jobs_failure_and_a_wrong_one_a_refusal(feeding: Feeding) -> None:
    feeding.send("missing")
    (feeding.folder / "missing").unlink()
    feeding.send("wrong", b'{"prompt": 5}')
    feeding.until_empty()
    (failed,) = feeding.ready
    assert (failed.job.job_id, failed.failure.code) == ("missing", "content_missing")
    ((_, error),) = feeding.refused
    assert (error.field, error.message.split(":")[0]) == ("body_ref", "prompt of the content")


def test_a_store_that_is_away_is_asked_until_it_answers(feeding: Feeding) -> None:
    feeding.send("patient")
    hidden = feeding.folder.rename(feeding.folder.with_name("unmounted"))
    feeding.turn()
    assert len(feeding.fetching) == 1
    hidden.rename(feeding.folder)
    feeding.until_empty()
    assert [job.failure for job in feeding.ready] == [None]


def test_a_worker_that_ends_drops_what_it_waits_for(feeding: Feeding) -> None:
    feeding.send("unread")
    feeding.folder.rename(feeding.folder.with_name("unmounted"))
    feeding.hurry.set()
    feeding.until_empty()
    assert (feeding.ready, feeding.refused) == ([], [])


def test_jobs_of_partitions_that_are_gone_are_not_read(feeding: Feeding) -> None:
    feeding.send("gone")
    feeding.fetching.discard(lambda delivery: True)
    assert len(feeding.fetching) == 0
