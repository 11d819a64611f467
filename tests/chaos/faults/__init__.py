"""The faults, by name: one module each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tests.chaos.faults import (
    broker_lost,
    clocks_skewed,
    connections_cut,
    disk_full,
    jobs_topics_made_anew,
    kafka_away,
    postgres_away,
    postgres_bounced,
    read_only,
    rebalance_storm,
    results_topic_deleted,
    workers_killed,
    workers_suspended,
)
from tests.chaos.faults.fault import Fault

_MODULES: Final = (
    workers_killed,
    workers_suspended,
    rebalance_storm,
    clocks_skewed,
    broker_lost,
    kafka_away,
    results_topic_deleted,
    jobs_topics_made_anew,
    postgres_bounced,
    postgres_away,
    disk_full,
    read_only,
    connections_cut,
)

FAULTS: Final[Mapping[str, Fault]] = MappingProxyType({module.FAULT.name: module.FAULT for module in _MODULES})
