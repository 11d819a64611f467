"""How the interpreter runs a worker: when it searches for cycles of objects, and how long a thread keeps it.

The objects of a job form no cycles, so they go when the last reference to them goes. Only rare objects form cycles,
such as exceptions with their frames. Python searches after every 700 new objects unless told otherwise, and so looks at
all jobs that wait and run again and again: a fifth of the processor time of a worker with short jobs.

A thread that computes gives the interpreter to a waiting one after 5 ms unless told otherwise. Each change costs both
threads what the processor's caches hold of their data. The neighbours of the loop wait for servers most of the time, so
their turns end by themselves, nearly always within a few milliseconds; only with a backlog of short jobs they do not.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

#: New objects, less those that went, between two searches of the young ones: a few hundred jobs' worth.
NUM_NEW_OBJECTS: Final = 50_000
#: Searches of one generation between two of the next older one; Python's own numbers.
_SEARCHES: Final = (10, 10)
#: With 1 ms the worker takes a quarter more processor time for a short job than with 5, with 20 some 7 % less; with 100
#: it is as fast as with 20.
TURN_S: Final = 0.02


def set_up_interpreter() -> None:
    """From now on, search seldom, and never in what there is now: models, kernels and modules stay with the process.

    A full search that looks at those takes .3 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *_SEARCHES)
    sys.setswitchinterval(TURN_S)
