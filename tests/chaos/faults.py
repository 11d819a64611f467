"""The faults, by name: what each does to the world, and what it hits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from alphaloop.errors import BrokerError
from alphaloop.kafka.topics import RESULTS, TopicIds, ensure_topics
from alphaloop.messages.topics import high_topic, jobs_topic
from tests.chaos.lost_jobs import send_lost_again
from tests.chaos.reading import TopicReader
from tests.chaos.work import TASK

if TYPE_CHECKING:
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
    what: str  #: for people: what is done
    target: Target
    inject: Inject


def away(stop: Callable[[World], object], start: Callable[[World], object]) -> Inject:
    """A server is stopped, and started again when the time is over."""

    def inject(world: World, rng: random.Random, seconds: float) -> None:
        stop(world)
        try:
            world.wait(seconds)
        finally:
            start(world)

    return inject


# kill -9, at moments drawn by chance.
_MEAN_BETWEEN_S: Final = 2.0


def _workers_killed(world: World, rng: random.Random, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not world.is_ending.is_set():
        if ready := world.fleet.ready():
            world.fleet.kill(rng.choice(ready))
        world.wait(min(seconds / 3, rng.expovariate(1 / _MEAN_BETWEEN_S)))


_WORKERS_KILLED: Final = Fault(
    "workers killed", "kill -9 of one worker after the other", Target.WORKERS, _workers_killed
)


# SIGSTOP for longer than session and lease, then SIGCONT: the worker wakes up and believes that it owns its jobs.
def _workers_suspended(world: World, rng: random.Random, seconds: float) -> None:
    num_workers = len(world.fleet.members)
    chosen = rng.sample(range(num_workers), max(1, num_workers // 2))
    try:
        for number in chosen:
            world.fleet.suspend(number)
        world.wait(max(seconds, 1.5 * (world.size.session_timeout_s + world.size.lease_s)))
    finally:
        for number in chosen:
            world.fleet.resume(number)


_WORKERS_SUSPENDED: Final = Fault(
    "workers suspended",
    "SIGSTOP of half the workers past session and lease, then SIGCONT",
    Target.WORKERS,
    _workers_suspended,
)


# Every worker leaves and joins again and again: half by kill -9, half by SIGTERM.
#: Between two looks for workers that have joined, and how long it may take on a busy machine.
_LOOK_S: Final = 0.3
_MOST_S: Final = 600.0


def _rebalance_storm(world: World, rng: random.Random, seconds: float) -> None:
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


_REBALANCE_STORM: Final = Fault(
    "rebalance storm", "every worker restarted as soon as it has joined, many times", Target.WORKERS, _rebalance_storm
)


# Clocks that are an hour wrong: half the workers are ahead, half behind.
_HOUR_S: Final = 3600.0


def _clocks_skewed(world: World, rng: random.Random, seconds: float) -> None:
    numbers = range(len(world.fleet.members))
    ahead = set(rng.sample(numbers, len(numbers) // 2 or 1))
    try:
        for number in numbers:
            world.fleet.set_clock(number, _HOUR_S if number in ahead else -_HOUR_S)
        world.wait(seconds)
    finally:
        for number in numbers:
            world.fleet.set_clock(number, 0.0)


_CLOCKS_SKEWED: Final = Fault(
    "clocks skewed", "half the workers' clocks an hour ahead, half an hour behind", Target.WORKERS, _clocks_skewed
)


# One broker of several killed and missing for a while; the only broker is killed and started at once.
def _broker_lost(world: World, rng: random.Random, seconds: float) -> None:
    number = rng.randrange(world.brokers.num_nodes)
    world.brokers.kill([number])
    try:
        if world.brokers.num_nodes > 1:
            world.wait(seconds)
    finally:
        world.brokers.start([number])


_BROKER_LOST: Final = Fault("broker lost", "kill -9 of one broker, started again later", Target.KAFKA, _broker_lost)


# No broker at all for a while.
_KAFKA_AWAY: Final = Fault(
    "Kafka away",
    "kill -9 of every broker, started again later",
    Target.KAFKA,
    away(lambda world: world.brokers.kill(), lambda world: world.brokers.start()),
)


# Somebody deletes the results topic. What was on it was read before, as a consumer of results does.
def _results_topic_deleted(world: World, rng: random.Random, seconds: float) -> None:
    reader = TopicReader(world.brokers.addresses)
    world.kept_results += reader.results()
    reader.delete(RESULTS)
    reader.close()
    world.deleted_at = datetime.now(UTC)
    world.wait(seconds)


_RESULTS_TOPIC_DELETED: Final = Fault(
    "results topic deleted", "the results topic deleted, and not created again", Target.KAFKA, _results_topic_deleted
)


# Somebody deletes the topics of jobs after an election and makes them anew, so that other brokers lead them.
#
# Messages that no worker had read are gone by this. Their sender sends them again at the end of the phase, and only
# those, so that the faults that follow meet work.
_TOPICS: Final = (jobs_topic(TASK), high_topic(TASK))
#: Until the controller counts a silent broker as gone, and the others lead its partitions.
_ELECTION_S: Final = 12.0
#: A topic of that name may still be going, and brokers that have just started answer late.
_MAKING_S: Final = 120.0
_AGAIN_S: Final = 0.5
#: Brokers learn of a new topic one after the other. A client that is told of the old one meanwhile sends to nobody.
_AGREEMENT_S: Final = 5.0


def _jobs_topics_made_anew(world: World, rng: random.Random, seconds: float) -> None:
    if world.brokers.num_nodes > 1:
        number = rng.randrange(world.brokers.num_nodes)
        world.brokers.kill([number])
        try:
            world.wait(_ELECTION_S)
        finally:
            world.brokers.start([number])
    world.num_sent_before_anew = world.feeder.make_anew(lambda: _make_anew(world))
    world.wait(seconds)
    reader = TopicReader(world.brokers.addresses)
    world.num_sent_again += send_lost_again(world, reader)
    reader.close()


def _make_anew(world: World) -> None:
    reader, ids = TopicReader(world.brokers.addresses), TopicIds(world.kafka)
    old = ids.ask(_TOPICS)
    world.watcher.gone_ids.update(f"topic_id={one}" for one in old.values())
    for topic in _TOPICS:
        reader.delete(topic)
    reader.close()
    deadline = time.monotonic() + _MAKING_S
    while not _are_new(world, ids, old):
        if time.monotonic() > deadline:
            raise TimeoutError(f"topics not made anew in {_MAKING_S:.0f} s: {', '.join(_TOPICS)}")
        world.wait(_AGAIN_S)
    world.wait(_AGREEMENT_S)


def _are_new(world: World, ids: TopicIds, old: Mapping[str, str]) -> bool:
    try:
        ensure_topics(world.kafka, [TASK])
        now = ids.ask(_TOPICS)
    except BrokerError:
        return False  # the old ones are still going
    return now.keys() == old.keys() and not set(now.values()) & set(old.values())


_JOBS_TOPICS_MADE_ANEW: Final = Fault(
    "jobs topics made anew",
    "one broker killed and started again, then both lanes' topics deleted and made anew",
    Target.KAFKA,
    _jobs_topics_made_anew,
)


# Postgres ends and comes back at once: by an orderly shutdown, and by kill -9.
def _postgres_bounced(world: World, rng: random.Random, seconds: float) -> None:
    for end in rng.sample((world.postgres.stop, world.postgres.kill), 2):
        end()
        world.postgres.start()
        world.wait(seconds / 2)


_POSTGRES_BOUNCED: Final = Fault(
    "Postgres bounced", "Postgres shut down, killed, started again at once", Target.POSTGRES, _postgres_bounced
)


# No Postgres for a while.
_POSTGRES_AWAY: Final = Fault(
    "Postgres away",
    "Postgres shut down, started again later",
    Target.POSTGRES,
    away(lambda world: world.postgres.stop(), lambda world: world.postgres.start()),
)


# Postgres's disk is full: SQLSTATE 53100.
#
# Where a file system can be mounted, the tables' is made full for real: whatever needs a new page is refused. Elsewhere
# triggers refuse every write as Postgres does then, because a machine's own disk is not to be filled.
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


def _disk_full(world: World, rng: random.Random, seconds: float) -> None:
    if world.disk is None:
        _refuse_writes(world, seconds)
        return
    world.disk.fill()
    try:
        world.wait(seconds)
    finally:
        world.disk.free()


def _refuse_writes(world: World, seconds: float) -> None:
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


_DISK_FULL: Final = Fault("disk full", "no space for Postgres's tables: SQLSTATE 53100", Target.POSTGRES, _disk_full)


# Postgres becomes read-only, as a primary does that was demoted.
def _read_only(world: World, rng: random.Random, seconds: float) -> None:
    with world.administrator() as connection:
        try:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            world.wait(seconds)
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")


_READ_ONLY: Final = Fault("read-only", "Postgres refuses every write: SQLSTATE 25006", Target.POSTGRES, _read_only)


# Connections to Postgres reset: all at once, before a COMMIT arrives, after one did; or held for a while.
_MEAN_BETWEEN_S_of_connections_cut: Final = 0.7
_HELD_S: Final = 3.0


def _connections_cut(world: World, rng: random.Random, seconds: float) -> None:
    until, proxy = time.monotonic() + seconds, world.proxy
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
        world.wait(rng.expovariate(1 / _MEAN_BETWEEN_S_of_connections_cut))
    proxy.cut_commits(0, 0)


_CONNECTIONS_CUT: Final = Fault(
    "connections cut", "connections to Postgres reset, many of them in mid-commit", Target.NETWORK, _connections_cut
)


FAULTS: Final[Mapping[str, Fault]] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            _WORKERS_KILLED,
            _WORKERS_SUSPENDED,
            _REBALANCE_STORM,
            _CLOCKS_SKEWED,
            _BROKER_LOST,
            _KAFKA_AWAY,
            _RESULTS_TOPIC_DELETED,
            _JOBS_TOPICS_MADE_ANEW,
            _POSTGRES_BOUNCED,
            _POSTGRES_AWAY,
            _DISK_FULL,
            _READ_ONLY,
            _CONNECTIONS_CUT,
        )
    }
)
