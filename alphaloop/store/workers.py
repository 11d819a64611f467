"""The fleet: what each worker runs and is doing, and what inference servers were, life by life.

A worker replaces its row every few seconds, whatever it decodes. Workers of several targets agree on which one is the
default, or they would read each other's tasks; without a default all serve one target. Workers of one target take the
same jobs. A server's life ends when it restarts with another model or other settings.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import JSON, Connection, bindparam, text

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.snapshot import SessionFacts, session_content
from alphaloop.engine import HeldRequests
from alphaloop.errors import ConfigError
from alphaloop.server_identity import ServerIdentity, shown_device
from alphaloop.settings.task import Bindings
from alphaloop.store.database import Store, of_row, values_of

#: A worker that has said nothing for so long is not shown any more, and its row is deleted by another one.
_FORGOTTEN_AFTER: Final = timedelta(hours=1)
#: A worker says every two seconds what it does; what it said is shown with its age once it is silent for this long.
SILENT_AFTER: Final = timedelta(seconds=10)
#: A worker that has said nothing for this long takes no more jobs and asks the same servers no more, or will be heard
#: of again.
_PEER_FOR: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which jobs a worker takes and does not refuse."""

    context_length: int  #: tokens of prompt and output together
    max_job_bytes: int
    fields: tuple[str, ...] = ()  #: of a job's body, those that not every engine follows and that it does
    content: tuple[str, ...] = ()  #: folders and prefixes from which it reads prompts by reference

    def lack(self, other: Capabilities) -> str | None:
        """What the other one can do and this one cannot, in words; None: nothing."""
        lacks = []
        for name, here, there in (
            ("tokens of context", self.context_length, other.context_length),
            ("bytes of a job", self.max_job_bytes, other.max_job_bytes),
        ):
            if here < there:
                lacks.append(f"{here:,} {name} and not {there:,}")
        if missing := sorted(set(other.fields) - set(self.fields)):
            lacks.append(f"not the fields {', '.join(f'body.{name}' for name in missing)}")
        if missing := sorted(set(other.content) - set(self.content)):
            lacks.append(f"no prompts from {', '.join(missing)}")
        return "; ".join(lacks) or None


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker decides and decodes with."""

    facts: SessionFacts
    drafters: tuple[DrafterState, ...]
    #: Drafters that it asks no more until it starts again, each with what it cannot serve and why.
    ended: Mapping[str, str] = field(default_factory=dict)
    default_model: str | None = None  #: as its tasks.toml says; None: it reads the topics of every task
    can: Capabilities | None = None
    held: Mapping[str, HeldRequests] = field(default_factory=dict)  #: by endpoint, what waits for the sake of others

    def as_json(self) -> str:
        """For the database."""
        own = {"ended": dict(self.ended), "default_model": self.default_model, "can": self.can and asdict(self.can)}
        own["held"] = {name: asdict(held) for name, held in self.held.items()}
        return json.dumps({**session_content(self.facts, self.drafters), **own})

    @classmethod
    def read(cls, content: Mapping[str, Any] | None) -> WorkerSetup | None:
        """From the database, without the fields that this release does not know.

        None of a worker of another release whose setup lacks a field without a default, or has one of another type.
        """
        if content is None:
            return None
        try:
            return _Setup.validate_python({**content, "facts": content})
        except (TypeError, ValueError) as error:
            log.info("the setup of a worker of another release is not read: %s", type(error).__name__)
            return None


_Setup: Final = TypeAdapter(WorkerSetup)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself. `tokens` is what each job that it decodes has written so far, by job_id."""

    owner: str
    device: str
    target: str
    num_slots: int
    num_waiting: int  #: taken from Kafka, not decoding
    num_held: int  #: claimed, outcome not recorded
    tokens: Mapping[str, int]
    tokens_per_s: float | None = None  #: since it said so before
    sampling_defaults: str = ""  #: what its model suggests and whether jobs take it, in words; empty: nothing
    setup: WorkerSetup | None = None  #: None of a worker of another release


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker that has said something lately, and how long ago, by the database's clock."""

    load: WorkerLoad
    started_at: datetime
    seen_at: datetime
    silence: timedelta

    @property
    def is_silent(self) -> bool:
        """Whether it may be in a long step, or dead."""
        return self.silence >= SILENT_AFTER

    @property
    def shown_device(self) -> str:
        """Its device as screens name it."""
        setup, device = self.load.setup, self.load.device
        return device if setup is None else shown_device(device, setup.facts.engine, setup.facts.host)

    def as_json(self) -> dict[str, Any]:
        """What it said last, and how long ago."""
        setup = self.load.setup
        return {
            **values_of(self.load, "tokens", "setup"),
            "device": self.shown_device,
            "target_revision": setup.facts.target_revision if setup else None,
            "engine": setup.facts.engine if setup else None,
            "drafters": [
                {"name": drafter.name, "revision": drafter.revision, "ended": setup.ended.get(drafter.name)}
                for drafter in setup.drafters
            ]
            if setup
            else None,
            "held": {name: asdict(held) for name, held in setup.held.items()} if setup else None,
            "num_running": len(self.load.tokens),
            "started_at": self.started_at,
            "seen_at": self.seen_at,
            "silence_s": round(self.silence.total_seconds(), 1),
            "is_silent": self.is_silent,
        }


class WorkerStore(Store):
    """The table of workers."""

    def say(self, load: WorkerLoad) -> int:
        """Replace what this worker said before; returns how many others with the same device said something lately.

        Inference servers are one device, so these are the workers that ask the same servers. The first time, forget
        workers that ended without a word.
        """
        with self._database.begin() as connection:
            return self._say(connection, load)

    def enter(self, load: WorkerLoad) -> Sequence[str]:
        """The worker begins to take jobs; returns other revisions of its target that workers serve.

        Raises ConfigError where a worker that was heard of lately serves another target and both would read the same
        topics, and where one of the same target can do what this one cannot.
        """
        with self._database.begin() as connection:
            connection.execute(_ONE_ENTERS)
            default_model = load.setup.default_model if load.setup else None
            others = self._beside(connection, load.owner, load.target, default_model)
            for owner, theirs in others.items():
                if load.setup and load.setup.can and theirs and theirs.can:
                    _refuse_lesser(load.target, load.setup.can, owner, theirs.can)
            self._say(connection, load)
        revisions = {theirs.facts.target_revision for theirs in others.values() if theirs}
        return sorted(revisions - {load.setup.facts.target_revision}) if load.setup else []

    def check_target(self, target: str, default_model: str | None = None) -> None:
        """Raises ConfigError where a worker of another target that was heard of lately would read the same topics."""
        with self._database.begin() as connection:
            self._beside(connection, "", target, default_model)

    def _beside(
        self, connection: Connection, owner: str, target: str, default_model: str | None
    ) -> dict[str, WorkerSetup | None]:
        """What the other workers of this target run, by owner; raises ConfigError as `check_target` does."""
        setups = {}
        for other in connection.execute(_OTHERS, {"owner": owner, "peer_for": _PEER_FOR}):
            theirs = WorkerSetup.read(other.setup)
            if other.target == target:
                setups[other.owner] = theirs
                continue
            default = theirs.default_model if theirs else None
            heard = f"(heard of {other.silence.total_seconds():.0f} s ago)"
            if default_model is None:
                raise ConfigError(
                    f"models.target.name: expected {other.target!r}, which worker {other.owner} serves {heard}, found "
                    f"{target!r}: without "
                    f"default_model in tasks.toml both would read the same topics",
                    hint=f"bind tasks to targets (default_model, and model in [tasks.NAME]), or stop the workers of "
                    f"{other.target!r} first: {_PEER_FOR.total_seconds():.0f} s after they were heard of last, this "
                    f"one may start",
                )
            if default != default_model:
                what = "is not set, so it reads the topics of every task" if default is None else f"is {default!r}"
                raise ConfigError(
                    f"default_model: expected what all workers have, found {default_model!r}, and that of worker "
                    f"{other.owner}, of {other.target!r} {heard}, {what}",
                    hint="give all workers the same tasks.toml; those that run follow it within seconds",
                )
        return setups

    def _say(self, connection: Connection, load: WorkerLoad) -> int:
        given = {
            **values_of(load, "tokens", "setup"),
            "job_ids": list(load.tokens),
            "num_tokens": list(load.tokens.values()),
            "target_revision": load.setup.facts.target_revision if load.setup else None,
            "setup": load.setup.as_json() if load.setup else None,
        }
        if connection.execute(_SAY, given).scalar():
            connection.execute(_FORGET, {"forgotten_after": _FORGOTTEN_AFTER})
        peers = {"device": load.device, "owner": load.owner, "peer_for": _PEER_FOR}
        return int(connection.execute(_PEERS, peers).scalar_one())

    def leave(self, owner: str) -> None:
        """The worker ends."""
        self._database.change(_LEAVE, {"owner": owner})

    def seen(self) -> list[SeenWorker]:
        """Every worker that has not left and was heard of in the last hour."""
        return [_seen(row) for row in self._database.rows(_SEEN, {"forgotten_after": _FORGOTTEN_AFTER})]


def _refuse_lesser(target: str, can: Capabilities, owner: str, theirs: Capabilities) -> None:
    if (lacks := can.lack(theirs)) is not None:
        raise ConfigError(
            f"expected to take every job of {target!r} that worker {owner} takes, but this one takes {lacks}",
            hint=f"a job may come to either of them. Give this one the same settings, or stop the others first: "
            f"{_PEER_FOR.total_seconds():.0f} s after they were heard of last, this one may start",
        )


def heard_lately(workers: Iterable[SeenWorker]) -> list[SeenWorker]:
    """Those that were heard of in the last half minute: they run, as far as anybody knows."""
    return [worker for worker in workers if worker.silence <= _PEER_FOR]


def drafters_of(workers: Sequence[SeenWorker], target: str | None) -> frozenset[str]:
    """What a worker of the target (None: of any) asks, of those that were heard of in the last half minute."""
    setups = [worker.load.setup for worker in heard_lately(workers) if target in (None, worker.load.target)]
    return frozenset(
        drafter.name for setup in setups if setup for drafter in setup.drafters if drafter.name not in setup.ended
    )


def targets_by_revision(workers: Sequence[SeenWorker]) -> dict[str, str]:
    """The target's name by every revision that these workers serve."""
    return {
        worker.load.setup.facts.target_revision: worker.load.target
        for worker in workers
        if worker.load.setup is not None
    }


def not_served(bindings: Bindings, task: str, workers: Sequence[SeenWorker]) -> str | None:
    """Why no worker takes the task's jobs, in words; None where a worker of its target was heard of lately."""
    heard = {worker.load.target for worker in heard_lately(workers)}
    target = bindings.target_of(task)
    if target is None:
        return None if heard else "no worker runs"
    return None if target in heard else f"no worker of {target} runs"


@dataclass(frozen=True, slots=True)
class Running:
    """What the fleet runs: the setup of most of the workers that were heard of lately."""

    setup: WorkerSetup  #: of one of them; `ended`: only what none of them asks any more
    num_slots: int  #: jobs that each of them decodes at once
    num_workers: int
    num_others: int  #: workers that run something else, or do not say what


def running(workers: Sequence[SeenWorker], target: str | None = None) -> Running | None:
    """What most of the workers run that were heard of in the last half minute; None where no worker says.

    With a `target` only its workers count.
    """
    heard = [worker.load for worker in heard_lately(workers) if target in (None, worker.load.target)]
    alike: dict[tuple[object, ...], list[WorkerLoad]] = {}
    for load in heard:
        if load.setup is not None:
            # Costs are those of a host, but equal hosts run the same.
            facts = replace(load.setup.facts, owner="", host="")
            alike.setdefault((facts, load.setup.drafters, load.num_slots), []).append(load)
    if not alike:
        return None
    most = max(alike.values(), key=len)
    setups = [load.setup for load in most if load.setup is not None]
    ended = {name: why for name, why in setups[0].ended.items() if all(name in setup.ended for setup in setups)}
    return Running(replace(setups[0], ended=ended), most[0].num_slots, len(most), len(heard) - len(most))


@dataclass(frozen=True, slots=True)
class ServerLife:
    """A server between two changes, and what evidence calls its model and itself."""

    endpoint: str
    target_revision: str
    engine: str
    identity: ServerIdentity
    changed: str | None  #: against the life before, in words
    first_seen_at: datetime
    last_seen_at: datetime


class ServerIdentityStore(Store):
    """The table of servers' identities."""

    @contextmanager
    def naming(self) -> Iterator[Naming]:
        """A turn at naming servers. Workers take turns, so that one model does not get two names at once."""
        with self._database.begin() as connection:
            connection.execute(_LOCK)
            yield Naming(connection)

    def known(self) -> list[ServerLife]:
        """Every life of every server, the one that was seen last first."""
        return [_life(row) for row in self._database.rows(_KNOWN)]

    def changed_since(self, moment: datetime) -> list[ServerLife]:
        """Lives that began after `moment` with something other than the life before, oldest first."""
        return [_life(row) for row in self._database.rows(_CHANGED, {"moment": moment})]


class Naming:
    """What a worker does in its turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def known(self) -> list[ServerLife]:
        """Every life of every server, the one that was seen last first."""
        return [_life(row) for row in self._connection.execute(_KNOWN)]

    def saw(
        self, endpoint: str, identity: ServerIdentity, *, target_revision: str, engine: str, changed: str | None
    ) -> None:
        """The server was found so. Its last life goes on unless something `changed`."""
        given = {"endpoint": endpoint, "target_revision": target_revision, "engine": engine}
        again = self._connection.execute(_SEEN_AGAIN, {**given, "is_other": changed is not None})
        if not again.rowcount:
            self._connection.execute(_FIRST_SEEN, {**given, "identity": identity.as_json(), "changed": changed})


log = logging.getLogger(__name__)
_SAY: Final = text("""
    INSERT INTO workers AS known (owner, device, target, num_slots, num_waiting, num_held, job_ids, num_tokens,
        tokens_per_s, sampling_defaults, target_revision, setup)
    VALUES (:owner, :device, :target, :num_slots, :num_waiting, :num_held, :job_ids, :num_tokens, :tokens_per_s,
        :sampling_defaults, :target_revision, :setup)
    ON CONFLICT (owner) DO UPDATE SET num_slots = excluded.num_slots, num_waiting = excluded.num_waiting,
        num_held = excluded.num_held, job_ids = excluded.job_ids, num_tokens = excluded.num_tokens,
        tokens_per_s = excluded.tokens_per_s, setup = excluded.setup, seen_at = excluded.seen_at
    RETURNING (xmax = 0) AS is_new
""")
_PEERS: Final = text("""
    SELECT count(*) FROM workers WHERE device = :device AND owner <> :owner AND seen_at > now() - :peer_for
""")
#: When two workers start at once, the second one sees the first.
_ONE_ENTERS: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('workers', 0))")
_OTHERS: Final = text("""
    SELECT owner, target, setup, now() - seen_at AS silence FROM workers
    WHERE owner <> :owner AND seen_at > now() - :peer_for ORDER BY seen_at DESC
""").columns(setup=JSON)
_FORGET: Final = text("DELETE FROM workers WHERE seen_at < now() - :forgotten_after")
_LEAVE: Final = text("DELETE FROM workers WHERE owner = :owner")
_SEEN: Final = text("""
    SELECT owner, device, target, num_slots, num_waiting, num_held, job_ids, num_tokens, tokens_per_s,
        sampling_defaults, started_at, seen_at, now() - seen_at AS silence, setup
    FROM workers WHERE seen_at > now() - :forgotten_after ORDER BY owner
""")


def _seen(row: Any) -> SeenWorker:
    tokens = dict(zip(row.job_ids, row.num_tokens, strict=True))
    load = of_row(WorkerLoad, row, tokens=tokens, setup=WorkerSetup.read(row.setup))
    return of_row(SeenWorker, row, load=load)


_LIVES: Final = """
    SELECT endpoint, target_revision, engine, identity, changed, first_seen_at, last_seen_at FROM server_identities
"""
_KNOWN: Final = text(f"{_LIVES} ORDER BY last_seen_at DESC, first_seen_at DESC, endpoint").columns(identity=JSON)
_CHANGED: Final = text(f"""
    {_LIVES} WHERE changed IS NOT NULL AND first_seen_at > :moment ORDER BY first_seen_at, endpoint
""").columns(identity=JSON)
_LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('server_identities', 0))")
_SEEN_AGAIN: Final = text("""
    UPDATE server_identities SET last_seen_at = now()
    WHERE endpoint = :endpoint AND target_revision = :target_revision AND engine = :engine
        AND first_seen_at = (SELECT max(first_seen_at) FROM server_identities WHERE endpoint = :endpoint)
        AND NOT :is_other
""")
_FIRST_SEEN: Final = text("""
    INSERT INTO server_identities (endpoint, target_revision, engine, identity, changed)
    VALUES (:endpoint, :target_revision, :engine, :identity, :changed)
""").bindparams(bindparam("identity", type_=JSON))


def _life(row: Any) -> ServerLife:
    return of_row(ServerLife, row, identity=ServerIdentity.from_json(row.identity))
