"""The command `alphaloop`: one module a group of commands, `app.py` puts them together."""

from __future__ import annotations

import codecs
import gc
import io
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_ESCAPED: Final = "alphaloop.escaped"


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 an error in words, 2 wrong usage, 130 interrupted."""
    codecs.register_error(_ESCAPED, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPED)
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
            signal.signal(signal.SIGINT, interrupt)
        gc.disable()  # nothing that is imported goes again: searching for it is a tenth of the start
        from alphaloop.cli.app import app
        from alphaloop.cli.screen import show_error
        from alphaloop.errors import AlphaloopError

        gc.enable()
        try:
            app(prog_name="alphaloop")
        except AlphaloopError as error:
            show_error(error)
            sys.exit(1)
    except KeyboardInterrupt:  # while the commands were imported, or after one had ended
        sys.exit(130)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What standard output cannot encode, as JSON escapes it, so that printed JSON stays what it is."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)), error.end


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """As Python's own handler, in Python.

    The own one sets an exception without an instance. The Kafka client loses such a one where the signal comes during a
    callback, and `poll` then raises SystemError.
    """
    raise KeyboardInterrupt
