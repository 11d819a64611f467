"""What becomes of a batch of the API: its lines are counted and sent, its requests awaited, its files written.

A second thread counts every open batch: those that came through Kafka, too, with which nothing else is done.

Every scheduler that serves the API looks for batches that are due. Whoever holds the lease of a batch goes on with it
from what the database says of it, so a scheduler may die at any moment: another one sends from the last line that the
broker surely has. Lines that are sent twice have the same job_id, and are decoded once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn

from alphaloop.batches.contents import FileContents, Writer
from alphaloop.batches.counting import PAUSE_OVER_COUNTING, BatchCounting, counted_columns
from alphaloop.batches.lines import BadRequest, BatchReader, BatchRequest, BatchSource, KeptBatches, LineRules
from alphaloop.batches.progress import PAGE, Part, Progress, RequestRow, SentBatch, rows_of, send
from alphaloop.batches.promising import Promising
from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import (
    AlphaloopError,
    BrokerError,
    ConfigError,
    ContentAltered,
    ContentMissing,
    ContentStoreUnavailable,
    StoreUnavailable,
    reason_of,
)
from alphaloop.files import reading, shown_name
from alphaloop.kafka.producer import request_cancellation
from alphaloop.messages import Status
from alphaloop.outcomes.reading import JobPlace, Whereabouts, find_jobs
from alphaloop.settings import Settings, settings_of_segment
from alphaloop.store.api import OPEN, ApiBatch, ApiBatchStore, ApiFile, ApiFileStore, Deed, backlog_of_segment
from alphaloop.store.coordination import LeaderLease
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.jobs import JobStore
from alphaloop.store.known_jobs import BatchStore

log = logging.getLogger(__name__)

#: Requests of a batch, as OpenAI has it.
MOST_LINES: Final = 50_000
#: Files of the API are deleted after it, and so are the files that a batch wrote.
KEPT_FOR: Final = timedelta(days=30)
#: A scheduler that died is followed after it.
LEASE_S: Final = 30.0
_LOOK_EVERY: Final = timedelta(seconds=1)
#: Between two counts at least.
_COUNT_EVERY_S: Final = 2.0
#: After a failure that passes by itself, and after any other.
_RETRY: Final = timedelta(seconds=5)
_LATER: Final = timedelta(minutes=1)
#: So long after its end no job of a batch may still get a text: its deadline has passed for every worker.
_GRACE: Final = timedelta(seconds=60)
#: A claim that began before a cancellation was written down has been written by then.
_CLAIMS_SETTLED_S: Final = 3.0
_CLEAN_EVERY_S: Final = 300.0
_MOST_CLEANED: Final = 100
_MOST_DUE: Final = 20
_MOST_ERRORS: Final = 100


class Advancing:
    """Goes on with batches that are due and counts the open ones, in threads of its own until it is closed."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        owner: str,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` must be new for each process. `database` must let read the texts of jobs."""
        self._settings, self._database, self._clock = settings, database, clock
        self._batches, self._files = ApiBatchStore(database), ApiFileStore(database)
        self._contents = FileContents(settings)
        self._owner, self._lease_s = owner, lease_s
        self._cancelled_at: dict[str, float] = {}  #: by batch, when its cancellations were written down, by `clock`
        self._counting, self._promising = BatchCounting(settings, database), Promising(settings, database)
        self._clean_due = self._count_due = 0.0
        self._news, self._stop = threading.Event(), threading.Event()
        turns = {"batches": self.run_once, "batch-counts": self.count_open}
        self._threads = [threading.Thread(target=self._run, args=(turns[n],), name=n, daemon=True) for n in turns]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Look at once: there is a new batch."""
        self._news.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the page of lines that is being sent; another scheduler goes on with the rest."""
        self._stop.set()
        self._news.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_s)

    def _run(self, turn: Callable[[], object]) -> None:
        logged: str | None = None  # why the last turn failed
        while not self._stop.is_set():
            pause, why = _LOOK_EVERY, None
            try:
                turn()
            except Exception as error:
                pause, why = _RETRY, reason_of(error)
            if why not in (None, logged):
                log.warning("batches wait: %s", why, extra={"action": "batches_not_read"})
            logged = why
            self._news.wait(pause.total_seconds())
            if not self._stop.is_set():
                self._news.clear()

    def run_once(self) -> int:
        """Go on with each batch that is due, and delete files whose time is over; returns how many were due.

        Raises StoreError.
        """
        due = self._batches.due(_MOST_DUE)
        for batch_id in due:
            if self._stop.is_set():
                break
            self._in_turn(batch_id)
        if self._clock() >= self._clean_due:
            self._clean_due = self._clock() + _CLEAN_EVERY_S
            self._delete_expired()
        return len(due)

    def count_open(self) -> None:
        """Count the open batches, whoever sent them, if that is due. Raises StoreError, BrokerError."""
        if (began := self._clock()) < self._count_due:
            return
        now = DatabaseClock(self._database).measure()
        batches, counts = self._counting.count(now)
        if batches:
            self._promising.promise(batches, counts, now)
        ended = self._clock()
        self._count_due = ended + max(_COUNT_EVERY_S, PAUSE_OVER_COUNTING * (ended - began))

    def _in_turn(self, batch_id: str) -> None:
        lease = LeaderLease(self._database, self._owner, lease_s=self._lease_s, role=f"batch {batch_id}")
        if not lease.try_acquire():
            self._batches.postpone(batch_id, _LOOK_EVERY)
            return
        pause = _LOOK_EVERY
        try:
            if (known := self._batches.with_files(batch_id)) is not None and known[0].status in OPEN:
                (batch, files, now), began = known, self._clock()
                _Turn(self, lease, batch, files.get(batch.input_file_id), now).take()
                if batch.status == "finalizing":  # it waits for redriven jobs, and was read whole
                    pause = max(pause, timedelta(seconds=PAUSE_OVER_COUNTING * (self._clock() - began)))
        except _Ended:
            pause = timedelta(0)
        except Exception as error:
            passes = isinstance(error, (StoreUnavailable, BrokerError, ContentStoreUnavailable))
            pause = _RETRY if passes else _LATER
            fields = {"action": "batch_waits", "hint": getattr(error, "hint", None) or ""}
            log.warning("batch %s waits: %s", batch_id, reason_of(error), extra=fields)
        try:
            if pause:
                self._batches.postpone(batch_id, pause)
        finally:
            lease.release()

    def _delete_expired(self) -> None:
        for file in self._files.expired(_MOST_CLEANED):
            try:
                self._contents.delete(file.id, file.parts)
            except (AlphaloopError, OSError) as error:
                log.warning("%s was not deleted: %s", file.id, type(error).__name__, extra={"action": "file_kept"})
                continue
            self._files.forget(file.id)


class _Ended(Exception):
    """This process has no more to do in this turn: the lease is lost, the batch was cancelled, or it stops."""


@dataclass(slots=True)
class _Found:
    by_status: Counter[str] = field(default_factory=Counter)
    open: list[str] = field(default_factory=list)  #: job_ids


class _Turn:
    """One turn at one batch."""

    def __init__(
        self, around: Advancing, lease: LeaderLease, batch: ApiBatch, file: ApiFile | None, now: datetime
    ) -> None:
        self._around, self._lease, self._batch, self._file, self._now = around, lease, batch, file, now
        self._settings, self._database, self._batches = around._settings, around._database, around._batches
        self._opened = ExitStack()
        self._path: Path | None = None

    def take(self) -> None:
        """Do what comes next for it. Raises _Ended, and the errors of what it does."""
        try:
            with self._opened:
                self._go_on()
        except (ContentMissing, ContentAltered) as error:
            if self._file is not None and self._file.parts is None:
                raise ContentStoreUnavailable(error.message, hint=error.hint) from None
            self._fail("input_file_gone", error.message)

    def _go_on(self) -> None:
        if self._batch.status == "cancelling" and self._batch.in_progress_at is None:
            self._end("cancelled", [])
        if self._batch.status == "validating":
            self._count_lines()
        if self._batch.status == "in_progress" and self._batch.num_sent < self._batch.num_total:
            self._send()
        end = Status.EXPIRED if self._now > self._batch.expires_at + _GRACE else None
        if self._batch.status == "finalizing":
            self._finish(Status.CANCELLED if self._batch.cancelling_at else end)
        elif self._batch.status == "cancelling":
            self._cancel(is_over=end is not None)
        else:
            self._look(end)

    def _input(self) -> Path:
        """Where the batch's file lies until the turn is over; it is fetched when it is needed first."""
        if self._file is None:
            raise ContentMissing("the input file is gone")
        if self._path is None:
            self._path = self._opened.enter_context(self._around._contents.as_file(self._file.id, self._file.parts))
        return self._path

    def _count_lines(self) -> None:
        """Refuse a file without a good line; what is wrong with one among good ones is found when it is sent."""
        console, path, num_lines, bad = self._settings.console, self._input(), 0, list[BadRequest]()
        most = console.max_batch_mb * 10**6
        try:
            with reading(path, max_bytes=most) as source:
                lines = iter(source.lines)
                for line in _reader(self._batch, self._settings).read(lines):
                    num_lines += 1
                    if isinstance(line, BatchRequest) or num_lines > MOST_LINES:
                        break
                    bad.append(line)
                num_lines += sum(1 for rest in lines if rest.strip())
        except ConfigError as error:
            # The error names the file by where it lies here.
            self._fail("invalid_file", error.message.removeprefix(f"{shown_name(path)}: "))
        if not num_lines:
            self._fail("empty_file", "expected one request a line, found no line with text")
        if num_lines > MOST_LINES:
            self._fail("too_many_requests", f"expected at most {MOST_LINES} requests, found {num_lines}")
        if len(bad) == num_lines:
            counts: dict[str, Any] = dict.fromkeys(("num_total", "num_invalid", "num_failed"), num_lines)
            counts["by_status"] = {"invalid": num_lines}
            self._end("failed", [], errors=[request.as_json() for request in bad[:_MOST_ERRORS]], **counts)
        self._changed("in_progress", num_total=num_lines)

    def _send(self) -> None:
        before = self._batch
        if self._now > before.expires_at:
            return  # jobs whose deadline has passed are not worth sending

        def after_page(done: SentBatch) -> None:
            self._keep_lease()
            num_sent, num_invalid = before.num_sent + done.num_lines, before.num_invalid + done.num_wrong
            self._changed(None, num_sent=num_sent, num_invalid=num_invalid)

        num_lines = self._num_lines_to_send()
        if not num_lines:
            return
        with reading(self._input()) as source:
            lines = _reader(before, self._settings).read(source.lines)
            lines = islice(lines, before.num_sent, before.num_sent + num_lines)
            send(lines, self._settings, self._database, before.id, after_page=after_page)

    def _num_lines_to_send(self) -> int:
        """The rest, or as many as may wait of the segment; none below half of it: each time the file is read."""
        batch = self._batch
        rest = batch.num_total - batch.num_sent
        most = settings_of_segment(self._settings.segments, batch.segment).max_waiting_jobs
        if most is None:
            return rest
        room = most - backlog_of_segment(self._database, batch.segment).num_in_kafka
        return 0 if room < min(rest, (most + 1) // 2) else min(rest, room)

    def _look(self, end: Status | None) -> None:
        """Where all that was counted has ended, or the time is over, see whether each request has."""
        is_sent = self._batch.num_sent >= self._batch.num_total
        if end or (is_sent and not Progress.of(self._batch).num_open and not self._read().open):
            self._changed("finalizing")
            self._write(end)

    def _cancel(self, *, is_over: bool) -> None:
        """Ask for the end of each request that has not ended; when none is decoded any more, it is over.

        What no worker has claimed when the cancellations are written down will be cancelled by whoever claims it.
        """
        # A scheduler that died may have sent one page more than it wrote down.
        counted = self._read(num_lines=self._batch.num_sent + PAGE)
        asked = self._around._cancelled_at
        if self._batch.id not in asked:
            jobs = JobStore(self._database)
            for start in range(0, len(counted.open), PAGE):
                jobs.request_cancel(*counted.open[start : start + PAGE])
                self._keep_lease()
            asked[self._batch.id] = self._around._clock()
        is_settled = self._around._clock() >= asked[self._batch.id] + _CLAIMS_SETTLED_S
        if is_over or (is_settled and not counted.by_status["held"]):
            self._write(Status.CANCELLED)

    def _finish(self, end: Status | None) -> None:
        """Write its files: of one that had ended, once no request is open whose dead letter was sent again."""
        if not self._batch.had_ended or not self._read(end).open:
            self._write(end)

    def _write(self, end: Status | None) -> None:
        """Write the files of a batch that is over, in one pass over its requests; the open ones ended with it."""
        contents = ContentStore.of(self._settings.claim_check)
        writers, by_status, used = dict[Part, Writer](), Counter[str](), Counter[str]()
        try:
            for row in self._rows(contents, end):
                if row.part == "open":
                    raise _Ended  # a dead letter was sent again meanwhile, and is waited for
                if row.part not in writers:
                    writers[row.part] = Writer(self._around._contents, self._file_id(row.part))
                writers[row.part].add(json.dumps(row.row).encode() + b"\n")
                by_status[row.status] += 1
                used.update(_tokens_of(row))
            files = {part: self._written(part, *writer.close()) for part, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.give_up()
            raise
        self._keep_lease()
        ids = {f"{part}_file_id": files[part].id if part in files else None for part in ("output", "error")}
        status = "cancelled" if end is Status.CANCELLED else "expired" if by_status["expired"] else "completed"
        self._end(status, list(files.values()), **ids, used=dict(used), **counted_columns(Progress(by_status)))

    def _written(self, part: str, num_bytes: int, parts: Any) -> ApiFile:
        name = f"{self._batch.id}_{part}.jsonl"
        kept_s = self._batch.output_kept_s
        expires_at = self._now + (KEPT_FOR if kept_s is None else timedelta(seconds=kept_s))
        return ApiFile(
            id=self._file_id(part),
            key_name=self._batch.key_name,
            filename=name,
            purpose="batch_output",
            num_bytes=num_bytes,
            parts=parts,
            created_at=self._now,
            expires_at=expires_at,
        )

    def _file_id(self, part: str) -> str:
        """The same whoever writes it, so that what is left of one that died is written over; others at each end."""
        again = f" {self._batch.finalizing_at}" if self._batch.had_ended else ""
        return f"file-{hashlib.sha256(f'{self._batch.id} {part}{again}'.encode()).hexdigest()[:32]}"

    def _read(self, end: Status | None = None, num_lines: int | None = None) -> _Found:
        """Read what became of each request, or of those of the first lines, and write down how many."""
        counted = _Found()
        for row in self._rows(None, end, num_lines):
            counted.by_status[row.status] += 1
            if row.part == "open" and row.job_id:
                counted.open.append(row.job_id)
        self._changed(None, **counted_columns(Progress(counted.by_status)))
        return counted

    def _rows(
        self, contents: ContentStore | None, end: Status | None, num_lines: int | None = None
    ) -> Iterator[RequestRow]:
        source = replace(api_source(self._batch, self._input(), self._settings), end=end, num_lines=num_lines)
        for number, row in enumerate(rows_of(source, self._settings, self._database, contents)):
            if number % PAGE == 0:
                self._keep_lease()
            yield row

    def _keep_lease(self) -> None:
        if self._around._stop.is_set() or not self._lease.is_held():
            raise _Ended

    def _fail(self, code: str, message: str) -> NoReturn:
        self._end("failed", [], errors=[{"code": code, "message": message, "param": None, "line": None}])

    def _changed(self, status: str | None, **values: Any) -> None:
        changed = self._batches.change(self._batch, status, **values)
        if changed is None:
            raise _Ended
        self._batch = changed

    def _end(self, status: str, files: list[ApiFile], **values: Any) -> NoReturn:
        self._around._cancelled_at.pop(self._batch.id, None)
        if self._batches.end(self._batch, status, files, **values):
            log.info("batch %s: %s", self._batch.id, status, extra={"action": f"batch_{status}"})
        raise _Ended


def _tokens_of(row: RequestRow) -> dict[str, int]:
    """The tokens of a request that has a text."""
    usage = (((row.row or {}).get("response") or {}).get("body") or {}).get("usage") or {}
    thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    counts = {"input": usage.get("prompt_tokens", 0), "output": usage.get("completion_tokens", 0)}
    # Only where there are any: a console of the release before knows no such tokens.
    return {**counts, "reasoning": thought, **({"cached": cached} if cached else {})}


@contextmanager
def batch_named(name: str, settings: Settings, database: Database) -> Iterator[BatchSource]:
    """The batch of this name: with the lines of its file, where that can be read here. Raises StoreError."""
    if (known := ApiBatchStore(database).with_files(name)) is None:
        yield KeptBatches(settings.console_batches).batch(name)
        return
    batch, files, _ = known
    with ExitStack() as opened:
        path, file = None, files.get(batch.input_file_id)
        with suppress(AlphaloopError):  # it may lie in another machine's folder
            if file is not None:
                path = opened.enter_context(FileContents(settings).as_file(file.id, file.parts))
        yield api_source(batch, path, settings)


def api_source(batch: ApiBatch, path: Path | None, settings: Settings) -> BatchSource:
    """A batch of the API; `path` is where its input file lies."""
    end = Status(batch.status) if batch.status in (Status.CANCELLED, Status.EXPIRED) else None
    return BatchSource(batch.id, path, partial(_reader, batch, settings), end, batch.had_ended)


def _reader(batch: ApiBatch, settings: Settings) -> BatchReader:
    fixed = {"segment": batch.segment, "deadline": batch.expires_at.isoformat()}
    tasks = batch.tasks or tuple(settings.tasks)
    rules = LineRules(batch.endpoint, tasks, fixed, task_by="metadata.task of the batch")
    return BatchReader(settings, batch.id, task=batch.task, rules=rules)


def files_of(batch_id: str, database: Database) -> dict[str, ApiFile]:
    """What a batch of the API read (`input`) and wrote (`output`, `error`); nothing of any other. Raises StoreError."""
    if (known := ApiBatchStore(database).with_files(batch_id)) is None:
        return {}
    batch, files, _ = known
    ids = {"input": batch.input_file_id}
    if batch.status not in OPEN:
        ids |= {"output": batch.output_file_id or "", "error": batch.error_file_id or ""}
    return {part: files[file_id] for part, file_id in ids.items() if file_id in files}


def written(batch_id: str, part: str, settings: Settings, database: Database) -> Iterator[bytes] | None:
    """One of these files; None where it is not there. Raises StoreError, ContentError, ContentStoreUnavailable."""
    file = files_of(batch_id, database).get(part)
    return None if file is None else FileContents(settings).read(file.id, file.parts)


def cancel(
    batch: BatchSource, settings: Settings, database: Database, deed: Deed | None, until: datetime | None = None
) -> tuple[int, int]:
    """Cancel the requests that have not ended, those too that were not sent yet of one of the API.

    Returns how many these are, and how many of another batch were never sent: those are cancelled if they come `until`
    then. With `deed` the audit says who cancelled one of the API. Raises as `rows_of`.
    """
    known = BatchStore(database).find(batch.batch_id)
    if known is not None and known.status is not None:
        ApiBatchStore(database).cancel(known.by or "", known.id, deed)
        return Progress.of(known).num_open, 0
    rows = rows_of(batch, settings, database)
    jobs = ask_to_cancel(settings, database, [row.job_id for row in rows if row.part == "open" and row.job_id], until)
    num_open = sum(job.is_open for job in jobs)
    return num_open, len(jobs) - num_open


def ask_to_cancel(
    settings: Settings, database: Database, job_ids: Sequence[str], until: datetime | None
) -> list[Whereabouts]:
    """Ask for the ends of jobs that have not ended, of unknown ones too where `until` is given; where each was."""
    places = find_jobs(settings, database, job_ids)
    asked = [job.job_id for job in places if job.is_open or (until and job.place is JobPlace.UNKNOWN)]
    request_cancellation(settings.kafka, asked, until=until)
    return places
