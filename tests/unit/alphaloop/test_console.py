"""The console's sessions, what it keeps, counts, draws and streams."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from pydantic import SecretStr

from alphaloop.console.jobs import Read, Streams
from alphaloop.console.reading import Remembered
from alphaloop.console.sessions import LIFETIME_S, MAX_FAILURES, WINDOW_S, Sessions, TooManyFailures
from alphaloop.console.tasks import by_activity
from alphaloop.errors import BrokerUnavailable, StoreUnavailable
from alphaloop.messages import Status
from alphaloop.outcomes.reading import Ended, Event, TextSoFar, Waits
from alphaloop.pages.drawing import alpha_over_time, sparkline
from alphaloop.settings import ConsoleSettings
from alphaloop.store.task_figures import AcceptanceHour, TaskFigures
from alphaloop.store.traffic import DecodedLately
from tests.fixtures.reports import AT, full
from tests.fixtures.simulated import Clock
from tests.fixtures.worker import until


def made(clock: Clock) -> Sessions:
    return Sessions(ConsoleSettings(password=SecretStr("lövelace")), clock=clock)


def header(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_a_session_lasts_until_its_hours_are_over() -> None:
    clock = Clock()
    sessions = made(clock)
    one, two = sessions.sign_in("alphaloop", "lövelace"), sessions.sign_in("alphaloop", "lövelace")
    assert one.cookie != two.cookie
    assert sessions.of_cookie(one.cookie) == one
    clock.pass_s(LIFETIME_S + 1)
    assert sessions.of_cookie(one.cookie) is None


@pytest.mark.parametrize(
    "given", ["Basic !", "Bearer x", "", None, header("alphaloop"), header("alphaloop:"), header("eva:lövelace")]
)
def test_other_headers_are_refused(given: str | None) -> None:
    assert made(Clock()).of_header(given) is None


def test_passwords_cannot_be_guessed_quickly() -> None:
    clock = Clock()
    sessions = made(clock)
    for number in range(MAX_FAILURES):
        assert sessions.sign_in("alphaloop", f"guess {number}") is None
    with pytest.raises(TooManyFailures):
        sessions.sign_in("alphaloop", "lövelace")
    clock.pass_s(WINDOW_S + 1)
    assert sessions.sign_in("alphaloop", "lövelace") is not None


def test_without_a_password_nobody_can_sign_in() -> None:
    sessions = Sessions(ConsoleSettings())
    assert not sessions.are_needed
    assert sessions.sign_in("alphaloop", "") is None


WAIT_S = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def remembered(clock: Clock) -> Iterator[Remembered]:
    made = Remembered(5.0, clock=clock, patience_s=WAIT_S)
    yield made
    made.close()


def test_the_first_reading_is_waited_for_and_later_ones_are_not_repeated(remembered: Remembered, clock: Clock) -> None:
    readings = iter(range(10))
    assert remembered.get("a", lambda: next(readings)).value == 0
    clock.now_s = 4.9
    assert remembered.get("a", lambda: next(readings)).value == 0
    assert remembered.get("b", lambda: next(readings)).value == 1


def test_an_old_value_is_shown_while_a_new_one_is_read(remembered: Remembered, clock: Clock) -> None:
    assert remembered.get("a", lambda: 1).value == 1
    may_end = threading.Event()

    def slow() -> int:
        assert may_end.wait(WAIT_S)
        return 2

    clock.now_s = 6.0
    assert remembered.get("a", slow).value == 1
    assert remembered.get("a", slow).value == 1, "a second one is not started beside it"
    may_end.set()
    until(lambda: remembered.get("a", slow).value == 2, "the new value is read")


def test_no_reader_waits_longer_than_the_patience(clock: Clock) -> None:
    made, may_end = Remembered(5.0, clock=clock, patience_s=0.0), threading.Event()
    try:
        found = made.get("a", lambda: may_end.wait(WAIT_S))
        assert (found.value, found.read_at, found.error) == (None, None, None)
    finally:
        may_end.set()
        made.close()


def test_a_failure_is_shown_in_words_and_the_last_value_stays(remembered: Remembered, clock: Clock) -> None:
    assert remembered.get("a", lambda: 1).value == 1

    def fails() -> int:
        raise StoreUnavailable("the database is away")

    clock.now_s = 6.0
    until(lambda: remembered.get("a", fails).error == "the database is away", "the failure is known")
    assert remembered.get("a", fails).value == 1


def test_a_foreign_failure_shows_its_class_only(remembered: Remembered) -> None:
    def fails() -> int:
        raise ValueError("a prompt")

    assert remembered.get("a", fails).error == "ValueError"


def test_what_takes_long_is_read_seldom(remembered: Remembered, clock: Clock) -> None:
    readings = iter(range(10))

    def slow() -> int:
        clock.pass_s(4.0)
        return next(readings)

    assert remembered.get("a", slow).value == 0
    clock.pass_s(19.0)
    assert remembered.get("a", slow).value == 0, "five times as long as the reading took"
    clock.pass_s(2.0)
    until(lambda: remembered.get("a", slow).value == 1, "it is read anew")


def test_what_was_forgotten_is_read_anew(remembered: Remembered) -> None:
    readings = iter(range(10))
    assert remembered.get("a", lambda: next(readings)).value == 0
    remembered.forget("a")
    assert remembered.get("a", lambda: next(readings)).value == 1


def test_probes_and_controls_are_counted_apart_from_traffic_that_ended() -> None:
    decoded = [
        DecodedLately("code", "control", 4, 160),
        DecodedLately("code", "probe", 4, 160),
        DecodedLately("code", "traffic", 10, 400),
        DecodedLately("sql", "probe", 2, 80),
    ]
    held = TaskFigures("chat", jobs={"running": 2}, probes={"running": 1})
    code, sql, chat = by_activity([held], decoded, {"code": 5})
    assert (code.task, code.num_ended, code.num_measuring, code.num_tokens, code.num_waiting) == ("code", 10, 8, 720, 5)
    assert (sql.task, sql.num_ended, sql.num_measuring) == ("sql", 0, 2)
    assert (chat.task, chat.num_held, chat.num_ended) == ("chat", 3, 0), "a held probe is held"


def test_a_task_that_waits_for_its_target_says_so() -> None:
    (sql,) = by_activity([TaskFigures("sql", not_served="no worker of b runs")], [], {"sql": 3})
    assert (sql.num_waiting, sql.not_served) == (3, "no worker of b runs")


NOW = datetime(2026, 11, 23, 7, 30, tzinfo=UTC)


def hour(ago: int, accepts: int) -> AcceptanceHour:
    return AcceptanceHour(NOW.replace(minute=0) - timedelta(hours=ago), 100, accepts)


def test_a_sparkline_is_broken_where_nothing_was_tested() -> None:
    drawn = sparkline([hour(5, 10), hour(4, 20), hour(2, 50), hour(1, 60)], NOW)
    assert drawn.count("<polyline") == 2
    assert "acceptance by the hour, 0.10 at first, 0.60 at last" in drawn
    (x_first, y_first), *_, (x_last, y_last) = (
        tuple(map(float, point.split(",")))
        for points in re.findall(r'points="([^"]+)"', drawn)
        for point in points.split()
    )
    assert 0 < x_first < x_last < 96
    assert 0 < y_last < y_first < 24, "more accepted is higher"


def test_a_single_hour_is_a_dot_and_none_is_nothing() -> None:
    assert sparkline([hour(3, 40)], NOW).count("<circle") == 2
    assert sparkline([], NOW) == ""


def test_the_course_shows_traffic_probes_and_changes_and_escapes_names() -> None:
    history = full(("code",)).history["code"].model_dump(mode="json")
    history["traffic"].append({**history["traffic"][0], "start": (AT + timedelta(hours=10)).isoformat()})
    history["revisions"][0]["changed"] = ["<target>", "draft"]
    drawn = alpha_over_time(history)
    tree = ElementTree.fromstring(drawn)
    classes = [element.get("class") for element in tree.iter()]
    assert classes.count("band") == 2, "one for each stretch without a gap"
    assert classes.count("whisker") == 1, "for a stretch of a single point"
    assert classes.count("probe") == 3
    assert classes.count("mark") == 1
    assert "&lt;target&gt;, draft" in drawn


def test_a_course_without_a_point_is_nothing() -> None:
    assert alpha_over_time({"step_s": 60.0, "traffic": [], "probes": [], "revisions": []}) == ""


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


def test_a_broker_that_is_away_is_named_and_the_place_is_free_again() -> None:
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
