"""The faults, by name: what each does to the world, and what it hits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from alphaloop.errors import BrokerError
from alphaloop.kafka.topics import RESULTS, ensure_topics, topic_ids
from alphaloop.messages.topics import high_topic, jobs_topic
from tests.chaos.collecting import send_lost_again
from tests.chaos.reading import TopicReader
from tests.chaos.work import TASK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.world import World

#: Hurts the world for so many seconds, then heals what it hurt, and returns.
Inject = Callable[["World", random.Random, float], None]


class Target(Enum):
    """What a fault hits. Two faults at the same time hit different things."""

    WORKERS = auto()
    KAFKA = auto()
    POSTGRES = auto()
    NETWORK = auto()


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the world, and what it hits."""

    name: str
    target: Target
    inject: Inject


FAULTS: Final[dict[str, Fault]] = {}


def _fault(name: str, target: Target) -> Callable[[Inject], Inject]:
    """Put what follows among the faults."""

    def named(inject: Inject) -> Inject:
        FAULTS[name] = Fault(name, target, inject)
        return inject

    return named


#: Between two kills, drawn by chance.
_MEAN_BETWEEN_KILLS_S: Final = 2.0


@_fault("workers killed", Target.WORKERS)
def _workers_killed(world: World, rng: random.Random, seconds: float) -> None:
    """kill -9 of one worker after the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not world.is_ending.is_set():
        if ready := world.fleet.ready():
            world.fleet.kill(rng.choice(ready))
        world.wait(min(seconds / 3, rng.expovariate(1 / _MEAN_BETWEEN_KILLS_S)))


@_fault("workers suspended", Target.WORKERS)
def _workers_suspended(world: World, rng: random.Random, seconds: float) -> None:
    """SIGSTOP of half the workers past session and lease, then SIGCONT: they wake up and believe that they own jobs."""
    num_workers = len(world.fleet.members)
    chosen = rng.sample(range(num_workers), max(1, num_workers // 2))
    try:
        for number in chosen:
            world.fleet.suspend(number)
        world.wait(max(seconds, 1.5 * (world.size.session_timeout_s + world.size.lease_s)))
    finally:
        for number in chosen:
            world.fleet.resume(number)


#: Between two looks for workers that have joined, and how long it may take on a busy machine.
_LOOK_S: Final = 0.3
_MOST_S: Final = 600.0


@_fault("rebalance storm", Target.WORKERS)
def _rebalance_storm(world: World, rng: random.Random, seconds: float) -> None:
    """Every worker restarted as soon as it has joined, many times: half by kill -9, half by SIGTERM."""
    fleet, left = world.fleet, dict.fromkeys(range(len(world.fleet.members)), world.size.num_storm_restarts)
    until = time.monotonic() + _MOST_S
    while any(left.values()):
        if time.monotonic() > until:
            raise TimeoutError(f"workers were too slow to come back for a storm; restarts left: {left}")
        if world.is_ending.is_set():
            return
        for number in fleet.ready():
            if left[number]:
                left[number] -= 1
                rng.choice((fleet.kill, fleet.terminate))(number)
        world.wait(_LOOK_S)


@_fault("clocks skewed", Target.WORKERS)
def _clocks_skewed(world: World, rng: random.Random, seconds: float) -> None:
    """Half the workers' clocks an hour ahead, half an hour behind."""
    numbers = range(len(world.fleet.members))
    ahead = set(rng.sample(numbers, len(numbers) // 2 or 1))
    try:
        for number in numbers:
            world.fleet.set_clock(number, 3600.0 if number in ahead else -3600.0)
        world.wait(seconds)
    finally:
        for number in numbers:
            world.fleet.set_clock(number, 0.0)


@_fault("broker lost", Target.KAFKA)
def _broker_lost(world: World, rng: random.Random, seconds: float) -> None:
    """One broker of several killed and missing for a while; the only broker is killed and started at once."""
    with _without_a_broker(world, rng):
        if world.servers.brokers.num_nodes > 1:
            world.wait(seconds)


@contextmanager
def _without_a_broker(world: World, rng: random.Random) -> Iterator[None]:
    number = rng.randrange(world.servers.brokers.num_nodes)
    world.servers.brokers.kill([number])
    try:
        yield
    finally:
        world.servers.brokers.start([number])


@_fault("Kafka away", Target.KAFKA)
def _kafka_away(world: World, rng: random.Random, seconds: float) -> None:
    """kill -9 of every broker, started again later."""
    world.servers.brokers.kill()
    try:
        world.wait(seconds)
    finally:
        world.servers.brokers.start()


@_fault("results topic deleted", Target.KAFKA)
def _results_topic_deleted(world: World, rng: random.Random, seconds: float) -> None:
    """Somebody deletes the results topic. What was on it was read before, as a consumer of results does."""
    reader = TopicReader(world.servers.brokers.addresses)
    old = topic_ids(world.servers.kafka, [RESULTS])[RESULTS]
    world.kept_results += reader.results()
    reader.delete(RESULTS)
    reader.close()
    deadline = time.monotonic() + _MAKING_S
    while world.servers.brokers.holds(RESULTS, old):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{RESULTS} not deleted by every broker in {_MAKING_S:.0f} s")
        world.wait(0.1)
    world.deleted_at = datetime.now(UTC)
    world.wait(seconds)


_TOPICS: Final = (jobs_topic(TASK), high_topic(TASK))
#: Until the controller counts a silent broker as gone, and the others lead its partitions.
_ELECTION_S: Final = 12.0
#: A topic of that name may still be going, and brokers that have just started answer late.
_MAKING_S: Final = 120.0
#: Brokers learn of a new topic one after the other. A client that is told of the old one meanwhile sends to nobody.
_AGREEMENT_S: Final = 5.0


@_fault("jobs topics made anew", Target.KAFKA)
def _jobs_topics_made_anew(world: World, rng: random.Random, seconds: float) -> None:
    """Both lanes' topics deleted after an election and made anew, so that other brokers lead them.

    Messages that no worker had read are gone by this. Their sender sends them again at the end of the phase, and only
    those, so that the faults that follow meet work.
    """
    if world.servers.brokers.num_nodes > 1:
        with _without_a_broker(world, rng):
            world.wait(_ELECTION_S)
    world.num_sent_before_anew = world.feeder.make_anew(lambda: _make_anew(world))
    world.wait(seconds)
    reader = TopicReader(world.servers.brokers.addresses)
    world.num_sent_again += send_lost_again(world, reader)
    reader.close()


def _make_anew(world: World) -> None:
    reader = TopicReader(world.servers.brokers.addresses)
    old = topic_ids(world.servers.kafka, _TOPICS)
    world.watcher.gone_ids.update(f"topic_id={one}" for one in old.values())
    for topic in _TOPICS:
        reader.delete(topic)
    reader.close()
    deadline = time.monotonic() + _MAKING_S
    while not _are_new(world, old):
        if time.monotonic() > deadline:
            raise TimeoutError(f"topics not made anew in {_MAKING_S:.0f} s: {', '.join(_TOPICS)}")
        world.wait(0.5)
    world.wait(_AGREEMENT_S)


def _are_new(world: World, old: Mapping[str, str]) -> bool:
    try:
        ensure_topics(world.servers.kafka, [TASK], high=[TASK])
        now = topic_ids(world.servers.kafka, _TOPICS)
    except BrokerError:
        return False  # the old ones are still going
    return now.keys() == old.keys() and not set(now.values()) & set(old.values())


@_fault("Postgres bounced", Target.POSTGRES)
def _postgres_bounced(world: World, rng: random.Random, seconds: float) -> None:
    """Postgres ends and comes back at once: by an orderly shutdown, and by kill -9."""
    for end in rng.sample((world.servers.postgres.stop, world.servers.postgres.kill), 2):
        end()
        world.servers.postgres.start()
        world.wait(seconds / 2)


@_fault("Postgres away", Target.POSTGRES)
def _postgres_away(world: World, rng: random.Random, seconds: float) -> None:
    """Postgres shut down, started again later."""
    world.servers.postgres.stop()
    try:
        world.wait(seconds)
    finally:
        world.servers.postgres.start()


_FUNCTION: Final = """
    CREATE OR REPLACE FUNCTION chaos_disk_full() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
    END $$
"""
_TABLES: Final = """
    SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
    AND NOT relispartition ORDER BY 1
"""
_FILL: Final = """
    CREATE TRIGGER chaos_disk_full BEFORE INSERT OR UPDATE ON {} FOR EACH STATEMENT EXECUTE FUNCTION chaos_disk_full()
"""
_EMPTY: Final = "DROP TRIGGER IF EXISTS chaos_disk_full ON {}"
_NUM_TRIES: Final = 20


@_fault("disk full", Target.POSTGRES)
def _disk_full(world: World, rng: random.Random, seconds: float) -> None:
    """No space for Postgres's tables: SQLSTATE 53100.

    Where a file system can be mounted, the tables' is made full for real: whatever needs a new page is refused.
    Elsewhere triggers refuse every write as Postgres does then, because a machine's own disk is not to be filled.
    """
    if world.servers.disk is not None:
        world.servers.disk.fill()
        try:
            world.wait(seconds)
        finally:
            world.servers.disk.free()
        return
    with world.administrator() as connection:
        connection.execute(_FUNCTION)
        tables = [name for (name,) in connection.execute(_TABLES)]
        try:
            _on_each(connection, tables, _FILL)
            world.wait(seconds)
        finally:
            _on_each(connection, tables, _EMPTY)


def _on_each(connection: psycopg.Connection, tables: list[str], statement: str) -> None:
    for table in tables:
        for number in range(_NUM_TRIES):
            try:
                connection.execute(sql.SQL(statement).format(sql.Identifier(table)))
                break
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                if number == _NUM_TRIES - 1:
                    raise


@_fault("read-only", Target.POSTGRES)
def _read_only(world: World, rng: random.Random, seconds: float) -> None:
    """Postgres refuses every write, as a primary does that was demoted: SQLSTATE 25006."""
    with world.administrator() as connection:
        try:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            world.wait(seconds)
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")


_MEAN_BETWEEN_CUTS_S: Final = 0.7
_HELD_S: Final = 3.0


@_fault("connections cut", Target.NETWORK)
def _connections_cut(world: World, rng: random.Random, seconds: float) -> None:
    """Connections to Postgres reset: all at once, before a COMMIT arrives, after one did; or held for a while."""
    until, proxy = time.monotonic() + seconds, world.servers.proxy
    kinds = ("commit lost", "commit not answered", "all", "held")
    while time.monotonic() < until and not world.is_ending.is_set():
        kind = rng.choices(kinds, weights=(4, 4, 2, 1))[0]
        if kind == "all":
            proxy.cut()
        elif kind == "held":
            proxy.hold()
            world.wait(min(_HELD_S, seconds / 3))
            proxy.release()
        else:
            lost = kind == "commit lost"
            proxy.cut_commits(rng.randint(1, 3) if lost else 0, 0 if lost else rng.randint(1, 3))
        world.wait(rng.expovariate(1 / _MEAN_BETWEEN_CUTS_S))
    proxy.cut_commits(0, 0)
