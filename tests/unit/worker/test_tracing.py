"""The spans of a job: their parents, their times, what they say, and what they never say."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.errors import ConfigError
from alphaloop.settings import Settings, TracingSettings
from alphaloop.store.outcomes import Outcome
from tests.fakes import FakeEngine
from tests.fixtures.publishing import claimed_job
from tests.fixtures.runs import decode_run
from worker.recording import EndedJob, open_tracing
from worker.tracing import Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
DECODED = datetime(2026, 11, 23, 12, 0, 10, tzinfo=UTC)
SECRET = "the quick brown fox"


def traced(*, sampled: str | None = "01", status: str = "succeeded") -> EndedJob:
    body = json.dumps({"job_id": "j1", "body": {"prompt": SECRET, "max_tokens": 20, "temperature": 0.5}})
    counts = AcceptanceCounts(rounds=4, proposed=(4, 4), trials=(4, 3), accepts=(3, 2))
    run = replace(
        decode_run(counts, device_s=1.5, at=DECODED), num_prompt_tokens=5, num_tokens=9, queue_s=3.0, wall_s=2.0
    )
    succeeded = status == "succeeded"
    result = {"text": SECRET, "finish_reason": "stop"} if succeeded else {"error": {"code": "engine_failed"}}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{sampled}"} if sampled else {}
    outcome = Outcome("j1", 3, status, json.dumps(result).encode(), "results", headers, run if succeeded else None)
    return EndedJob(claimed_job("j1", attempt=3, value=body.encode()), outcome)


class Clock:
    """Two seconds pass between two looks: the commit, and each acknowledgement."""

    def __init__(self) -> None:
        self.now = DECODED

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=2)
        return self.now


def spans_of(*jobs: EndedJob) -> dict[str, ReadableSpan]:
    memory = InMemorySpanExporter()
    spans = Tracing(
        TracingSettings(),
        FakeEngine().identity,
        owner="w1",
        group_id="workers",
        now=Clock(),
        processor=SimpleSpanProcessor(memory),
    )
    for trace in spans.recorded(jobs):
        trace.published()
    spans.close()
    return {span.name: span for span in memory.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Begin and end, from the end of decoding on."""
    return span.start_time / 1e9 - DECODED.timestamp(), span.end_time / 1e9 - DECODED.timestamp()


def test_the_spans_follow_the_job_from_its_arrival_to_its_result() -> None:
    target = FakeEngine().identity.target
    found = spans_of(traced())
    assert {name: seconds(span) for name, span in found.items()} == {
        "process jobs.code": (-5.0, 4.0),
        "wait": (-5.0, -2.0),
        f"text_completion {target}": (-2.0, 0.0),
        "record": (0.0, 2.0),
        "send results": (2.0, 4.0),
    }
    whole = found.pop("process jobs.code")
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert all(span.parent and span.parent.span_id == whole.context.span_id for span in found.values())
    assert {f"{span.context.trace_id:032x}" for span in (whole, *found.values())} == {TRACE}


def test_decoding_is_described_in_the_words_of_the_conventions() -> None:
    found = dict(spans_of(traced())[f"text_completion {FakeEngine().identity.target}"].attributes or {})
    assert found["gen_ai.operation.name"] == "text_completion"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (5, 9)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (20, 0.5)
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert "gen_ai.request.seed" not in found
    assert (found["alphaloop.decoding.num_proposed"], found["alphaloop.decoding.num_accepted"]) == (8, 5)


def test_no_span_holds_text_of_the_prompt_or_the_result() -> None:
    assert all(SECRET not in span.to_json() for span in spans_of(traced()).values())


def test_a_failed_job_says_its_code_and_has_no_decoding() -> None:
    found = spans_of(traced(status="failed"))
    assert set(found) == {"process jobs.code", "record", "send results"}
    whole = found["process jobs.code"]
    assert (whole.attributes or {})["error.type"] == "engine_failed"
    assert not whole.status.is_ok


@pytest.mark.parametrize(
    ("sampled", "share", "num_spans"), [("00", "1.0", 0), ("01", "0.0", 5), (None, "0.0", 0), (None, "1.0", 5)]
)
def test_a_job_with_a_trace_does_as_its_trace_says_and_the_share_holds_for_others(
    monkeypatch: pytest.MonkeyPatch, sampled: str | None, share: str, num_spans: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    assert len(spans_of(traced(sampled=sampled))) == num_spans


def settings_with(endpoint: str) -> Settings:
    return Settings.model_validate({"tracing": {"endpoint": endpoint}})


def test_a_collector_gets_the_spans_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20t0k3n")
    came: list[tuple[str | None, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.headers["Authorization"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.handle_request)
        settings = settings_with(f"http://127.0.0.1:{server.server_port}/v1/traces")
        spans = open_tracing(settings, FakeEngine().identity, owner="w1", now=Clock())
        for trace in spans.recorded([traced()]):
            trace.published()
        spans.close()
    ((credentials, body),) = came
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("alphaloop-worker", "w1")
    assert len(resource.scope_spans[0].spans) == 5
    assert credentials == "Bearer t0k3n"


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert open_tracing(Settings(), FakeEngine().identity, owner="w1", now=Clock()) is None


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "worker.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: needs the package .* is not installed") as found:
        open_tracing(settings_with("http://127.0.0.1:1/v1/traces"), FakeEngine().identity, owner="w1", now=Clock())
    assert "alphaloop[tracing]" in (found.value.hint or "")
