"""Prometheus metrics of the inference servers that a worker sends jobs to; where it decodes itself, of none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from alphaloop.errors import PromptTooLong, ServerError
from worker.engine import Load
from worker.servers.fleet_member import EndpointState, EndpointStatus, SuspectCounts

_STATES: Final[tuple[EndpointState, ...]] = get_args(EndpointState)


def _codes_below(error: type[ServerError]) -> Iterable[str]:
    for below in error.__subclasses__():
        yield below.code
        yield from _codes_below(below)


#: All are shown from the start: a counter that begins at 1 has not grown, for Prometheus.
_FAILURES: Final = (PromptTooLong.code, *_codes_below(ServerError))
_OTHER: Final = "other"


class Servers(Protocol):
    """What is needed of `worker.engine.Engine`."""

    def endpoints(self) -> Sequence[EndpointStatus]: ...
    def suspects(self) -> SuspectCounts: ...
    def load(self) -> Load: ...


class EndpointMetrics(Collector):
    """Read at every scrape. Labels are names of the settings and codes of errors, so they are few."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    @classmethod
    def register(cls, registry: CollectorRegistry, servers: Servers) -> None:
        """Show how the servers are, from now on."""
        registry.register(cls(servers))

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        yield from self._of_each(self._servers.endpoints())
        suspects, load = self._servers.suspects(), self._servers.load()
        yield GaugeMetricFamily(
            "alphaloop_requests_alone",
            "Jobs that failed and have to run alone at a server, or do",
            value=suspects.num_alone,
        )
        yield CounterMetricFamily(
            "alphaloop_requests_killed_servers",
            "Jobs that failed for good because servers died with them",
            value=suspects.num_killers,
        )
        yield GaugeMetricFamily(
            "alphaloop_requests_waiting_for_route",
            "Jobs in the engine that wait for servers of their own, because others may not take them",
            value=len(load.waiting),
        )

    def _of_each(self, statuses: Sequence[EndpointStatus]) -> Iterable[Metric]:
        labels = ["endpoint", "drafter"]
        in_flight = GaugeMetricFamily("alphaloop_endpoint_in_flight", "Requests at an inference server", labels=labels)
        limit = GaugeMetricFamily(
            "alphaloop_endpoint_limit", "Requests that the server may have now; 0 where it gets none", labels=labels
        )
        state = GaugeMetricFamily(
            "alphaloop_endpoint_state", "1 for the state of an inference server", labels=[*labels, "state"]
        )
        since = GaugeMetricFamily("alphaloop_endpoint_state_seconds", "In that state", labels=labels)
        failed = CounterMetricFamily(
            "alphaloop_endpoint_failures", "Requests that failed at the server", labels=[*labels, "code"]
        )
        undrafted = GaugeMetricFamily(
            "alphaloop_endpoint_undrafted_in_flight",
            "Of the requests at a server that switches drafts, those without drafts",
            labels=labels,
        )
        switches = GaugeMetricFamily(
            "alphaloop_endpoint_switches_drafts",
            "1 where a server that shall leave out drafts for one request does so",
            labels=labels,
        )
        whole_load_known = GaugeMetricFamily(
            "alphaloop_endpoint_whole_load_known",
            "1 where the server told a moment ago how many requests it has, whoever sent them",
            labels=labels,
        )
        others = GaugeMetricFamily(
            "alphaloop_endpoint_others_in_flight",
            "Requests of other clients at the server, where it tells its load",
            labels=labels,
        )
        for status in statuses:
            names = [status.name, status.drafter or ""]
            in_flight.add_metric(names, status.num_in_flight)
            limit.add_metric(names, status.limit)
            since.add_metric(names, status.since_s)
            whole_load_known.add_metric(names, float(status.is_whole_load_known))
            if status.num_others is not None:
                others.add_metric(names, status.num_others)
            if status.num_undrafted is not None:
                undrafted.add_metric(names, status.num_undrafted)
                switches.add_metric(names, float(status.is_obeying))
            for one in _STATES:
                state.add_metric([*names, one], float(one == status.state))
            for code in _FAILURES:
                failed.add_metric([*names, code], status.num_failed.get(code, 0))
            num_other = sum(number for code, number in status.num_failed.items() if code not in _FAILURES)
            failed.add_metric([*names, _OTHER], num_other)
        return in_flight, limit, state, since, failed, undrafted, switches, whole_load_known, others
