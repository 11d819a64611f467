"""The four stories in one history, step by step, in `Run.play()`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.errors import AlphaloopError
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.drift import DriftEventStore, IncidentStore
from alphaloop.store.probes import ProbeSetStore
from alphaloop.store.reports import ReportStore
from engine.models import find_weights
from tests.stories.asking import Asking
from tests.stories.configs import PROFILE, write_configs
from tests.stories.deployment import Deployment
from tests.stories.faults import Dropped, Faults, Worn
from tests.stories.models import trained_draft, tuned_target
from tests.stories.prompts import CHANGED, DRAFTED, DROPPED, TASKS, WORN, story_prompts
from tests.stories.size import Size
from tests.stories.told import LOOKUP, Story, judge_stories


@dataclass(slots=True)
class Run:
    """One run under a data folder. A draft or a tuned target that lies there already is used again."""

    data_dir: Path
    source: str  #: the second target; the first one is made of it
    seed: int
    size: Size
    num_threads: int
    screen: Console
    _begun: float = field(default_factory=time.monotonic, init=False)
    _asking: Asking = field(init=False)

    def __post_init__(self) -> None:
        self._asking = Asking(self.seed, self.size)

    def play(self) -> list[Story]:
        """Train → first target → second target → code becomes tales, the engine wears → restart → the report."""
        prompts = story_prompts(self.seed, num_probes=self.size.num_probes)
        tuned = tuned_target(self.data_dir, self.source, prompts, self.size, seed=self.seed, say=self._say)
        draft = trained_draft(
            self.data_dir, tuned, prompts, num_threads=self.num_threads, seed=self.seed, say=self._say
        )
        first = self._configs("first", str(tuned), draft, is_watched=False)
        second = self._configs("second", self.source, draft, is_watched=True)
        options = GlobalOptions(first, PROFILE, self.data_dir)
        traffic = {task: self._asking.endless(lines) for task, lines in prompts.traffic.items()}
        tales = self._asking.endless(prompts.tales)
        with EmbeddedStack(options.settings(), on_event=self._say) as running:
            prepare(running)
            with open_database(running) as database:
                self._asking.register_probes(ProbeSetStore(database), prompts, TASKS)
                on = Deployment(running, database, self.data_dir, self.seed)
                self._under_first_target(on, first, traffic)
                self._under_second_target(on, second, traffic, tales)
                self._after_restart(on, second, traffic)
                return self._judge(on, find_weights(self.source).revision)

    def _under_first_target(self, on: Deployment, configs: Path, traffic: Mapping[str, Iterator[str]]) -> None:
        size = self.size
        with on.worker(configs, Faults(seed=self.seed)) as worker:
            self._say(f"first target: {on.measure(configs, worker)} probes and controls")
            jobs = self._asking.jobs(
                traffic, {DRAFTED: size.before, **dict.fromkeys((CHANGED, DROPPED, WORN), size.others)}
            )
            on.decode(jobs, worker)
            on.run_scheduler(configs)
            self._say(f"first target: {len(jobs)} jobs")

    def _under_second_target(
        self, on: Deployment, configs: Path, traffic: Mapping[str, Iterator[str]], tales: Iterator[str]
    ) -> None:
        size = self.size
        faults = Faults(
            seed=self.seed,
            # Probes of the first runs, and the jobs before: nothing is wrong before there is a reference.
            worn=self._wear(),
            dropped=Dropped(task=DROPPED, sound=3 * size.num_probes + size.others),
        )
        with on.worker(configs, faults) as worker:
            self._say(f"second target: {on.measure(configs, worker)} probes and controls")
            on.decode(
                self._asking.jobs(
                    traffic, {DRAFTED: size.others, CHANGED: size.settled, DROPPED: size.others, WORN: size.busy}
                ),
                worker,
            )
            self._say(f"second target, nothing wrong yet: {on.measure(configs, worker)} probes and controls")
            on.decode(
                self._asking.jobs(
                    {**traffic, CHANGED: tales}, {CHANGED: size.changed, DROPPED: size.others, WORN: size.worn}
                ),
                worker,
            )
            self._say(f"tales, wear, dropped tokens: {on.measure(configs, worker)} probes and controls")

    def _after_restart(self, on: Deployment, configs: Path, traffic: Mapping[str, Iterator[str]]) -> None:
        size = self.size
        # The same wear, which begins anew. The dropped token is in the program: a restart does not mend it.
        faults = Faults(
            seed=self.seed,
            worn=self._wear(),
            dropped=Dropped(task=DROPPED, sound=0),
        )
        with on.worker(configs, faults) as worker:
            self._say(f"after the restart: {on.measure(configs, worker)} probes and controls")
            on.decode(self._asking.jobs(traffic, {WORN: size.healed}), worker)
            on.run_scheduler(configs)

    def _wear(self) -> Worn:
        """It begins when a process has decoded what comes before the tales, which it does only before the restart."""
        size = self.size
        return Worn(
            task=WORN, drafter=LOOKUP, sound=size.busy + 2 * size.num_probes + size.others, wholly=size.worn // 3
        )

    def _judge(self, on: Deployment, target: str) -> list[Story]:
        report = ReportStore(on.database).latest()
        if report is None:
            raise AlphaloopError("the scheduler made no report")
        self._say(report.summary)
        return judge_stories(
            DriftEventStore(on.database).since(datetime.min.replace(tzinfo=UTC)),
            IncidentStore(on.database).open_incidents(),
            DraftRegistry(on.database).all(),
            report.content,
            target,
        )

    def _configs(self, name: str, target: str, draft: Path, *, is_watched: bool) -> Path:
        return write_configs(
            self.data_dir / f"configs-{name}",
            target=target,
            draft=draft,
            num_threads=self.num_threads,
            num_probes=self.size.num_probes,
            is_watched=is_watched,
        )

    def _say(self, text: str) -> None:
        self.screen.print(f"{time.monotonic() - self._begun:6.0f} s  {text}", markup=False, soft_wrap=True)
