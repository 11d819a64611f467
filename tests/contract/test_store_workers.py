"""Workers that ask the same inference servers know of each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.workers import WorkerLoad, WorkerStore

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

LOAD: Final = WorkerLoad("one", "servers 12ab", "model", 8, 0, 0, {})


def test_what_a_model_suggests_for_sampling_is_known_of_its_worker(database: Database) -> None:
    store = WorkerStore(database)
    store.say(LOAD)
    store.say(replace(LOAD, owner="two", sampling_defaults="temperature 0.6 (not used)"))
    one, two = (seen.as_json()["sampling_defaults"] for seen in store.seen())
    assert (one, two) == ("", "temperature 0.6 (not used)")


def test_others_with_the_same_device_are_counted_until_they_leave_or_fall_silent(database: Database) -> None:
    store = WorkerStore(database)
    assert store.say(LOAD) == 0
    assert store.say(replace(LOAD, owner="two")) == 1
    assert store.say(replace(LOAD, owner="elsewhere", device="servers 34cd")) == 0
    assert store.say(LOAD) == 1
    store.leave("two")
    assert store.say(LOAD) == 0
    store.say(replace(LOAD, owner="three"))
    with database.begin() as connection:
        connection.execute(text("UPDATE workers SET seen_at = seen_at - interval '31 seconds' WHERE owner = 'three'"))
    assert store.say(LOAD) == 0
