"""`python -m worker.commands`: the commands that need a model, in a process of their own.

The process reads one order on standard input and answers with events on standard output. `alphaloop.commands` declares
both, and the command line shows the events. What loads torch or aiohttp is imported where a command needs it, so that a
wrong option is reported at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from alphaloop import logs, page
from alphaloop.commands import (
    LOADING,
    ORDER,
    AdvanceEvent,
    CalibrateOrder,
    Calibration,
    CheckPairOrder,
    CheckServerOrder,
    CommandEvent,
    FailedEvent,
    MeasureOrder,
    NoteEvent,
    Order,
    PairCheck,
    RegisterOrder,
    ReportEvent,
    StageEvent,
    Tell,
    TrainOrder,
    line_of,
)
from alphaloop.costs import CostPoint, with_shared_weights
from alphaloop.draft_card import DraftCard, draft_name, read_card
from alphaloop.embedded.stack import with_running_stack
from alphaloop.engine import Engine, ModelSize, Sampling
from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    DecodeFailed,
    InvalidField,
    MessageError,
    PromptTooLong,
    StoreError,
    package_missing,
)
from alphaloop.files import readable_again, reading
from alphaloop.job_lines import BadLine, JobLine, JobReader
from alphaloop.payoff.figures import VANILLA
from alphaloop.settings import Settings, load_settings
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry, DraftStatus
from worker.assembly import open_engine
from worker.costs.calibration import calibrate, calibrate_servers, is_timed_by_step, plan, timed_by
from worker.measuring.observing import choose_candidates, choose_drafters
from worker.measuring.records import MemoryWatch, records_of
from worker.measuring.report import DrafterRecords, busy_note
from worker.measuring.session import MeasuringPlan, MeasuringSession, draw, prepare, read_lines, refuse_few
from worker.measuring.targets import TargetsSession, models_of

if TYPE_CHECKING:
    from engine.pairing import DeviceRoom
    from engine.training.data import TextRequest


INTERRUPTED: Final = 130
NOBODY_LISTENS: Final = 141


def main() -> int:
    """0 done, 1 after an error in words, 130 interrupted, 141 where the command line has gone."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints must not come between two events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: CommandEvent) -> None:
        events.write(line_of(event))
        events.flush()

    try:
        return carry_out(ORDER.validate_python(json.loads(sys.stdin.buffer.readline())), tell)
    except BrokenPipeError:
        os._exit(NOBODY_LISTENS)


def carry_out(order: Order, tell: Tell) -> int:
    """Do what is asked with the settings that the environment names; the exit code."""
    try:
        configs = os.environ.get("ALPHALOOP_CONFIGS")
        settings = load_settings(Path(configs) if configs else None, profile=os.environ.get("ALPHALOOP_PROFILE"))
        # A measurement reports what went wrong itself; a warning would stand in the middle of its bar.
        logs.configure("ERROR" if isinstance(order, MeasureOrder) else "WARNING", settings.logs.format)
        try:
            return _COMMANDS[type(order)](order, settings, tell)
        except ImportError as error:
            raise package_missing(error) from None
    except AlphaloopError as error:
        field = f"{error.field}: " if isinstance(error, MessageError) and error.field else ""
        tell(FailedEvent(message=f"{field}{error.message}", hint=error.hint))
        return 1
    except KeyboardInterrupt:
        tell(NoteEvent(text="interrupted"))
        return INTERRUPTED


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], bool]]:
    """Whether to stop: the first SIGINT or SIGTERM asks to end and keep what is done, the second ends at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure(order: MeasureOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop measure`: whether speculation pays on a user's own prompts. Needs neither a broker nor a database.

    130 when interrupted, after a report of what was measured. Raises AlphaloopError."""
    lines, notes = draw(
        read_lines(order, settings, lambda text: tell(NoteEvent(text=text))), order.num, random.Random(order.seed)
    )
    if order.target:
        return _measure_targets(order, settings, lines, notes, tell)
    chosen = choose_drafters(settings.models.drafter_names, order.drafter)
    # Checks the candidates before anything is loaded, so that a wrong one is reported at once.
    candidates = choose_candidates([settings.models.drafter_state(name, "") for name in chosen], order.k)
    refuse_few(len(lines), order.batch, len(candidates))
    tell(StageEvent(name=LOADING))
    engine, sizes, records, remarks = _open_with_records(settings, chosen, order.batch)
    memory = MemoryWatch(engine)
    candidates = choose_candidates([drafter for drafter in engine.drafters if drafter.name in chosen], order.k)
    prepared = prepare(lines, engine, settings.tasks)
    plan = MeasuringPlan(prepared, candidates, order.batch, order.repeats, order.bar, order.seed)

    def on_event(event: CommandEvent) -> None:
        tell(event)
        memory.sample()

    with closing(engine), _stopped_by_signals() as should_stop:
        session = MeasuringSession(engine, plan, should_stop=should_stop, tell=on_event)
        session.run()
        if session.measured.turns:
            busy = busy_note(session.measured.of(VANILLA))
            notes = [*notes, *remarks, *([busy] if busy else [])]
            tell(ReportEvent(data=session.report(records, lambda: memory.footprint(sizes), notes)))
    return _ended(session.failure, session.measured.is_interrupted, bool(session.measured.turns), tell)


def _measure_targets(
    order: MeasureOrder, settings: Settings, lines: Sequence[JobLine], notes: Sequence[str], tell: Tell
) -> int:
    """`alphaloop measure --target A --target B`: times and texts of two targets on the same prompts."""
    models = models_of(settings.models, order.target)
    refuse_few(len(lines), order.batch, 1)
    tell(StageEvent(name=LOADING))
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(open_engine(one, num_slots=order.batch))) for one in models]
        prepared = [prepare(lines, engine, settings.tasks) for engine in engines]
        should_stop = stack.enter_context(_stopped_by_signals())
        limits = order.batch, order.repeats, order.seed
        session = TargetsSession(engines, prepared, *limits, should_stop=should_stop, tell=tell)
        session.run()
        if session.seen:
            tell(ReportEvent(data=session.report(order.target, [line.where for line in lines], notes)))
    return _ended(session.failure, session.is_interrupted, bool(session.seen), tell)


def _ended(failure: DecodeFailed | None, is_interrupted: bool, has_report: bool, tell: Tell) -> int:
    """The exit code of a measurement. Raises `failure`."""
    if failure is not None:
        raise failure
    if is_interrupted:
        tell(NoteEvent(text="interrupted" if has_report else "interrupted before a batch was decoded in every way"))
        return INTERRUPTED
    return 0


def _open_with_records(
    settings: Settings, drafters: Collection[str], batch: int
) -> tuple[Engine, tuple[ModelSize, ...], DrafterRecords, list[str]]:
    """The engine with only these drafters, the sizes of its models, what is on record of them, and notes.

    Raises ConfigError where servers take fewer texts at once than `batch`.
    """
    if settings.models.target.engine != "own":
        engine = open_engine(settings.models, num_slots=batch)
        if (room := engine.load().num_slots) < batch:
            raise ConfigError(f"--batch: expected at most {room}, which the endpoints take at once, found {batch}")
        note = "the texts are decoded by servers: memory is this process's alone, and rounds are not timed apart"
        return engine, (), DrafterRecords(), [note]
    needed = settings.models.with_sources(drafters)
    only = {name: drafter for name, drafter in settings.models.drafters.items() if name in needed}
    settings = settings.model_copy(update={"models": settings.models.model_copy(update={"drafters": only})})
    engine = open_engine(settings.models, num_slots=batch)
    return engine, *records_of(settings, engine)


def _calibrate(order: CalibrateOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop calibrate`: measure what rounds cost here, and store it for every worker of this device."""
    began = time.perf_counter()
    database = None if order.no_store else _database(with_running_stack(settings))
    tell(StageEvent(name="loading the model"))
    with closing(open_engine(settings.models, num_slots=settings.worker.batch_size, database=database)) as engine:
        points = _points(engine, settings, order.budget, tell)
    identity = engine.identity
    if database is not None:
        revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
        where = CostSubject(identity.host, identity.device, identity.engine, identity.target_revision, revisions)
        CostStore(database).save(where, points, replaces_all=True)
        database.close()
    seconds = time.perf_counter() - began
    tell(ReportEvent(data=Calibration(identity, points, seconds, is_stored=database is not None)))
    return 0


def _points(engine: Engine, settings: Settings, budget_s: float, tell: Tell) -> tuple[CostPoint, ...]:
    tell(StageEvent(name="measuring"))
    if not is_timed_by_step(engine):
        return tuple(calibrate_servers(engine, budget_s=budget_s, on_measured=lambda: tell(AdvanceEvent())))
    points = calibrate(
        engine,
        plan(engine, settings.worker),
        budget_s=budget_s,
        on_measured=lambda done, total: tell(AdvanceEvent(total=total)),
    )
    return tuple(with_shared_weights(points, timed_by(engine.drafters)))


def _database(settings: Settings) -> Database:
    if settings.postgres.url is None:
        raise ConfigError("no database is configured", hint="start `alphaloop up`, set DATABASE_URL or give --no-store")
    database = Database(settings.postgres.url, limits=settings.postgres.limits())
    database.check_revision()
    return database


def _check_pair(order: CheckPairOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop check-pair`: read the facts of both models, or of a model and heads, without weights, and check them.

    1 where the draft is refused.
    """
    from engine.device import TARGET_SETTING
    from engine.drafters.head_files import check_heads, find_heads
    from engine.models import revision_here
    from engine.pairing import check_pair, facts_of, translation_between

    served = settings.models.target
    dtype = order.dtype or served.dtype
    # A wrong device is reported before any file is read.
    room = _room(order.device or served.device, "--device" if order.device else TARGET_SETTING)
    draft_room = _room(order.draft_device, "--draft-device") if order.draft_device else room
    target = facts_of(order.target, dtype=dtype, context_length=order.context_length)
    if (heads := find_heads(order.draft)) is not None:
        sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "vocabulary": target.num_rows}
        revision = revision_here(order.target) if heads.config.get("target_revision") else None
        findings = check_heads(heads, **sizes, target_revision=revision)
    else:
        draft = facts_of(order.draft, dtype=order.draft_dtype or dtype, context_length=target.context_length)
        findings = check_pair(
            target,
            draft,
            num_slots=order.batch_size or settings.worker.batch_size,
            max_draft_tokens=order.max_draft_tokens,
            room=room,
            draft_room=draft_room,
            translation=translation_between(target, draft),
        )
    check = PairCheck(order.target, order.draft, findings)
    tell(ReportEvent(data=check))
    return 1 if check.is_refused else 0


def _room(name: str, setting: str) -> DeviceRoom:
    from engine.device import available_bytes, find_device
    from engine.pairing import DeviceRoom

    device = find_device(name, setting=setting)
    return DeviceRoom(str(device), available_bytes(device))


def _check_server(order: CheckServerOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop check-server`: ask an inference server for three short texts, and report what it can show.

    Raises AlphaloopError where the server does not answer as its kind does.
    """
    endpoint = _endpoint(order, settings)
    from worker.servers.testing import check_server

    tell(ReportEvent(data=asyncio.run(check_server(endpoint))))
    return 0


def _endpoint(order: CheckServerOrder, settings: Settings) -> EndpointSettings:
    from worker.servers.http import endpoint_of

    if "://" in order.server:
        if order.kind is None:
            raise ConfigError("expected --kind for the server at an address")
        return endpoint_of(order.server, order.kind, order.model or None, _key(order.api_key_env))
    for name, given in (("--kind", order.kind), ("--api-key-env", order.api_key_env)):
        if given is not None:
            raise ConfigError(f"expected {name} only for an address: an endpoint's is in the settings")
    endpoints = settings.models.endpoints
    if order.server not in endpoints:
        raise ConfigError(
            f"expected an address or an endpoint of the settings ({', '.join(sorted(endpoints)) or 'there are none'}), "
            f"found {order.server!r}",
            hint="endpoints are tables of configs/models.toml: [models.endpoints.NAME]",
        )
    endpoint = endpoints[order.server]
    return endpoint.model_copy(update={"model": order.model or endpoint.model})


def _key(name: str | None) -> SecretStr | None:
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise ConfigError(f"expected the server's key in the environment variable {name}, found none")
    return SecretStr(key)


class TrainingEvents:
    """The progress of a training run, as events."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def stage(self, name: str, total: int, done: int) -> None:
        """As `TrainingProgress.stage`."""
        self._tell(StageEvent(name=name, total=total, done=done))

    def advance(self, num: int, note: str) -> None:
        """As `TrainingProgress.advance`."""
        self._tell(AdvanceEvent(num=num, note=note))

    def note(self, text: str) -> None:
        """As `TrainingProgress.note`."""
        self._tell(NoteEvent(text=text))


def _train(order: TrainOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop draft train`: train a draft, or go on with one, and register it; 130 when interrupted."""
    from engine.training.recipe import read_recipe
    from engine.training.run import TrainingRun, WantedDraft

    recipe = read_recipe(order.recipe, seed=order.seed)
    with ExitStack() as stack:
        # Which are read more than once.
        prompts, held_out = (
            file and stack.enter_context(readable_again(file)) for file in (order.prompts, order.held_out)
        )
        run = TrainingRun(
            WantedDraft(order.folder, order.method, order.name, prompts, held_out, order.begun_from),
            settings.models.target,
            recipe,
            descriptions={name: task.description for name, task in settings.tasks.items()},
            read_prompts=partial(read_prompts, settings, order.task, lambda text: tell(NoteEvent(text=text))),
            progress=TrainingEvents(tell),
            should_stop=stack.enter_context(_stopped_by_signals()),
        )
        try:
            card = run.make()
        finally:
            run.close()
    if card is None:
        tell(NoteEvent(text=f"stopped; what was done is in {order.folder}, and the same command continues from there"))
        return INTERRUPTED
    tell(ReportEvent(data=card))
    try:
        card, status = register_folder(order.folder, settings)
    except (StoreError, ConfigError) as error:
        note = f"not registered: {error.message}. Later: alphaloop draft register {shlex.quote(str(order.folder))}"
    else:
        note = f"registered as {card.name} {card.draft_revision}, {status}"
    tell(NoteEvent(text=note))
    return 0


def read_prompts(
    settings: Settings,
    task: str | None,
    say: Callable[[str], object],
    file: Path,
    tokenizer: Any,
    *,
    drops_wrong: bool = False,
) -> list[TextRequest]:
    """The prompts of a JSONL file, in any form that `alphaloop enqueue` takes, tokenized as when served.

    `say` is called with a note about any other encoding than plain UTF-8.

    Raises ConfigError for a file that cannot be read, for wrong lines with their places unless it `drops_wrong`, and
    for no line at all.
    """
    from engine.prompts import prepare_job
    from engine.training.data import LONGEST_PROMPT, TextRequest

    with reading(file, say=say) as source:
        lines = list(JobReader(settings, task=task).read(source.lines, source.name))
    prompts: list[TextRequest] = []
    wrong: list[str] = []
    for line in lines:
        if isinstance(line, BadLine):
            wrong.append(f"{line.where}: {line.error.field or 'line'}: {line.error.message}")
            continue
        try:
            prepared = prepare_job(
                tokenizer, settings.models.target.name, LONGEST_PROMPT, line.job, Sampling(max_tokens=1, temperature=0)
            )
        except PromptTooLong:
            continue
        except InvalidField as error:
            wrong.append(f"{line.where}: {line.named_in_line(error.field)}: {error.message}")
            continue
        prompts.append(TextRequest(len(prompts), line.job.task, prepared.token_ids))
    if wrong and not drops_wrong:
        raise ConfigError(f"{len(wrong)} wrong lines; the first: {wrong[0]}", hint=f"see {page('guides/enqueue.md')}")
    if not prompts:
        raise ConfigError(f"{file}: expected at least one prompt below {LONGEST_PROMPT} tokens, found none")
    return prompts


def register_folder(folder: Path, settings: Settings, name: str | None = None) -> tuple[DraftCard, DraftStatus]:
    """Register the draft in `folder`, under `name` if one is given. Returns its card and its status in the database.

    Raises ConfigError for a folder without a card or with other weights than the card's, or if no database is
    configured; StoreError if the database cannot be used.
    """
    from engine.models import find_weights

    card = read_card(folder)
    if (revision := find_weights(str(folder)).revision) != card.draft_revision:
        raise ConfigError(
            f"the card in {folder} was written for weights {card.draft_revision}, found {revision}",
            hint="its figures are another draft's: train again",
        )
    if (url := with_running_stack(settings).postgres.url) is None:
        raise ConfigError("no database is configured", hint="set DATABASE_URL, or start everything with `alphaloop up`")
    with Database(url, pool_size=1, limits=settings.postgres.limits()) as database:
        database.check_revision()
        status = DraftRegistry(database).register_trained(
            draft_name(name or card.name),
            card.draft_revision,
            card.target_revision,
            trained_on=card.trained_on,
            figures=card.judgement.model_dump(mode="json"),
        )
    return card, status


def _register(order: RegisterOrder, settings: Settings, tell: Tell) -> int:
    """`alphaloop draft register`: register a draft that was trained before; the report is a sentence."""
    card, status = register_folder(order.folder, settings, order.name)
    name = order.name or card.name
    tell(ReportEvent(data=f"{name} {card.draft_revision} for target {card.target_revision}: {status}"))
    return 0


#: Each command reports what it finds, and raises AlphaloopError for what it cannot do.
_COMMANDS: Final[Mapping[type[Order], Callable[[Any, Settings, Tell], int]]] = {
    MeasureOrder: _measure,
    CalibrateOrder: _calibrate,
    CheckPairOrder: _check_pair,
    CheckServerOrder: _check_server,
    TrainOrder: _train,
    RegisterOrder: _register,
}


if __name__ == "__main__":
    sys.exit(main())
