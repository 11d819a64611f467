"""The answer to a record that is no job follows from the record alone, whoever gives it, and stays small."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import jsonschema
import pytest

from alphaloop.contract import result_schema
from alphaloop.dead_letters.reading import DeadLetterRecord
from alphaloop.errors import JobConflict, MessageError
from alphaloop.kafka.offsets import Record
from alphaloop.messages import Origin, RecordPlace, Result, Status, derived_job_id
from alphaloop.messages.dead_letter import JOB_ID, MAX_REASON_CHARS, PREFIX
from alphaloop.messages.headers import RetryHeaders
from alphaloop.messages.topics import retry_topic
from alphaloop.settings import TaskSettings
from tests.fixtures.publishing import NOW, TASKS, validation
from tests.fuzz.mutations import mutated
from tests.fuzz.test_messages import NUM_MESSAGES
from worker.dead_letters import DeadMessage, Forwarded, letter_of
from worker.intake.partitions import Delivery, as_sent
from worker.intake.validation import Fetching, Refusal, Validation

MOST_BYTES: Final = 32 << 10
RESULT: Final = jsonschema.Draft202012Validator(result_schema())


class Reader:
    """A worker's reader of messages. `tasks` are those that it knows; it takes no probe for one."""

    def __init__(self, tasks: Mapping[str, TaskSettings] = TASKS) -> None:
        self._validation: Validation = validation(tasks=tasks, is_probe=lambda job_id, digest: False)
        self._fetching = Fetching(None, self._validation, retry=None, wake=lambda: None)  # type: ignore[arg-type]

    def refuse(self, record: Record) -> Forwarded | None:
        """The letter and the answer of a record; None for a job."""
        refused: list[Refusal] = []
        self._fetching.read(Delivery(record, epoch=1), refused)
        return self.answer(*refused[0]) if refused else None

    def answer(self, delivery: Delivery, error: MessageError) -> Forwarded:
        dead = DeadMessage(delivery, error, None)  # type: ignore[arg-type]
        return letter_of(dead, self._validation, "g")


def deep_in_the_stack(levels: int, work: Callable[[], Any]) -> Any:
    return deep_in_the_stack(levels - 1, work) if levels else work()


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def tried_again(record: Record) -> Record:
    """The same message as it lies on a retry topic, and is delivered from there."""
    said = RetryHeaders(*(record.topic, record.partition, record.offset, record.timestamp_ms), 1, 1, "decode_failed")
    moved = replace(record, topic=retry_topic("code", 10), partition=0, offset=3, timestamp_ms=99)
    return as_sent(replace(moved, headers=tuple(said.headers(record.headers))), NOW)[0]


@pytest.mark.timeout(180 + NUM_MESSAGES // 20)
def test_every_copy_of_an_answer_is_the_same_and_it_is_small(rng: random.Random) -> None:
    one, other, num_refused = Reader(), Reader({**TASKS, "new": TaskSettings()}), 0
    for number in range(NUM_MESSAGES):
        record = mutated(rng, number)
        if (found := one.refuse(record)) is None:
            continue
        num_refused += 1
        assert found.answer is not None
        again = [other.refuse(record), deep_in_the_stack(400, lambda: one.refuse(record))]  # noqa: B023
        again.append(in_a_thread(lambda: other.refuse(record)))  # noqa: B023
        again.append(one.refuse(tried_again(record)))
        assert {copy.answer for copy in again} == {found.answer}
        value, headers = found.answer.value or b"", found.answer.headers
        size = len(value) + sum(len(name) + len(content) for name, content in headers)
        assert size < MOST_BYTES, record.value and record.value[:300]
        check(found, record)
    assert num_refused > NUM_MESSAGES // 4


def check(found: Forwarded, record: Record) -> None:
    """The answer says what it has to, and its letter knows it."""
    assert found.answer is not None
    result = Result.decode(found.answer.value or b"")
    RESULT.validate(result.model_dump(mode="json", exclude_none=True))
    assert (result.status, found.answer.key) == (Status.REFUSED, result.job_id.encode())
    assert result.origin == RecordPlace(topic=record.topic, partition=record.partition, offset=record.offset)
    origin = Origin("cluster", record.topic, record.partition, record.offset, record.timestamp_ms)
    derived = derived_job_id(origin, record.value or b"")
    assert dict(found.answer.headers)["ce_id"].decode() == derived, "no two records are one event"
    said = dict(found.letter.headers)
    assert said[JOB_ID].decode() == result.job_id
    if len(said[PREFIX + "message"]) < MAX_REASON_CHARS:
        letter = Record(found.letter.topic, 0, 0, found.letter.key, found.letter.value, tuple(found.letter.headers), 1)
        assert DeadLetterRecord(letter).refusal() == result, "the letter gives the same answer"


OWN: Final = b'{"job_id": "mine", "prompt": "x", "temperature": 9, "custom_id": "c"}'
IDS: Final = {
    "its own": (OWN, "mine", None),
    "none": (b'{"prompt": "x", "temperature": 9}', None, None),
    "no id of a job": (b'{"job_id": "two words", "prompt": 5}', None, None),
    "no JSON": (b'{"job_id": "mine"', None, None),
    "a forged probe's": (b'{"job_id": "probe-1", "purpose": "probe", "prompt": "x"}', None, "probe-1"),
    "a wrong probe's": (b'{"job_id": "probe-1", "purpose": "probe", "prompt": 5}', None, "probe-1"),
}


@pytest.mark.parametrize("name", IDS)
def test_it_is_answered_under_its_own_id_or_beside_that_of_another(name: str) -> None:
    value, own, claimed = IDS[name]
    record = Record("jobs.code", 1, 7, None, value, (), 5)
    found = Reader().refuse(record)
    result = Result.decode(found.answer.value)
    derived = derived_job_id(Origin("cluster", "jobs.code", 1, 7, 5), value)
    assert (result.job_id, result.claimed_job_id) == (own or derived, claimed)
    assert result.sent_job_id == (claimed or result.job_id)


def test_a_conflict_is_answered_under_the_derived_id() -> None:
    delivery = Delivery(Record("jobs.code", 1, 7, None, OWN, (), 5), epoch=1)
    result = Result.decode(Reader().answer(delivery, JobConflict(field="job_id")).answer.value)
    assert (result.claimed_job_id, result.custom_id) == ("mine", "c")
    assert result.job_id == derived_job_id(Origin("cluster", "jobs.code", 1, 7, 5), OWN)
