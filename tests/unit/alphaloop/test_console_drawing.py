"""The small plots of the console."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

from alphaloop.pages.drawing import alpha_over_time, sparkline
from alphaloop.store.task_figures import AcceptanceHour
from tests.fixtures.reports import AT, full

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
