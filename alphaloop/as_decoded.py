"""How the traffic of a task was decoded, and how its next job would be: the two answers to "is speculation on?". Pure.

Every screen shows both, the first counted, the second decided. A share is one of rounds and never of jobs, because one
drafted round makes no speculative job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Final, Self

from alphaloop.wording import how_many, named

#: Shares of loads that differ by more are shown apart.
_MARGIN: Final = 0.1
#: A load with a smaller share of the rounds is not shown.
_FEW: Final = 0.02


@dataclass(frozen=True, slots=True)
class AtLoad:
    """Rounds of jobs beside which at most `most` sequences ran."""

    least_running: int
    most_running: int
    num_rounds: int  #: without prefills
    num_drafted_rounds: int  #: of them, those in which a drafter was asked for a token

    @property
    def drafted_share(self) -> float | None:
        """Share of the rounds that drafted; None without a round."""
        return self.num_drafted_rounds / self.num_rounds if self.num_rounds else None


@dataclass(frozen=True, slots=True)
class Decoded:
    """How the traffic of a task was decoded in a window."""

    num_jobs: int
    by_load: tuple[AtLoad, ...]  #: bands of load that double, lowest first
    drafters: tuple[str, ...]
    num_draft_tokens: tuple[int, int] | None  #: smallest and largest of the jobs' longest k; None without any
    running: int  #: the usual load: half of the rounds had at most that many sequences
    sampling_bucket: str  #: that of most jobs
    form_bucket: str = ""  #: likewise

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        """From the JSON of a report, a status or an explanation."""
        kept = {field.name: found[field.name] for field in fields(cls)}
        loads = tuple(AtLoad(**load) for load in kept.pop("by_load"))
        k = kept.pop("num_draft_tokens")
        drafters = tuple(kept.pop("drafters"))
        return cls(by_load=loads, num_draft_tokens=tuple(k) if k else None, drafters=drafters, **kept)

    @property
    def num_rounds(self) -> int:
        """Rounds at every load, without prefills."""
        return sum(load.num_rounds for load in self.by_load)

    @property
    def num_drafted_rounds(self) -> int:
        """Those that drafted."""
        return sum(load.num_drafted_rounds for load in self.by_load)

    @property
    def drafted_share(self) -> float | None:
        """Share of the rounds that drafted; None without a round."""
        return self.num_drafted_rounds / self.num_rounds if self.num_rounds else None

    def as_json(self) -> dict[str, Any]:
        """Counts, and the shares that screens show."""
        return {
            **asdict(self),
            "num_rounds": self.num_rounds,
            "num_drafted_rounds": self.num_drafted_rounds,
            "drafted_share": self.drafted_share,
        }

    @property
    def differing_loads(self) -> tuple[AtLoad, ...]:
        """The loads with their shares, where these differ; else empty."""
        loads = tuple(load for load in self.by_load if load.num_rounds > _FEW * self.num_rounds)
        shares = [load.num_drafted_rounds / load.num_rounds for load in loads]
        return loads if len(loads) > 1 and max(shares) - min(shares) > _MARGIN else ()


def at_loads(counted: Iterable[tuple[int, int, int]]) -> tuple[AtLoad, ...]:
    """From sequences, rounds and drafted rounds: bands of 1, 2, 3 to 4, 5 to 8 … sequences, as far as seen."""
    bands: dict[int, AtLoad] = {}
    for running, num_rounds, num_drafted in counted:
        band = max(running - 1, 0).bit_length()
        was = bands.get(band) or AtLoad(running, running, 0, 0)
        bands[band] = AtLoad(
            min(was.least_running, running),
            max(was.most_running, running),
            was.num_rounds + num_rounds,
            was.num_drafted_rounds + num_drafted,
        )
    return tuple(bands[band] for band in sorted(bands))


def usual_load(weighted: Iterable[tuple[int, int]]) -> int:
    """From sequences and rounds: half of the rounds had at most that many sequences. 1 without a round."""
    rounds: Counter[int] = Counter()
    for running, num_rounds in weighted:
        rounds[running] += num_rounds
    loads = sorted(rounds)
    seen = zip(loads, accumulate(rounds[running] for running in loads), strict=True)
    return next((running for running, num_rounds in seen if num_rounds >= rounds.total() / 2), 1)


@dataclass(frozen=True, slots=True)
class NextJob:
    """What would be decided of a task's next job at a load: one like most of its traffic.

    Without a load, how the task was decoded last.
    """

    mode: str
    drafter: str | None
    num_draft_tokens: int
    reason: str
    explanation: str
    running: int | None = None  #: sequences in its rounds, the job itself among them
    sampling_bucket: str = ""
    form_bucket: str = ""
    revisions: tuple[str, str] | None = None  #: of target and draft; None where they are not known
    expected_low: float | None = None  #: lower bound of the speed-up that was expected; None where nothing was weighed


def percent(share: float | None) -> str:
    """`87%`; `<1%` and `>99%` where it is not nothing or everything; `-` without a share."""
    if share is None:
        return "-"
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def drafted_by_load(done: Decoded | None) -> list[str]:
    """`96% at 1-2`, by the sequences that ran, lowest load first; empty where the load made no difference."""
    return [] if done is None else [f"{percent(load.drafted_share)} at {_band(load)}" for load in done.differing_loads]


def drafted_sentence(done: Decoded | None) -> str:
    """What was done, in one sentence without a window."""
    if done is None:
        return "No job of traffic was decoded"
    jobs = how_many(done.num_jobs, "decoded job")
    if not done.num_rounds:
        return f"No round after the prompts of {jobs} was decoded"
    by_load = ", ".join(drafted_by_load(done))
    sentence = f"{percent(done.drafted_share)} of the {how_many(done.num_rounds, 'round')} of {jobs} drafted"
    if done.drafters:
        sentence += f", with {' and '.join(done.drafters)}"
    return f"{sentence} ({by_load} running)" if by_load else sentence


def setting(one: NextJob | None) -> str:
    """`lookup k=12`, `vanilla`; `-` where it is not known."""
    return "-" if one is None else named(one.drafter, one.num_draft_tokens)


def at_load(one: NextJob | None) -> str:
    """`at 4 running`: the load at which the next job is decided; empty without one."""
    if one is None:
        return ""
    return "as logged last" if one.running is None else f"at {one.running} running"


def _band(one: AtLoad) -> str:
    least, most = one.least_running, one.most_running
    return str(least) if least == most else f"{least}-{most}"
