"""What a scrape shows of inference servers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from alphaloop.errors import RequestRefused, StoreError
from tests.fixtures.simulated_fleet import FleetSimulation, SimulatedJob
from worker.engine import Load
from worker.metrics import EndpointMetrics
from worker.servers.fleet_member import EndpointStatus, FleetEndpoint, SuspectCounts

ENDPOINTS = (FleetEndpoint("plain", None, 0, 4), FleetEndpoint("ngram", "ngram", 4, 4))


class Servers:
    """A fleet as an engine shows it, with two jobs in line for a route."""

    def __init__(self) -> None:
        self.simulation = FleetSimulation(ENDPOINTS, seed=0)
        self.fleet = self.simulation.fleet
        self.registry = CollectorRegistry()
        self.registry.register(EndpointMetrics(self))  # type: ignore[arg-type]

    def endpoints(self) -> tuple[EndpointStatus, ...]:
        return self.fleet.statuses()

    def unavailable(self) -> str | None:
        return self.fleet.unavailable()

    def suspects(self) -> SuspectCounts:
        return self.fleet.suspects()

    def load(self) -> Load:
        return Load(3, 8, frozenset({"a", "b"}), frozenset({"a"}))

    def failures(self, endpoint: str, code: str) -> float | None:
        labels = {"endpoint": endpoint, "drafter": "" if endpoint == "plain" else endpoint, "code": code}
        return self.registry.get_sample_value("alphaloop_endpoint_failures_total", labels)


def test_failures_are_counted_by_endpoint_and_kind_from_zero() -> None:
    servers = Servers()
    for error in (RequestRefused(), RequestRefused(), StoreError("of a kind that no server has")):
        servers.fleet.failed("ngram", error)
    assert [servers.failures("ngram", code) for code in ("request_refused", "reply_cut", "other")] == [2, 0, 1]
    assert servers.failures("plain", "request_refused") == 0


def test_a_job_under_suspicion_is_shown_until_it_is_given_up_and_then_as_a_killer() -> None:
    servers, shown = Servers(), set()
    servers.simulation.send([SimulatedJob("killer", takes_s=9.0, kills_after_s=1.0)])
    for _ in range(600):
        servers.simulation.run(1.0)
        names = "alphaloop_requests_alone", "alphaloop_requests_killed_servers_total"
        shown.add(tuple(map(servers.registry.get_sample_value, names)))
    assert shown == {(0, 0), (1, 0), (0, 1)}
    assert sum(servers.failures(endpoint.name, "reply_cut") or 0 for endpoint in ENDPOINTS) == 4
    assert servers.registry.get_sample_value("alphaloop_requests_waiting_for_route") == 2


def test_the_load_of_others_is_shown_while_a_server_tells_it() -> None:
    servers = Servers()

    def shown(name: str) -> list[float | None]:
        labels = [{"endpoint": one, "drafter": "" if one == "plain" else one} for one in ("plain", "ngram")]
        return [servers.registry.get_sample_value(f"alphaloop_endpoint_{name}", one) for one in labels]

    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 0], [None, None])
    servers.fleet.load.told("ngram", 7, 2)
    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 1], [None, 5])
    servers.simulation.clock.pass_s(10.0)
    assert (shown("whole_load_known"), shown("others_in_flight")) == ([0, 0], [None, None])
