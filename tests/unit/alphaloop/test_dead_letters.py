"""Dead letters and results as messages: what they keep, and what is cut."""

from __future__ import annotations

import json

import pytest

from alphaloop.dead_letters.reading import DeadLetterRecord
from alphaloop.dead_letters.redriving import Redriven, redriven
from alphaloop.errors import InvalidField, JobConflict, MalformedMessage, MessageError
from alphaloop.kafka.offsets import Record
from alphaloop.messages import DeadLetter, dead_letter
from alphaloop.messages.dead_letter import MAX_REASON_CHARS, PREFIX, SHORTENED, shortened
from alphaloop.messages.headers import Headers
from alphaloop.settings import Settings
from tests.fixtures.messages import ORIGIN


def letter_of(
    error: MessageError,
    value: bytes = b"",
    *,
    key: bytes | None = None,
    headers: Headers = (),
    job_id: str | None = None,
) -> DeadLetter:
    return dead_letter(
        error, ORIGIN, group="workers", num_deliveries=3, key=key, value=value, headers=headers, job_id=job_id
    )


def of_record(letter: DeadLetter) -> Redriven:
    record = Record(letter.topic, 0, 7, letter.key, letter.value, tuple(letter.headers), None)
    return redriven(DeadLetterRecord(record), {}, Settings())


def test_a_dead_letter_keeps_the_message_and_says_why() -> None:
    error = InvalidField("expected less, found more", field="body.temperature", hint="lower it")
    kept = [("traceparent", b"00-ab"), ("ce_id", b"\xff\x00")]
    headers = [*kept, (PREFIX + "old", b"1")]
    letter = letter_of(error, b"\xff", key=b"k", headers=headers)
    assert (letter.topic, letter.key, letter.value) == ("jobs.code.dlq", b"k", b"\xff")
    assert list(letter.headers[:2]) == kept
    said = dict(letter.headers[2:])
    assert said == {
        PREFIX + "topic": b"jobs.code",
        PREFIX + "partition": b"2",
        PREFIX + "offset": b"41",
        PREFIX + "group": b"workers",
        PREFIX + "delivery.count": b"3",
        PREFIX + "message": b"body.temperature: expected less, found more\nhint: lower it",
        PREFIX + "exception": b"invalid_field",
        PREFIX + "field": b"body.temperature",
    }


def test_a_senders_long_field_name_is_cut_in_the_letter() -> None:
    error = InvalidField("expected a number", field="body.logit_bias." + "9" * 100_000)
    letter = letter_of(error)
    assert sum(len(name) + len(value) for name, value in letter.headers) < 4 * MAX_REASON_CHARS
    assert dict(letter.headers)[PREFIX + "field"].startswith(b"body.logit_bias.999")


def test_a_letter_sent_back_and_refused_again_carries_one_reason() -> None:
    first = letter_of(MalformedMessage("x" * 9999))
    again = letter_of(MalformedMessage("later"), headers=first.headers)
    names = [name for name, _ in again.headers]
    assert len(names) == len(set(names))
    assert len(dict(first.headers)[PREFIX + "message"]) == MAX_REASON_CHARS
    assert dict(again.headers)[PREFIX + "message"] == b"later"


def test_a_shortened_letter_loses_headers_and_a_long_key_and_says_so() -> None:
    headers = [("big", b"h" * 20_000), ("small", b"s")]
    letter = letter_of(MalformedMessage("no"), b"v", key=b"k" * 5000, headers=headers)
    less = shortened(letter)
    assert (less.key, less.value) == (None, b"v")
    kept = dict(less.headers)
    assert kept[PREFIX + "exception"] == b"malformed_message"
    assert kept[SHORTENED] == b"20009 bytes of headers left out; a key of 5000 bytes left out"
    assert {"big", "small"}.isdisjoint(kept)
    least = shortened(less)
    assert least.value == b""
    assert shortened(least) is None


def test_a_refused_message_is_sent_again_as_a_new_job_however_often() -> None:
    value, found = json.dumps({"job_id": "j", "prompt": "x"}).encode(), []
    for answered in ("derived", "derived~1", "derived~2"):
        value = of_record(letter_of(JobConflict(field="job_id"), value, job_id=answered)).value
        found.append((json.loads(value)["job_id"], json.loads(value)["redrive_of"]))
    assert found == [("derived~1", "derived"), ("derived~2", "derived~1"), ("derived~3", "derived~2")]


def test_a_shortened_letter_is_not_sent_again_and_the_whole_message_is_named() -> None:
    value, headers = json.dumps({"job_id": "j", "prompt": "x"}).encode(), [("big", b"h" * 20_000)]
    whole = letter_of(MalformedMessage("no"), value, headers=headers, job_id="j")
    assert of_record(whole).job_id == "j~1"
    with pytest.raises(MalformedMessage, match="in the header alphaloop-job-id, found none"):
        of_record(letter_of(MalformedMessage("no"), value))
    less = shortened(whole)
    assert less is not None
    with pytest.raises(MalformedMessage) as error:
        of_record(less)
    assert "jobs.code:2:41" in (error.value.hint or "")
