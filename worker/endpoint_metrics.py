"""Prometheus metrics of the inference servers that a worker sends jobs to; none where it decodes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.servers.fleet_member import EndpointState, EndpointStatus

_STATES: Final[tuple[EndpointState, ...]] = get_args(EndpointState)


class EndpointMetrics(Collector):
    """Read at every scrape. Labels are names of the settings, so they are few."""

    def __init__(self, statuses: Callable[[], Sequence[EndpointStatus]]) -> None:
        self._statuses = statuses

    @classmethod
    def register(cls, registry: CollectorRegistry, statuses: Callable[[], Sequence[EndpointStatus]]) -> None:
        """Show what `statuses` says, from now on."""
        registry.register(cls(statuses))

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        labels = ["endpoint", "drafter"]
        in_flight = GaugeMetricFamily("alphaloop_endpoint_in_flight", "Requests at an inference server", labels=labels)
        limit = GaugeMetricFamily(
            "alphaloop_endpoint_limit", "Requests that the server may have now; 0 where it gets none", labels=labels
        )
        state = GaugeMetricFamily(
            "alphaloop_endpoint_state", "1 for the state of an inference server", labels=[*labels, "state"]
        )
        since = GaugeMetricFamily("alphaloop_endpoint_state_seconds", "In that state", labels=labels)
        for status in self._statuses():
            names = [status.name, status.drafter or ""]
            in_flight.add_metric(names, status.num_in_flight)
            limit.add_metric(names, status.limit)
            since.add_metric(names, status.since_s)
            for one in _STATES:
                state.add_metric([*names, one], float(one == status.state))
        return in_flight, limit, state, since
