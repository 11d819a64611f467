"""`alphaloop batch`: OpenAI batch files in, output and error files out; `alphaloop keys`: who may use the API."""

from __future__ import annotations

import getpass
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from alphaloop.batches import advancing
from alphaloop.batches.lines import BatchReader, BatchSource, batch_id_of
from alphaloop.batches.progress import Progress, batch_as_json, count, require_sent, rows_of, send
from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_both, open_database, require_tasks
from alphaloop.cli.screen import note, print_json, show_rows
from alphaloop.client import Batch, Client, ResultsMissing
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.files import STANDARD, Destination, readable_again, reading, shown_name
from alphaloop.messages.job import Label
from alphaloop.settings import Settings
from alphaloop.store.api import ApiKey, ApiKeyStore, Deed
from alphaloop.store.database import Database, values_of
from alphaloop.store.known_jobs import BatchStore, ListedBatch
from alphaloop.store.spending import SpendingStore, spent_as_json
from alphaloop.wording import counts, how_many, moment_ahead, money, one_line, second, span, words

_MAX_SHOWN: Final = 20
_BATCH: Final = typer.Argument(
    help="The batch's file, - for standard input, or the batch_id that its jobs were sent with."
)
EVEN_IF_UNKNOWN: Final = typer.Option(False, help="Also cancel what was never sent, should it still come.")
FOR: Final = typer.Option("24h", "--for", help="How long it is cancelled with --even-if-unknown: 90m, 2h, 3d.")
_TO: Final = typer.Option(
    None, help="File to write, replaced when it is complete; standard output without one, or with -."
)


@example("alphaloop batch submit requests.jsonl --task chat --wait")
def submit(
    context: typer.Context,
    file: Path = typer.Argument(help="JSONL of requests in OpenAI's batch form; - for standard input."),
    task: str = typer.Option(help="Task of lines that name none."),
    ignore_model: bool = typer.Option(False, "--ignore-model", help="Leave out the model that lines name."),
    wait: bool = typer.Option(False, "--wait", help="Wait until every request has ended."),
    timeout: float = typer.Option(86_400.0, min=0.0, help="Seconds to wait."),
    as_json: bool = typer.Option(False, "--json", help="Print the status as JSON."),
) -> None:
    """Submit the requests of a batch file. A wrong line is left out and goes to the errors.

    An interrupted submission is repeated: the same file is the same batch, and requests that a worker has already seen
    are not sent again. The batch's id is printed. The exit code is 1 if no line is a request, and with --wait if a
    request has no text.
    """
    settings = connected_settings(context)
    require_tasks(settings, [task])
    with open_both(settings) as database, ExitStack() as stack:
        path = stack.enter_context(readable_again(file))
        batch = BatchSource(batch_id_of(path), path)
        client = stack.enter_context(Client(settings))
        before = client.sent_before(()) if wait else None
        lines = BatchReader(settings, batch.batch_id, task=task, ignores_model=ignore_model)
        with reading(path) as source:
            num_lines = sum(bool(line.strip()) for line in source.lines)
        if not num_lines:
            raise ConfigError(f"{shown_name(file)}: expected one request a line, found no line with text")
        with reading(path) as source:
            if source.form:
                note(f"{shown_name(file)} is read as {source.form}")
            noted: dict[str, str | int] = {"source": "command", "by": account(), "task": task}
            noted |= {"name": Path(shown_name(file)).name, "num_bytes": path.stat().st_size, "num_total": num_lines}
            sent = send(lines.read(source.lines), settings, database, batch.batch_id, noted=noted)
        note(f"{how_many(sent.num_sent, 'request')} sent")
        if not as_json:
            sys.stdout.write(f"{batch.batch_id}\n")
            sys.stdout.flush()
        if before is not None:
            _wait(client, before.only(tuple(sent.waiting)), timeout)
        num_failed = _tell_status(batch, settings, database, as_json=as_json, says_why=True)
    if (wait and num_failed) or sent.num_wrong == num_lines:
        raise typer.Exit(1)


@example("alphaloop batch status requests.jsonl")
def status(
    context: typer.Context,
    batch: str = _BATCH,
    as_json: bool = AS_JSON,
) -> None:
    """Count the requests of a batch by what became of them. The exit code is 1 if none was ever sent."""
    settings = connected_settings(context)
    with open_database(settings) as database, _named(batch, settings, database) as source:
        _tell_status(source, settings, database, as_json=as_json)


@example("alphaloop batch cancel requests.jsonl")
def cancel(
    context: typer.Context, batch: str = _BATCH, even_if_unknown: bool = EVEN_IF_UNKNOWN, lasts: str = FOR
) -> None:
    """Cancel every request that has not ended. What has ended keeps its outcome.

    The exit code is 1 if the batch is unknown.
    """
    until = moment_ahead(lasts, datetime.now(UTC), "--for") if even_if_unknown else None
    settings = connected_settings(context)
    with open_both(settings) as database, _named(batch, settings, database, even_if_unknown=until) as source:
        deed = Deed("command", account(), "batch_cancelled", source.batch_id)
        num_open, num_unsent = advancing.cancel(source, settings, database, deed, until)
    if num_open:
        note(f"asked to cancel {how_many(num_open, 'request')}; `alphaloop batch status` shows what became of them")
    elif not until:
        note("nothing to cancel: no request is open")
    if num_unsent:
        later = f", and are cancelled if they come until {second(until)}" if until else ""
        note(f"{num_unsent} were never sent{later}")


@example("""\
alphaloop batch list
alphaloop batch list --limit 1000 --json""")
def list_batches(
    context: typer.Context,
    limit: int = typer.Option(50, min=1, max=100_000, help="Number of batches to show, the newest first."),
    as_json: bool = AS_JSON,
) -> None:
    """List the newest batches of every producer.

    The column done has the requests with a text, those that ended without one, and all of them. A scheduler counts
    what came through Kafka every few seconds. A batch that was not submitted as a file is listed once a worker has
    claimed a job of it. The column cost is there where a price is set, and has what was decoded so far.
    """
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        batches = BatchStore(database).page(limit)
        spent = SpendingStore(database, settings.prices).of_batches([batch.id for batch in batches])
    currency, has_price = settings.prices.currency, settings.prices.per_hour is not None

    def cells(batch: ListedBatch) -> tuple[str, ...]:
        of_batch = spent.get(batch.id)
        cost = "" if of_batch is None or of_batch.cost is None else money(of_batch.cost, currency)
        return (*_batch_cells(batch), cost) if has_price else _batch_cells(batch)

    show_rows(
        batches,
        *("batch", "from", "state", "done", "age", "end", *(("cost",) if has_price else ())),
        right=("done", "age", "cost"),
        cells=cells,
        nothing="no batches",
        as_json=as_json,
        row_as_json=lambda batch: {**batch_as_json(batch), "spent": spent_as_json(spent.get(batch.id), currency)},
    )


def _batch_cells(batch: ListedBatch) -> tuple[str, ...]:
    now, came = Progress.of(batch), " ".join(one_line(part) for part in (batch.source, batch.by or "") if part)
    done = f"{now.num_completed:,}+{now.num_failed:,}/{now.total:,}"
    age = (datetime.now(UTC) - batch.created_at).total_seconds()
    end = now.end.sentence() if now.end else ""
    return (one_line(batch.id), came, words(now.state), done, span(age), end)


@example("alphaloop batch output requests.jsonl --to output.jsonl")
def output(context: typer.Context, batch: str = _BATCH, to: Path | None = _TO) -> None:
    """Write the output file so far: one line for each request that succeeded, as OpenAI's."""
    _write(context, batch, to, "output")


@example("alphaloop batch errors requests.jsonl --to errors.jsonl")
def errors(context: typer.Context, batch: str = _BATCH, to: Path | None = _TO) -> None:
    """Write the error file so far: one line for each request that has no text, wrong lines among them."""
    _write(context, batch, to, "error")


def _wait(client: Client, waiting: Batch, timeout_s: float) -> None:
    try:
        for _ in client.results(waiting, timeout_s=timeout_s):
            pass
    except ResultsMissing as error:
        raise AlphaloopError(
            f"not ended within {timeout_s:g} s: {how_many(len(error.job_ids), 'request')}",
            hint="they go on; `alphaloop batch status` shows how far they are",
        ) from None


def _tell_status(
    batch: BatchSource, settings: Settings, database: Database, *, as_json: bool, says_why: bool = False
) -> int:
    """Print the counts, and with `says_why` the first requests without a text; returns how many there are."""
    counted = count(batch, settings, database, most_wrong=_MAX_SHOWN if says_why else 0)
    num_failed = counted.num_failed
    for row in counted.wrong if says_why else ():
        wrong = row.as_wrong()
        error, names = wrong["error"] or {}, (wrong["line"] and f"line {wrong['line']}", wrong["custom_id"])
        where = ", ".join(filter(None, names)) or row.job_id
        field = f"{wrong['field']}: " if wrong["field"] else ""
        note(one_line(f"{where}: {row.status}, {error.get('code')}: {field}{error.get('message')}"))
    if says_why and num_failed > len(counted.wrong):
        note(f"… and {num_failed - len(counted.wrong)} more; `alphaloop batch errors` has them all")
    spent = SpendingStore(database, settings.prices).of_batches([batch.batch_id]).get(batch.batch_id)
    currency = settings.prices.currency
    if as_json:
        print_json({**counted.as_json(batch.batch_id), "spent": spent_as_json(spent, currency)})
    else:
        end = f"; {counted.end.sentence()}" if counted.end else ""
        took = "" if spent is None else f"; {spent.in_words(currency)}"
        note(one_line(f"{batch.batch_id}: {counted.state}; {counts(counted.by_status)}{end}{took}"))
    return num_failed


@contextmanager
def _named(
    name: str, settings: Settings, database: Database, *, even_if_unknown: object = None
) -> Iterator[BatchSource]:
    """The batch of a file, else of this name. Raises ConfigError, StoreError, BrokerError, UnknownName."""
    with BatchSource.named(name) as source, advancing.batch_named(name, settings, database) as known:
        if source.path is None or not even_if_unknown:
            require_sent(source, settings, database)
        yield known if source.path is None else source


def _write(context: typer.Context, name: str, to: Path | None, part: Literal["output", "error"]) -> None:
    target = Destination.of(to or STANDARD, option="--to", inputs=[name])
    settings = connected_settings(context)
    num_open = 0
    contents = ContentStore.of(settings.claim_check)
    with open_database(settings) as database, _named(name, settings, database) as batch, target.writing() as file:
        if (whole := advancing.written(batch.batch_id, part, settings, database)) is not None:
            file.writelines(chunk.decode() for chunk in whole)
            return
        for row in rows_of(batch, settings, database, contents):
            num_open += row.part == "open"
            if row.part == part:
                file.write(json.dumps(row.row) + "\n")
    if num_open:
        note(f"not ended yet: {how_many(num_open, 'request')}")


_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ARGUMENT: Final = typer.Argument(help="Name of the key: files and batches belong to it.")


@example("alphaloop keys create nightly --segment free --task chat")
def create_key(
    context: typer.Context,
    name: str = _ARGUMENT,
    segment: str = typer.Option(help="Segment of every job that is sent with it."),
    task: list[str] = typer.Option([], help="Task that it may send jobs to; repeat it for more. Without one, all."),
    expires_days: int | None = typer.Option(None, min=1, max=3650, help="Days after which it is refused."),
) -> None:
    """Make a key of the API, and print it. It is shown this once: only a digest of it is stored.

    A new key of a name whose key was revoked goes on with the files and batches of that one.
    """
    settings = connected_settings(context, broker=False)
    if not _NAME.fullmatch(name):
        raise ConfigError("expected a name of 1 to 100 letters, digits, points, hyphens or underscores")
    try:
        TypeAdapter(Label).validate_python(segment)
    except ValidationError:
        raise ConfigError("--segment: expected 1 to 100 characters without control characters") from None
    require_tasks(settings, task)
    expires_at = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    with open_database(settings) as database:
        made = ApiKeyStore(database).create(
            name, segment=segment, tasks=task, expires_at=expires_at, deed=_deed("key_created", name)
        )
    sys.stdout.write(f"{made}\n")
    note("keep it now: it is not shown again")


@example("alphaloop keys list")
def list_keys(context: typer.Context, as_json: bool = AS_JSON) -> None:
    """List every key that was made, without its secret."""
    with open_database(connected_settings(context, broker=False)) as database:
        keys = ApiKeyStore(database).all()
    show_rows(
        keys,
        *("name", "key", "segment", "tasks", "made", "last used", "state"),
        cells=_cells,
        nothing="no keys; `alphaloop keys create` makes one",
        as_json=as_json,
        row_as_json=values_of,
    )


@example("alphaloop keys revoke nightly")
def revoke(context: typer.Context, name: str = _ARGUMENT) -> None:
    """Refuse a key from now on. Its files and batches stay, and its open batches go on."""
    with open_database(connected_settings(context, broker=False)) as database:
        ApiKeyStore(database).revoke(name, _deed("key_revoked", name))
    note(one_line(f"{name} is revoked"))


def _cells(key: ApiKey) -> tuple[str, ...]:
    now, state = datetime.now(UTC), "valid"
    if key.revoked_at is not None:
        state = f"revoked {key.revoked_at:%F}"
    elif key.expires_at is not None:
        state = f"{'expired' if key.expires_at <= now else 'valid until'} {key.expires_at:%F}"
    used = f"{key.last_used_at:%F %H:%M}" if key.last_used_at else "never"
    tasks = ", ".join(key.tasks) or "all"
    return (key.name, f"{key.prefix}…", one_line(key.segment), tasks, f"{key.created_at:%F}", used, state)


def _deed(action: str, name: str) -> Deed:
    return Deed("command", account(), action, name)


def account() -> str:
    """Who types the command, as the operating system calls them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
