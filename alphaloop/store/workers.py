"""What each worker is doing: a row that the worker replaces every few seconds, whatever it decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import text

from alphaloop.store.database import Database

#: A worker that has said nothing for so long is not shown any more, and its row is deleted by another one.
FORGOTTEN_AFTER: Final = timedelta(hours=1)

_SAY: Final = text("""
    INSERT INTO workers AS known (owner, device, target, num_slots, num_waiting, num_held, job_ids, num_tokens,
        tokens_per_s, sampling_defaults)
    VALUES (:owner, :device, :target, :num_slots, :num_waiting, :num_held, :job_ids, :num_tokens, :tokens_per_s,
        :sampling_defaults)
    ON CONFLICT (owner) DO UPDATE SET num_slots = excluded.num_slots, num_waiting = excluded.num_waiting,
        num_held = excluded.num_held, job_ids = excluded.job_ids, num_tokens = excluded.num_tokens,
        tokens_per_s = excluded.tokens_per_s, seen_at = excluded.seen_at
    RETURNING (xmax = 0) AS is_new
""")
#: A worker that has said nothing for so long asks the same servers no more, or will be heard of again.
PEER_FOR: Final = timedelta(seconds=30)

_PEERS: Final = text("""
    SELECT count(*) FROM workers WHERE device = :device AND owner <> :owner AND seen_at > now() - :peer_for
""")
_FORGET: Final = text("DELETE FROM workers WHERE seen_at < now() - :forgotten_after")
_LEAVE: Final = text("DELETE FROM workers WHERE owner = :owner")
_SEEN: Final = text("""
    SELECT owner, device, target, num_slots, num_waiting, num_held, job_ids, num_tokens, tokens_per_s,
        sampling_defaults, started_at, seen_at, now() - seen_at AS silence
    FROM workers WHERE seen_at > now() - :forgotten_after ORDER BY owner
""")


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


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker that has said something lately, and how long ago, by the database's clock."""

    load: WorkerLoad
    started_at: datetime
    seen_at: datetime
    silence: timedelta

    def as_json(self) -> dict[str, Any]:
        """What it said last, and how long ago."""
        return {
            **{name: value for name, value in asdict(self.load).items() if name != "tokens"},
            "num_running": len(self.load.tokens),
            "started_at": self.started_at,
            "seen_at": self.seen_at,
            "silence_s": round(self.silence.total_seconds(), 1),
        }


class WorkerStore:
    """The table of workers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def say(self, load: WorkerLoad) -> int:
        """Replace what this worker said before; returns how many others with the same device said something lately.

        Inference servers are one device, so these are the workers that ask the same servers. The first time, forget
        workers that ended without a word.
        """
        given = {
            "owner": load.owner,
            "device": load.device,
            "target": load.target,
            "num_slots": load.num_slots,
            "num_waiting": load.num_waiting,
            "num_held": load.num_held,
            "job_ids": list(load.tokens),
            "num_tokens": list(load.tokens.values()),
            "tokens_per_s": load.tokens_per_s,
            "sampling_defaults": load.sampling_defaults,
        }
        with self._database.begin() as connection:
            if connection.execute(_SAY, given).scalar():
                connection.execute(_FORGET, {"forgotten_after": FORGOTTEN_AFTER})
            peers = {"device": load.device, "owner": load.owner, "peer_for": PEER_FOR}
            return int(connection.execute(_PEERS, peers).scalar_one())

    def leave(self, owner: str) -> None:
        """The worker ends."""
        with self._database.begin() as connection:
            connection.execute(_LEAVE, {"owner": owner})

    def seen(self) -> list[SeenWorker]:
        """Every worker that has not left and was heard of in the last hour."""
        with self._database.begin() as connection:
            rows = connection.execute(_SEEN, {"forgotten_after": FORGOTTEN_AFTER}).mappings().all()
        return [_seen(**row) for row in rows]


def _seen(
    *,
    job_ids: list[str],
    num_tokens: list[int],
    started_at: datetime,
    seen_at: datetime,
    silence: timedelta,
    **load: Any,
) -> SeenWorker:
    tokens = dict(zip(job_ids, num_tokens, strict=True))
    return SeenWorker(WorkerLoad(**load, tokens=tokens), started_at, seen_at, silence)
