"""`alphaloop replay`: decide past jobs again under other settings, day by day, and compare the costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.as_decoded import percent
from alphaloop.cli.explain import check_task
from alphaloop.cli.options import AS_JSON, connected_settings, example, global_options, open_database
from alphaloop.cli.screen import out, paragraph, print_json, progress, table
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.replay import Compared, Pricing, Replay, Rules, group_of, is_given, total
from alphaloop.deciding.snapshot import JobsAlike, Snapshot
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.explaining.explanation import HISTORY
from alphaloop.messages import Purpose
from alphaloop.settings import Settings, load_settings, overridden
from alphaloop.store.database import Database
from alphaloop.store.decisions import SnapshotStore
from alphaloop.wording import how_many, moment_ago, named, second, words

#: Settings that decisions depend on and that history can replay; `*` is a name that the user chooses.
_DECIDING: Final = (
    "policy.*",
    "tasks.*.decoding",
    "tasks.*.target_time_per_token_ms",
    "tasks.*.target_time_to_first_token_ms",
    "models.drafters.*.max_draft_tokens",
)
_DAY: Final = timedelta(days=1)
_NO_COST = "no cost was known of how they were, or would have been, decoded"
_NO_SNAPSHOT = "no snapshot of their decision is stored"
_MAX_WAYS: Final = 3
_HONESTLY: Final = (
    '"measured" is the device time that the jobs took, "replayed" that time by the ratio of what both ways would take '
    "by the posteriors and the costs of each decision's snapshot. Its bounds include the doubt about α only. No job "
    "was decoded with the replayed settings: the evidence is that of the decoded jobs, exploration of the past costs "
    "the replay nothing, and a job keeps one setting, however many sequences run."
)


@example("""\
alphaloop replay --set policy.explore_share=0.0
alphaloop replay --since 7d --set models.drafters.lookup.max_draft_tokens=4
alphaloop replay --configs ./configs-to-be --task code --since 2026-09-01""")
def replay(
    context: typer.Context,
    task: str | None = typer.Option(None, help="Only this task; all, if not given."),
    since: str | None = typer.Option(None, help="From this time on: 2026-09-01, or 90m, 2h, 3d ago. 14 days at most."),
    until: str | None = typer.Option(None, help="Up to this time; now, if not given."),
    changes: list[str] = typer.Option(
        [], "--set", help="A setting to change, policy.explore_share=0.0; may be repeated."
    ),
    configs: Path | None = typer.Option(None, help="Folder of TOML files to use instead of today's."),
    seed: int = typer.Option(0, help="Seed of the random draws for exploration, controls and bounds."),
    as_json: bool = AS_JSON,
) -> None:
    """Decide past jobs again under other settings, and compare the costs.

    Takes each decision again from its snapshot, in order, with the policy that a worker uses, and compares the device
    time of these choices with that of the choices made. Writes nothing to the database.
    """
    now = datetime.now(UTC)
    end = now if until is None else moment_ago(until, now, "--until")
    begin = None if since is None else moment_ago(since, now, "--since")
    if begin is not None and begin >= end:
        raise ConfigError("--since: expected a time before --until", hint="--since 7d --until 1d")
    was = connected_settings(context, broker=False)
    would = _changed_settings(context, was, configs, changes)
    with open_database(was) as database:
        check_task(database, was, task)
        window = _window(database, task, begin, end, HISTORY)
        with progress() as bar:
            days = bar.add_task("days", total=sum(1 for _ in window.days()), note="")

            def tell(num_done: int, num_jobs: int) -> None:
                bar.update(days, completed=num_done, note=how_many(num_jobs, "job"))

            replayed = replay_history(database, rules_of(was, would), window, seed=seed, tell=tell)
    changed = [*([f"--configs {configs}"] if configs else []), *changes]
    if as_json:
        print_json(_document(replayed, changed))
    else:
        show(replayed, changed)


def _changed_settings(context: typer.Context, was: Settings, configs: Path | None, changes: list[str]) -> Settings:
    """The settings to replay with. Raises ConfigError for an unknown setting or one that no decision depends on."""
    for change in changes:
        overridden(was, [change])  # an unknown setting is the first error
        path = change.partition("=")[0].strip()
        if not any(_matches(path, known) for known in _DECIDING):
            raise ConfigError(
                f"{path}: expected a setting that a snapshot is decided with",
                hint=f"what replay can change: {', '.join(_DECIDING)}",
            )
    base = was if configs is None else load_settings(configs, profile=global_options(context).profile)
    would = overridden(base, changes)
    for name in would.models.drafters.keys() & was.models.drafters.keys():
        longest, known = (settings.models.drafters[name].max_draft_tokens for settings in (would, was))
        if longest > known:
            raise ConfigError(
                f"models.drafters.{name}.max_draft_tokens: expected at most {known}, found {longest}",
                hint="a snapshot knows nothing of longer drafts; shorter ones can be replayed",
            )
    return would


def _matches(path: str, known: str) -> bool:
    parts, pattern = path.split("."), known.split(".")
    return len(parts) == len(pattern) and all(b in ("*", a) for a, b in zip(parts, pattern, strict=True))


@dataclass(frozen=True, slots=True)
class Window:
    """What is replayed: decisions taken in [since, until), of one task or all."""

    since: datetime
    until: datetime
    task: str | None

    def days(self) -> Iterator[tuple[datetime, datetime]]:
        """Its parts by UTC day; each begins where the one before ended."""
        begin = self.since
        while begin < self.until:
            end = min(self.until, datetime.combine(begin.astimezone(UTC).date(), time(), UTC) + _DAY)
            yield begin, end
            begin = end


@dataclass(slots=True)
class Replayed:
    """The result of a replay."""

    window: Window
    tasks: dict[str, Compared] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  #: jobs by the reason that they would have had
    num_recorded: int = 0  #: decisions of the window
    num_reproduced: int = 0  #: of these, decisions that come out as they were recorded
    num_given: int = 0  #: probes, controls, and jobs whose mode the job or the engine fixed
    left_out: Counter[str] = field(default_factory=Counter)  #: jobs that were not compared, by the reason


def _window(database: Database, task: str | None, begin: datetime | None, end: datetime, longest: timedelta) -> Window:
    kept = SnapshotStore(database).first_and_last(task)
    if kept is None or kept[0] >= end or (begin is not None and kept[1] < begin):
        which = f"job of {task}" if task else "job"
        span = "" if kept is None else f"; they are from {kept[0]:%Y-%m-%d %H:%M} to {kept[1]:%Y-%m-%d %H:%M} UTC"
        raise AlphaloopError(f"expected history to replay, found no {which} in that time{span}")
    last = min(end, kept[1] + timedelta(microseconds=1))
    return Window(max(kept[0], last - longest if begin is None else begin), last, task)


def rules_of(was: Settings, would: Settings) -> Rules:
    """The settings to replay with; `was` are today's, which say what of the drafters was changed."""
    before, after = was.models.drafters, would.models.drafters
    longest = {
        name: after[name].max_draft_tokens
        for name in before.keys() & after.keys()
        if after[name].max_draft_tokens != before[name].max_draft_tokens
    }
    tasks = {name: task.rules() for name, task in would.tasks.items()}
    return Rules(would.policy.explore_share, tasks, longest, frozenset(before.keys() - after.keys()))


def replay_history(
    database: Database, rules: Rules, window: Window, *, seed: int, tell: Callable[[int, int], None]
) -> Replayed:
    """Decide the window again under `rules`; `tell` is called with days done and jobs read. Only reads.

    Memory grows with the number of incumbents and with the decisions of a day, not with the number of jobs.
    """
    replayed, store, pricing = Replayed(window), SnapshotStore(database), Pricing(seed)
    replays: dict[str, Replay] = {}
    for number, (begin, end) in enumerate(window.days()):
        for stored, jobs in store.between(begin, end, task=window.task):
            past, facts = stored.snapshot, stored.facts
            replayed.num_recorded += 1
            replayed.num_reproduced += past.is_reproduced(past.decide())
            decisions = replays.setdefault(facts.owner, Replay(rules)).decide(past, facts)
            _compare(past, decisions, jobs, pricing, replayed)
            if replayed.num_recorded % 200 == 0:
                tell(number, sum(replayed.reasons.values()))
        replayed.left_out[_NO_SNAPSHOT] += store.num_without(begin, end, task=window.task)
        tell(number + 1, sum(replayed.reasons.values()))
    return replayed


def _compare(
    past: Snapshot, decisions: Sequence[Decision], jobs: Sequence[JobsAlike], pricing: Pricing, replayed: Replayed
) -> None:
    for alike in jobs:
        number = group_of(past, alike.segment, alike.prompt_bucket, alike.form_bucket)
        if alike.purpose != Purpose.TRAFFIC or (number is not None and is_given(past, past.decisions[number])):
            replayed.num_given += alike.num_jobs
            continue
        if number is None or not past.is_whole:
            replayed.left_out["their snapshot had no room for all drafters and groups of jobs"] += alike.num_jobs
            continue
        compared = pricing.compare(past, past.groups[number], alike, decisions[number].setting)
        if compared is None:
            replayed.left_out[_NO_COST] += alike.num_jobs
            continue
        task = past.subject.task
        replayed.tasks[task] = replayed.tasks.get(task, Compared()) + compared
        replayed.reasons[decisions[number].reason_said] += alike.num_jobs


def show(replayed: Replayed, changed: Sequence[str]) -> None:
    """Print what would have been chosen, and what that would have cost."""
    everything, window = total(replayed.tasks.values()), replayed.window
    paragraph(
        f"{how_many(everything.num_jobs, 'job')} from {second(window.since)} to {second(window.until)}, "
        f"{how_many(replayed.num_recorded, 'decision')}, taken again with "
        f"{', '.join(changed) or 'the settings of today'}.",
        style="bold",
    )
    if replayed.num_given:
        paragraph(
            f"{replayed.num_given} more were probes, controls, or fixed by the job or by the state of the engine."
        )
    if replayed.num_recorded:
        paragraph(
            f"{replayed.num_reproduced} of {replayed.num_recorded} decisions come out as they were, with the settings "
            "of their time."
        )
    for why, number in replayed.left_out.items():
        if number:
            paragraph(f"{number} more are left out: {why}.")
    if not everything.num_jobs:
        return
    out().print()
    columns = ("jobs", "same", "measured", "replayed", "device time [95 %]")
    made = table("ms/token", *columns, right=columns[:-1])
    for task, compared in sorted(replayed.tasks.items()):
        made.add_row(task, *_cells(compared))
    if len(replayed.tasks) > 1:
        made.add_row("all tasks", *_cells(everything), style="bold")
    out().print(made)
    out().print()
    for task, compared in sorted(replayed.tasks.items()):
        if named_changes := _ways(compared):
            paragraph(f"{task}: {named_changes}.")
    reasons = ", ".join(f"{words(reason)} {number}" for reason, number in replayed.reasons.most_common())
    paragraph(f"Jobs by reason: {reasons}.")
    num_changed = sum(tokens for (was, would), tokens in everything.settings.items() if was != would)
    gained = everything.measured_s - everything.replayed_s
    verdict = f"saved {_time(gained)} of" if gained >= 0 else f"cost {_time(-gained)} more than"
    paragraph(
        f"It would have {verdict} {_time(everything.measured_s)} of the device. "
        f"{percent(num_changed / everything.num_tokens)} of the tokens would change settings; "
        f"{percent(everything.num_untested_tokens / everything.num_tokens)} from drafts longer than any tested."
    )
    paragraph(_HONESTLY, style="dim")


def _document(replayed: Replayed, changed: Sequence[str]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "since": replayed.window.since,
        "until": replayed.window.until,
        "changed": list(changed),
        "num_recorded": replayed.num_recorded,
        "num_reproduced": replayed.num_reproduced,
        "num_given": replayed.num_given,
        "left_out": {why: number for why, number in replayed.left_out.items() if number},
        "reasons": dict(replayed.reasons),
        "tasks": {task: _compared(compared) for task, compared in sorted(replayed.tasks.items())},
        "total": _compared(total(replayed.tasks.values())),
        "modelled": _HONESTLY,
    }


def _compared(compared: Compared) -> dict[str, Any]:
    sums = "num_jobs", "num_tokens", "num_same_jobs", "num_untested_tokens", "measured_s", "replayed_s"
    return {
        **{name: getattr(compared, name) for name in sums},
        "ratio": asdict(compared.ratio) if compared.ratio else None,
        "ways": [
            {"was": asdict(was), "would": asdict(would), "num_tokens": tokens}
            for (was, would), tokens in compared.settings.most_common()
        ],
    }


def _cells(compared: Compared) -> list[str]:
    per_token = [
        f"{1000 * seconds / compared.num_tokens:.2f}" for seconds in (compared.measured_s, compared.replayed_s)
    ]
    ratio = compared.ratio
    gain = "-" if ratio is None else f"{ratio.mean - 1:+.1%} [{ratio.low - 1:+.1%} {ratio.high - 1:+.1%}]"
    return [str(compared.num_jobs), f"{compared.num_same_jobs / compared.num_jobs:.0%}", *per_token, gain]


def _ways(compared: Compared) -> str:
    other = Counter({ways: tokens for ways, tokens in compared.settings.items() if ways[0] != ways[1]})
    named_changes = []
    for ways, tokens in other.most_common(_MAX_WAYS):
        change = " → ".join(named(way.drafter, way.num_draft_tokens) for way in ways)
        named_changes.append(f"{change} for {percent(tokens / compared.num_tokens)} of the tokens")
    more = len(other) - _MAX_WAYS
    return "; ".join(named_changes) + (f"; {more} other changes" if more > 0 else "")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"
