"""A round on a device with slots as a rule sees it: the jobs that run, how each drafts, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from alphaloop.deciding.decision import DraftSetting
from benchmarks.policy.load import Slower
from benchmarks.policy.slot_jobs import SlotJob

VANILLA: Final = DraftSetting()


@dataclass(slots=True)
class Running:
    """A job in a slot."""

    job: SlotJob
    setting: DraftSetting = VANILLA  #: how it drafts in the next round
    left: int = 0  #: tokens
    num_rounds: int = 0
    has_read: set[str] = field(default_factory=set)  #: drafters that know its text
    device_ms: float = 0.0  #: its share: each round's time over the sequences in it
    is_budget: bool = False  #: decoded for exploration


@dataclass(slots=True)
class SlotRound:
    """One round, after it ran. Lists are by running job."""

    began_ms: float
    ms: float
    draft_ms: float  #: of it, proposing
    read_ms: float  #: of it, the target's reading of prompts
    draft_read_ms: float  #: of it, reading by drafters
    num_read: int  #: tokens of prompts that the target read
    num_draft_read: int
    running: Sequence[Running]
    num_offered: Sequence[int]
    num_accepted: Sequence[int]  #: that the target accepted, those behind the text's end too
    num_tokens: Sequence[int]  #: put out
    drafters: frozenset[str]  #: that proposed
    #: Milliseconds of the same round, reading apart, with these jobs (by their place) decoding vanilla.
    vanilla_ms: Callable[[Sequence[int]], float]


class SlotRule(Protocol):
    """Decides when jobs start, and before every round how each sequence drafts."""

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """Jobs that start together; `num_running` counts them. Their settings are set."""

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """Before a round: change settings. `slower` is for the oracle alone."""

    def observe(self, done: SlotRound) -> None:
        """What the round came to."""

    def end(self, ended: Running, now_ms: float) -> None:
        """A text ended with the last round."""
