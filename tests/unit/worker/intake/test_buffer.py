"""Messages between Kafka and the feed: their order, their delays, and the offset that may be committed."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.kafka.offsets import Record
from alphaloop.messages.headers import RETRY_PREFIX, RetryHeaders
from tests.fixtures.publishing import delivery
from worker.feed import Unread, segment_in
from worker.intake.partitions import JITTER, Delivery, Watermark, as_sent

MB = 1 << 20


def nobody(task: str, segment: str, is_dated: bool) -> int:
    """Nothing that was read waits."""
    return 0


def job_id(one: Delivery) -> str:
    return str(json.loads(one.record.value or b"")["job_id"])


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_each_comes_out_once_in_the_order_of_its_line_and_bytes_add_up(seed: int) -> None:
    rng, unread, came = Random(seed), Unread(MB), list[str]()
    read: Counter[tuple[str, str, bool]] = Counter()
    sent: dict[str, list[str]] = {}
    for number in range(60):
        segment, name = rng.choice(["", "gold", "batch"]), f"job-{number}"
        unread.put([delivery(name, segment=segment or None)])
        sent.setdefault(segment, []).append(name)
        taken = zip(range(rng.choice([0, 1, 2])), unread.take(lambda *line: read[line]), strict=False)
        came += [job_id(one) for _, one in taken]
    came += [job_id(one) for one in unread.take(nobody)]
    assert sorted(came) == sorted(name for names in sent.values() for name in names)
    for names in sent.values():
        assert [name for name in came if name in names] == names
    assert (len(unread), bool(unread), unread.room_bytes) == (0, False, MB)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", ""),
        (b"not JSON", ""),
        (b'{"prompt": "x"}', ""),
        (b'{"segment": "gold", "prompt": "x"}', "gold"),
        (b'{"prompt": "x", "segment"\n:\t"a b"}', "a b"),
        (b'{"segment": "caf\\u00e9 \\"1\\""}', 'caf\u00e9 "1"'),
        ('{"segment": "café"}'.encode(), "caf\u00e9"),
        (b'{"prompt": "the \\"segment\\": \\"gold\\" of a file"}', ""),
        (b'{"segment": 7}', ""),
        (b'{"segment": "\xff"}', ""),
        (b'{"segment": "' + b"x" * 5000 + b'"}', ""),
        (b'{"segment": "\\q"}', ""),
    ],
)
def test_the_segment_is_found_in_the_bytes_of_a_message(value: bytes, expected: str) -> None:
    assert segment_in(value) == expected


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(min_size=1, max_size=100), st.text(max_size=200), st.booleans())
def test_whatever_a_prompt_says_the_jobs_own_segment_is_found(segment: str, prompt: str, is_ascii: bool) -> None:
    fields = {"prompt": f'"segment": "other" {prompt}', "segment": segment}
    try:
        value = json.dumps(fields, ensure_ascii=is_ascii).encode()
    except UnicodeEncodeError:
        return
    assert segment_in(value) == segment


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


@dataclass
class Log:
    """A partition that can be cut and written again; `delivered` are the messages that it still has, oldest first."""

    next_offset: int = 0
    delivered: list[tuple[int, int]] = field(default_factory=list)  # offset and number of delivery

    def cut(self, offset: int) -> None:
        """Lose everything from an offset on."""
        self.next_offset = offset
        self.delivered = [one for one in self.delivered if one[0] < offset]

    def unfinished(self, finished: set[int]) -> list[int]:
        """Offsets of messages that were delivered and are not finished."""
        return [offset for offset, number in self.delivered if number not in finished]


@given(st.randoms(use_true_random=False), st.integers(0, 80), st.booleans())
def test_nothing_that_the_log_has_is_committed_past(chance: random.Random, num_acts: int, may_go_back: bool) -> None:
    watermark, log = Watermark(), Log()
    numbers: list[int] = []
    finished: set[int] = set()
    committed, was_read = -1, False
    for _ in range(num_acts):
        act = chance.random()
        went_back = False
        if act < 0.1 and may_go_back and log.delivered:
            log.cut(chance.choice([0, *(offset for offset, _ in log.delivered)]))
            # The consumer notices with the next message.
            act = 0.2
            went_back = True
        if act < 0.55:
            offset = log.next_offset + chance.choice([0, 0, 0, 1, 5])
            if went_back:
                offset = log.next_offset
            number, is_back = watermark.deliver(offset)
            assert is_back == went_back
            assert number not in numbers
            log.delivered.append((offset, number))
            log.next_offset = offset + 1
            numbers.append(number)
        elif numbers:
            # Any delivery may end at any time, also one that the log lost, and also twice.
            number = chance.choice(numbers)
            finished.add(number)
            watermark.finish(number)
        if chance.random() < 0.2:
            # What is behind the newest message holds no message, as far as the consumer has read.
            log.next_offset += chance.choice([0, 1, 7])
            watermark.pass_over(log.next_offset)
            was_read = True
        elif not numbers and not was_read:
            assert watermark.committable is None
            continue
        unfinished = log.unfinished(finished)
        assert watermark.committable == min(unfinished, default=log.next_offset)
        assert watermark.num_in_flight == len(unfinished)
        assert watermark.distance == log.next_offset - watermark.committable
        assert went_back or watermark.committable >= committed, "it falls only when the log goes back"
        committed = watermark.committable
