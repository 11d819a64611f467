"""Dead letters, and the trace context that messages carry."""

from __future__ import annotations

import json
import random

import pytest

from alphaloop.dead_letters.reading import DeadLetterRecord
from alphaloop.dead_letters.redriving import Redriven, redriven
from alphaloop.errors import InvalidField, JobConflict, MalformedMessage, MessageError
from alphaloop.kafka.offsets import Record
from alphaloop.messages import DeadLetter, dead_letter
from alphaloop.messages.dead_letter import MAX_REASON_CHARS, PREFIX, SHORTENED, shortened
from alphaloop.messages.headers import MAX_TRACESTATE_CHARS, Headers, trace_context
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


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def carried(parent: bytes = PARENT.encode(), state: bytes | None = None) -> dict[str, str]:
    headers = [("ce_id", b"1"), ("traceparent", parent)]
    return trace_context(headers if state is None else [*headers, ("tracestate", state)])


def test_a_valid_trace_goes_on_and_nothing_else() -> None:
    assert carried() == {"traceparent": PARENT}
    state = "rojo=00f067aa0ba902b7,congo@vendor=t61rcWkgMzE"
    assert carried(state=state.encode()) == {"traceparent": PARENT, "tracestate": state}


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-" + b"0" * 16 + b"-01",
        b"ff" + PARENT[2:].encode(),
        PARENT.encode() + b"\n",
        PARENT.encode() * 10_000,
        b"\xff\x00",
    ],
)
def test_without_a_valid_traceparent_there_is_no_trace(parent: bytes) -> None:
    assert carried(parent, b"rojo=1") == {}


def test_the_last_of_repeated_headers_counts() -> None:
    other = PARENT.replace("01", "00")
    assert trace_context([("traceparent", other.encode()), ("traceparent", PARENT.encode())]) == carried()


def test_a_state_of_megabytes_is_cut_at_a_member() -> None:
    members = [f"vendor{number}={'v' * 20}" for number in range(100_000)]
    state = carried(state=",".join(members).encode())["tracestate"]
    assert MAX_TRACESTATE_CHARS - 40 < len(state) <= MAX_TRACESTATE_CHARS
    assert state.split(",") == members[: len(state.split(","))]


@pytest.mark.parametrize(
    "state", [b"a=" + b"x" * 600, b"", b"\x00", "a=é".encode(), b"A=1", b"a=1\r\nb: 2", b"==", b","]
)
def test_what_is_no_member_is_left_out(state: bytes) -> None:
    assert carried(state=state) == {"traceparent": PARENT}


def test_any_bytes_give_bounded_ascii(rng: random.Random) -> None:
    for _ in range(2000):
        state = rng.randbytes(rng.choice([3, 40, 3000]))
        text = carried(state=b"a=1," + state)["tracestate"]
        assert len(text) <= MAX_TRACESTATE_CHARS
        assert text.isascii()
        assert text.isprintable()
