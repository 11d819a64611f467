"""`alphaloop demo`: jobs of real text on this machine, from Kafka to the report.

Their prompts come from this Python's sources: some for probe sets, others for traffic, none in both.
"""

from __future__ import annotations

import ast
import os
import signal
import sysconfig
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Final

import typer

from alphaloop.cli import interrupt
from alphaloop.cli.children import LogFollower, await_event, child_log, child_process
from alphaloop.cli.options import DATA_DIR, GlobalOptions, example, global_options, open_database
from alphaloop.cli.screen import err, note, out, progress
from alphaloop.cli.services import fetch_kafka, prepare, program
from alphaloop.cli.status import task_table
from alphaloop.client import Client
from alphaloop.embedded.install import find_kafka_home
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.errors import AlphaloopError, ConfigError, InstallFailed
from alphaloop.explaining.explanation import tasks_now
from alphaloop.messages import Job, Result, Status
from alphaloop.probes import DEFAULT_K, DEFAULT_MAX_TOKENS, new_probe_set
from alphaloop.settings import Settings
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import check
from alphaloop.store.probes import ProbeSetStore, probe_progress
from alphaloop.store.reports import ReportStore

_FOLDER: Final = Path(".alphaloop") / "demo"
_INSTALL_S: Final = 60.0
_ADDRESSES: Final = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")
#: Tasks whose answers repeat a part of their prompts, so that ten blocks of rounds show a difference.
TASKS: Final = ("code", "extraction", "test_writing")
_MAX_TOKENS: Final = 128
#: A failure without a single outcome for this long, also on a slow machine.
_STALLED_S: Final = 180.0
_SCHEDULER_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.5
# A minute of traffic has to end with verdicts: blocks follow each other without a round between them (the largest
# `SwitchbackDesign.control_share`), and few slots make many rounds of few tokens. These have fewer costs to measure.
_WORKER_ENVIRONMENT: Final = {
    "ALPHALOOP_POLICY__CONTROL_SHARE": "0.38",
    "ALPHALOOP_WORKER__BATCH_SIZE": "2",
    "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "8",
}
# All tasks are measured in the demo's one run; a real installation spreads them over its budget.
_SCHEDULER_ENVIRONMENT: Final = {"ALPHALOOP_SCHEDULER__PROBE_MIN_DEVICE_S": "3600"}
_MANUAL: Final = "manual"


@example("""\
alphaloop demo
alphaloop demo --jobs 40 --data-dir /tmp/demo""")
def demo(
    context: typer.Context,
    jobs: int = typer.Option(26, min=2, max=100, help="Jobs of each task."),
    seed: int = typer.Option(7, help="Seed of the choice of prompts and of exploration."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Run alphaloop on this machine on real text, in a few minutes.

    Starts a broker, a database and a worker with a real model under .alphaloop/demo, measures the drafters on probe
    sets, decodes jobs of three tasks, tests for drift, and writes the report. The data is kept.
    """
    options = global_options(context, data_dir)
    options = replace(options, profile=options.profile or "local", data_dir=options.data_dir or _FOLDER)
    settings = _embedded(options)
    signal.signal(signal.SIGTERM, interrupt)
    _try_kafka(settings)
    run = _Demo(options, settings, seed, jobs)
    try:
        run.run()
    except AlphaloopError as error:
        note(f"\nThe demo failed while {run.step}. Logs: {settings.data_dir / 'logs'}")
        raise error


def _embedded(options: GlobalOptions) -> Settings:
    """Settings that name no broker and no database: the demo must never send its jobs to a real installation."""
    for name in _ADDRESSES:
        if os.environ.get(name):
            note(f"{name} is set; the demo starts its own all the same")
    settings = options.settings()
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": None})
    postgres = settings.postgres.model_copy(update={"url": None})
    return settings.model_copy(update={"kafka": kafka, "postgres": postgres})


def _try_kafka(settings: Settings) -> None:
    """Fetch Apache Kafka if there is none, for a minute at most; without it the fallback broker runs."""
    if settings.embedded.broker == "tansu" or find_kafka_home(settings) is not None:
        return
    note("no Apache Kafka is here; fetching it, for a minute at most …")
    try:
        fetch_kafka(deadline_s=_INSTALL_S)
    except InstallFailed as error:
        note(f"not fetched: {error.message.splitlines()[0]}")


@dataclass(slots=True)
class _Demo:
    """One run. `step` names what it is doing, for a report of a failure."""

    options: GlobalOptions
    settings: Settings  #: local ones, naming neither broker nor database
    seed: int
    jobs_per_task: int
    step: str = field(default="reading this Python's sources", init=False)

    def run(self) -> None:
        """Harvest → start → probe sets → worker → probes → traffic → report → table → integrity.

        Raises AlphaloopError where a step fails.
        """
        prompts, begun_at = self._harvest(), datetime.now(UTC)
        self.step = "starting the broker and the database"
        with EmbeddedStack(self.settings, on_event=note) as running:
            self.step = "creating the schema and the topics"
            prepare(running)
            with open_database(running) as database, self._worker(running) as worker:
                self._register_probe_sets(database, prompts)
                self._measure(running, database, worker)
                self._send_traffic(running, worker, prompts)
                self._report(running, database, prompts)
                self._check(database, begun_at)
            self.step = "stopping"
        folder, here = self.settings.data_dir, Path.cwd()
        ours = f"{program()} --data-dir {folder.relative_to(here) if folder.is_relative_to(here) else folder}"
        note(f"\nEverything is kept. `{ours} up` starts it again; then, in another terminal:")
        for command in ("status", "explain code", 'enqueue --task code --prompt "def gcd(a, b):" --wait'):
            note(f"  {ours} {command}")

    def _harvest(self) -> DemoPrompts:
        num_probes = self.settings.scheduler.probe_prompts
        prompts = harvest(self.seed, num_traffic=self.jobs_per_task, num_probes=num_probes, tasks=TASKS)
        note(
            f"{prompts.num_traffic} prompts for {len(prompts.traffic)} tasks, and {num_probes} more each to measure "
            "with, from the sources of this Python"
        )
        return prompts

    @contextmanager
    def _worker(self, running: Settings) -> Iterator[ChildProcess]:
        self.step = "starting the worker"
        environment = {name: value for name, value in _WORKER_ENVIRONMENT.items() if name not in os.environ}
        seeded = ["--seed", str(self.seed)]
        worker = child_process("worker", seeded, self.options, running, environment=environment)
        follower = LogFollower(worker.log)
        worker.start()
        try:
            begun = time.monotonic()
            note("loading the model, and measuring what a round costs here unless that is known …")
            with err().status("the worker is starting"):
                await_event(worker, follower, "worker_ready")
            note(f"the worker consumes after {time.monotonic() - begun:.1f} s")
            yield worker
        finally:
            worker.stop()

    def _register_probe_sets(self, database: Database, prompts: DemoPrompts) -> None:
        store, now = ProbeSetStore(database), datetime.now(UTC)
        for task, texts in prompts.probes.items():
            bodies = [_body(prompt) for prompt in texts]
            made = new_probe_set(task, bodies, num_draft_tokens=DEFAULT_K, max_tokens=DEFAULT_MAX_TOKENS)
            store.register(made, now)

    def _measure(self, running: Settings, database: Database, worker: ChildProcess) -> None:
        """A scheduler run, and every probe and control that it sent."""
        self.step = "measuring the drafters on the probe sets"
        begun = time.monotonic()
        self._schedule_once(running)
        run = ScheduleStore(database).last_finished(_MANUAL)
        if run is None:
            log = child_log(running, "scheduler")
            raise AlphaloopError("the scheduler ended without recording its run", hint=f"see {log}")
        check = _stall_check("probes and controls", worker)
        with progress() as bar:
            sent = probe_progress(database, run[0])
            note(f"the scheduler sent {sent.num_sent} probes and controls")
            shown = bar.add_task("probes and controls", total=sent.num_sent, note="")
            while sent.num_ended < sent.num_sent:
                check(sent.num_ended, sent.num_sent)
                time.sleep(_POLL_S)
                sent = probe_progress(database, run[0])
                bar.update(shown, completed=sent.num_ended)
        if sent.num_sent:
            token_s = (time.monotonic() - begun) / (sent.num_sent * DEFAULT_MAX_TOKENS)
            longest_min = token_s * self.jobs_per_task * len(TASKS) * _MAX_TOKENS / 60
            note(f"at this pace the jobs take up to {max(1, round(longest_min))} min; fewer jobs: --jobs")

    def _send_traffic(self, running: Settings, worker: ChildProcess, prompts: DemoPrompts) -> None:
        self.step = "decoding the jobs"
        batch_id = f"demo-{uuid.uuid4().hex[:8]}"
        ended: list[Result] = []
        check = _stall_check("jobs", worker)

        def alive() -> None:
            check(len(ended), prompts.num_traffic)

        with Client(running) as client, progress() as bar:
            # A task leaves a block in the round in which it has no sequence. So tasks do not share the slots.
            for task, texts in prompts.traffic.items():
                shown = bar.add_task(f"jobs of {task}", total=len(texts), note="")
                batch = client.submit([_job(task, prompt, batch_id) for prompt in texts])
                for result in client.results(batch, alive=alive):
                    ended.append(result)
                    bar.update(shown, advance=1)
        if failed := sum(result.status is not Status.SUCCEEDED for result in ended):
            raise AlphaloopError(
                f"expected {prompts.num_traffic} texts, found {failed} jobs that ended without one",
                hint=f"see {worker.log}",
            )

    def _report(self, running: Settings, database: Database, prompts: DemoPrompts) -> None:
        self.step = "testing for drift and writing the report"
        self._schedule_once(running)
        report = ReportStore(database).latest()
        if report is None:
            raise AlphaloopError("the scheduler made no report", hint=f"see {child_log(running, 'scheduler')}")
        out().print()
        sent = [now for now in tasks_now(database, running) if now.task in prompts.traffic]
        out().print(task_table([replace(now, probes={}, controls={}) for now in sent], None))
        out().print(
            "\nRounds drafted: in which a drafter was asked, by the sequences that ran where that made a difference. "
            "k: the longest draft that a round was allowed. α₁: acceptance of the first drafted token. Speed-up: over "
            "vanilla, by control rounds among the speculative ones. Next job: what would be decided now.",
            style="dim",
        )
        _conclude(report.summary)
        _conclude(f"the report: {(running.report_folder / 'latest.html').absolute().as_uri()}")

    def _check(self, database: Database, begun_at: datetime) -> None:
        """Check the jobs of this run: an earlier one may have been stopped, and the fallback broker lost its jobs."""
        self.step = "checking what was recorded"
        record = check(database, begun_at)
        sentence = (
            f"{record.num_jobs} jobs, {record.num_outcomes} recorded outcomes, {record.num_tokens} tokens; "
            f"counts that do not add up: {record.num_wrong_counts + record.num_wrong_tokens}"
        )
        if not record.holds:
            raise AlphaloopError(f"the record does not hold together: {sentence}")
        _conclude(f"in Postgres: {sentence}")

    def _schedule_once(self, running: Settings) -> None:
        scheduler = child_process("scheduler", ["once"], self.options, running, environment=_SCHEDULER_ENVIRONMENT)
        scheduler.start()
        try:
            with err().status("the scheduler runs"):
                code = scheduler.wait(_SCHEDULER_TIMEOUT_S)
        finally:
            scheduler.stop()
        if code:
            raise scheduler.failed(f"ended with code {code}")


def _conclude(text: str) -> None:
    out().print(text, markup=False, soft_wrap=True)


def _job(task: str, prompt: str, batch_id: str) -> Job:
    fields = {"job_id": uuid.uuid4().hex, "task": task, "batch_id": batch_id, "body": _body(prompt)}
    return Job.model_validate(fields)


def _body(prompt: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": _MAX_TOKENS, "temperature": 0.0}


def _stall_check(what: str, worker: ChildProcess) -> Callable[[int, int], None]:
    """A check to call again and again with how many of how many are done.

    It raises StartFailed when the worker is gone, AlphaloopError when nothing came for `_STALLED_S`.
    """
    last = (0, time.monotonic())  # how many were done, and since when

    def check(done: int, total: int) -> None:
        nonlocal last
        if not worker.is_running:
            raise worker.failed("ended by itself")
        if done != last[0]:
            last = done, time.monotonic()
        if time.monotonic() - last[1] > _STALLED_S:
            problem = f"{done} of {total} {what} done, and none in the last {_STALLED_S:.0f} s"
            raise AlphaloopError(problem, hint=f"see {worker.log}")

    return check


# About 60 to 400 tokens: long enough for look-up, short enough for a laptop.
MIN_CHARS: Final = 240
MAX_CHARS: Final = 1300
_MAX_PER_MODULE: Final = 3


@dataclass(frozen=True, slots=True)
class DemoPrompts:
    """Prompts by task."""

    traffic: Mapping[str, Sequence[str]]
    probes: Mapping[str, Sequence[str]]

    @property
    def num_traffic(self) -> int:
        """Jobs to send."""
        return sum(len(prompts) for prompts in self.traffic.values())


def _code(function: Function) -> str:
    lines = function.body.splitlines()
    started = "\n".join(lines[: max(1, len(lines) // 2)])
    return (
        f"Complete this function of Python's module {function.module}. Answer with the rest of its code.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n{started}\n```"
    )


def _docstring(function: Function) -> str:
    return f"Write the docstring of this Python function.\n\n```python\n{function.source}\n```"


def _test_writing(function: Function) -> str:
    return (
        f"Write a pytest test of {function.module}.{function.name}.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n{function.body}\n```"
    )


def _extraction(function: Function) -> str:
    return (
        "List every parameter of this function as JSON: name, default (null if it has none), meaning.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n```"
    )


FROM_FUNCTIONS: Final[Mapping[str, Callable[[Function], str]]] = {
    "code": _code,
    "docstring": _docstring,
    "test_writing": _test_writing,
    "extraction": _extraction,
}


def harvest(
    seed: int, *, num_traffic: int, num_probes: int, tasks: Collection[str] = tuple(FROM_FUNCTIONS)
) -> DemoPrompts:
    """`num_traffic` and `num_probes` prompts of each task.

    The same for the same arguments and the same Python. Raises ConfigError where this Python came without its sources.
    """
    folder, rng, each = stdlib_folder(), Random(seed), num_traffic + num_probes
    prompts = _deal(_some_of_each_module(folder, rng), tasks, each)
    short = {task: len(texts) for task, texts in prompts.items() if len(texts) < each}
    if short:
        raise ConfigError(
            f"expected {each} prompts a task from {folder}, found too few: {short}",
            hint="the demo reads the sources of the Python that runs it; use a full installation",
        )
    return DemoPrompts(
        traffic={task: texts[num_probes:] for task, texts in prompts.items()},
        probes={task: texts[:num_probes] for task, texts in prompts.items()},
    )


def _deal(harvested: Iterable[Function], tasks: Collection[str], each: int) -> dict[str, list[str]]:
    """Give each function to the task with the fewest prompts among those that it makes a prompt of the right size for.

    Ends when every task has enough, because parsing the whole library would take seconds.
    """
    dealt: dict[str, list[str]] = {task: [] for task in tasks}
    for function in harvested:
        for task in sorted(dealt, key=lambda task: len(dealt[task])):
            prompt = FROM_FUNCTIONS[task](function)
            if len(dealt[task]) < each and MIN_CHARS <= len(prompt) <= MAX_CHARS:
                dealt[task].append(prompt)
                break
        if all(len(prompts) >= each for prompts in dealt.values()):
            break
    return dealt


def _some_of_each_module(folder: Path, rng: Random) -> Iterator[Function]:
    for name, tree, source in modules(folder, rng):
        some = list(functions(name, tree, source))
        yield from rng.sample(some, min(_MAX_PER_MODULE, len(some)))


def _quoted(docstring: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in f'"""{docstring}\n"""'.splitlines())


@dataclass(frozen=True, slots=True)
class Function:
    """A documented function of the standard library."""

    module: str
    name: str
    signature: str  #: from `def` to the colon, on one line
    docstring: str
    body: str  #: without the docstring, indented as in the file

    @property
    def source(self) -> str:
        """The function without its docstring."""
        return f"{self.signature}\n{self.body}"


def stdlib_folder() -> Path:
    """Where this Python's own sources lie. Raises ConfigError where there are none to read."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not any(folder.glob("*.py")):
        raise ConfigError(f"expected the sources of Python's standard library in {folder}, found no .py file")
    return folder


def modules(folder: Path, rng: Random) -> Iterator[tuple[str, ast.Module, str]]:
    """Public top-level modules as (name, tree, source), in an order that depends only on the seed."""
    paths = sorted(path for path in folder.glob("*.py") if not path.stem.startswith(("_", "test")))
    rng.shuffle(paths)
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8")
            yield path.stem, ast.parse(source), source
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a distribution may patch or drop single files


def functions(module: str, tree: ast.Module, source: str) -> Iterator[Function]:
    """The documented top-level functions of a module that take something, in their order."""
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.decorator_list:
            continue
        docstring = ast.get_docstring(node)
        arguments = node.args
        has_parameters = bool(arguments.posonlyargs or arguments.args or arguments.kwonlyargs)
        if not docstring or not has_parameters or len(node.body) < 2:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield Function(
            module,
            node.name,
            f"def {node.name}({ast.unparse(arguments)}){returns}:",
            docstring,
            "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno]),
        )
