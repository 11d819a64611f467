"""Retry topics: what their messages stand for, and when these are due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.kafka.offsets import Record
from alphaloop.messages.headers import RETRY_PREFIX, RetryHeaders
from worker.intake.partitions import JITTER, as_sent

NOW = datetime(2026, 11, 22, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
SENT = Record("jobs.code.high", 2, 41, b"key", b"value", (("traceparent", b"00-1"), ("x", b"")), 1234)


def waiting(sent: Record, not_before_ms: int, *, topic: str = "jobs.code.retry.10s") -> Record:
    said = RetryHeaders(sent.topic, sent.partition, sent.offset, sent.timestamp_ms, not_before_ms, 1, "decode_failed")
    return Record(topic, 0, 7, sent.key, sent.value, tuple(said.headers(sent.headers)), NOW_MS)


@settings(max_examples=30)
@given(
    st.builds(
        Record,
        st.just("jobs.code"),
        st.integers(0, 99),
        st.integers(0, 10**15),
        st.none() | st.binary(max_size=9),
        st.none() | st.binary(max_size=9),
        st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3).map(tuple),
        st.none() | st.integers(0, 10**15),
    )
)
def test_a_retry_is_the_message_that_failed_also_the_second_time(sent: Record) -> None:
    for topic in ("jobs.code.retry.10s", "jobs.code.retry.1m"):
        assert as_sent(waiting(sent, NOW_MS, topic=topic), NOW) == (sent, 0.0)


def test_it_is_due_when_its_header_says() -> None:
    for delay_s in (-5, 0, 4, 11):
        assert as_sent(waiting(SENT, NOW_MS + 1000 * delay_s), NOW)[1] == max(0, delay_s)
    assert as_sent(waiting(SENT, NOW_MS + 10_000), NOW + timedelta(seconds=10))[1] == 0


def test_a_wrong_clock_delays_no_longer_than_the_topic() -> None:
    assert as_sent(waiting(SENT, 10**17), NOW)[1] == 10 * (1 + JITTER)


@pytest.mark.parametrize("missing", ["topic", "partition", "offset", "not-before", "num-failures", "reason"])
def test_a_message_of_somebody_else_is_itself_and_due_at_once(missing: str) -> None:
    found = waiting(SENT, NOW_MS + 5000)
    is_text = missing in ("topic", "reason")
    for content in (None, b"\xff") if is_text else (None, b"\xff", b"-1", b"1" * 19):
        kept = [(name, value) for name, value in found.headers if name != RETRY_PREFIX + missing]
        added = [] if content is None else [(RETRY_PREFIX + missing, content)]
        strange = Record("jobs.code.retry.10s", 0, 7, None, b"", (*kept, *added), None)
        assert as_sent(strange, NOW) == (strange, 0.0)


def test_the_same_headers_mean_nothing_on_a_topic_of_jobs() -> None:
    forged = waiting(SENT, NOW_MS + 5000, topic="jobs.code")
    assert as_sent(forged, NOW) == (forged, 0.0)
