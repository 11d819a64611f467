"""What a result repeats of a job's trace: valid by W3C Trace Context, and bounded."""

from __future__ import annotations

import random

import pytest

from alphaloop.messages.headers import MAX_TRACESTATE_CHARS, trace_context

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
