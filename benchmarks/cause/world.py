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

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject, ProbeResult
from scheduler.causes.comparing import state_of
from scheduler.paired import PromptPair, alpha_change
from scheduler.verdicts import Setup, State, TrafficVerdict

START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTER = "draft"
MARGIN = 0.05
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
    setups: list[tuple[float, Setup]] = field(default_factory=lambda: [(0.0, Setup("target-1", "draft-1", "engine-1"))])
    levels: list[Level] = field(default_factory=lambda: [Level(0.0, 0.75)])
    dips: Mapping[int, float] = field(default_factory=dict)  #: loss of a single prompt at the last level

    def setup(self, day: float) -> Setup:
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
            trials=(trials,),
            accepts=(accepts,),
            num_tokens=_TOKENS,
            device_s=1.0,
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
    """Verdicts of all segments together, and by segment where there are several, from jobs drawn for them.

    The change was on day `changed`, found on day `seen`; when exactly is known to about a quarter of a day.
    """
    jobs = {
        s.name: (_jobs(rng, s.alpha_before, s.num_before), _jobs(rng, s.alpha_after, s.num_after)) for s in segments
    }
    subject = DriftSubject(world.task, DRAFTER, world.setup(seen).draft_revision, world.setup(seen).target_revision)
    between = at(changed - rng.uniform(0, 0.25)), at(min(seen, changed + rng.uniform(0, 0.25)))
    everything = (
        [job for before, _ in jobs.values() for job in before],
        [job for _, after in jobs.values() for job in after],
    )
    found = [_verdict(subject, "", *everything, between)]
    if len(segments) > 1:
        found += [_verdict(subject, name, before, after, between) for name, (before, after) in jobs.items()]
    return tuple(found)


def shifted(alpha: float, logits: float) -> float:
    """α moved on the scale of logits."""
    return 1 / (1 + math.exp(-(math.log(alpha / (1 - alpha)) + logits)))


def decoded(draws: Sequence[float], alpha: float) -> tuple[int, int]:
    """Trials and accepts of position 1 in a text: token t is accepted if its draw is below α."""
    trials = accepts = index = 0
    while index < len(draws):
        accepted = 0
        while accepted < _K and index + accepted < len(draws) and draws[index + accepted] < alpha:
            accepted += 1
        trials += 1
        accepts += accepted > 0
        index += accepted + 1
    return trials, accepts


def _jobs(rng: random.Random, alpha: float, number: int) -> list[tuple[int, int]]:
    return [
        decoded([rng.random() for _ in range(rng.randrange(24, 80))], shifted(alpha, rng.gauss(0, _JOB_SPREAD)))
        for _ in range(number)
    ]


def _verdict(
    subject: DriftSubject,
    segment: str,
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    between: tuple[datetime, datetime],
) -> TrafficVerdict:
    """An estimate over jobs: the ratio on each side, jobs as clusters."""
    change = alpha_change([PromptPair(n, a, 0, 0) for n, a in before] + [PromptPair(0, 0, n, a) for n, a in after])
    state = State.TOO_LITTLE if change is None else state_of(change, MARGIN)
    moved = state in (State.FELL, State.ROSE)
    return TrafficVerdict(
        subject=subject,
        segment=segment,
        state=state,
        change=change or Interval(0.0, -1.0, 1.0),
        changed_after=between[0] if moved else None,
        changed_before=between[1] if moved else None,
        num_jobs_before=len(before),
        num_jobs_after=len(after),
        trials_before=sum(n for n, _ in before),
        accepts_before=sum(a for _, a in before),
        trials_after=sum(n for n, _ in after),
        accepts_after=sum(a for _, a in after),
    )
