"""The processes of alphaloop on this machine: `up`, `down`, `worker`, `scheduler`, `env`. What has to be there
before they run: `kafka install`, `migrate`, `topics create` and `list`.

`up` starts the embedded servers, a worker and a scheduler, and starts again what ends by itself, within bounds.
`worker` and `scheduler` replace the command by that process: the command line imports neither, because both load
libraries that the other commands do not need.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Final, Literal, NoReturn
from urllib.parse import urlsplit

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from alphaloop.cli.children import (
    LogFollower,
    await_event,
    child_command,
    child_environment,
    child_process,
    field_of,
    signals_to,
)
from alphaloop.cli.options import (
    AS_JSON,
    DATA_DIR,
    GlobalOptions,
    connected_settings,
    example,
    global_options,
    require_tasks,
)
from alphaloop.cli.screen import err, note, out, print_json, show_address, show_rows
from alphaloop.embedded.install import ARCHIVE, KAFKA_VERSION, MIRROR, install_kafka
from alphaloop.embedded.process import ChildProcess, EmbeddedServer
from alphaloop.embedded.stack import EmbeddedStack, running_stack
from alphaloop.errors import BrokerError, StartFailed
from alphaloop.files import is_locked
from alphaloop.kafka.topics import (
    CONTROL,
    Topic,
    cluster_id,
    create_topics,
    ensure_topics,
    existing_topics,
    failure_topics,
    first_topics,
    missing_topics,
    properties,
)
from alphaloop.liveness import ExitCode
from alphaloop.messages.topics import dlq_topic
from alphaloop.settings import Settings
from alphaloop.settings.load import ENV_PREFIX
from alphaloop.store.coordination import InstallationStore
from alphaloop.store.database import Database, parse_url, redacted
from alphaloop.wording import span

_WATCH_S: Final = 0.5
#: New starts within WINDOW_S; one more end is an error that a person has to see to.
MOST_STARTS: Final = 5
WINDOW_S: Final = 600.0
#: Before the first new start; each further one within WINDOW_S waits twice as long.
_FIRST_WAIT_S: Final = 1.0


@example("alphaloop up --data-dir ./data")
def up(
    context: typer.Context,
    worker: bool = typer.Option(True, help="Start a worker too."),
    scheduler: bool = typer.Option(True, help="Start the scheduler too."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Run all services in the foreground: broker, database, worker, scheduler; a trainer where drafts are refreshed.

    They run until Ctrl-C or `alphaloop down`. Each of them that ends by itself is
    started again, up to five times in ten minutes.

    Uses the broker of KAFKA_BOOTSTRAP_SERVERS and the database of DATABASE_URL if set. The data is kept.
    """
    options = global_options(context, data_dir)
    options = replace(options, profile=options.profile or "local")
    stop = threading.Event()
    stack = EmbeddedStack(options.settings(), on_event=note)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():  # the second one ends the process at once
            raise KeyboardInterrupt
        stop.set()

    with signals_to(handle), stack as settings:
        prepare(settings, owns_both=len(stack.servers) > 1)
        children: list[ChildProcess] = []
        try:
            addresses = _start(options, settings, children, stop, with_worker=worker, with_scheduler=scheduler)
            if not stop.is_set():
                _show_addresses(settings, addresses)
                _stay(stack.servers, children, settings, stop)
        finally:
            for child in children:  # the worker first: it still needs the servers to drain
                note(f"stopping the {child.name}")
                child.stop()
            note("stopping the servers")


@example("alphaloop down --data-dir ./data")
def down(
    context: typer.Context,
    timeout: float = typer.Option(90.0, min=0.0, help="Seconds to wait."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Stop what `alphaloop up` started, and wait."""
    folder = global_options(context, data_dir).settings().data_dir
    stack = running_stack(folder)
    if stack is None:
        note(f"nothing runs under {folder}")
        return
    owner = stack.pids["alphaloop"]
    os.kill(owner, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    with err().status("waiting for the running batch to finish"):
        while is_locked(folder / "stack.lock"):
            if time.monotonic() >= deadline:
                raise StartFailed(
                    f"process {owner} did not stop within {timeout:g} s", hint=f"its logs are in {folder / 'logs'}"
                )
            time.sleep(_WATCH_S / 5)
    note("stopped")


@example("KAFKA_BOOTSTRAP_SERVERS=kafka:9092 DATABASE_URL=… alphaloop worker")
def worker(
    context: typer.Context,
    seed: int | None = typer.Option(None, help="Seed of exploration; random if not given."),
) -> None:
    """Run a worker: decode jobs until SIGTERM, which lets running jobs finish."""
    _become(context, "worker", [] if seed is None else ["--seed", str(seed)])


@example("alphaloop scheduler once")
def scheduler(
    context: typer.Context,
    mode: Literal["run", "once"] = typer.Argument(
        "run", help="run: stay and measure at every interval. once: one run now, then end."
    ),
) -> None:
    """Run the scheduler: measure acceptance again, test for drift and report."""
    _become(context, "scheduler", [mode])


@example("alphaloop trainer")
def trainer(context: typer.Context) -> None:
    """Run a trainer: train drafters anew that `alphaloop draft refresh` or the scheduler asks for, until SIGTERM.

    `alphaloop up` starts it where `[refresh] automatic` is set. Only a trainer of the same data folder goes on with a
    training that broke off; any other begins it anew.
    """
    _become(context, "worker.trainer", [])


@example("alphaloop env")
def env(
    context: typer.Context,
    as_json: bool = AS_JSON,
) -> None:
    """Print the addresses of the running servers as variables of a shell.

    In a shell: eval "$(alphaloop env)", and then psql "$DATABASE_URL" or kcat -b $KAFKA_BOOTSTRAP_SERVERS -L.
    Debian's kcat cannot talk to the fallback broker, which runs where no Apache Kafka is; `alphaloop enqueue` can.
    DATABASE_URL holds the password, so keep the output out of logs.
    """
    settings = connected_settings(context)
    assert settings.kafka.bootstrap_servers and settings.postgres.url  # noqa: S101, PT018 - connected
    addresses = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
        "DATABASE_URL": settings.postgres.url.get_secret_value(),
    }
    if as_json:
        print_json(addresses)
        return
    for name, value in addresses.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


@example("DATABASE_URL=postgresql://alphaloop@localhost/alphaloop alphaloop migrate")
def migrate(
    context: typer.Context,
    revision: str = typer.Option("head", help="Schema revision to go up to."),
    check: bool = typer.Option(False, "--check", help="Change nothing; exit code 1 if the schema is not up to date."),
    adopt_cluster: str | None = typer.Option(
        None, metavar="ID", help="Then have the database belong to this Kafka cluster, after a move or a restore."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the revisions as JSON."),
) -> None:
    """Upgrade the database's schema. Safe to run from several machines at once."""
    from alphaloop.store import schema  # alembic: the other commands start a tenth faster without it

    settings = connected_settings(context, broker=False)
    url = settings.postgres.url
    assert url is not None  # noqa: S101 - connected
    before = schema.current(url)
    if check:
        is_pending = schema.pending(url)
        note(f"at revision {before or 'none'}, " + ("an upgrade is pending" if is_pending else "nothing to do"))
        if as_json:
            print_json({"revision": before, "pending": is_pending})
        raise typer.Exit(int(is_pending))
    schema.upgrade(url, revision)
    after = schema.current(url)
    note(f"already at revision {after}" if before == after else f"from revision {before or 'none'} to {after}")
    if after is not None and (missing := schema.grant_to_roles(url)):
        note(
            f"this user may not create the roles {', '.join(missing)}; until another user does, and migrates again, "
            "every process needs the rights of this user"
        )
    if adopt_cluster is not None:
        with Database(url, pool_size=1) as database:
            is_new = InstallationStore(database).adopt(adopt_cluster, settings.kafka.prefix)
        note(f"the database {'now belongs' if is_new else 'belongs already'} to the Kafka cluster {adopt_cluster}")
    if as_json:
        print_json({"from": before, "to": after})


@example("""\
alphaloop kafka install
alphaloop kafka install --mirror https://mirror.example.org/apache/kafka""")
def install(
    version: str | None = typer.Option(None, help="Release; the one that alphaloop is tested with, if not given."),
    mirror: str | None = typer.Option(None, help="Address of the releases; Apache's site, if not given."),
) -> None:
    """Fetch Apache Kafka, check its published SHA-512, and unpack it under the user's cache.

    Prints the folder.
    """
    out().print(str(fetch_kafka(version=version, mirror=mirror)), soft_wrap=True, markup=False)


def fetch_kafka(*, version: str | None = None, mirror: str | None = None, deadline_s: float = math.inf) -> Path:
    """The installed folder, fetched with a progress bar if need be. Raises InstallFailed."""
    mirrors = [mirror] if mirror else [MIRROR, ARCHIVE]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=(console := err()),
        transient=True,
        disable=not console.is_terminal,
    )
    wanted = version or KAFKA_VERSION
    with bar:
        shown = bar.add_task(f"Apache Kafka {wanted}", total=None)
        return install_kafka(
            wanted,
            mirrors=mirrors,
            deadline_s=deadline_s,
            on_progress=lambda done, total: bar.update(shown, completed=done, total=total),
        )


def prepare(settings: Settings, *, owns_both: bool = False) -> None:
    """Create schema and topics; `owns_both`: the broker may be another than before. Raises StoreError, BrokerError."""
    from alphaloop.store import schema

    assert settings.postgres.url is not None  # noqa: S101 - the embedded stack fills it in
    schema.upgrade(settings.postgres.url)
    if owns_both:
        with Database(settings.postgres.url, pool_size=1) as database:
            InstallationStore(database).adopt(cluster_id(settings.kafka), settings.kafka.prefix)
    ensure_topics(settings.kafka, settings.tasks)


def _start(
    options: GlobalOptions,
    settings: Settings,
    children: list[ChildProcess],
    stop: threading.Event,
    *,
    with_worker: bool,
    with_scheduler: bool,
) -> dict[str, str]:
    """Start the children into `children`; returns the addresses of the console and of their metrics by name."""
    addresses: dict[str, str] = {}

    def start(module: str, *arguments: str) -> None:
        child = child_process(module, arguments, options, settings)
        follower = LogFollower(child.log)
        children.append(child)
        child.start()
        with err().status(f"the {module} is starting"):
            line = await_event(child, follower, f"{module}_ready", stop.is_set)
        if line is not None:
            metrics, console = field_of(line, "metrics"), field_of(line, "console")
            addresses[f"{module} metrics"] = f"{metrics}/metrics"
            _stays_at(child, module, metrics)
            if console:
                addresses["console"] = console
                if settings.console.public_url is None:
                    _stays_at(child, "console", console)

    if with_worker:
        note("loading the model, and measuring what a round costs here unless that is known …")
        start("worker")
    if with_scheduler and not stop.is_set():
        start("scheduler", "run")
    if with_worker and settings.refresh.automatic and not stop.is_set():
        children.append(child := child_process("worker.trainer", [], options, settings))
        child.start()
    return addresses


def _stays_at(child: ChildProcess, section: str, address: str | None) -> None:
    """Have the child's next start take the port of this one, which bookmarks and Prometheus know, where it was free."""
    name = f"{ENV_PREFIX}{section.upper()}__HTTP_PORT"
    if address and (port := urlsplit(address).port) is not None:
        child.env[name] = str(port)


def _show_addresses(settings: Settings, addresses: dict[str, str]) -> None:
    assert settings.postgres.url is not None  # noqa: S101 - the embedded stack fills it in
    typed = [str(_beside_python() or "alphaloop"), "--data-dir", str(settings.data_dir.absolute()), "env"]
    rows = {
        "broker": settings.kafka.bootstrap_servers,
        # Without the password, because this output is often kept as a log.
        "database": redacted(parse_url(settings.postgres.url)),
        "in a shell": f'eval "$({shlex.join(typed)})"',  # whatever the folder
        **addresses,
        "reports": settings.report_folder,
        "logs": settings.data_dir / "logs",
    }
    for name, value in rows.items():
        show_address(name, f"{value}")
    note("up; Ctrl-C stops it")


def _stay(
    servers: Sequence[EmbeddedServer], children: Sequence[ChildProcess], settings: Settings, stop: threading.Event
) -> None:
    def make_topics() -> None:
        try:
            ensure_topics(settings.kafka, settings.tasks)
        except BrokerError as error:
            note(f"topics are missing: {error.message}")

    supervised = [Supervised(server, note) for server in servers if server.part != "broker"]
    # A broker that keeps its messages in memory has lost its topics too.
    supervised += [Supervised(server, note, then=make_topics) for server in servers if server.part == "broker"]
    supervised += [Supervised(child, note) for child in children]
    while not stop.wait(_WATCH_S):
        for child in supervised:
            child.look()


@dataclass(eq=False)
class Supervised:
    """A child that is started again when it ends. `tell` shows the user what happens; `then` runs after a new start."""

    child: ChildProcess | EmbeddedServer
    tell: Callable[[str], None]
    _: KW_ONLY
    then: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _starts: deque[float] = field(default_factory=deque, init=False)  #: of the new starts within WINDOW_S, when
    _due: float | None = field(default=None, init=False)

    def look(self) -> None:
        """Start the child again when it has ended and its wait is over. Raises StartFailed after too many starts.

        A new start that fails counts as an end.
        """
        if self._due is None:
            if (code := self.child.ended_with()) is not None:
                known = f" ({ExitCode(code).meaning})" if code in set(ExitCode) else ""
                meaning = f" (killed by signal {code - 128})" if code > 128 else known
                self._plan(f"ended with code {code}{meaning}")
        elif self.clock() >= self._due:
            self._due = None
            self._starts.append(self.clock())
            try:
                self.child.start()
            except StartFailed as error:
                self._plan(f"could not be started again: {error.message}")
            else:
                self.then()

    def _plan(self, why: str) -> None:
        now = self.clock()
        while self._starts and now - self._starts[0] > WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= MOST_STARTS:
            raise self.child.failed(f"{why}, after {MOST_STARTS} new starts within {WINDOW_S / 60:g} minutes")
        wait_s = _FIRST_WAIT_S * 2 ** len(self._starts)
        self._due = now + wait_s
        name = self.child.name  # only servers have names of their own
        self.tell(f"{name if name[0].isupper() else f'the {name}'} {why}; starting it again in {wait_s:g} s")


def _become(context: typer.Context, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one of our modules."""
    environment = child_environment(global_options(context), connected_settings(context))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, child_command(module, arguments), environment)  # noqa: S606 - our own interpreter, no shell


def program() -> str:
    """What a person types here for `alphaloop`: with its folder where the shell does not find it."""
    beside, on_path = _beside_python(), shutil.which("alphaloop")
    if beside is None or (on_path is not None and beside.samefile(on_path)):
        return "alphaloop"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def _beside_python() -> Path | None:
    beside = Path(sys.executable).with_name("alphaloop")
    return beside if beside.exists() else None


@example("""\
alphaloop topics create code --high
alphaloop topics create --all
alphaloop topics create --all --dry-run > make-topics.sh""")
def make_topics(
    context: typer.Context,
    task: list[str] = typer.Argument(None, help="Of these tasks; without any, of all in configs/tasks.toml."),
    high: bool = typer.Option(False, "--high", help="Also jobs.TASK.high of each task, for jobs that go first."),
    everything: bool = typer.Option(
        False, "--all", help="Also what workers create later: retry topics and dead-letter topics."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Create nothing; print a line of Kafka's kafka-topics.sh for each missing topic."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Create the topics that are missing; those that are there stay as they are.

    Workers create jobs.TASK when they start, and the retry and dead-letter topics of a task at its first failure. Where
    they may not, create them all beforehand with --all. jobs.TASK.high is created here with --high, and where the
    task's settings say high_topic = true.
    """
    settings = connected_settings(context, database=False)
    kafka = settings.kafka
    missing = missing_topics(kafka, _names(settings, task or list(settings.tasks), high=high, everything=everything))
    if not dry_run:
        created = create_topics(kafka, missing)
        missing = [topic for topic in missing if topic.name in created]
    if as_json:
        print_json([dataclasses.asdict(topic) for topic in missing])
    elif not missing:
        note("no topic is missing")
    for topic in [] if as_json else missing:
        typer.echo(_command(topic, kafka.bootstrap_servers or "") if dry_run else topic.name)


@example("alphaloop topics list --json")
def list_topics(context: typer.Context, as_json: bool = AS_JSON) -> None:
    """List the topics that are there, with partitions, replicas and limits."""

    def cells(topic: Topic) -> tuple[str, ...]:
        kept, size = topic.retention_ms, topic.max_message_bytes
        kept_for = "-" if kept is None else "ever" if kept < 0 else span(kept / 1000)
        largest = "-" if size is None else f"{size:,}"
        return topic.name, str(topic.num_partitions), str(topic.replication_factor), kept_for, largest

    figures = "partitions", "replicas", "kept for", "message bytes"
    show_rows(
        existing_topics(connected_settings(context, database=False).kafka),
        "topic",
        *figures,
        cells=cells,
        right=figures,
        nothing="no topics: a worker creates them when it starts, or `alphaloop topics create`",
        as_json=as_json,
        row_as_json=dataclasses.asdict,
    )


def _names(settings: Settings, tasks: list[str], *, high: bool, everything: bool) -> list[str]:
    """The topics of these tasks and those that all tasks share. Raises UnknownTask."""
    require_tasks(settings, tasks)
    names = first_topics(tasks, high=[task for task in tasks if high or settings.tasks[task].high_topic])
    if everything:
        names += [topic for task in tasks for topic in failure_topics(settings.kafka, task)]
        names.append(dlq_topic(CONTROL))
    return names


def _command(topic: Topic, bootstrap_servers: str) -> str:
    words = ["kafka-topics.sh", "--bootstrap-server", bootstrap_servers, "--create", "--if-not-exists"]
    words += ["--topic", topic.name, "--partitions", str(topic.num_partitions)]
    words += ["--replication-factor", str(topic.replication_factor)]
    words += [word for name, value in properties(topic).items() for word in ("--config", f"{name}={value}")]
    return shlex.join(words)
