"""Streams of the console: how many there may be, and what is sent of what is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from alphaloop.console.jobs import Read, Streams
from alphaloop.errors import BrokerUnavailable
from alphaloop.messages import Status
from alphaloop.outcomes.reading import Ended, Event, TextSoFar, Waits


def sent(streams: Streams, read: Read) -> str:
    """Everything that one stream sends."""

    async def collected() -> str:
        answer = streams.answer(read)
        return "".join([str(part) async for part in answer.body_iterator])

    return asyncio.run(collected())


def reading(*events: Event) -> Read:
    return lambda _: events


def test_the_end_carries_the_text_that_was_not_told_before() -> None:
    shown = sent(
        Streams(),
        reading(Waits("a", True), TextSoFar("a", 1, "one"), Ended("a", Status.SUCCEEDED, "one two", None, True)),
    )
    assert shown.endswith('event: end\ndata: {"status": "succeeded", "reason": null}\n\n')
    assert "two" in shown


def test_a_broker_that_is_away_is_told_and_the_place_is_free_again() -> None:
    def fails(_: Callable[[], bool]) -> Iterator[Event]:
        raise BrokerUnavailable("no broker answers")
        yield

    streams = Streams(limit=1)
    for _ in range(3):
        assert sent(streams, fails) == 'event: refused\ndata: {"reason": "no broker answers"}\n\n'


def test_more_streams_than_the_limit_are_refused_in_words() -> None:
    streams = Streams(limit=1)

    def asks_for_another(_: Callable[[], bool]) -> Iterator[Event]:
        assert "too many streams are open" in sent(streams, reading())
        yield Ended("a", Status.SUCCEEDED, "one", None, True)

    assert "one" in sent(streams, asks_for_another)


@pytest.mark.parametrize("text", ["", "ends\n\nevent: end", "ünïcödé \u2028"])
def test_a_text_cannot_break_out_of_its_event(text: str) -> None:
    shown = sent(Streams(), reading(Ended("a", Status.SUCCEEDED, text, None, True)))
    assert [line for line in shown.splitlines() if line.startswith("event:")] == ["event: text", "event: end"]
