"""`python -m worker.trainer`: drafters that are trained anew, one refresh after another; `Trainer.run_once` shows how.

A process of its own, because training takes a device, memory and minutes, and a worker has jobs to decode. It leases a
refresh in Postgres. Killed, it leaves a folder from which the next trainer of the same data folder goes on. The folder
holds texts of jobs, and goes when the refresh ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from alphaloop import logs
from alphaloop.commands import CommandEvent, StageEvent
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import (
    AlphaloopError,
    BrokerUnavailable,
    ConfigError,
    ContentStoreUnavailable,
    StoreUnavailable,
    package_missing,
    reason_of,
)
from alphaloop.liveness import ExitCode
from alphaloop.settings import Settings, load_settings
from alphaloop.settings.models import HeadsDrafterSettings
from alphaloop.start_wait import StartStopped, StartWait, await_servers
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.probes import ProbeSetStore
from alphaloop.store.refreshes import Refresh, RefreshState, RefreshStore
from alphaloop.store.workers import WorkerStore, targets_by_revision
from worker.background import BackgroundThread
from worker.training.capture import TakenPrompt, read_taken, refuse_few, take_prompts, write_prompts
from worker.training.command import CommandAgain, CommandLimits, run_command, run_hook
from worker.training.judge import Verdict, verdict_of
from worker.training.keep import KeptDrafts
from worker.training.train import (
    PromptFiles,
    Trainee,
    judge,
    open_parent,
    served_revision,
    target_revision,
    train,
)

log = logging.getLogger("worker.trainer")

LEASE_S: Final = 30.0
#: Between two looks for a refresh, where there is none.
LOOK_S: Final = 2.0
#: Before another attempt, where this one could not go on.
AGAIN_AFTER: Final = timedelta(seconds=60)
#: For the scheduler of the operating system: jobs go before training.
_NICE: Final = 10
_AWAY: Final = (StoreUnavailable, BrokerUnavailable, ContentStoreUnavailable)


class Stopped(Exception):
    """The refresh was stopped between two steps: by a signal, because it is another's now, or because it has ended."""


@dataclass(frozen=True, slots=True)
class Held:
    """A refresh while this trainer has it."""

    stop: threading.Event
    lost: threading.Event
    deadline: float  #: of training, by time.monotonic

    def is_over(self) -> bool:
        """Whether the trainer is asked to stop, or the attempt holds no more."""
        return self.stop.is_set() or self.lost.is_set()

    def should_stop(self) -> bool:
        """The same, or time to train is up."""
        return self.is_over() or time.monotonic() > self.deadline


@dataclass(eq=False)
class Trainer:
    """Trains candidates for the refreshes of one target."""

    settings: Settings
    database: Database
    stop: threading.Event
    _: KW_ONLY
    now: Callable[[], datetime]  #: the database's time
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        self._store = RefreshStore(self.database)
        self._kept = KeptDrafts(self.settings)
        self._folder = self.settings.data_dir / "refreshes"

    def run_once(self, now: datetime) -> bool:
        """Take a refresh and bring it to a trial or an end; False where there is none. Raises StoreError.

        Capture → train, or have the command train → judge → keep → trial; with servers → the hook → kept.
        """
        self._forget_ended()
        refresh = self._store.lease(self.owner, now, LEASE_S)
        if refresh is None:
            return False
        log.info("training %s", refresh.drafter, extra={"action": "refresh_taken", "refresh": refresh.id})
        with self._lease_kept(refresh) as held:
            try:
                self._refresh(refresh, held)
            except Stopped:
                if self.stop.is_set():
                    self._release(refresh, "the trainer was stopped", now=self.now())
            except (CommandAgain, *_AWAY) as error:
                self._release(refresh, error.message, now=self.now() + AGAIN_AFTER)
            except AlphaloopError as error:
                self._end(refresh, RefreshState.FAILED, error.message)
            except Exception as error:
                log.exception("training %s failed", refresh.drafter, extra={"action": "refresh_failed"})
                self._end(refresh, RefreshState.FAILED, reason_of(error))
        self._forget_ended()
        return True

    def _refresh(self, refresh: Refresh, held: Held) -> None:
        """The stages. Raises Stopped, AlphaloopError."""
        settings, should_stop = self.settings, held.should_stop
        if (other := self._other_target(refresh)) is not None:
            self._release(refresh, f"this trainer has the target {other}", now=self.now() + AGAIN_AFTER)
            return
        work = self._folder / str(refresh.id)
        prompts = self._capture(refresh, work)
        parent = open_parent(self._drafter(refresh), None if self._is_served else refresh.parent_draft_revision)
        name, out = self._candidate_name(refresh.drafter), work / "draft"
        trainee = Trainee(settings, name, parent, prompts, out, progress=_Progress(refresh.id), should_stop=should_stop)
        if settings.refresh.command:
            self._command(refresh, trainee, work)
            trained_on, judgement = "by refresh.command", None
        elif (card := train(trainee)) is None:
            raise self._why_stopped(refresh, should_stop)
        else:
            trained_on, judgement = card.trained_on, card.judgement.model_dump(mode="json")
        rounds = judge(trainee, work)
        if rounds is None:
            raise self._why_stopped(refresh, should_stop)
        if not rounds:
            raise ConfigError("expected held-out texts of more than one token to judge with, found none")
        verdict = verdict_of(rounds)
        if not verdict.is_better:
            self._end(refresh, RefreshState.REJECTED, f"nowhere better: {verdict.sentence()}", verdict)
            return
        self._try(refresh, held, trainee, verdict, trained_on, judgement)

    @property
    def _is_served(self) -> bool:
        """Whether servers decode the target, which load their drafts themselves."""
        return self.settings.models.target.engine != "own"

    def _other_target(self, refresh: Refresh) -> str | None:
        """What this trainer has in place of the refresh's target; None where that is its own. Raises ModelError.

        The revision of a server's model names no files, so a worker has to say which target it is of.
        """
        ours = self.settings.models.target.name
        if self._is_served:
            named = targets_by_revision(WorkerStore(self.database).seen())
            return None if named.get(refresh.target_revision) == ours else ours
        revision = target_revision(self.settings)
        return None if revision == refresh.target_revision else revision

    def _capture(self, refresh: Refresh, work: Path) -> PromptFiles:
        """The prompts of this attempt: those of the attempt before, unless a job of theirs was erased since."""
        files = PromptFiles(work / "prompts.jsonl", work / "held-out.jsonl")
        if files.trained.exists() and files.held_out.exists():
            before = read_taken(files.trained) + read_taken(files.held_out)
            if len(self._held(refresh, before)) == len(before):
                return files
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, mode=0o700)
        taken = take_prompts(self.settings, ProbeSetStore(self.database).prompt_ids())
        refuse_few(taken, self.settings.refresh.min_texts)
        taken = self._held(refresh, taken)
        refuse_few(taken, self.settings.refresh.min_texts)
        write_prompts((each for each in taken if not each.is_held_out), files.trained)
        write_prompts((each for each in taken if each.is_held_out), files.held_out)
        return files

    def _held(self, refresh: Refresh, taken: Sequence[TakenPrompt]) -> list[TakenPrompt]:
        """Those whose jobs have ended and are not erased, from now on noted as the refresh's. Raises Stopped."""
        given = [(each.job_id, each.prompt_id, each.is_held_out) for each in taken]
        held = self._store.prompts(refresh.id, refresh.attempt, given)
        if held is None:
            raise Stopped
        return [each for each in taken if each.job_id in held]

    def _command(self, refresh: Refresh, trainee: Trainee, work: Path) -> None:
        """Have `[refresh] command` train. Raises Stopped, CommandFailed, CommandAgain."""
        limits = self.settings.refresh
        shutil.rmtree(trainee.out, ignore_errors=True)
        is_done = run_command(
            limits.command,
            [trainee.prompts.trained, trainee.target.source, trainee.parent.path, trainee.out],
            work,
            CommandLimits(
                max(0.0, limits.max_training_s - refresh.device_s), limits.max_command_bytes, limits.num_threads
            ),
            on_event=_Progress(refresh.id).take,
            should_stop=trainee.should_stop,
        )
        if not is_done:
            raise self._why_stopped(refresh, trainee.should_stop)

    def _try(
        self,
        refresh: Refresh,
        held: Held,
        trainee: Trainee,
        verdict: Verdict,
        trained_on: str,
        judgement: Mapping[str, Any] | None,
    ) -> None:
        """Keep the candidate, and have workers try it, or servers start with it. Raises Stopped."""
        revision = served_revision(trainee)
        location = self._kept.keep(trainee.out, revision)
        state, sentence = RefreshState.TRIAL, verdict.sentence()
        if self._is_served:
            state = RefreshState.KEPT
            sentence = f"{self._hook(refresh, held, trainee.name, revision, location)}; {sentence}"
        DraftRegistry(self.database).register_trained(
            trainee.name,
            revision,
            refresh.target_revision,
            trained_on=trained_on,
            figures=judgement,
            parent_revision=refresh.parent_draft_revision,
        )
        if self._store.trial(
            refresh.id,
            refresh.attempt,
            name=trainee.name,
            revision=revision,
            location=location,
            figures=verdict.figures(),
            sentence=sentence,
            state=state,
        ):
            facts = {"action": f"refresh_{state.value}", "refresh": refresh.id}
            log.info("%s: %s", trainee.name, sentence, extra=facts)

    def _hook(self, refresh: Refresh, held: Held, name: str, revision: str, location: str) -> str:
        """Have the hook start servers with a draft; what became of it, in words. Raises Stopped."""
        limits, folder = self.settings.refresh, location.removeprefix("file://")
        no_trial = f"no trial, because servers load their drafts themselves: {name} lies in {folder}"
        if not limits.hook:
            return f"{no_trial}, and refresh.hook is not set"
        ended = run_hook(
            limits.hook,
            [self.settings.models.target.name, name, revision, folder],
            self._folder / str(refresh.id) / "hook",
            CommandLimits(limits.max_hook_s, limits.max_command_bytes, limits.num_threads),
            should_stop=held.is_over,
        )
        if ended is None:
            raise Stopped
        log.info("%s", ended, extra={"action": "refresh_hook", "refresh": refresh.id, "drafter": name})
        return f"{no_trial}; {ended}"

    def _drafter(self, refresh: Refresh) -> HeadsDrafterSettings:
        """The settings of the parent, which is configured or a candidate that was kept. Raises AlphaloopError."""
        models = self.settings.models
        drafter = models.trainable.get(models.ancestor(refresh.drafter))
        if drafter is None:
            raise ConfigError(f"expected a drafter of the method heads or eagle3, found {refresh.drafter}")
        if refresh.drafter in models.drafters:
            return drafter
        for earlier in self._store.all():
            if (earlier.candidate_name, earlier.candidate_revision) == (refresh.drafter, refresh.parent_draft_revision):
                source = self._kept.fetch(earlier.location or "")
                return drafter.model_copy(update={"source": str(source), "revision": None})
        raise ConfigError(f"expected a kept draft {refresh.drafter} {refresh.parent_draft_revision}, found none")

    def _candidate_name(self, drafter: str) -> str:
        """The drafter's with the lowest suffix that no drafter has, or ever had."""
        known = set(self.settings.models.drafters) | {draft.drafter for draft in DraftRegistry(self.database).all()}
        known |= {refresh.candidate_name for refresh in self._store.all() if refresh.candidate_name}
        base = self.settings.models.ancestor(drafter)
        return next(name for number in range(2, 2 + len(known) + 1) if (name := f"{base}-{number}") not in known)

    @contextmanager
    def _lease_kept(self, refresh: Refresh) -> Iterator[Held]:
        """Renew the lease meanwhile."""
        lost = threading.Event()
        deadline = time.monotonic() + self.settings.refresh.max_training_s - refresh.device_s

        def renew() -> None:
            try:
                if not self._store.renew(refresh.id, refresh.attempt, self.owner, self.now(), LEASE_S):
                    lost.set()
            except StoreUnavailable as error:
                log.warning("the lease was not renewed: %s", error.message, extra={"action": "lease_not_renewed"})

        thread = BackgroundThread("lease", renew, every_s=LEASE_S / 6, on_failure=lost.set)
        thread.start()
        try:
            yield Held(self.stop, lost, deadline)
        finally:
            thread.end(LEASE_S)

    def _why_stopped(self, refresh: Refresh, should_stop: Callable[[], bool]) -> Exception:
        """Time that is up is a failure; all else is no more than a stop."""
        holds = self._store.renew(refresh.id, refresh.attempt, self.owner, self.now(), LEASE_S)
        if self.stop.is_set() or not holds:
            return Stopped()
        return ConfigError(
            f"training took longer than refresh.max_training_s, {self.settings.refresh.max_training_s:g} s",
            hint="raise it, or have a smaller target written fewer texts",
        )

    def _release(self, refresh: Refresh, why: str, *, now: datetime) -> None:
        self._store.release(refresh.id, refresh.attempt, sentence=why, not_before=now)
        log.info("%s waits: %s", refresh.drafter, why, extra={"action": "refresh_waits", "refresh": refresh.id})

    def _end(self, refresh: Refresh, state: RefreshState, why: str, verdict: Verdict | None = None) -> None:
        figures = None if verdict is None else verdict.figures()
        self._store.end(refresh.id, refresh.attempt, state, sentence=why, figures=figures)
        log.info("%s: %s", refresh.drafter, why, extra={"action": f"refresh_{state.value}", "refresh": refresh.id})

    def _forget_ended(self) -> None:
        """Delete the folders of refreshes that are not to be trained any more, with their texts."""
        if not self._folder.is_dir():
            return
        due = (RefreshState.WAITING, RefreshState.TRAINING)
        kept = {str(refresh.id) for refresh in self._store.all() if refresh.state in due}
        for folder in self._folder.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


class _Progress:
    """Logs how far a refresh is; texts are never among it."""

    def __init__(self, refresh_id: int) -> None:
        self._extra = {"action": "refresh_progress", "refresh": refresh_id}

    def stage(self, name: str, total: int, done: int) -> None:
        """As `TrainingProgress.stage`."""
        log.info("%s: %d of %d", name, done, total, extra=self._extra)

    def advance(self, num: int, note: str) -> None:
        """As `TrainingProgress.advance`."""

    def note(self, text: str) -> None:
        """As `TrainingProgress.note`."""
        log.info("%s", text, extra=self._extra)

    def take(self, event: CommandEvent) -> None:
        """An event of the command: what it writes may hold texts of jobs, so only stages are logged."""
        if isinstance(event, StageEvent):
            self.stage("a stage of the command", event.total or 0, event.done)


def main() -> int:
    """Run a trainer, with the settings that the environment names, until SIGTERM or SIGINT.

    Returns why it ended, one of alphaloop.liveness.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        configs = os.environ.get("ALPHALOOP_CONFIGS")
        profile = os.environ.get("ALPHALOOP_PROFILE")
        settings = with_running_stack(load_settings(Path(configs) if configs else None, profile=profile))
        logs.configure(settings.logs.level, settings.logs.format)
        if settings.postgres.url is None:
            raise ConfigError("postgres.url: not set", hint="set DATABASE_URL, or start `alphaloop up`")
        with Database(settings.postgres.url, pool_size=2, limits=settings.postgres.limits()) as database:
            await_servers(settings, database, StartWait(stop, settings.startup.server_wait_s))
            _serve(Trainer(settings, database, stop, now=DatabaseClock(database).now))
    except ImportError as error:
        log.error("%s", package_missing(error).message, extra={"action": "trainer_failed"})
        return ExitCode.FAILED
    except AlphaloopError as error:
        log.error("%s", error.message, extra={"action": "trainer_failed", "code": error.code, "hint": error.hint or ""})
        return ExitCode.FAILED
    except StartStopped:
        pass
    log.info("stopped", extra={"action": "trainer_stopped"})
    return ExitCode.STOPPED


def _serve(trainer: Trainer) -> None:
    os.nice(_NICE)
    log.info("waiting for refreshes", extra={"action": "trainer_ready", "owner": trainer.owner})
    while not trainer.stop.is_set():
        try:
            was_busy = trainer.run_once(trainer.now())
        except StoreUnavailable as error:
            log.warning("%s", error.message, extra={"action": "store_away"})
            was_busy = False
        if not was_busy:
            trainer.stop.wait(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
