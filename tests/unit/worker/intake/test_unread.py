"""Unread messages wait behind others of their task and segment, and come out for whoever has the fewest read ones."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.publishing import delivery
from worker.feed import Unread, segment_in
from worker.intake.partitions import Delivery

MB = 1 << 20


def nobody(task: str, segment: str) -> int:
    """Nothing that was read waits."""
    return 0


def job_id(one: Delivery) -> str:
    return str(json.loads(one.record.value or b"")["job_id"])


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_each_comes_out_once_in_the_order_of_its_line_and_bytes_add_up(seed: int) -> None:
    rng, unread, came = Random(seed), Unread(MB), list[str]()
    read: Counter[tuple[str, str]] = Counter()
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
        (None, ""),
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
def test_the_segment_is_found_in_the_bytes_of_a_message(value: bytes | None, expected: str) -> None:
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
