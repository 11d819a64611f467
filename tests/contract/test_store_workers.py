"""Workers know of each other: which ask the same inference servers, and that all serve one target."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import ConfigError
from alphaloop.store.database import Database
from alphaloop.store.workers import Capabilities, WorkerLoad, WorkerStore, running
from tests.fixtures.deciding import SETUP

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

LOAD: Final = WorkerLoad("one", "servers 12ab", "model", 8, 0, 0, {}, setup=SETUP)


def test_others_with_the_same_device_are_counted_until_they_leave_or_fall_silent(database: Database) -> None:
    store = WorkerStore(database)
    assert store.say(LOAD) == 0
    assert store.say(replace(LOAD, owner="two")) == 1
    assert store.say(replace(LOAD, owner="elsewhere", device="servers 34cd")) == 0
    assert store.say(LOAD) == 1
    store.leave("two")
    assert store.say(LOAD) == 0
    store.say(replace(LOAD, owner="three"))
    database.change(text("UPDATE workers SET seen_at = seen_at - interval '31 seconds' WHERE owner = 'three'"))
    assert store.say(LOAD) == 0


def silence(database: Database, owner: str, seconds: float) -> None:
    """Have the worker be heard of last so long ago."""
    database.change(
        text("UPDATE workers SET seen_at = now() - make_interval(secs => :s) WHERE owner = :owner"),
        {"s": seconds, "owner": owner},
    )


def of_revision(owner: str, revision: str) -> WorkerLoad:
    facts = replace(SETUP.facts, owner=owner, target_revision=revision)
    return replace(LOAD, owner=owner, setup=replace(SETUP, facts=facts))


def test_a_worker_of_another_target_is_refused_with_both_names(database: Database) -> None:
    store, other = WorkerStore(database), replace(LOAD, owner="two", target="another")
    store.check_target("another")
    assert store.enter(LOAD) == []
    for refused in (lambda: store.check_target("another"), lambda: store.enter(other)):
        with pytest.raises(ConfigError, match=r"expected 'model', which worker one serves .* found 'another'"):
            refused()
    assert [one.load.owner for one in store.seen()] == ["one"]
    store.check_target("model")
    silence(database, "one", 29)
    with pytest.raises(ConfigError):
        store.enter(other)
    silence(database, "one", 31)
    store.check_target("another")
    assert store.enter(other) == [], "the other one is dead, or hangs"
    store.leave("two")
    assert store.enter(LOAD) == [], "the other one has left"


def with_default(load: WorkerLoad, default_model: str | None, can: Capabilities | None = None) -> WorkerLoad:
    assert load.setup is not None
    return replace(load, setup=replace(load.setup, default_model=default_model, can=can))


def test_workers_of_several_targets_enter_where_they_agree_on_the_default(database: Database) -> None:
    store, other = WorkerStore(database), replace(LOAD, owner="two", target="another")
    store.enter(LOAD)
    with pytest.raises(ConfigError, match="is not set, so it reads the topics of every task"):
        store.check_target("another", "model")
    with pytest.raises(ConfigError, match="is not set, so it reads"):
        store.enter(with_default(other, "model"))
    store.say(with_default(LOAD, "model"))
    with pytest.raises(ConfigError, match=r"without default_model in tasks\.toml both would read the same topics"):
        store.enter(other)
    with pytest.raises(ConfigError, match=r"found 'another', and that of worker one, of 'model' .* is 'model'"):
        store.enter(with_default(other, "another"))
    store.check_target("another", "model")
    assert store.enter(with_default(other, "model")) == []
    assert store.enter(with_default(replace(LOAD, owner="three"), "model")) == []


def test_a_worker_that_can_do_less_than_another_of_its_target_is_refused_with_the_difference(
    database: Database,
) -> None:
    store, can = WorkerStore(database), Capabilities(8192, 1 << 20, ("top_k",), ())
    store.enter(with_default(LOAD, "model", can))
    less = replace(can, context_length=4096, fields=())
    refused = with_default(replace(LOAD, owner="two"), "model", less)
    with pytest.raises(ConfigError, match=r"worker one takes, but this one takes 4,096 .* 8,192; not .* body\.top_k"):
        store.enter(refused)
    store.enter(replace(with_default(refused, "model", less), target="another"))
    store.enter(with_default(replace(LOAD, owner="three"), "model", replace(can, context_length=16384)))
    silence(database, "one", 31)
    silence(database, "three", 31)
    store.enter(refused)


def test_another_revision_of_the_target_enters_and_is_named(database: Database) -> None:
    store = WorkerStore(database)
    assert store.enter(of_revision("one", "a")) == []
    assert store.enter(of_revision("two", "a")) == []
    assert store.enter(of_revision("three", "b")) == ["a"]
    assert store.enter(of_revision("four", "a")) == ["b"]
    store.say(replace(LOAD, owner="of an earlier release", setup=None))
    assert store.enter(of_revision("five", "a")) == ["b"]
    assert store.enter(of_revision("five", "a")) == ["b"], "it may come again"


def test_of_two_that_start_at_once_one_is_refused(database: Database, database_url: SecretStr) -> None:
    barrier = threading.Barrier(8)

    def enter(number: int) -> int | None:
        with Database(database_url, pool_size=1) as own:
            store = WorkerStore(own)
            store.seen()  # connects
            barrier.wait(60)
            try:
                store.enter(replace(LOAD, owner=f"w{number}", target=f"model-{number % 2}"))
            except ConfigError:
                return None
            return number % 2

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(enter, range(8)))
    assert ended.count(None) == 4
    assert len({*ended} - {None}) == 1
    assert len({one.load.target for one in WorkerStore(database).seen()}) == 1


def test_what_most_of_the_workers_run_comes_back_as_it_was_said(database: Database) -> None:
    store = WorkerStore(database)
    assert running(store.seen()) is None
    store.say(replace(LOAD, owner="of an earlier release", setup=None))
    assert running(store.seen()) is None
    store.say(replace(of_revision("one", "a"), sampling_defaults="temperature 0.6 (not used)"))
    said = {seen.load.owner: seen.as_json()["sampling_defaults"] for seen in store.seen()}
    assert said == {"of an earlier release": "", "one": "temperature 0.6 (not used)"}
    found = running(store.seen())
    assert (found.setup.drafters, found.num_slots, found.num_workers, found.num_others) == (SETUP.drafters, 8, 1, 1)
    assert found.setup.facts == replace(SETUP.facts, owner="one", target_revision="a")
    for owner in ("two", "three"):
        other = of_revision(owner, "b")
        assert other.setup is not None
        ended = {"small": "any job: it failed"} | ({"lookup": "any job"} if owner == "two" else {})
        store.say(replace(other, setup=replace(other.setup, ended=ended)))
    found = running(store.seen())
    assert (found.setup.facts.target_revision, found.num_workers, found.num_others) == ("b", 2, 2)
    assert found.setup.ended.keys() == {"small"}, "one of them asks lookup"
    for owner in ("two", "three"):
        silence(database, owner, 31)
    found = running(store.seen())
    assert found.setup.facts.target_revision == "a"


def test_the_setup_of_another_release_is_left_out(database: Database) -> None:
    store = WorkerStore(database)
    store.say(LOAD)
    database.change(text("""UPDATE workers SET setup = '{"owner": "one", "drafters": [{"colour": 1}]}'"""))
    (one,) = store.seen()
    assert one.load.setup is None
    assert one.as_json()["drafters"] is None
