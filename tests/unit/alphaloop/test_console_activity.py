"""What the console lists as going on now."""

from __future__ import annotations

from alphaloop.console.tasks import by_activity
from alphaloop.store.task_figures import TaskFigures
from alphaloop.store.traffic import DecodedLately


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
