"""Logging of every process: to standard error, one line an event, as text for people or JSON for machines.

    log = logging.getLogger(__name__)
    log.info("consuming", extra={"action": "worker_ready", "topic": "jobs.code"})

`action` is the event's stable machine name; the sentence may change, the action does not. Further fields of `extra`
are counts, names and identifiers: one-line values of at most MAX_FIELD_CHARS. Prompt and output text never go into a
log; fields under the names that carry it are withheld even if a caller passes them, and so is the text of an exception
that is not alphaloop's own.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal

from alphaloop.errors import AlphaloopError
from alphaloop.wording import harmless, json_text, one_line

OURS: Final = ("alphaloop", "engine", "worker", "scheduler", "__main__")
MAX_FIELD_CHARS: Final = 300
START_PROGRESS: Final = "start_progress"  #: the action of what a process that starts is doing, which `up` shows
WITHHELD: Final = frozenset(
    {"body", "completion", "content", "messages", "output", "payload", "prompt", "text", "value"}
)
# What a LogRecord has without `extra`; `message`, `asctime` and `taskName` are added along the way.
_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str = "INFO", format: Literal["text", "json"] = "text") -> None:
    """Send the log of this process to standard error. Calling it again replaces what was configured before.

    Other libraries are heard from WARNING up, and at every level when `level` is DEBUG.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    if level != "DEBUG":
        handler.addFilter(_is_ours_or_grave)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.excepthook = _log_unhandled


class TextFormatter(logging.Formatter):
    """`HH:MM:SS level action text key=value …`, time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the traceback where there is one."""
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        fields = [f"{name}={_shown(value)}" for name, value in event_fields(record).items()]
        action = getattr(record, "action", None)
        parts = [time, record.levelname.lower(), *([action] if action else []), one_line(record.getMessage()), *fields]
        line = " ".join(parts)
        return f"{line}\n{harmless(_traceback_of(record))}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, action, logger, message, the event's fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "action": getattr(record, "action", None),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in event_fields(record).items():
            entry.setdefault(name, value)
        if record.exc_info:
            entry["error"] = _traceback_of(record)
        return json_text(entry)


def event_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that `extra` gave this record, cut to size, without `action`."""
    given = {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS and name != "action"}
    return {name: "withheld" if name in WITHHELD else _cut(value) for name, value in given.items()}


def _traceback_of(record: logging.LogRecord) -> str:
    """The frames and classes of an exception and its causes, the newest first, with the texts of our own only."""
    error = record.exc_info[1] if record.exc_info else None
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines += [("caused by " if lines else "") + _named(error), *traceback.format_tb(error.__traceback__)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(line.rstrip("\n") for line in lines)


def _named(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error.message}" if isinstance(error, AlphaloopError) else name


def _log_unhandled(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends a process goes through the same formatter as everything else."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("alphaloop").critical(
            "ended by an exception", exc_info=(kind, error, trace), extra={"action": "process_failed"}
        )


def _cut(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_FIELD_CHARS else f"{text[:MAX_FIELD_CHARS]}…"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = one_line(str(value))  # a line break could forge a second event
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.split(".")[0] in OURS
