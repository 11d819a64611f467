"""The command `alphaloop`: one file a command, `app.py` puts them together."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 an error in words, 2 wrong usage, 130 interrupted."""
    try:
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
