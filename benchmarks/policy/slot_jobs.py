"""Jobs of a scenario with slots, with every chance of their rounds drawn beforehand (see stream.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from alphaloop.acceptance import AcceptanceCounts
from benchmarks.policy.load import Stretches, draw_stretches
from benchmarks.policy.real_runs import RealRun, read_runs
from benchmarks.policy.scenario import FILE, Acceptance, Device, Scenario, Task
from benchmarks.policy.stream import ROUND_NOISE, Cell, Floats, Ints, cells_of, logit

#: Tokens that a job with an uncut output may have: what the rule is told, far beyond what is drawn.
MOST_TOKENS: Final = 16_384
#: Rounds that a real run's own counts are averaged with: so many trials of its task.
_TASK_TRIALS: Final = 8.0


@dataclass(frozen=True, slots=True)
class SlotJob:
    """A job. Of its rounds: what would be accepted and offered by drafter, as in `Drafts`."""

    number: int
    cell: Cell  #: what can be known
    kind: int  #: cell and producer: what the oracle knows
    needed: int  #: tokens of the output
    max_tokens: float
    accepted: dict[str, list[int]]
    offered: dict[str, list[int]]

    def counts_at(self, drafter: str, k: int) -> AcceptanceCounts:
        """What the drafter would have been counted with, had it decoded the whole text at k; the prefill is a round."""
        counter = Counter(k)
        left, number = self.needed - 1, 0
        offered, accepted = self.offered[drafter], self.accepted[drafter]
        while left > 0:
            left -= counter.add(min(offered[number], k), min(accepted[number], k), left)
            number += 1
        return counter.counts


class Counter:
    """Rounds of a job with one drafter, while they are added up."""

    def __init__(self, most: int) -> None:
        self._rounds, self._empty, self._cropped = 0, 0, 0
        self._proposed, self._trials, self._accepts, self._chances = ([0] * most for _ in range(4))

    def add(self, offered: int, accepted: int, left: int, *, k: int | None = None) -> int:
        """A round at k that came before the last `left` tokens; returns the tokens that it put out."""
        accepted = min(accepted, offered)
        # A text that ends inside its accepted tokens censors what came behind.
        if left <= accepted:
            offered = accepted = left
            self._cropped += 1
        self._rounds += 1
        self._empty += not offered
        for i in range(offered):
            self._proposed[i] += 1
            self._trials[i] += i <= accepted
            self._accepts[i] += i < accepted
        for i in range(min(accepted + 1, len(self._chances) if k is None else k)):
            self._chances[i] += 1
        return min(accepted + 1, left)

    @property
    def counts(self) -> AcceptanceCounts:
        """With a round for the prefill."""
        by_position = (tuple(self._proposed), tuple(self._trials), tuple(self._accepts))
        return AcceptanceCounts(self._rounds + 1, self._empty + 1, self._cropped, *by_position)

    @property
    def chances(self) -> tuple[int, ...]:
        """By position, rounds in which it was allowed, with all before it accepted."""
        return tuple(self._chances)


@dataclass(frozen=True, slots=True)
class DrawnRounds:
    """What was drawn of one drafter for all jobs, job after job: as many rounds as a job's text needs in vanilla."""

    num_rounds: Ints  #: [jobs]
    accepted: Ints  #: [rounds of all jobs]
    offered: Ints  #: [rounds of all jobs]

    @property
    def first(self) -> Ints:
        """[jobs], the place of a job's first round."""
        return np.asarray(np.cumsum(self.num_rounds) - self.num_rounds)


@dataclass(frozen=True)
class SlotStream:
    """A scenario's jobs for one seed, and what the device is like meanwhile."""

    scenario: Scenario
    device: Device
    jobs: tuple[SlotJob, ...]
    stretches: Stretches
    noise: list[float]  #: factor of a round's time, by the round's number; used again from the beginning
    _drawn: dict[str | None, DrawnRounds] = field(default_factory=dict)

    def drawn(self, drafter: str | None) -> DrawnRounds:
        """All jobs' rounds with this drafter; without one, none is offered or accepted."""
        if drafter not in self._drawn:
            num_rounds = np.array([job.needed - 1 for job in self.jobs])
            if drafter is None:
                nothing = np.zeros(int(num_rounds.sum()), np.int64)
                self._drawn[None] = DrawnRounds(num_rounds, nothing, nothing)
            else:
                accepted, offered = (
                    np.fromiter(chain.from_iterable(rounds), np.int64)
                    for rounds in ([j.accepted[drafter] for j in self.jobs], [j.offered[drafter] for j in self.jobs])
                )
                self._drawn[drafter] = DrawnRounds(num_rounds, accepted, offered)
        return self._drawn[drafter]

    @property
    def num_tokens(self) -> int:
        """Of all outputs."""
        return sum(job.needed for job in self.jobs)


def draw_slot_stream(scenario: Scenario, device: Device, seed: int) -> SlotStream:
    """The stream of this seed."""
    assert scenario.slots is not None
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    jobs = draw_jobs(scenario, scenario.num_jobs, rng)
    num_tokens = sum(job.needed for job in jobs)
    stretches = draw_stretches(scenario.slots, num_tokens, rng)
    noise = np.exp(ROUND_NOISE * rng.standard_normal(num_tokens) - ROUND_NOISE**2 / 2)
    return SlotStream(scenario, device, jobs, stretches, noise.tolist())


@dataclass(frozen=True, slots=True)
class _Kind:
    cell: Cell
    share: float
    shift: float
    drafters: dict[str, Acceptance]


def draw_jobs(scenario: Scenario, num_jobs: int, rng: np.random.Generator) -> tuple[SlotJob, ...]:
    """Jobs in the order of their arrival."""
    if scenario.replayed is not None:
        runs = read_runs(FILE.parent / scenario.replayed)
        return _draw_replayed(scenario, runs, num_jobs, rng)
    kinds = _kinds_of(scenario.tasks)
    shares = np.array([kind.share for kind in kinds])
    kind_of = rng.choice(len(kinds), size=num_jobs, p=shares / shares.sum())
    jobs = []
    for number, index in enumerate(kind_of.tolist()):
        kind = kinds[index]
        task = scenario.tasks[kind.cell.task]
        length = task.tokens * np.exp(task.tokens_spread * rng.standard_normal())
        longest = min(task.longest * task.tokens, MOST_TOKENS)
        needed = int(np.clip(np.rint(length), 2, longest))
        shared = task.job_spread * rng.standard_normal()
        alphas, reaches = {}, {}
        for drafter, most in scenario.draft_tokens.items():
            alpha, reach = (np.array(list(map(logit, row))) for row in kind.drafters[drafter].at(most))
            moved = kind.shift + (_beta_shift(alpha[0], task.correlation, rng) if task.correlation else shared)
            alphas[drafter] = alpha + moved
            # Where rounds with a proposal come in runs, the runs make a job's rounds alike.
            reaches[drafter] = reach if task.run_rounds > 1 else reach + moved
        rounds = {d: _rounds(alphas[d], reaches[d], needed - 1, task.run_rounds, rng) for d in alphas}
        accepted, offered = ({d: pair[i] for d, pair in rounds.items()} for i in (0, 1))
        jobs.append(SlotJob(number, kind.cell, index, needed, longest, accepted, offered))
    return tuple(jobs)


def _kinds_of(tasks: dict[str, Task]) -> list[_Kind]:
    found = []
    for cell, share, shift in cells_of(tasks):
        producers = tasks[cell.task].producers
        whole = sum(producer.share for producer in producers)
        for producer in producers:
            drafters = {**tasks[cell.task].drafters, **producer.drafters}
            found.append(_Kind(cell, share * producer.share / whole, shift, drafters))
    return found


def _beta_shift(alpha: float, correlation: float, rng: np.random.Generator) -> float:
    """What moves the logit `alpha` to that of a draw from the beta distribution of this mean and correlation."""
    if not np.isfinite(alpha):
        return 0.0
    mean, trials = 1 / (1 + np.exp(-alpha)), 1 / correlation - 1
    drawn = float(np.clip(rng.beta(mean * trials, (1 - mean) * trials), 1e-4, 1 - 1e-4))
    return logit(drawn) - float(alpha)


def _rounds(
    alpha: Floats, reach: Floats, num_rounds: int, run_rounds: float, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Accepted and offered tokens of every round."""
    accepted = _in_a_row(alpha, num_rounds, rng)
    share = float(1 / (1 + np.exp(-reach[0])))
    if run_rounds == 1 or share == 1:
        return accepted.tolist(), _in_a_row(reach, num_rounds, rng).tolist()
    offered = 1 + _in_a_row(reach[1:], num_rounds, rng)
    return accepted.tolist(), (offered * _in_runs(share, run_rounds, num_rounds, rng)).tolist()


def _in_a_row(logits: Floats, num_rounds: int, rng: np.random.Generator) -> Ints:
    through = np.cumprod(1 / (1 + np.exp(-logits)))
    return np.asarray((rng.random(num_rounds)[:, None] < through).sum(axis=1), dtype=np.int64)


def _in_runs(share: float, run_rounds: float, num_rounds: int, rng: np.random.Generator) -> Ints:
    """A Markov chain of 0 and 1: `share` of the rounds are 1, in runs of `run_rounds` on average."""
    begin = min(1.0, share / (1 - share) / run_rounds)
    is_on, found = bool(rng.random() < share), []
    for draw in rng.random(num_rounds).tolist():
        found.append(int(is_on))
        is_on = (draw >= 1 / run_rounds) if is_on else draw < begin
    return np.array(found, dtype=np.int64)


def _draw_replayed(
    scenario: Scenario, runs: tuple[RealRun, ...], num_jobs: int, rng: np.random.Generator
) -> tuple[SlotJob, ...]:
    """The runs in their order, from the beginning again where they are too few; each with rounds by its own counts."""
    tasks = sorted({run.task for run in runs})
    known = {(t, d): _pooled(runs, t, d, most) for t in tasks for d, most in scenario.draft_tokens.items()}
    jobs = []
    for number in range(num_jobs):
        run = runs[number % len(runs)]
        accepted, offered = {}, {}
        for drafter, most in scenario.draft_tokens.items():
            pooled = known[run.task, drafter]
            alpha, reach = run.rates(drafter, most, pooled, _TASK_TRIALS)
            rounds = _rounds(
                np.array(list(map(logit, alpha))), np.array(list(map(logit, reach))), run.num_tokens - 1, 1.0, rng
            )
            accepted[drafter], offered[drafter] = rounds
        cell = Cell(run.task, run.segment, run.sampling_bucket, run.prompt_bucket, run.num_prompt_tokens)
        most_tokens = max(one.num_tokens for one in runs if one.task == run.task)
        jobs.append(SlotJob(number, cell, tasks.index(run.task), run.num_tokens, most_tokens, accepted, offered))
    return tuple(jobs)


def _pooled(
    runs: tuple[RealRun, ...], task: str, drafter: str, most: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """α_i and reach_i of all the task's runs with the drafter; a drafter that never ran there accepts nothing."""
    its = [run.of(drafter) for run in runs if run.task == task]
    alpha: list[float] = []
    reach: list[float] = []
    for i in range(most):
        trials, accepts, proposed, chances = (
            sum(getattr(one, name)[i] for one in its if len(one.trials) > i)
            for name in ("trials", "accepts", "proposed", "chances")
        )
        alpha.append(accepts / trials if trials else (alpha[-1] if alpha else 0.0))
        reach.append(min(1.0, proposed / chances) if chances else (reach[-1] if reach else 0.0))
    return tuple(alpha), tuple(reach)
