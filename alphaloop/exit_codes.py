"""Exit codes of the worker and the scheduler, so that a supervisor or a person sees why a process ended."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a process ended. 2 is left out, because Python and argparse use it for wrong arguments."""

    STOPPED = 0  #: asked to stop, and everything was handed over
    FAILED = 1  #: an error that the last line of the log names
    ENGINE_SICK = 3  #: nothing could be decoded any more; its jobs were given back uncounted
    HUNG = 4  #: a step, a run or a thread did not move for too long

    @property
    def meaning(self) -> str:
        """What to tell a person, as the end of a sentence about the process."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.STOPPED: "it was asked to stop",
    ExitCode.FAILED: "it met an error",
    ExitCode.ENGINE_SICK: "its engine could decode nothing any more",
    ExitCode.HUNG: "a step, a run or a thread did not move any more",
}
