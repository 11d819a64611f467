"""`python -m worker.commands`: carry out the order on standard input, and answer with events on standard output."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from alphaloop import logs
from alphaloop.commands import (
    ORDER,
    CalibrateOrder,
    CheckPairOrder,
    CheckServerOrder,
    CommandEvent,
    FailedEvent,
    MeasureOrder,
    NoteEvent,
    Order,
    RegisterOrder,
    Tell,
)
from alphaloop.errors import AlphaloopError, MessageError
from alphaloop.settings import Settings, load_settings
from worker.commands.stopping import INTERRUPTED

NOBODY_LISTENS: Final = 141


def main() -> int:
    """0 done, 1 after an error in words, 130 interrupted, 141 where the command line has gone."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # What a library prints must not come between two events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: CommandEvent) -> None:
        events.write(f"{event.model_dump_json()}\n")
        events.flush()

    try:
        return carry_out(ORDER.validate_json(sys.stdin.buffer.readline()), tell)
    except BrokenPipeError:
        os._exit(NOBODY_LISTENS)


def carry_out(order: Order, tell: Tell) -> int:
    """Do what is asked with the settings that the environment names; the exit code."""
    try:
        configs = os.environ.get("ALPHALOOP_CONFIGS")
        settings = load_settings(Path(configs) if configs else None, profile=os.environ.get("ALPHALOOP_PROFILE"))
        # A measurement reports what went wrong itself; a warning would stand in the middle of its bar.
        logs.configure("ERROR" if isinstance(order, MeasureOrder) else "WARNING", settings.logs.format)
        return _carry_out(order, settings, tell)
    except AlphaloopError as error:
        field = f"{error.field}: " if isinstance(error, MessageError) and error.field else ""
        tell(FailedEvent(message=f"{field}{error.message}", hint=error.hint))
        return 1
    except KeyboardInterrupt:
        tell(NoteEvent(text="interrupted"))
        return INTERRUPTED


def _carry_out(order: Order, settings: Settings, tell: Tell) -> int:
    """Each command's modules are imported here: no command needs those of another."""
    if isinstance(order, MeasureOrder):
        from worker.commands.measure import measure

        return measure(order, settings, tell)
    if isinstance(order, CalibrateOrder):
        from worker.commands.calibrate import calibrate_device

        return calibrate_device(order, settings, tell)
    if isinstance(order, CheckPairOrder):
        from worker.commands.check_pair import check

        return check(order, settings, tell)
    if isinstance(order, CheckServerOrder):
        from worker.commands import check_server

        return check_server.check(order, settings, tell)
    from worker.commands.draft import register, train

    return register(order, settings, tell) if isinstance(order, RegisterOrder) else train(order, settings, tell)


if __name__ == "__main__":
    sys.exit(main())
