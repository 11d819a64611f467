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
    phases: tuple[tuple[str, ...], ...]  #: names of FAULTS that come together
    num_pairs: int  #: drawn phases with two faults at once, behind the others
    fault_s: float  #: how long a fault lasts
    num_storm_restarts: int  #: of each worker in a rebalance storm
    round_s: float  #: of the null engine
    session_timeout_s: float  #: of a member of the consumer group
    lease_s: float
    catch_up_s: float  #: most time between the end of a fault and the next one
    settle_s: float  #: most time after the last job in which nothing moves and something is left
    measure_every_s: float  #: between two runs of the scheduler
    is_ordered: bool = False  #: whether they come in the order of `phases`


#: What a fleet has to come back from without a hand.
_OUTAGES: Final = ("Postgres away", "Kafka away", "disk full", "results topic deleted")
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
    phases=tuple((name,) for name in FAULTS),
    num_pairs=2,
    fault_s=20.0,
    num_storm_restarts=16,
    round_s=0.025,
    session_timeout_s=6.0,
    lease_s=8.0,
    catch_up_s=10.0,
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
    phases=tuple((name,) for name in _OUTAGES),
    num_pairs=0,
    fault_s=75.0,
    catch_up_s=20.0,
    is_ordered=True,
)
SHORT: Final = Size(
    num_null_jobs=1_000,
    num_real_jobs=0,
    planted={
        Fate.REFUSED: 8,
        Fate.KILLS: 1,
        Fate.FAILS: 2,
        Fate.FAILS_FIRST: 8,
        Fate.EXPIRES: 8,
        Fate.MAY_EXPIRE: 20,
        Fate.IS_CANCELLED: 20,
    },
    num_workers=3,
    num_brokers=1,
    phases=(
        ("workers killed", "Postgres bounced"),
        ("workers suspended", "connections cut"),
        ("rebalance storm",),
        *((name,) for name in _OUTAGES),
    ),
    num_pairs=0,
    fault_s=2.0,
    num_storm_restarts=1,
    round_s=0.02,
    session_timeout_s=2.5,
    lease_s=2.0,
    catch_up_s=4.0,
    settle_s=120.0,
    measure_every_s=10.0,
)
