"""When Python looks for cycles of objects that nothing else refers to.

The objects of a job form no cycles, so they go when the last reference to them goes. Only rare objects form cycles,
such as exceptions with their frames. Python searches after every 700 new objects unless told otherwise, and so looks at
all jobs that wait and run again and again: a fifth of the processor time of a worker with short jobs.
"""

from __future__ import annotations

import gc
from typing import Final

#: New objects, less those that went, between two searches of the young ones: a few hundred jobs' worth.
NUM_NEW_OBJECTS: Final = 50_000
#: Searches of one generation between two of the next older one; Python's own numbers.
_SEARCHES: Final = (10, 10)


def search_rarely() -> None:
    """From now on, search seldom, and never in what there is now: models, kernels and modules stay with the process.

    A full search that looks at those takes .3 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *_SEARCHES)
