"""Which draft lengths a vLLM server should be started with, by batch size, as decisions expect them to pay.

For a server that drafts for others too, or without alphaloop's scheduler class: vLLM then has one k for all requests,
and `num_speculative_tokens_per_batch_size` sets it by their number.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from alphaloop.deciding.batch_sizes import BatchSizes, WeighedTask, draft_lengths_by_batch
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import AlphaloopError, ConfigError, UnknownName
from alphaloop.explaining.explanation import AsAWorker, usual_request
from alphaloop.server_identity import SERVERS
from alphaloop.settings import Settings
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.store.arrivals import ArrivalStore
from alphaloop.store.database import Database
from alphaloop.store.spending import SpendingStore, SpentBy
from alphaloop.store.task_figures import TaskFigures, task_figures
from alphaloop.wording import how_many, one_line, share, share_with_interval

#: Traffic that tasks are weighed by.
TRAFFIC: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class AdvisedTask:
    """A task that the endpoint's target serves."""

    task: str
    share: float  #: of the tokens of these tasks
    num_measured_jobs: float  #: weighted jobs that its acceptance rests on; 0: borrowed from other tasks

    @property
    def shown(self) -> str:
        """`sql 0.62`, `chat 0.38 (borrowed)`."""
        return f"{one_line(self.task)} {share(self.share)}" + ("" if self.num_measured_jobs else " (borrowed)")


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer for one endpoint; without `ranges` it is not known, for the reason given."""

    endpoint: str
    drafter: str | None
    unknown_because: str = ""
    tasks: Sequence[AdvisedTask] = ()
    batches: Sequence[int] = ()  #: at which both vanilla and the drafter were measured, or a neighbour of each
    widths: Sequence[float] = ()  #: of the target's passes; of whole rounds where these are timed
    ranges: Sequence[BatchSizes] = ()
    started_with: Mapping[str, Any] = field(default_factory=dict)  #: the speculative config, as far as it is known
    notes: Sequence[str] = ()

    @property
    def is_worth_it(self) -> bool:
        """Whether any batch size drafts."""
        return any(sizes.num_draft_tokens for sizes in self.ranges)

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """For `--speculative-config`; None where nothing is known, or drafts do not pay at any batch size."""
        if not self.is_worth_it:
            return None
        schedule = [[sizes.first, sizes.last, sizes.num_draft_tokens] for sizes in self.ranges]
        most = max(sizes.num_draft_tokens for sizes in self.ranges)
        return {
            **self.started_with,
            "num_speculative_tokens": most,
            "num_speculative_tokens_per_batch_size": schedule,
        }

    @property
    def option(self) -> str | None:
        """`--speculative-config '{…}'` as a shell takes it; None where there is none."""
        config = self.speculative_config
        return None if config is None else f"--speculative-config {shlex.quote(json.dumps(config))}"

    @property
    def sentence(self) -> str:
        """What is advised, in one paragraph."""
        name, drafter = one_line(self.endpoint), one_line(self.drafter or "")
        if not self.ranges:
            return f"{name}: not known, because {one_line(self.unknown_because)}."
        basis = (
            f"from acceptance and costs measured at {', '.join(map(str, self.batches))} requests at once and widths "
            f"{', '.join(f'{width:g}' for width in self.widths)}, over {how_many(len(self.tasks), 'task')} by share of "
            f"tokens: {', '.join(task.shown for task in self.tasks)}."
        )
        if not self.is_worth_it:
            return f"{name}: {drafter} is not expected to pay at any batch size, {basis}"
        drafting = [sizes for sizes in self.ranges if sizes.num_draft_tokens]
        return f"{name}: {drafter} is expected to pay up to a batch size of {drafting[-1].last}, {basis}"

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Batch sizes, k, and the expected speed-up over vanilla at the least and the greatest of them."""
        rows = []
        for sizes in self.ranges:
            name = str(sizes.first) if sizes.first == sizes.last else f"{sizes.first}-{sizes.last}"
            if sizes.at_first is None:
                rows.append((name, "0", "not measured", ""))
            elif not sizes.num_draft_tokens:
                rows.append((name, "0", "vanilla", "vanilla"))
            else:
                gains = share_with_interval(sizes.at_first), share_with_interval(sizes.at_last)
                rows.append((name, str(sizes.num_draft_tokens), *gains))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Figures as numbers; null where they are not known."""
        return {
            "endpoint": self.endpoint,
            "drafter": self.drafter,
            "unknown_because": self.unknown_because or None,
            "is_worth_it": self.is_worth_it if self.ranges else None,
            "tasks": [asdict(task) for task in self.tasks],
            "measured_batches": list(self.batches),
            "measured_widths": list(self.widths),
            "ranges": [
                {
                    "first": sizes.first,
                    "last": sizes.last,
                    "num_draft_tokens": sizes.num_draft_tokens,
                    "at_first": None if sizes.at_first is None else asdict(sizes.at_first),
                    "at_last": None if sizes.at_last is None else asdict(sizes.at_last),
                }
                for sizes in self.ranges
            ],
            "speculative_config": self.speculative_config,
            "option": self.option,
            "notes": list(self.notes),
        }


def advise(database: Database, settings: Settings, name: str, now: datetime) -> Advice:
    """The advice for a configured endpoint.

    Raises UnknownName for one that is not configured, ConfigError for a server that is no vLLM.
    """
    endpoint = _endpoint(settings, name)
    advice = Advice(name, endpoint.drafter)
    if endpoint.drafter is None:
        return replace(advice, unknown_because="nothing drafts there, so neither acceptance nor costs were measured")
    started_with: Mapping[str, Any] = {}
    if settings.models.target.engine == "vllm" and (started := settings.models.drafting_in_vllm) is not None:
        started_with = started.speculative_config
        if started_with["method"] == "ngram":
            return replace(
                advice,
                unknown_because=(
                    "alphaloop's look-up drafts there, for each request as it asks; vLLM alone would draft n-grams, "
                    "which were not measured"
                ),
            )
    target = settings.models.target.name
    try:
        worker = AsAWorker(database, settings, now, target if target in settings.bindings.targets else None)
    except AlphaloopError as error:
        return replace(advice, unknown_because=error.message)
    drafter = next((state for state in worker.fleet.drafters if state.name == endpoint.drafter), None)
    if drafter is None or not worker.fleet.engine.device.startswith(SERVERS):
        return replace(advice, unknown_because=f"no worker that asks servers says that it uses {endpoint.drafter}")
    return _of_drafter(database, settings, replace(advice, started_with=started_with), worker, drafter, now)


def _endpoint(settings: Settings, name: str) -> EndpointSettings:
    endpoints = settings.models.endpoints
    if (endpoint := endpoints.get(name)) is None:
        known = f"one of {', '.join(endpoints)}" if endpoints else "none is configured: [models.endpoints.NAME]"
        raise UnknownName(f"no endpoint {name[:100]!r} in configs/models.toml", hint=known)
    if endpoint.kind != "vllm":
        raise ConfigError(
            f'models.endpoints.{name}.kind: expected "vllm", found {endpoint.kind!r}',
            hint="the option with a draft length by batch size is vLLM's",
        )
    return endpoint


def _of_drafter(
    database: Database, settings: Settings, advice: Advice, worker: AsAWorker, drafter: DrafterState, now: datetime
) -> Advice:
    target, figures = settings.models.target.name, task_figures(database)
    spent = SpendingStore(database, settings.prices).by(SpentBy.TASK, now - TRAFFIC, now)
    num_tokens = {row.name: row.num_tokens for row in spent if settings.bindings.is_of(target, row.name)}
    if not (total := sum(num_tokens.values())):
        return replace(advice, unknown_because=f"no job of {target} was decoded in the last {TRAFFIC.days} days")
    weighed, tasks = list[WeighedTask](), list[AdvisedTask]()
    for task, number in sorted(num_tokens.items(), key=lambda pair: (-pair[1], pair[0])):
        request = worker.asked(usual_request(figures.get(task) or TaskFigures(task), now, is_now=True))
        snapshot = worker.decide(request)
        seen = snapshot.seen.get(drafter.name)
        posterior = snapshot.groups[0].posteriors[drafter.name]
        weighed.append(WeighedTask(number / total, posterior, snapshot.context.size))
        tasks.append(AdvisedTask(task, number / total, seen.jobs if seen is not None and any(seen.trials) else 0.0))
    advice = replace(advice, tasks=tasks)
    if not any(task.num_measured_jobs for task in tasks):
        names = ", ".join(task.task for task in tasks)
        return replace(advice, unknown_because=f"the acceptance of {drafter.name} was not measured in {names}")
    costs = worker.costs
    most = _most_seen(database, settings, now) if costs.is_of_servers else None
    ranges = draft_lengths_by_batch(weighed, drafter, costs, most=most)
    if not ranges:
        return replace(advice, unknown_because=f"no costs of vanilla and of {drafter.name} were measured together")
    planes = costs.measured(None), costs.measured(drafter.name)
    widths = planes[1 if costs.is_served(drafter.name) else 0]
    return replace(
        advice,
        batches=sorted(batch for batch in {*planes[0], *planes[1]} if batch <= ranges[-1].last),
        widths=sorted({width for line in widths.values() for width in line}),
        ranges=ranges,
        notes=_notes(advice, ranges, is_of_requests=costs.is_of_servers),
    )


def _most_seen(database: Database, settings: Settings, now: datetime) -> int | None:
    """The most requests that were in flight together at a server: costs of requests hold no further."""
    target, is_alone = settings.models.target.name, not settings.bindings.targets
    seen = ArrivalStore(database).seen(now - TRAFFIC, now)
    return max((arrivals.most_running for arrivals in seen if is_alone or arrivals.target == target), default=None)


def _notes(advice: Advice, ranges: Sequence[BatchSizes], *, is_of_requests: bool) -> list[str]:
    last = ranges[-1]
    notes = []
    if last.num_draft_tokens:
        notes.append(
            f"Nothing was measured above a batch size of {last.last}: vLLM goes on with k = {last.num_draft_tokens} "
            f"there, unless --max-num-seqs is {last.last}."
        )
    else:
        notes.append(f"Nothing was measured above a batch size of {last.last}: vLLM does not draft there.")
    if is_of_requests:
        notes.append("Costs were learned from the times of requests, not of single steps.")
    if not advice.started_with and any(sizes.num_draft_tokens for sizes in ranges):
        notes.append("Add what else the server is started with, as method and model: alphaloop does not know it.")
    return notes
