"""A device with slots, played round by round: its jobs, a round as a rule sees it, and the true times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.costs import CostTable
from alphaloop.deciding.decision import DraftSetting
from benchmarks.policy.scenario import (
    Acceptance,
    Device,
    Hiccup,
    Scenario,
    Slower,
    Stretches,
    Task,
    draw_stretches,
)
from benchmarks.policy.stream import ROUND_NOISE, Cell, Costs, Floats, Ints, cells_of, logit

#: Tokens that a job with an uncut output may have: what the rule sees, far beyond what is drawn.
MOST_TOKENS: Final = 16_384


@dataclass(frozen=True, slots=True)
class SlotJob:
    """A job, and by round what would be accepted and offered by drafter, as in `Drafts`."""

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
        # A text that ends inside its accepted tokens censors what came after.
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


@dataclass(frozen=True)
class SlotStream:
    """A scenario's jobs for one seed, and what the device is like meanwhile."""

    scenario: Scenario
    device: Device
    jobs: tuple[SlotJob, ...]
    stretches: Stretches
    noise: list[float]  #: factor of a round's time, by the round's number; used again from the beginning

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
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
    kinds = _kinds_of(scenario.tasks)
    shares = np.array([kind.share for kind in kinds])
    kind_of = rng.choice(len(kinds), size=num_jobs, p=shares / shares.sum())
    jobs = []
    for number, index in enumerate(kind_of.tolist()):
        kind = kinds[index]
        task = scenario.tasks[kind.cell.task]
        length = (1 - task.forced) * task.tokens * np.exp(task.tokens_spread * rng.standard_normal())
        longest = min(task.longest * (1 - task.forced) * task.tokens, MOST_TOKENS)
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


VANILLA: Final = DraftSetting()


@dataclass(slots=True)
class Running:
    """A job in a slot."""

    job: SlotJob
    setting: DraftSetting = VANILLA  #: how it drafts in the next round
    left: int = 0  #: tokens
    num_rounds: int = 0
    has_read: set[str] = field(default_factory=set)  #: drafters that know its text
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
    num_accepted: Sequence[int]  #: that the target accepted, those after the text's end too
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


class SlotTable:
    """The device's true times at whole widths, and at any speed."""

    def __init__(self, device: Device, most_sequences: int, draft_tokens: Mapping[str, int]) -> None:
        self.table: CostTable = device.table()
        self._costs = Costs.of(self.table, most_sequences, dict(draft_tokens))
        # Lists are read faster than arrays, one number at a time.
        self._passes: list[list[float]] = self._costs.passes.tolist()
        self._drafts: dict[str, list[list[float]]] = {d: grid.tolist() for d, grid in self._costs.drafts.items()}
        self._read: dict[tuple[str | None, int], float] = {}

    def pass_ms(self, num_running: int, mean_proposed: float) -> float:
        """The target's pass."""
        row = self._passes[num_running]
        below = min(int(mean_proposed), len(row) - 1)
        above = min(below + 1, len(row) - 1)
        return row[below] + (mean_proposed - below) * (row[above] - row[below])

    def draft_ms(self, drafter: str, num_drafting: int, k: int) -> float:
        """Proposing k tokens for `num_drafting` sequences."""
        return self._drafts[drafter][num_drafting][k]

    def read_ms(self, part: str | None, num_tokens: int) -> float:
        """Reading a text."""
        key = part, num_tokens
        if key not in self._read:
            self._read[key] = self.table.prefill_ms(part, num_tokens)
        return self._read[key]


@dataclass(frozen=True)
class SlotTrace:
    """What a rule did."""

    ms: float  #: the device's time
    job_ms: Floats  #: [jobs], share of the device's time
    budget_ms: Floats  #: [jobs], of it, exploring or in control rounds
    budget_tokens: Floats  #: [jobs], put out meanwhile


def play_slots(
    stream: SlotStream, table: SlotTable, rule: SlotRule, *, is_control: _IsControl | None = None
) -> SlotTrace:
    """The rule decides all of the stream. `is_control` returns which running jobs a round spent on control."""
    return _Play(stream, table, rule, is_control or (lambda: frozenset())).run()


def by_lane(jobs: Sequence[SlotJob]) -> list[list[SlotJob]]:
    """Jobs that start in one round, by task and sampling bucket: each lane is decided together."""
    lanes: dict[tuple[str, str], list[SlotJob]] = {}
    for job in jobs:
        lanes.setdefault((job.cell.task, job.cell.sampling), []).append(job)
    return list(lanes.values())


_IsControl = Callable[[], frozenset[int]]


class _Play:
    def __init__(self, stream: SlotStream, table: SlotTable, rule: SlotRule, is_control: _IsControl) -> None:
        self._stream, self._table, self._rule, self._is_control = stream, table, rule, is_control
        self._ms, self._num_rounds, self._num_tokens, self._next = 0.0, 0, 0, 0
        self._running: list[Running] = []
        self._noise = stream.noise
        slots = stream.scenario.slots
        assert slots is not None
        self._hiccup: Hiccup | None = slots.hiccup
        self._hiccup_left = slots.hiccup.num_rounds if slots.hiccup else 0
        num_jobs = len(stream.jobs)
        # Lists: a single number is added to them faster than to arrays.
        self._job_ms, self._budget_ms, self._budget_tokens = ([0.0] * num_jobs for _ in range(3))

    def run(self) -> SlotTrace:
        while self._next < len(self._stream.jobs) or self._running:
            self._round()
        return SlotTrace(self._ms, np.array(self._job_ms), np.array(self._budget_ms), np.array(self._budget_tokens))

    def _round(self) -> None:
        stretch = self._stream.stretches.at(self._num_tokens)
        new = self._admit(stretch.num_open)
        running, table = self._running, self._table
        self._rule.steer(running, stretch.slower, self._ms)
        slower = dict(stretch.slower) if stretch.slower else {}
        host = slower.pop("host", 1.0) * self._noise[self._num_rounds % len(self._noise)]
        offered, accepted = self._luck(running)
        drafts = self._drafts(running, slower)
        num_running = len(running)
        draft_ms = host * sum(drafts.values())
        pass_ms = host * table.pass_ms(num_running, sum(offered) / num_running)
        read_ms, draft_read_ms, num_read, num_draft_read = self._read(running, new, host, slower)
        ms = pass_ms + draft_ms + read_ms + draft_read_ms
        tokens = [a + 1 if a < one.left else one.left for a, one in zip(accepted, running, strict=True)]

        def vanilla_ms(places: Sequence[int]) -> float:
            left = [i for i in range(num_running) if i not in places]
            mean = sum(offered[i] for i in left) / num_running
            others = self._drafts([running[i] for i in left], slower, is_counted=False)
            return host * (table.pass_ms(num_running, mean) + sum(others.values()))

        done = SlotRound(
            self._ms,
            ms,
            draft_ms,
            read_ms,
            draft_read_ms,
            num_read,
            num_draft_read,
            tuple(running),
            offered,
            accepted,
            tokens,
            frozenset(drafts),
            vanilla_ms,
        )
        self._charge(done)
        self._rule.observe(done)
        self._ms += ms
        self._num_rounds += 1
        self._num_tokens += sum(tokens) + len(new)  # a prompt yields the first token
        self._end(tokens)

    def _admit(self, num_open: int) -> list[Running]:
        if len(self._running) >= num_open:
            return []
        new: list[Running] = []
        while len(self._running) + len(new) < num_open and self._next < len(self._stream.jobs):
            job = self._stream.jobs[self._next]
            self._next += 1
            new.append(Running(job, left=job.needed - 1))
        by_number = {one.job.number: one for one in new}
        for lane in by_lane([one.job for one in new]):
            jobs = [by_number[job.number] for job in lane]
            self._rule.start(jobs, len(self._running) + len(jobs), self._ms)
            self._running += jobs
        return new

    def _luck(self, running: Sequence[Running]) -> tuple[list[int], list[int]]:
        offered, accepted = [], []
        for one in running:
            setting = one.setting
            if setting.num_draft_tokens and setting.drafter is not None:
                offers = one.job.offered[setting.drafter][one.num_rounds]
                accepts = one.job.accepted[setting.drafter][one.num_rounds]
                offers = offers if offers < setting.num_draft_tokens else setting.num_draft_tokens
                offered.append(offers)
                accepted.append(accepts if accepts < offers else offers)
            else:
                offered.append(0)
                accepted.append(0)
        return offered, accepted

    def _drafts(
        self, running: Sequence[Running], slower: Mapping[str, float], *, is_counted: bool = True
    ) -> dict[str, float]:
        """Milliseconds of each drafter that proposes."""
        number: dict[str, int] = {}
        longest: dict[str, int] = {}
        for one in running:
            drafter, k = one.setting.drafter, one.setting.num_draft_tokens
            if drafter is not None and k:
                number[drafter] = number.get(drafter, 0) + 1
                if k > longest.get(drafter, 0):
                    longest[drafter] = k
        hiccup = self._hiccup
        is_hit = hiccup is not None and self._hiccup_left > 0 and self._next > hiccup.from_job
        found = {}
        for drafter, k in longest.items():
            factor = slower.get(drafter, 1.0)
            if is_hit and hiccup is not None and drafter == hiccup.drafter:
                factor *= hiccup.slower
                self._hiccup_left -= is_counted
            found[drafter] = factor * self._table.draft_ms(drafter, number[drafter], k)
        return found

    def _read(
        self, running: Sequence[Running], new: Sequence[Running], host: float, slower: Mapping[str, float]
    ) -> tuple[float, float, int, int]:
        """Milliseconds that the target and drafters read for; tokens that they read."""
        ms, draft_ms, num_read, num_draft_read = 0.0, 0.0, 0, 0
        for one in new:
            num_read += one.job.cell.prompt_tokens
            ms += self._table.read_ms(None, one.job.cell.prompt_tokens)
        for one in running:
            drafter = one.setting.drafter
            if drafter is not None and drafter not in one.has_read and one.setting.num_draft_tokens:
                one.has_read.add(drafter)
                num_tokens = one.job.cell.prompt_tokens + one.job.needed - 1 - one.left
                took = self._table.read_ms(drafter, num_tokens)
                draft_ms += slower.get(drafter, 1.0) * took
                num_draft_read += num_tokens if took else 0
        return host * ms, host * draft_ms, num_read, num_draft_read

    def _charge(self, done: SlotRound) -> None:
        share, control = done.ms / len(done.running), self._is_control()
        for one, num_tokens in zip(done.running, done.num_tokens, strict=True):
            number = one.job.number
            self._job_ms[number] += share
            if one.is_budget or (control and number in control):
                self._budget_ms[number] += share
                self._budget_tokens[number] += num_tokens

    def _end(self, tokens: Sequence[int]) -> None:
        has_ended = False
        for one, num_tokens in zip(self._running, tokens, strict=True):
            one.left -= num_tokens
            one.num_rounds += 1
            has_ended = has_ended or one.left <= 0
        if has_ended:
            ended = [one for one in self._running if one.left <= 0]
            self._running = [one for one in self._running if one.left > 0]
            for one in ended:
                self._rule.end(one, self._ms)
