"""What an experiment over requests simulates: the servers, the texts, the workers and what these know of the load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

#: What a worker counts as load: the requests of everybody at every moment; its own alone; or its own at every moment,
#: with those of others as the servers tell them now and then.
KnownLoad: TypeAlias = Literal["all", "own", "read"]


@dataclass(frozen=True, slots=True)
class RequestScenario:
    """One experiment over requests, to be repeated with many seeds."""

    name: str
    is_shared: bool = False  #: both servers on one device: a pass takes what the requests of both make it take
    num_draft_tokens: int = 0  #: 0: the speculating server decodes vanilla too, the null experiment
    mean_acceptance: float = 0.7
    correlation: float = 0.2  #: of the trials of one text
    cost: float = 1.0  #: of a pass that drafts, in vanilla passes
    cost_per_request: float = 0.0  #: the same, for each request beside the first in the pass
    num_workers: int = 1  #: that ask both servers, and switch by themselves
    known_load: KnownLoad = "all"
    read_every_s: float = 0.5  #: between two answers of a server about its load, where they are read
    read_delay_s: float = 0.05  #: the number in such an answer is so old when it comes
    num_slots: int = 8  #: requests on trial at once, at most, of each worker
    jobs_per_s: float = math.inf  #: arrivals in a burst; infinite: a backlog
    burst_s: float = 60.0  #: mean length of a burst, and of the quieter time behind it, with a quarter of the arrivals
    num_others: int = 0  #: requests of other tasks, always at the vanilla server; of no worker's own
    are_others_constant: bool = True  #: or their number wanders
    spread: float = 1.2  #: of the logarithm of a text's length
    slow_every_s: float = math.inf  #: mean time between slow spells of the host
    slow_s: float = 60.0  #: mean length of one; the host is 1.5 to 4 times slower
    noise: float = 0.04
