"""Cancellation requests: the right ones are read, the wrong ones named."""

from __future__ import annotations

import pytest

from alphaloop.errors import MessageError
from worker.intake.control import parse_cancellation


def test_a_request_names_its_job() -> None:
    assert parse_cancellation(b'{"action": "cancel", "job_id": "a-1", "why": "changed my mind"}').job_id == "a-1"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, None),
        (b"cancel a-1", None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b'["cancel"]', None),
        (b'{"action": "pause", "job_id": "a"}', "action"),
        (b'{"action": "cancel"}', "job_id"),
        (b'{"action": "cancel", "job_id": "a b"}', "job_id"),
        (b'{"action": "cancel", "job_id": 7}', "job_id"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(value: bytes | None, field: str | None) -> None:
    with pytest.raises(MessageError) as refused:
        parse_cancellation(value)
    assert refused.value.field == field
