"""What becomes of a batch of the API: its lines are counted and sent, its requests awaited, its files written.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn

from alphaloop.batches.contents import FileContents, Writer
from alphaloop.batches.lines import BatchReader, BatchSource, LineRules
from alphaloop.batches.progress import Part, RequestRow, SentBatch, rows_of, send, unanswered_row
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
from alphaloop.messages import Status
from alphaloop.settings import Settings, settings_of_segment
from alphaloop.store.api import ApiBatch, ApiBatchStore, ApiFile, ApiFileStore, backlog_of_segment
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.store.schedule import LeaderLease

log = logging.getLogger(__name__)

#: Requests of a batch, as OpenAI has it.
MOST_LINES: Final = 50_000
#: Files of the API are deleted after it, and so are the files that a batch wrote.
KEPT_FOR: Final = timedelta(days=30)
#: A scheduler that died is followed after it.
LEASE_S: Final = 30.0
_LOOK_EVERY: Final = timedelta(seconds=1)
#: Between two looks for refused requests, which reads every request: at least so long, and so many times as it took.
_COUNT_EVERY_S: Final = 5.0
_PAUSE_OVER_COUNTING: Final = 5.0
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
_PAGE: Final = 500
_MOST_REMEMBERED: Final = 10_000


class Advancing:
    """Goes on with batches that are due, in a thread of its own until it is closed."""

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
        self._counts: dict[str, _Counted] = {}
        self._cancelled_at: dict[str, float] = {}  #: by batch, when its cancellations were written down, by `clock`
        self._clean_due = 0.0
        self._told: str | None = None  #: why the last look failed
        self._news, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look at once: there is a new batch."""
        self._news.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the page of lines that is being sent; another scheduler goes on with the rest."""
        self._stop.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            pause, why = _LOOK_EVERY, None
            try:
                self.run_once()
            except Exception as error:
                pause, why = _RETRY, reason_of(error)
            if why not in (None, self._told):
                log.warning("batches of the API wait: %s", why, extra={"action": "batches_not_read"})
            self._told = why
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

    def _in_turn(self, batch_id: str) -> None:
        lease = LeaderLease(self._database, self._owner, lease_s=self._lease_s, role=f"batch {batch_id}")
        if not lease.try_acquire():
            self._batches.postpone(batch_id, _LOOK_EVERY)
            return
        pause = _LOOK_EVERY
        try:
            if (found := self._batches.open_one(batch_id)) is not None:
                _Turn(self, lease, *found).take()
        except _Ended:
            pause = timedelta(0)
        except Exception as error:
            passes = isinstance(error, (StoreUnavailable, BrokerError, ContentStoreUnavailable))
            pause = _RETRY if passes else _LATER
            told = {"action": "batch_waits", "hint": getattr(error, "hint", None) or ""}
            log.warning("batch %s waits: %s", batch_id, reason_of(error), extra=told)
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

    def _counts_of(self, batch_id: str) -> _Counted:
        """What is known of the last time that its requests were read, from the first look at it on."""
        if len(self._counts) > _MOST_REMEMBERED:
            self._counts.clear()
        return self._counts.setdefault(batch_id, _Counted(self._clock() + _COUNT_EVERY_S, 0))


@dataclass(slots=True)
class _Counted:
    """When requests are to be read again, and how many jobs had ended when they were read last."""

    due: float
    num_ended: int


class _Ended(Exception):
    """This process has no more to do in this turn: the lease is lost, the batch was cancelled, or it stops."""


@dataclass(slots=True)
class _Found:
    num_completed: int = 0
    num_failed: int = 0
    num_held: int = 0
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
        is_over = self._now > self._batch.expires_at + _GRACE
        if self._batch.status == "finalizing":
            self._write("expired" if is_over else "completed")
        elif self._batch.status == "cancelling":
            self._cancel(is_over=is_over)
        else:
            self._look(is_over=is_over)

    def _input(self) -> Path:
        """Where the batch's file lies until the turn is over; it is fetched when it is needed first."""
        if self._file is None:
            raise ContentMissing("the input file is gone")
        if self._path is None:
            self._path = self._opened.enter_context(self._around._contents.as_file(self._file.id, self._file.parts))
        return self._path

    def _count_lines(self) -> None:
        """Refuse a file that is none; what is wrong with a single line is found when it is sent."""
        console, path, num_lines = self._settings.console, self._input(), 0
        most = console.max_batch_mb * 10**6
        try:
            with reading(path, max_bytes=most) as source:
                for line in source.lines:
                    num_lines += bool(line.strip())
                    if num_lines > MOST_LINES:
                        told = f"expected at most {MOST_LINES} requests, found more"
                        self._fail("too_many_requests", told)
        except ConfigError as error:
            # The error names the file by where it lies here.
            self._fail("invalid_file", error.message.removeprefix(f"{shown_name(path)}: "))
        if not num_lines:
            self._fail("empty_file", "expected one request a line, found no line with text")
        self._changed("in_progress", num_total=num_lines)

    def _send(self) -> None:
        before = self._batch
        if self._now > before.expires_at:
            return  # jobs whose deadline has passed are not worth sending

        def after_page(done: SentBatch) -> None:
            self._keep_lease()
            num_sent, num_invalid = before.num_sent + done.num_lines, before.num_invalid + done.num_wrong
            self._changed(None, num_sent=num_sent, num_invalid=num_invalid, num_failed=num_invalid)

        num_lines = self._num_lines_to_send()
        if not num_lines:
            return
        with reading(self._input()) as source:
            lines = islice(self._reader().read(source.lines), before.num_sent, before.num_sent + num_lines)
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

    def _look(self, *, is_over: bool) -> None:
        """See how far it is; where it may be done, or requests may have been refused, by reading each one."""
        batch, counted = self._batch, self._around._counts_of(self._batch.id)
        num_succeeded, num_others = self._batches.num_ended(batch.id)
        num_ended = num_succeeded + num_others
        may_be_done = num_ended + batch.num_invalid >= batch.num_total and num_ended != counted.num_ended
        if not (may_be_done or is_over or self._around._clock() >= counted.due):
            num_failed = max(batch.num_failed, num_others + batch.num_invalid)
            if (num_succeeded, num_failed) != (batch.num_completed, batch.num_failed):
                self._changed(None, num_completed=num_succeeded, num_failed=num_failed)
            return
        found = self._read()
        counted.num_ended = num_ended
        if is_over or not found.open:
            self._changed("finalizing", num_completed=found.num_completed, num_failed=found.num_failed)
            self._write("expired" if is_over else "completed")
        else:
            self._changed(None, num_completed=found.num_completed, num_failed=found.num_failed)

    def _cancel(self, *, is_over: bool) -> None:
        """Ask for the end of each request that has not ended; when none is decoded any more, it is over.

        What no worker has claimed when the cancellations are written down will be cancelled by whoever claims it.
        """
        found = self._read()
        self._changed(None, num_completed=found.num_completed, num_failed=found.num_failed)
        asked = self._around._cancelled_at
        if self._batch.id not in asked:
            jobs = JobStore(self._database)
            for start in range(0, len(found.open), _PAGE):
                jobs.request_cancel(*found.open[start : start + _PAGE])
                self._keep_lease()
            asked[self._batch.id] = self._around._clock()
        is_settled = self._around._clock() >= asked[self._batch.id] + _CLAIMS_SETTLED_S
        if is_over or (is_settled and not found.num_held):
            self._write("cancelled")

    def _write(self, status: str) -> None:
        """Write the files of a batch that is over, in one pass over its requests."""
        end = Status.CANCELLED if status == "cancelled" else Status.EXPIRED
        contents = ContentStore.of(self._settings.claim_check)
        writers, num_rows = dict[Part, Writer](), Counter[Part]()
        any_expired = False
        try:
            for row in self._rows(contents):
                if row.part == "open" and status == "completed":
                    raise _Ended  # a dead letter was sent again meanwhile, and is waited for
                ended = _ended(row, end)
                any_expired = any_expired or ended.status == Status.EXPIRED
                if ended.part not in writers:
                    writers[ended.part] = Writer(self._around._contents, self._file_id(ended.part))
                writers[ended.part].add(json.dumps(ended.row).encode() + b"\n")
                num_rows[ended.part] += 1
            if status == "completed" and any_expired:
                status = "expired"
            files = {part: self._written(part, *writer.close()) for part, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.give_up()
            raise
        self._keep_lease()
        self._end(
            status,
            list(files.values()),
            **{f"{part}_file_id": file.id for part, file in files.items()},
            num_completed=num_rows["output"],
            num_failed=num_rows["error"],
        )

    def _written(self, part: str, num_bytes: int, parts: Any) -> ApiFile:
        name = f"{self._batch.id}_{part}.jsonl"
        expires_at = self._now + KEPT_FOR
        file_id, key_name = self._file_id(part), self._batch.key_name
        return ApiFile(file_id, key_name, name, "batch_output", num_bytes, parts, self._now, expires_at)

    def _file_id(self, part: str) -> str:
        """The same whoever writes it, so that what a scheduler left that died is written over."""
        return f"file-{hashlib.sha256(f'{self._batch.id} {part}'.encode()).hexdigest()[:32]}"

    def _read(self) -> _Found:
        """Read what became of each request."""
        began, found = self._around._clock(), _Found()
        for row in self._rows(None):
            found.num_completed += row.part == "output"
            found.num_failed += row.part == "error"
            found.num_held += row.status == "held"
            if row.part == "open" and row.job_id:
                found.open.append(row.job_id)
        ended = self._around._clock()
        self._around._counts_of(self._batch.id).due = ended + max(
            _COUNT_EVERY_S, _PAUSE_OVER_COUNTING * (ended - began)
        )
        return found

    def _rows(self, contents: ContentStore | None) -> Iterator[RequestRow]:
        source = BatchSource(self._batch.id, self._input(), self._reader)
        for number, row in enumerate(rows_of(source, self._settings, self._database, contents)):
            if number % _PAGE == 0:
                self._keep_lease()
            yield row

    def _reader(self) -> BatchReader:
        batch = self._batch
        fixed = {"segment": batch.segment, "deadline": batch.expires_at.isoformat()}
        rules = LineRules(batch.endpoint, batch.tasks, fixed)
        return BatchReader(self._settings, batch.id, task=batch.task, rules=rules)

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
        self._around._counts.pop(self._batch.id, None)
        self._around._cancelled_at.pop(self._batch.id, None)
        if self._batches.end(self._batch, status, files, **values):
            log.info("batch %s: %s", self._batch.id, status, extra={"action": f"batch_{status}"})
        raise _Ended


def _ended(row: RequestRow, end: Status) -> RequestRow:
    """The row of a batch that is over: a request that is still open ended with it."""
    if row.part != "open":
        return row
    told = "cancelled with its batch" if end is Status.CANCELLED else "not done when the time of its batch was over"
    ended = unanswered_row(row.job_id or "", end, told, custom_id=row.custom_id)
    return replace(row, part="error", status=end.value, row=ended)
