"""The way of a job as OpenTelemetry spans: received, waiting, decoded, recorded, its result on Kafka.

    process jobs.code            CONSUMER   from the message's arrival to the acknowledgement of the result
      wait                       INTERNAL   until decoding begins
      chat SmolLM2-135M          INTERNAL   decoding, with the attributes of OpenTelemetry's GenAI conventions
      record                     INTERNAL   until Postgres has committed the outcome
      send results               PRODUCER   until the broker has acknowledged the result

All are made when the outcome is committed, from times that the worker keeps anyway, so decoding does no work for them.
The parent is the job's `traceparent`. Attributes hold names, counts and settings, and never text of a prompt or of a
result. Sources: OpenTelemetry semantic conventions for messaging and for generative AI (both in development).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from alphaloop import __version__
from alphaloop.engine import EngineIdentity
from alphaloop.messages import Status as JobStatus
from alphaloop.settings import TracingSettings
from alphaloop.store.job_counts import DecodeRun

if TYPE_CHECKING:
    from worker.recording import EndedJob


_Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CLOSE_MS: Final = 3000
SERVICE_NAME: Final = "alphaloop-worker"
#: Fields of a body that have the same name in the conventions.
_ASKED: Final = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class Tracing:
    """Makes the spans of jobs. Called by the recorder's thread; spans are sent by a thread of the SDK.

    The queue of that thread is bounded. A collector that is away costs spans, and never a job or its time.
    """

    def __init__(
        self,
        settings: TracingSettings,
        identity: EngineIdentity,
        *,
        owner: str,
        group_id: str,
        now: Callable[[], datetime],
        processor: SpanProcessor | None = None,
    ) -> None:
        """Spans go to the settings' endpoint over HTTP, unless another `processor` is given.

        The SDK reads its own variables of the environment: the sampler, and headers with the collector's credentials.
        """
        self._identity, self._group_id, self._now = identity, group_id, now
        self._provider = TracerProvider(
            resource=Resource.create(
                {
                    "service.name": SERVICE_NAME,
                    "service.version": __version__,
                    "service.instance.id": owner,
                    "host.name": identity.host,
                }
            ),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=settings.endpoint)
        self._provider.add_span_processor(processor or BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("alphaloop", __version__)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()

    def recorded(self, jobs: Sequence[EndedJob]) -> Iterator[JobTrace]:
        """Begin the trace of each sampled job whose outcome was committed; its parts up to the commit are over."""
        at = self._now()
        for ended in jobs:
            run, record = ended.outcome.run, ended.claimed.ready.delivery.record
            decoded_at = run.decoded_at if run else at
            decoding_began = decoded_at - timedelta(seconds=run.wall_s if run else 0.0)
            arrived = decoding_began - timedelta(seconds=run.queue_s if run else 0.0)
            whole = self._tracer.start_span(
                f"process {record.topic}",
                context=_PROPAGATOR.extract(ended.outcome.headers, Context()),
                kind=SpanKind.CONSUMER,
                start_time=_ns(arrived),
            )
            if not whole.is_recording():
                continue
            result = json.loads(ended.outcome.result)
            whole.set_attributes(self._job_attributes(ended))
            if ended.outcome.status != JobStatus.SUCCEEDED.value:
                code = str((result.get("error") or {}).get("code") or ended.outcome.status)
                whole.set_attribute("error.type", code)
                whole.set_status(Status(StatusCode.ERROR, ended.outcome.status))
            inside = set_span_in_context(whole, Context())
            if run:
                self._span("wait", inside, arrived, decoding_began, {})
                operation = "chat" if ended.claimed.ready.job.body.messages is not None else "text_completion"
                self._span(
                    f"{operation} {self._identity.target}",
                    inside,
                    decoding_began,
                    decoded_at,
                    self._decoding_attributes(ended, run, operation, _finish_reasons(result)),
                )
            self._span("record", inside, decoded_at, at, {"db.system.name": "postgresql"})
            sending = self._tracer.start_span(
                f"send {ended.outcome.topic}",
                context=inside,
                kind=SpanKind.PRODUCER,
                start_time=_ns(at),
                attributes={
                    "messaging.system": "kafka",
                    "messaging.operation.type": "send",
                    "messaging.operation.name": "send",
                    "messaging.destination.name": ended.outcome.topic,
                },
            )
            yield JobTrace(whole, sending, self._now)

    def _span(self, name: str, inside: Context, begin: datetime, end: datetime, attributes: _Attributes) -> None:
        span = self._tracer.start_span(name, context=inside, start_time=_ns(begin), attributes=dict(attributes))
        span.end(_ns(max(begin, end)))

    def _job_attributes(self, ended: EndedJob) -> _Attributes:
        job, record = ended.claimed.ready.job, ended.claimed.ready.delivery.record
        return {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": str(record.partition),
            "messaging.kafka.offset": record.offset,
            "messaging.consumer.group.name": self._group_id,
            "alphaloop.job.id": job.job_id,
            "alphaloop.job.task": job.task,
            "alphaloop.job.purpose": job.purpose.value,
            "alphaloop.job.attempt": ended.outcome.attempt,
            "alphaloop.job.status": ended.outcome.status,
        }

    def _decoding_attributes(
        self, ended: EndedJob, run: DecodeRun, operation: str, finish_reasons: Sequence[str]
    ) -> _Attributes:
        body = ended.claimed.ready.job.body
        asked = {
            "gen_ai.request.model": body.model or self._identity.target,
            **{f"gen_ai.request.{name}": getattr(body, name) for name in _ASKED},
            "alphaloop.time_to_first_token_s": run.time_to_first_token_s,
        }
        return {
            **{name: value for name, value in asked.items() if value is not None},
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "alphaloop",
            "gen_ai.response.model": self._identity.target,
            "gen_ai.response.finish_reasons": finish_reasons,
            "gen_ai.usage.input_tokens": run.num_prompt_tokens,
            "gen_ai.usage.output_tokens": run.num_tokens,
            "alphaloop.decoding.mode": run.mode,
            "alphaloop.decoding.drafter": run.key.drafter,
            "alphaloop.decoding.num_draft_tokens": run.num_draft_tokens,
            "alphaloop.decoding.reason": run.reason,
            "alphaloop.decoding.num_rounds": run.counts.rounds,
            "alphaloop.decoding.num_proposed": sum(run.counts.proposed),
            "alphaloop.decoding.num_accepted": sum(run.counts.accepts),
            "alphaloop.decoding.batch_size": run.batch_size,
            "alphaloop.decoding.device_s": run.device_s,
        }


class JobTrace:
    """The trace of one job, open until its result is on Kafka: two of its spans wait for the broker."""

    def __init__(self, whole: Span, sending: Span, now: Callable[[], datetime]) -> None:
        self._whole, self._sending, self._now = whole, sending, now

    def published(self) -> None:
        """The broker has acknowledged the result."""
        acknowledged_at = _ns(self._now())
        self._sending.end(acknowledged_at)
        self._whole.end(acknowledged_at)


def _finish_reasons(result: Mapping[str, Any]) -> list[str]:
    """By text."""
    return [choice["finish_reason"] for choice in result.get("choices") or [result] if choice.get("finish_reason")]


def _ns(moment: datetime) -> int:
    """Nanoseconds since 1970, as the SDK wants times."""
    return int(moment.timestamp() * 1e9)
