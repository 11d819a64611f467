"""How large a run is. The long one is `make chaos`, the short one is part of `make test`, outages have their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tests.chaos.faults import FAULTS
from tests.chaos.work import Fate


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of a run; times in seconds."""

    num_null_jobs: int
    num_real_jobs: int  #: decoded by the real engine, before the null engine's; 0 leaves that part out
    planted: Mapping[Fate, int]  #: how many of the null engine's jobs do not just succeed
    num_workers: int
    num_brokers: int
    faults: tuple[str, ...]  #: names of FAULTS, each of which gets a phase
    num_pairs: int  #: phases with two faults at once
    fault_s: float  #: how long a fault lasts
    num_storm_restarts: int  #: of each worker in a rebalance storm
    round_s: float  #: of the null engine
    session_timeout_s: float  #: of a member of the consumer group
    lease_s: float
    catch_up_s: float  #: most time between the end of a fault and the next one
    settle_s: float  #: most time after the last job in which nothing moves and something is left
    measure_every_s: float  #: between two runs of the scheduler
    is_ordered: bool = False  #: whether the faults come in the order of `faults`


LONG: Final = Size(
    num_null_jobs=50_000,
    num_real_jobs=300,
    planted={
        Fate.REFUSED: 50,
        Fate.KILLS: 2,
        Fate.FAILS: 10,
        Fate.FAILS_FIRST: 200,
        Fate.EXPIRES: 200,
        Fate.MAY_EXPIRE: 500,
        Fate.IS_CANCELLED: 500,
    },
    num_workers=8,
    num_brokers=3,
    faults=tuple(FAULTS),
    num_pairs=2,
    fault_s=40.0,
    num_storm_restarts=16,
    round_s=0.05,
    session_timeout_s=6.0,
    lease_s=8.0,
    catch_up_s=20.0,
    settle_s=120.0,
    measure_every_s=20.0,
)
#: An hour of outages, shortened as much as session and lease are: servers away, full, and a topic gone.
OUTAGES: Final = replace(
    LONG,
    num_null_jobs=10_000,
    num_real_jobs=0,
    planted={fate: number // 5 for fate, number in LONG.planted.items() if fate is not Fate.KILLS},
    num_workers=4,
    faults=("Postgres away", "Kafka away", "disk full", "results topic deleted"),
    num_pairs=0,
    fault_s=75.0,
    is_ordered=True,
)
SHORT: Final = Size(
    num_null_jobs=3_000,
    num_real_jobs=0,
    planted={
        Fate.REFUSED: 8,
        Fate.KILLS: 1,
        Fate.FAILS: 2,
        Fate.FAILS_FIRST: 12,
        Fate.EXPIRES: 12,
        Fate.MAY_EXPIRE: 30,
        Fate.IS_CANCELLED: 30,
    },
    num_workers=3,
    num_brokers=1,
    faults=("workers killed", "workers suspended", "Postgres bounced", "connections cut", "rebalance storm"),
    num_pairs=0,
    fault_s=6.0,
    num_storm_restarts=2,
    round_s=0.02,
    session_timeout_s=3.0,
    lease_s=3.0,
    catch_up_s=10.0,
    settle_s=120.0,
    measure_every_s=10.0,
)
