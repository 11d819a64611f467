"""A simulated task: what its probes and its jobs show over two weeks, with the noise that real ones have.

A probe's text is the target's greedy text, so the same target draws the same tokens again, except for near-ties that
flip (`_FLIPS`). Whether a token is accepted is drawn once for a prompt, a target and a draft. So a fault lowers the
acceptance of the same tokens, and another target or draft draws anew. Prompts and jobs differ in how easy they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from alphaloop.measurements import ProbeResult, Stream, WatchedJob
from scheduler.counts import subject_of
from scheduler.drift.phases import DriftRules
from scheduler.drift.watching import SegmentedStream, TrafficVerdict
from scheduler.probe_history import ProbeSetup

START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTER = "draft"
MARGIN = 0.05
#: As configs/scheduler.toml has them, where one false alarm a month is one in 50,000 jobs.
RULES = DriftRules(50_000, reference_jobs=64, margin=MARGIN)
_TOKENS = 48
_K = 3
_FLIPS = 0.1  #: share of repeated texts that take another turn at a near-tie
_PROMPT_SPREAD = 0.5  #: standard deviation between prompts, in logits
_JOB_SPREAD = 0.5  #: between jobs


def at(day: float) -> datetime:
    """A moment, in days after the start."""
    return START + timedelta(days=day)


@dataclass(frozen=True, slots=True)
class Level:
    """Acceptance from a day on: the mean α of an average prompt."""

    day: float
    alpha: float


@dataclass
class World:
    """One task, its setups and its levels."""

    seed: str
    task: str = "code"
    setups: list[tuple[float, ProbeSetup]] = field(
        default_factory=lambda: [(0.0, ProbeSetup("target-1", "draft-1", "engine-1"))]
    )
    levels: list[Level] = field(default_factory=lambda: [Level(0.0, 0.75)])
    dips: Mapping[int, float] = field(default_factory=dict)  #: loss of a single prompt at the last level

    def setup(self, day: float) -> ProbeSetup:
        """What decodes on a day."""
        return [setup for since, setup in self.setups if since <= day][-1]

    def alpha(self, day: float) -> float:
        """The level of a day; between two levels of the same day number the later one."""
        return [level.alpha for level in self.levels if level.day <= day][-1]

    def probes(self, days: Sequence[float], prompts: Sequence[int], probe_set: str = "set-1") -> list[ProbeResult]:
        """The results of one run on each of these days."""
        return [
            self._probe(day, position, prompt, probe_set) for day in days for position, prompt in enumerate(prompts)
        ]

    def _probe(self, day: float, position: int, prompt: int, probe_set: str) -> ProbeResult:
        setup = self.setup(day)
        easy = random.Random(f"{self.seed} {self.task} {prompt}").gauss(0, _PROMPT_SPREAD)
        dip = self.dips.get(prompt, 0.0) if self.alpha(day) == self.levels[-1].alpha and len(self.levels) > 1 else 0.0
        alpha = max(0.01, shifted(self.alpha(day), easy) - dip)
        draws = f"{self.seed} {self.task} {prompt} {setup.target_revision} {setup.draft_revision}"
        flipped = random.Random(f"{draws} {setup.engine} {day}").random() < _FLIPS
        rng = random.Random(f"{draws} {day}" if flipped else draws)
        trials, accepts = decoded([rng.random() for _ in range(_TOKENS)], alpha)
        return ProbeResult(
            scheduled_for=at(day),
            task=self.task,
            probe_set=probe_set,
            position=position,
            prompt_id=f"prompt-{prompt}",
            drafter=DRAFTER,
            draft_revision=setup.draft_revision,
            target_revision=setup.target_revision,
            engine=setup.engine,
            num_draft_tokens=_K,
            trials=trials,
            accepts=accepts,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Traffic of a segment around a change: mean α and number of jobs, before and after."""

    name: str
    alpha_before: float
    alpha_after: float
    num_before: int
    num_after: int


def traffic(
    rng: random.Random, world: World, segments: Sequence[Segment], changed: float, seen: float
) -> tuple[TrafficVerdict, ...]:
    """What the product's test says on day `seen` of jobs that changed on day `changed`.

    Jobs come evenly over the time before and after, the segments mixed. Where target, draft or engine changed too, the
    later jobs are a stream of their own, as in the product.
    """
    jobs = [
        *_between(rng, [(s.name, s.alpha_before) for s in segments for _ in range(s.num_before)], 0.0, changed),
        *_between(rng, [(s.name, s.alpha_after) for s in segments for _ in range(s.num_after)], changed, seen),
    ]
    setup = world.setup(seen)
    stream = Stream(world.task, setup.target_revision, setup.engine, "greedy", DRAFTER, setup.draft_revision)
    watched = SegmentedStream()
    watched.add([job.of(stream, number) for number, job in enumerate(jobs) if world.setup(job.day) == setup], RULES)
    return tuple(watched.verdicts(subject_of(stream), MARGIN))


def shifted(alpha: float, logits: float) -> float:
    """α moved on the scale of logits."""
    return 1 / (1 + math.exp(-(math.log(alpha / (1 - alpha)) + logits)))


def decoded(draws: Sequence[float], alpha: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trials and accepts by position in a text: token t is accepted if its draw is below α."""
    trials, accepts = [0] * _K, [0] * _K
    index = 0
    while index < len(draws):
        place = 0
        while place < _K and index + place < len(draws):
            trials[place] += 1
            if draws[index + place] >= alpha:
                break
            accepts[place] += 1
            place += 1
        index += place + 1
    return tuple(trials), tuple(accepts)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job of traffic."""

    day: float
    segment: str
    num_tokens: int
    trials: tuple[int, ...]
    accepts: tuple[int, ...]

    def of(self, stream: Stream, number: int) -> WatchedJob:
        """As the test reads it."""
        return WatchedJob(stream, self.segment, at(self.day), number, _K, self.trials, self.accepts, self.num_tokens)


def _between(rng: random.Random, levels: list[tuple[str, float]], begin: float, end: float) -> list[_Job]:
    """Jobs of these segments and levels, in the order in which they are decoded between two days."""
    rng.shuffle(levels)
    step = (end - begin) / max(len(levels), 1)
    return [_job(rng, begin + (number + 0.5) * step, segment, alpha) for number, (segment, alpha) in enumerate(levels)]


def _job(rng: random.Random, day: float, segment: str, alpha: float) -> _Job:
    num_tokens = rng.randrange(24, 80)
    counts = decoded([rng.random() for _ in range(num_tokens)], shifted(alpha, rng.gauss(0, _JOB_SPREAD)))
    return _Job(day, segment, num_tokens, *counts)
