"""The worker's Prometheus metrics. Labels are bounded: tasks, drafters, reasons, servers, never jobs or callers.

Where vLLM has a metric for the same thing its name is kept under our prefix, so that dashboards carry over.
α_i over any window is `rate(alphaloop_spec_decode_accepts_total) / rate(alphaloop_spec_decode_trials_total)`, of
purpose="traffic": probes have prompts and a k of their own.
"""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from alphaloop import __version__
from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import AsksServers, EndpointState, EndpointStatus, Engine, Step, SuspectCounts
from alphaloop.errors import PromptTooLong, ServerError
from alphaloop.liveness import Pulse
from alphaloop.store.job_counts import DecodeRun
from alphaloop.store.outcomes import Outcome
from worker.costs.learning import KnownCosts
from worker.intake.polling import Intake

#: A step and its parts: look-up on a CPU takes microseconds, a wide pass of a large model a second.
STEP_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
#: Between two tokens: fractions of a millisecond on a fast device, a second on a slow one.
TOKEN_S = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 3)
LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class WorkerMetrics:
    """Counters and gauges of one worker process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # when the process started, its memory and its processor time
        self._open_jobs()
        self._open_decoding()
        self._open_steps()
        self._build = Gauge(
            "alphaloop_build_info", "What runs", ["version", "engine", "target", "device"], registry=self.registry
        )

    def _open_jobs(self) -> None:
        """What becomes of messages and jobs."""
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self._jobs = counter("alphaloop_jobs", "Recorded outcomes", ["task", "purpose", "status"])
        self.dead_letters = counter("alphaloop_dead_letters", "Refused messages", ["code"])
        self._results_refused = counter(
            "alphaloop_results_refused", "Results that Kafka refused, by what was done", ["code", "done"]
        )
        self.set_aside = gauge("alphaloop_results_set_aside", "Results in the outbox that wait for a person")
        self._chunks_dropped = counter("alphaloop_chunks_dropped", "Streamed chunks that Kafka did not take", ["code"])
        self._topics = gauge("alphaloop_topic_unavailable", "1 while no message reaches the topic", ["topic"])
        self.letters_shortened = counter(
            "alphaloop_dead_letters_shortened", "Dead letters published without their whole message"
        )
        self.retried = counter("alphaloop_jobs_retried", "Failed jobs that are tried again", ["code"])
        self.answered_again = counter("alphaloop_jobs_answered_again", "Redeliveries answered from the record")
        self._reused = counter("alphaloop_jobs_reused", "Jobs answered with the text of an equal job", ["task"])
        self.fenced = counter("alphaloop_outcomes_fenced", "Outcomes dropped because the claim was lost")
        self.decisions = counter("alphaloop_decisions", "Decided batches", ["task", "mode", "reason"])

    def _open_decoding(self) -> None:
        """Tokens, device time and latency of jobs, and how their drafts fared."""
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._prompt_tokens = counter("alphaloop_prompt_tokens", "Tokens of prompts", ["task"])
        by_mode = ["task", "mode"]
        self._tokens = counter("alphaloop_generation_tokens", "Tokens generated", by_mode)
        self._device_s = counter("alphaloop_device_seconds", "Engine seconds", by_mode)
        spec = ["task", "drafter", "purpose"]
        self._rounds = counter("alphaloop_spec_decode_rounds", "Rounds of speculative jobs", spec)
        spec = [*spec, "position"]
        self._proposed = counter("alphaloop_spec_decode_proposed", "Proposed tokens", spec)
        self._trials = counter("alphaloop_spec_decode_trials", "Tested draft positions", spec)
        self._accepts = counter("alphaloop_spec_decode_accepts", "Accepted draft positions", spec)
        latency = partial(histogram, buckets=LATENCY_S)
        self._queue = latency("alphaloop_request_queue_time_seconds", "Waiting", ["task"])
        self._first = latency("alphaloop_time_to_first_token_seconds", "First token", by_mode)
        self._per_token = histogram(
            "alphaloop_time_per_output_token_seconds",
            "Between two tokens after the first, mean of a job",
            by_mode,
            buckets=TOKEN_S,
        )
        self._decode = latency("alphaloop_request_decode_time_seconds", "Decoding", by_mode)
        self._whole = latency(
            "alphaloop_e2e_request_latency_seconds", "From a job's arrival at the worker to its last token", by_mode
        )

    def _open_steps(self) -> None:
        """What steps of the engine took."""
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._steps = histogram("alphaloop_step_seconds", "Engine steps", buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))
        self._parts = {
            name: histogram(f"alphaloop_step_{name}_seconds", help_text, buckets=STEP_S)
            for name, help_text in (
                ("draft", "Of a step with drafts, proposing"),
                ("verify", "Of a step with a round, the target's pass and its verification"),
                ("overhead", "Of a step with a round, what is neither draft nor pass"),
            )
        }
        self._batch = histogram("alphaloop_step_batch_size", "Sequences a step", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
        self._width = histogram(
            "alphaloop_step_width", "Target positions a sequence", buckets=(1, 2, 3, 5, 9, 17, 33, 65)
        )
        self._prefill = counter("alphaloop_step_prefill_tokens", "Tokens of prompts read")
        self._prefix_cache_hits = counter("alphaloop_prefix_cache_hits", "Texts that began with a cached prefix")
        self._prefix_cache_tokens = counter("alphaloop_prefix_cache_tokens", "Prompt tokens from the prefix cache")
        self._prefix_cache_bytes = gauge("alphaloop_prefix_cache_bytes", "Of cached prefixes, after the last step")
        self._shadow = counter(
            "alphaloop_shadow_seconds", "Beside steps, scoring drafters on texts they did not decode"
        )
        self._drafter_failures = counter(
            "alphaloop_drafter_failures", "Times that a drafter raised; its texts went on vanilla", ["drafter"]
        )

    def watch(self, intake: Intake, num_waiting: Callable[[], int]) -> None:
        """Read these gauges at every scrape."""
        for name, help_text, read in (
            ("intake_in_flight", "Messages taken and not finished", lambda: intake.num_in_flight),
            ("watermark_distance", "Offsets a restart would read again", lambda: intake.distance),
            ("intake_poll_age_seconds", "Since the consumer was polled", lambda: intake.poll_age_s),
            ("num_requests_waiting", "Jobs waiting for a slot", num_waiting),
        ):
            Gauge(f"alphaloop_{name}", help_text, registry=self.registry).set_function(read)

    def watch_pulses(self, pulses: Sequence[Pulse]) -> None:
        """Show at every scrape how long each thread, and the engine's step, have not moved."""
        help_text = "Since it last moved; 0 while it does not run"
        silence = Gauge("alphaloop_silence_seconds", help_text, ["part"], registry=self.registry)
        for pulse in pulses:
            silence.labels(pulse.name).set_function(partial(getattr, pulse, "silence_s"))

    def watch_costs(self, costs: KnownCosts) -> None:
        """Show at every scrape how much slower than calibrated the target and each drafter are."""
        help_text = "Time of rounds over what was calibrated, by what was timed"
        level = Gauge("alphaloop_cost_level", help_text, ["part"], registry=self.registry)
        for part in costs.parts:
            level.labels(part or "target").set_function(partial(costs.level, part))

    def watch_engine(self, engine: Engine) -> None:
        """Show the engine, target and device, and at every scrape how its servers are."""
        identity = engine.identity
        self._build.labels(__version__, identity.engine, identity.target, identity.device).set(1)
        self.registry.register(EndpointMetrics(engine))

    def stepped(self, step: Step) -> None:
        """Observe an engine step."""
        self._steps.observe(step.wall_s)
        self._batch.observe(step.batch)
        self._prefill.inc(step.num_prefill_tokens)
        self._prefix_cache_hits.inc(step.num_prefix_cache_hits)
        self._prefix_cache_tokens.inc(step.num_prefix_cache_tokens)
        self._prefix_cache_bytes.set(step.prefix_cache_bytes)
        self._shadow.inc(step.shadow_s)
        for drafter, num_failures in step.drafter_failures.items():
            self._drafter_failures.labels(drafter).inc(num_failures)
        if step.verify_s > 0:
            self._width.observe(step.width)
            self._parts["verify"].observe(step.verify_s)
            self._parts["overhead"].observe(step.overhead_s)
        if step.draft_s > 0:
            self._parts["draft"].observe(step.draft_s)

    def recorded(self, task: str, purpose: str, outcomes: Sequence[Outcome]) -> None:
        """Count outcomes of a task and a purpose that won their record, with their tokens and acceptance.

        They are counted together, because finding the counter of a label takes longer than adding to it.
        """
        for status, num_jobs in CountOf(outcome.status for outcome in outcomes).items():
            self._jobs.labels(task, purpose, status).inc(num_jobs)
        if num_reused := sum(outcome.reused is not None for outcome in outcomes):
            self._reused.labels(task).inc(num_reused)
        if not (runs := [outcome.run for outcome in outcomes if outcome.run is not None]):
            return
        self._prompt_tokens.labels(task).inc(sum(run.num_prompt_tokens for run in runs))
        queue = self._queue.labels(task)
        for run in runs:
            queue.observe(run.queue_s)
        for mode in {run.mode for run in runs}:
            alike = [run for run in runs if run.mode == mode]
            self._took(task, mode, alike)
            self._tokens.labels(task, mode).inc(sum(run.num_tokens for run in alike))
            self._device_s.labels(task, mode).inc(sum(run.device_s for run in alike))
        for drafter in {run.key.drafter for run in runs} - {""}:
            self._drafted((task, drafter, purpose), [run.counts for run in runs if run.key.drafter == drafter])

    def _took(self, task: str, mode: str, runs: Sequence[DecodeRun]) -> None:
        decode, whole = self._decode.labels(task, mode), self._whole.labels(task, mode)
        first, per_token = self._first.labels(task, mode), self._per_token.labels(task, mode)
        for run in runs:
            decode.observe(run.wall_s)
            whole.observe(run.queue_s + run.wall_s)
            if run.time_to_first_token_s is None:
                continue
            first.observe(run.time_to_first_token_s)
            if run.num_tokens > 1:
                per_token.observe((run.wall_s - run.time_to_first_token_s) / (run.num_tokens - 1))

    def _drafted(self, labels: tuple[str, str, str], counts: Sequence[AcceptanceCounts]) -> None:
        self._rounds.labels(*labels).inc(sum(drafted.rounds for drafted in counts))
        for metric, of_jobs in (
            (self._proposed, [drafted.proposed for drafted in counts]),
            (self._trials, [drafted.trials for drafted in counts]),
            (self._accepts, [drafted.accepts for drafted in counts]),
        ):
            for position, numbers in enumerate(zip_longest(*of_jobs, fillvalue=0), start=1):
                metric.labels(*labels, str(position)).inc(sum(numbers))

    def result_refused(self, code: str, done: str) -> None:
        """Count a result that Kafka refused, and what was done: replaced, set_aside or not_repeated."""
        self._results_refused.labels(code, done).inc()

    def chunk_dropped(self, code: str) -> None:
        """Count a chunk that is not published."""
        self._chunks_dropped.labels(code).inc()

    def topic_unavailable(self, topic: str, is_unavailable: bool) -> None:
        """Show that no message reaches a topic; a topic that works again is shown no longer."""
        if is_unavailable:
            self._topics.labels(topic).set(1)
        else:
            self._topics.remove(topic)


class EndpointMetrics(Collector):
    """Metrics of the inference servers that an engine sends jobs to, read at every scrape.

    Labels are names of the settings and codes of errors, so they are few. Where this process decodes, there are no
    servers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._servers = engine if isinstance(engine, AsksServers) else None

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        servers, num_waiting = self._servers, len(self._engine.load().waiting)
        yield from self._of_each(servers.endpoints() if servers else ())
        suspects = servers.suspects() if servers else SuspectCounts()
        alone = "Jobs that failed and have to run alone at a server, or do"
        yield GaugeMetricFamily("alphaloop_requests_alone", alone, value=suspects.num_alone)
        killers = "Jobs that failed for good because servers died with them"
        yield CounterMetricFamily("alphaloop_requests_killed_servers", killers, value=suspects.num_killers)
        waiting = "Jobs in the engine that wait for servers of their own, because others may not take them"
        yield GaugeMetricFamily("alphaloop_requests_waiting_for_route", waiting, value=num_waiting)

    def _of_each(self, statuses: Sequence[EndpointStatus]) -> Iterable[Metric]:
        labels = ["endpoint", "drafter"]
        for name, help_text, read in _OF_EACH:
            family = GaugeMetricFamily(f"alphaloop_endpoint_{name}", help_text, labels=labels)
            for status in statuses:
                if (value := read(status)) is not None:
                    family.add_metric([status.name, status.drafter or ""], value)
            yield family
        help_text = "1 for the state of an inference server"
        state = GaugeMetricFamily("alphaloop_endpoint_state", help_text, labels=[*labels, "state"])
        help_text = "Requests that failed at the server"
        failed = CounterMetricFamily("alphaloop_endpoint_failures", help_text, labels=[*labels, "code"])
        for status in statuses:
            names = [status.name, status.drafter or ""]
            for known_state in _STATES:
                state.add_metric([*names, known_state], float(known_state == status.state))
            for code in _FAILURES:
                failed.add_metric([*names, code], status.num_failed.get(code, 0))
            num_other = sum(number for code, number in status.num_failed.items() if code not in _FAILURES)
            failed.add_metric([*names, _OTHER], num_other)
        yield from (state, failed)


#: Gauges of each server: name, help text, and what reads it; None where the server does not report it.
_OF_EACH: Final[tuple[tuple[str, str, Callable[[EndpointStatus], float | None]], ...]] = (
    ("in_flight", "Requests at an inference server", lambda status: status.num_in_flight),
    ("limit", "Requests that the server may have now; 0 where it gets none", lambda status: status.limit),
    ("state_seconds", "In that state", lambda status: status.since_s),
    (
        "undrafted_in_flight",
        "Of the requests at a server that switches drafts, those without drafts",
        lambda status: status.num_undrafted,
    ),
    (
        "switches_drafts",
        "1 where a server that shall leave out drafts for one request does so",
        lambda status: None if status.num_undrafted is None else float(status.is_obeying),
    ),
    (
        "whole_load_known",
        "1 where the server told a moment ago how many requests it has, whoever sent them",
        lambda status: float(status.is_whole_load_known),
    ),
    (
        "others_in_flight",
        "Requests of other clients at the server, where it tells its load",
        lambda status: status.num_others,
    ),
    ("kept", "Places that stay free for requests of other clients", lambda status: status.num_kept),
    (
        "held",
        "Requests that wait while the server gets nothing new, for the sake of other clients",
        lambda status: status.held.num if status.held else 0,
    ),
)
_STATES: Final[tuple[EndpointState, ...]] = get_args(EndpointState)


def _codes_below(error: type[ServerError]) -> Iterable[str]:
    for below in error.__subclasses__():
        yield below.code
        yield from _codes_below(below)


#: All are shown from the start: a counter that begins at 1 has not grown, for Prometheus.
_FAILURES: Final = (PromptTooLong.code, *_codes_below(ServerError))
_OTHER: Final = "other"
