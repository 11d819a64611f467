"""`alphaloop job`, `wait`, `tail` and `cancel`: jobs that were sent before, by their ids; `erase`: no text stays."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.batches.advancing import ask_to_cancel
from alphaloop.batches.lines import BatchSource
from alphaloop.batches.progress import latest_jobs, require_sent, rows_of
from alphaloop.claim_check.store import ContentStore, with_text
from alphaloop.cli.batch import EVEN_IF_UNKNOWN, FOR, account
from alphaloop.cli.options import (
    AS_JSON,
    GlobalOptions,
    connected_settings,
    example,
    global_options,
    open_both,
    open_database,
)
from alphaloop.cli.screen import as_shown, note, paragraph, print_json, print_json_line
from alphaloop.cli.services import program
from alphaloop.client import Client, Piece, ResultsMissing
from alphaloop.errors import AlphaloopError, BrokerUnavailable, ConfigError, ContentError, MessageError, UnknownName
from alphaloop.files import STANDARD, Destination, reading
from alphaloop.messages import Job, Result, Status, fields_of
from alphaloop.outcomes.reading import (
    Ended,
    Event,
    GrowingText,
    JobPlace,
    TextSoFar,
    Waits,
    Whereabouts,
    as_one_text,
    find_jobs,
    follow,
    reason_of,
    recorded,
)
from alphaloop.settings import Settings
from alphaloop.store.api import Deed
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.housekeeping import EraseStore, Erasure, Texts
from alphaloop.store.known_jobs import known_jobs
from alphaloop.store.promises import newest_promises
from alphaloop.store.spending import SpendingStore, spent_as_json
from alphaloop.wording import counts, how_many, json_text, moment_ago, moment_ahead, one_line, second

_MAX_SHOWN: Final = 20
_MAX_CHARS: Final = 1000
#: Job_ids in one command. A line of thousands of them cannot be typed again.
_MAX_TYPED: Final = 20


@example("alphaloop job order-4711")
def job(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to look for."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON: a list with an object a job."),
) -> None:
    """Show the status of jobs.

    A job waits in Kafka, is held or decoded by a worker, has ended, or was refused. The jobs that were
    made of its dead letters, JOB_ID~1 and so on, follow it.

    The tokens so far are those that the worker reported within the last seconds. For a job that no worker has claimed
    the messages that wait in Kafka are read, for up to 20 seconds. The exit code is 1 if a job is unknown.
    """
    settings = connected_settings(context)
    with open_database(settings) as database:
        names = (name for now in latest_jobs(database, job_id).values() for name in (*now.made_of, now.job_id))
        places = find_jobs(settings, database, list(dict.fromkeys(names)))
        spent = SpendingStore(database, settings.prices).of_jobs([where.job_id for where in places])
    currency = settings.prices.currency
    if as_json:
        print_json([{**where.as_json(), "spent": spent_as_json(spent.get(where.job_id), currency)} for where in places])
    else:
        for where in places:
            took = spent.get(where.job_id)
            more = "" if took is None else f"; {took.in_words(currency)}"
            paragraph(one_line(f"{where.job_id}: {where.sentence()}{more}"))
    if any(where.place is JobPlace.UNKNOWN for where in places):
        raise typer.Exit(1)


@example("""\
alphaloop wait order-4711 order-4712
alphaloop wait --batch-id monday --output results.jsonl
alphaloop wait --file results.jsonl --json""")
def wait(
    context: typer.Context,
    job_id: list[str] = typer.Argument(None, help="The jobs to wait for."),
    batch_id: str | None = typer.Option(None, help="Every job that was sent with this batch_id."),
    file: Path | None = typer.Option(
        None,
        "--file",
        "-f",
        help="JSONL with a job_id a line: jobs, or the output of an interrupted wait; - for standard input.",
    ),
    timeout: float = typer.Option(1800.0, min=0.0, help="Seconds to wait for the ends of the jobs."),
    output: Path | None = typer.Option(
        None, help="JSONL to write the results to, in the order of the jobs; - for standard output."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print each result as a line of JSON when the job ends."),
) -> None:
    """Wait for the results of jobs that were sent before.

    A job that has ended is answered at once. The text of a single job is printed. Ctrl-C ends the wait, and the jobs go
    on. The exit code is 0 if every job succeeded.
    """
    if not job_id and batch_id is None and file is None:
        raise typer.BadParameter("expected job_ids, --batch-id or --file")
    target = None if output is None else Destination.of(output, option="--output", inputs=[file] if file else [])
    settings = connected_settings(context)
    with open_database(settings) as database, ExitStack() as stack:
        wanted = _wanted(settings, database, [*(job_id or []), *_job_ids(file)], batch_id)
        known = [where.job_id for where in _known(settings, database, wanted)]
        contents = ContentStore.of(settings.claim_check)
        results: dict[str, Result] = {}
        stack.callback(lambda: _write(target, wanted, results))
        if batch_id is not None and (end := newest_promises(database, [batch_id]).get(batch_id)):
            note(one_line(f"{batch_id}: {end.sentence()}" if end.ended_at is None else f"{batch_id}: ended"))
        with _going_on(context, wanted, results, batch_id, file):
            for result in _ends(settings, database, known, timeout_s=timeout):
                results[result.sent_job_id] = shown = texts_of(result, contents)
                _show_result(shown, is_single=len(wanted) == 1 and str(output) != STANDARD, as_json=as_json)
    if missing := len(known) - len(results):
        raise AlphaloopError(
            f"not ended within {timeout:g} s: {missing} of {how_many(len(wanted), 'job')}",
            hint="`alphaloop job JOB_ID` says where a job is",
        )
    if len(known) < len(wanted) or any(result.status is not Status.SUCCEEDED for result in results.values()):
        raise typer.Exit(1)


@example("""\
alphaloop cancel 5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d --wait
alphaloop cancel --batch-id monday""")
def cancel(
    context: typer.Context,
    job_id: list[str] = typer.Argument(None, help="The jobs to cancel."),
    batch_id: str | None = typer.Option(None, help="Every job that was sent with this batch_id."),
    wait: bool = typer.Option(False, "--wait", help="Wait until each job has ended, and say how."),
    timeout: float = typer.Option(60.0, min=0.0, help="Seconds to wait with --wait."),
    even_if_unknown: bool = EVEN_IF_UNKNOWN,
    lasts: str = FOR,
    as_json: bool = typer.Option(False, "--json", help="Print what was found, and with --wait the end, as JSON."),
) -> None:
    """Cancel jobs, and show the status of each.

    A job that has ended keeps its outcome. Any other is reported as cancelled in its result, unless it ends before
    the request arrives. The exit code is 1 if a job is unknown: nothing is kept of it.
    """
    if not job_id and batch_id is None:
        raise typer.BadParameter("expected job_ids or --batch-id")
    until = moment_ahead(lasts, datetime.now(UTC), "--for") if even_if_unknown else None
    settings = connected_settings(context)
    with open_both(settings) as database:
        places = ask_to_cancel(settings, database, _wanted(settings, database, job_id or [], batch_id), until)
        if not as_json:
            _tell(places, until)
        awaited = [where.job_id for where in places if where.is_open]
        ended: dict[str, str] = {}
        with _going_on(context, awaited, ended):
            for end in _ends(settings, database, awaited, timeout_s=timeout) if wait else ():
                ended[end.sent_job_id] = end.status.value
    if as_json:
        how = {job_id: {"ended": status} for job_id, status in ended.items()}
        print_json([{**where.as_json(), **how.get(where.job_id, {})} for where in places])
    elif ended:
        note(f"ended: {counts(Counter(ended.values()))}")
    if wait and (missing := len(awaited) - len(ended)):
        raise AlphaloopError(
            f"{how_many(missing, 'job')} did not end within {timeout:g} s",
            hint="is a worker running? `alphaloop status` shows it",
        )
    if not until and any(where.place is JobPlace.UNKNOWN for where in places):
        raise typer.Exit(1)


@example("""\
alphaloop tail order-4711
alphaloop tail order-4711 order-4712 --json""")
def tail(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to follow."),
    timeout: float = typer.Option(1800.0, min=0.0, help="Seconds to wait for the ends of the jobs."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a line: each new text, and each end."),
) -> None:
    """Show texts while they are decoded, until every job has ended.

    A job sent with stream=true appears as it grows, any other at its end. A text is printed on standard output; what
    happens to the job, on standard error. With several jobs each line begins with the job's id. The exit code is 0 if
    every job succeeded.
    """
    settings = connected_settings(context)
    with open_database(settings) as database:
        wanted = _wanted(settings, database, job_id, None)
        known = _known(settings, database, wanted)
        refused = {where.job_id: recorded(where.refusal) for where in known if where.refusal is not None}
        left = [where.job_id for where in known if where.job_id not in refused]
        events = chain(refused.values(), follow(settings.kafka, database, left, timeout_s=timeout))
        ended = _show_texts_as_json(events) if as_json else _show_texts(events, is_one=len(wanted) == 1)
    if missing := [job_id for job_id in left if job_id not in ended]:
        raise AlphaloopError(
            f"not ended within {timeout:g} s: {', '.join(missing)}",
            hint="is a worker running? `alphaloop status` shows it, and `alphaloop job JOB_ID` says where a job is",
        )
    if len(known) < len(wanted) or any(end.status is not Status.SUCCEEDED for end in ended.values()):
        raise typer.Exit(1)


def _ends(settings: Settings, database: Database, job_ids: Sequence[str], *, timeout_s: float) -> Iterator[Result]:
    """The result of each of the jobs, once: of those that have ended at once, of others as they end.

    Ends when all are there or the time is up. Raises BrokerError and StoreError.
    """
    left = dict.fromkeys(job_ids)
    with Client(settings) as client:
        # Nothing is missed: what ends from here on is read, and what ended before is recorded.
        before = client.sent_before(())
        yield from _recorded(database, left)
        with suppress(BrokerUnavailable):  # there is more in Kafka than can be read through: they are waited for
            for refusal in [where.refusal for where in find_jobs(settings, database, list(left)) if where.refusal]:
                del left[refusal.job_id]
                yield refusal
        with suppress(ResultsMissing):
            for result in client.results(before.only(tuple(left)), timeout_s=timeout_s):
                del left[result.sent_job_id]
                yield result
    yield from _recorded(database, left)  # a result that Kafka refused is recorded and never published


def _wanted(settings: Settings, database: Database, job_ids: Sequence[str], batch_id: str | None) -> list[str]:
    """These jobs and those of a batch, or what redrives have made of them, each once.

    Raises StoreError, BrokerError, and UnknownName for a batch.
    """
    wanted = list(job_ids)
    if batch_id is not None:
        batch = BatchSource(batch_id, None)
        require_sent(batch, settings, database)
        wanted += [row.job_id for row in rows_of(batch, settings, database) if row.job_id]
    latest = latest_jobs(database, wanted)
    return list(dict.fromkeys(latest[job_id].job_id for job_id in wanted))


def _known(settings: Settings, database: Database, job_ids: Sequence[str]) -> list[Whereabouts]:
    """Those that are not unknown; the others are said. Raises UnknownName where none is left."""
    try:
        places = find_jobs(settings, database, job_ids)
    except BrokerUnavailable:
        return [Whereabouts(job_id, JobPlace.WAITING) for job_id in job_ids]  # as far as can be known
    known = [where for where in places if where.place is not JobPlace.UNKNOWN]
    unknown = ", ".join(where.job_id for where in places if where.place is JobPlace.UNKNOWN)[:_MAX_CHARS]
    problem = one_line(f"{unknown or 'no job_id'}: unknown: no worker has seen it, and it waits nowhere in Kafka")
    if not known:
        raise UnknownName(problem)
    if unknown:
        note(problem)
    return known


def _recorded(database: Database, left: dict[str, None]) -> Iterator[Result]:
    for job in known_jobs(database, list(left)).values():
        if job.outcome is not None:
            del left[job.job_id]
            yield Result.decode(job.outcome)


def row_of(job: Job | str, result: Result | None) -> dict[str, Any]:
    """What became of a job, as one object; of a job that is known by its job_id alone, less."""
    if result is not None:
        row: dict[str, Any] = json.loads(result.encode())
        return row
    named: dict[str, Any] = {"job_id": job}
    if isinstance(job, Job):
        named = {"job_id": job.job_id, "custom_id": job.custom_id, "task": job.task}
    return {**named, "status": "missing"}


def texts_of(result: Result, contents: ContentStore | None) -> Result:
    """The result with its texts. One whose texts cannot be read keeps the reference."""
    try:
        return with_text(result, contents)
    except (ContentError, MessageError) as error:
        note(f"{result.job_id}: {error.message}")
        return result


def wait_again(
    options: GlobalOptions, job_ids: Sequence[str], *, batch_id: str | None = None, file: Path | None = None
) -> str:
    """The command that waits for these jobs, as it is typed here; `file` has a job_id a line.

    The ids of many jobs that have neither a batch nor a file are written into a file of the temporary folder.
    """
    typed = f"{program()} {shlex.join([*options.typed(), 'wait'])}"
    if batch_id is not None:
        return f"{typed} {shlex.join(['--batch-id', batch_id])}"
    if file is None and len(job_ids) > _MAX_TYPED:
        with tempfile.NamedTemporaryFile("w", prefix="alphaloop-jobs-", suffix=".jsonl", delete=False) as listed:
            listed.writelines(json.dumps({"job_id": job_id}) + "\n" for job_id in job_ids)
        file = Path(listed.name)
    if file is not None:
        return f"{typed} {shlex.join(['--file', str(file)])}"
    return f"{typed} {shlex.join(job_ids)}"


def say_they_go_on(num_jobs: int, again: str) -> None:
    """A note that the wait has ended and the jobs have not."""
    note(f"stopped waiting; {'1 job goes' if num_jobs == 1 else f'{num_jobs} jobs go'} on. Wait again: {again}")


def _job_ids(file: Path | None) -> list[str]:
    if file is None:
        return []
    job_ids: list[str] = []
    with reading(file, say=note) as source:
        for number, line in enumerate(source.lines, 1):
            if (fields := fields_of(line)) is None and line.strip():
                problem = f"{source.name}:{number}: expected one JSON object a line, found something else"
                raise ConfigError(problem, hint="name a file of JSONL with a job_id a line")
            if isinstance(job_id := (fields or {}).get("job_id"), str):
                job_ids.append(job_id)
    return job_ids


def _show_result(result: Result, *, is_single: bool, as_json: bool) -> None:
    row = row_of(result.job_id, result)
    if as_json:
        print_json_line(row)
    elif is_single and (messages := result.messages):
        sys.stdout.write(f"{as_shown(as_one_text(messages))}\n")
    why = reason_of(result)
    note(one_line(f"{result.job_id}: {result.status.value}" + (f", {why}" if why else "")))


def _write(target: Destination | None, wanted: Sequence[str], results: dict[str, Result]) -> None:
    """The rows so far, also after Ctrl-C."""
    if target is None:
        return
    with target.writing() as file:
        file.writelines(json_text(row_of(job_id, results.get(job_id))) + "\n" for job_id in wanted)


def _tell(places: Sequence[Whereabouts], until: datetime | None) -> None:
    for where in places[:_MAX_SHOWN]:
        paragraph(one_line(f"{where.job_id}: {where.sentence()}"))
    if len(places) > _MAX_SHOWN:
        paragraph(f"… and {len(places) - _MAX_SHOWN} more: {counts(Counter(where.place.value for where in places))}")
    if num_asked := sum(where.is_open for where in places):
        note(f"asked to cancel {how_many(num_asked, 'job')}; the answer is the job's result")
    elif not until:
        note("nothing to cancel")
    if until and any(where.place is JobPlace.UNKNOWN for where in places):
        note(f"the unknown are cancelled if they come until {second(until)}")


@contextmanager
def _going_on(
    context: typer.Context,
    job_ids: Sequence[str],
    ended: Container[str],
    batch_id: str | None = None,
    file: Path | None = None,
) -> Iterator[None]:
    """Ctrl-C in the block ends the command, which says how to wait for the others again."""
    try:
        yield
    except KeyboardInterrupt:
        left = [job_id for job_id in job_ids if job_id not in ended]
        named = None if str(file) == STANDARD else file  # what was read from there is gone
        say_they_go_on(len(left), wait_again(global_options(context), left, batch_id=batch_id, file=named))
        raise typer.Exit(130) from None


class PrintedText:
    """One job's answer on standard output, piece by piece, as a text to read."""

    def __init__(self, job_id: str, *, is_one: bool) -> None:
        self._growing = GrowingText()
        self._printed = ""
        self._said = ""  #: by pieces, where that is not all that was printed
        self._is_repeating = False  #: an attempt that began again has not come so far yet
        self._job_id = job_id
        self._is_one = is_one
        self._line = ""  #: of several jobs: the line that is not complete
        self._is_in_line = False  #: of one job: whether what was printed does not end a line

    def add(self, piece: Piece) -> None:
        """Print what a piece adds to the first text; the others come with the result."""
        added = self._growing.added(piece)
        if piece.begins_again:
            self._said, self._is_repeating = "", True
        if self._is_repeating:
            self._said += added
            self.show(self._said)
            self._is_repeating = len(self._said) < len(self._printed)
        else:
            self._printed += added
            self._print(added)

    def show(self, text: str, *, is_end: bool = False) -> None:
        """Print what is new; a text that begins again begins on a line of its own. With `is_end` it is complete."""
        if not text.startswith(self._printed):
            if self._printed.startswith(text) and not is_end:
                return
            self.end()
            note(f"{self._job_id}: decoded again with another text; it begins here")
            self._printed = ""
        self._print(text[len(self._printed) :])
        self._printed = text

    def _print(self, text: str) -> None:
        text = as_shown(text)
        if self._is_one:
            sys.stdout.write(text)
            self._is_in_line = not text.endswith("\n") if text else self._is_in_line
        else:
            *lines, self._line = (self._line + text).split("\n")
            sys.stdout.writelines(f"{self._job_id}  {line}\n" for line in lines)
        sys.stdout.flush()

    def end(self) -> None:
        """Nothing more comes."""
        if self._is_in_line:
            sys.stdout.write("\n")
            self._is_in_line = False
        if self._line:
            sys.stdout.write(f"{self._job_id}  {self._line}\n")
            self._line = ""
        sys.stdout.flush()


def _show_texts(events: Iterable[Event], *, is_one: bool) -> dict[str, Ended]:
    texts: dict[str, PrintedText] = {}
    ended: dict[str, Ended] = {}
    for event in events:
        text = texts.setdefault(event.job_id, PrintedText(event.job_id, is_one=is_one))
        match event:
            case Waits(is_claimed=True):
                note(f"{event.job_id}: a worker has it; a text that is not streamed comes at its end")
            case Waits():
                note(f"{event.job_id}: no worker has seen it: it waits in Kafka")
            case TextSoFar():
                text.show(event.shown)
            case Ended():
                ended[event.job_id] = event
                if event.shown is not None:
                    text.show(event.shown, is_end=True)
                text.end()
                ending = event.status.value + (f", {event.reason}" if event.reason else "")
                note(f"{event.job_id}: {ending}{'' if event.is_streamed else '; it was not streamed'}")
    return ended


def _show_texts_as_json(events: Iterable[Event]) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    shown: dict[str, TextSoFar] = {}
    for event in events:
        line: dict[str, Any] = {"job_id": event.job_id}
        match event:
            case Waits():
                line |= {"status": "running" if event.is_claimed else "waiting"}
            case TextSoFar():
                before = shown.get(event.job_id)
                is_same = before is not None and before.attempt == event.attempt
                num_shown = len(before.text) if before is not None and is_same else 0
                shown[event.job_id] = event
                if is_same and num_shown == len(event.text):
                    continue  # reasoning, or another text: it comes with the end
                line |= {"attempt": event.attempt, "new_text": event.text[num_shown:]}
            case Ended():
                ended[event.job_id] = event
                line |= {"status": event.status.value, "text": event.text, "streamed": event.is_streamed}
                if event.messages:
                    line |= {"messages": [said.model_dump(exclude_none=True) for said in event.messages]}
                line |= {"reason": event.reason} if event.reason else {}
        print_json_line(line)
    return ended


@example("""\
alphaloop erase --job 7f3c1a90 --yes
alphaloop erase --segment acme --dry-run
alphaloop erase --before 2026-09-01""")
def erase(
    context: typer.Context,
    job: str | None = typer.Option(None, help="The texts of this job, and of those that redrives have made of it."),
    segment: str | None = typer.Option(None, help="The texts of all jobs of this segment."),
    before: str | None = typer.Option(None, help="The texts of all jobs that ended before then: 30d, 2026-09-01."),
    drafts: bool = typer.Option(False, "--drafts", help="Also retire drafts that were trained with their prompts."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only count what would be erased."),
    as_json: bool = AS_JSON,
) -> None:
    """Erase texts from results, drawn probes and the memory of tasks, after counting them. Workers follow in seconds.

    Counts stay, because they hold no text. So do messages: Kafka deletes them, and prompts that they refer to, when
    their retention ends. Drafts that were trained with their prompts stay too, unless --drafts retires them.
    """
    until = moment_ago(before, datetime.now(UTC), "--before") if before is not None else None
    erasure = Erasure(None if job is None else (job,), segment, until, drafts)
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        store = EraseStore(database)
        where: Whereabouts | None = None
        if job is not None:
            now = latest_jobs(database, [job])[job]
            erasure = replace(erasure, job_ids=(*now.made_of, now.job_id))
            if not now.is_claimed and (now.made_of or not store.knows(erasure)):
                (where,) = find_jobs(connected_settings(context), database, [now.job_id])
        if not store.knows(erasure) and (where is None or where.place is JobPlace.UNKNOWN):
            raise UnknownName(f"{one_line(erasure.subject)}: no worker has seen a job of it, and no text of it is kept")
        texts = store.count(erasure)
        for row in _rows(texts):
            note(row)
        asked = f"erase the texts of {one_line(erasure.subject)}?"
        is_done = not dry_run and (yes or typer.confirm(asked, err=True))
        if is_done:
            contents = ContentStore.of(settings.claim_check)
            deed = Deed("command", account(), "texts_erased", erasure.subject)
            delete = None if contents is None else contents.delete
            texts = store.erase(erasure, deed, delete, DatabaseClock(database).measure())
    if as_json:
        print_json({**asdict(texts), "erased": is_done})
    if num_running := texts.num_running + (where is not None and where.is_open):
        running = how_many(num_running, "job")
        note(f"not ended: {running}. Texts that are written at the end stay: erase again then")
    if texts.drafts and not drafts:
        note(f"trained with prompts of theirs, in use: {', '.join(texts.drafts)}. With --drafts they are retired")
    if not is_done and not dry_run:
        raise typer.Exit(1)


def _rows(texts: Texts) -> list[str]:
    named = {
        "results": texts.num_jobs,
        "results in the memory of tasks": texts.num_remembered,
        "drawn probes": texts.num_drawn_probes,
        "texts of probes": texts.num_probe_texts,
        "texts outside the database": texts.num_stored_texts,
        "files of the API": texts.num_api_files,
        "trainings and trials of drafts, which end": texts.num_refreshes,
    }
    return [f"{num} {name}" for name, num in named.items()]
