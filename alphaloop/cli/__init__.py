"""The command `alphaloop`: one file a command, `app.py` puts them together."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 an error in words, 2 wrong usage, 130 interrupted."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
            signal.signal(signal.SIGINT, _interrupt)
        from alphaloop.cli.app import app
        from alphaloop.cli.screen import show_error
        from alphaloop.errors import AlphaloopError

        try:
            app(prog_name="alphaloop")
        except AlphaloopError as error:
            show_error(error)
            sys.exit(1)
    except KeyboardInterrupt:  # while the commands were imported, or after one had ended
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """As Python's own handler, in Python.

    The own one sets an exception without an instance. The Kafka client loses such a one where the signal comes during a
    callback, and `poll` then raises SystemError.
    """
    raise KeyboardInterrupt
