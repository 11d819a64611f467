"""What a dead letter becomes when it is sent again."""

from __future__ import annotations

import json

import pytest

from alphaloop.errors import MalformedMessage, UnknownTask
from alphaloop.kafka.offsets import Record
from alphaloop.letters.reading import Letter
from alphaloop.letters.redriving import redriven
from alphaloop.messages import DeadLetter, Origin, dead_letter
from alphaloop.messages.dead_letter import shortened

ORIGIN = Origin("cluster", "jobs.code", 2, 41)


def letter_of(letter: DeadLetter) -> Letter:
    record = Record(letter.topic, 0, 7, letter.key, letter.value, tuple(letter.headers), None)
    return Letter(record)


def test_a_shortened_letter_is_not_sent_again_and_the_whole_message_is_named() -> None:
    value = json.dumps({"job_id": "j", "prompt": "x"}).encode()
    headers = [("big", b"h" * 20_000)]
    whole = dead_letter(
        UnknownTask("no such task"), ORIGIN, group="g", num_deliveries=1, key=None, value=value, headers=headers
    )
    assert redriven(letter_of(whole), {}).job_id == "j"
    less = shortened(whole)
    assert less is not None
    with pytest.raises(MalformedMessage) as told:
        redriven(letter_of(less), {})
    assert "jobs.code:2:41" in (told.value.hint or "")
