"""Decoding prompts in every way: in which order, every turn in full or not at all, and whether the texts are equal.

The order is a randomised complete block design: a batch of prompts is decoded in every way, one after the other and in
random order, before the next batch begins. A machine that slows down slows all ways, no way is always first, and an
interrupted run has measured every way equally often. Observations are sums; rates are computed where they are shown.

A pass of another width rounds differently, so greedy texts may differ where two logits are almost equal
(docs/concepts/exactness.md). The engine's interface returns no logits, but it takes biases. So the target alone decodes
one token after the common text, twice: each time one of the two tokens has its logit raised by a tolerance. If the
raised token is chosen both times, both lie within the tolerance of the best, and rounding explains the difference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Engine, Generation, PreparedJob, Step, tolerance_of
from alphaloop.errors import ConfigError, DecodeFailed
from alphaloop.payoff.figures import VANILLA, Candidate, Exactness, RoundTimes

#: Draft lengths that are tried where none are named: short, usual, long.
DEFAULT_LENGTHS: Final = (2, 4, 8)
WARM_UP_TOKENS: Final = 16
#: Asking costs a reading of the prompt twice; a broken engine would differ everywhere.
MAX_EXAMINED: Final = 20


def choose_drafters(configured: Collection[str], wanted: Sequence[str]) -> list[str]:
    """The drafters to load: those wanted, or all. Raises ConfigError."""
    if not configured:
        raise ConfigError(
            "no drafter is configured, so there is nothing to compare with",
            hint="add [models.drafters.lookup] to configs/models.toml",
        )
    if unknown := [name for name in wanted if name not in configured]:
        raise ConfigError(
            f"--drafter: expected one of {', '.join(sorted(configured))}, found {unknown[0]!r}",
            hint="drafters are named in configs/models.toml",
        )
    return list(dict.fromkeys(wanted)) or list(configured)


def choose_candidates(drafters: Sequence[DrafterState], lengths: Sequence[int]) -> list[Candidate]:
    """Each drafter at every length that it can draft; DEFAULT_LENGTHS, or its longest where it can draft none of them.

    Vanilla is not among them. Raises ConfigError for a length beyond every drafter.
    """
    longest = max((drafter.max_draft_tokens for drafter in drafters), default=0)
    if too_long := [k for k in lengths if k > longest]:
        raise ConfigError(
            f"--k: expected at most {longest}, found {too_long[0]}",
            hint="models.drafters.NAME.max_draft_tokens is the longest draft that a drafter makes",
        )
    candidates = []
    for drafter in drafters:
        own = [k for k in sorted(set(lengths or DEFAULT_LENGTHS)) if k == drafter.within(k)]
        candidates += [Candidate(drafter.name, k, drafter.revision) for k in own or [drafter.max_draft_tokens]]
    return candidates


@dataclass(frozen=True, slots=True)
class BlockTurn:
    """One batch of prompts (their numbers), and every way to decode it, in the order of this turn."""

    block: int
    repeat: int
    prompts: tuple[int, ...]
    candidates: tuple[Candidate, ...]


def divide(num_prompts: int, batch: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts in random order, in as few blocks as hold at most `batch` each, of sizes that differ by one at most."""
    order = rng.sample(range(num_prompts), num_prompts)
    num_blocks = -(-num_prompts // batch)
    ends = [num_prompts * (i + 1) // num_blocks for i in range(num_blocks)]
    return [tuple(order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def turns(
    blocks: Sequence[tuple[int, ...]], candidates: Sequence[Candidate], num_repeats: int, rng: random.Random
) -> Iterator[BlockTurn]:
    """Every block in every way, `num_repeats` times; all blocks once before any comes again."""
    every = [VANILLA, *candidates]
    for repeat in range(num_repeats):
        for block in rng.sample(range(len(blocks)), len(blocks)):
            yield BlockTurn(block, repeat, blocks[block], tuple(rng.sample(every, len(every))))


@dataclass(eq=False)
class Runner:
    """Drives the engine. `should_stop` is asked between two steps."""

    engine: Engine
    prepared: Sequence[PreparedJob]
    _: KW_ONLY
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter

    def warm_up(self, block: Sequence[int], candidates: Sequence[Candidate]) -> None:
        """Decode shortly in every way, so that no measured time includes a device's first pass of a shape.

        Raises Interrupted or DecodeFailed.
        """
        short = [
            replace(job, sampling=replace(job.sampling, max_tokens=min(job.sampling.max_tokens, WARM_UP_TOKENS)))
            for job in (self.prepared[number] for number in block)
        ]
        for candidate in (VANILLA, *candidates):
            self.decode(short, candidate)

    def run(self, turns: Iterable[BlockTurn], measured: Measurements, on_decoded: Callable[[int], None]) -> None:
        """Fill `measured` turn by turn; `on_decoded` is called with how many texts were added.

        Ends early, with `is_interrupted`, when it should stop. Raises DecodeFailed; the turns before are kept.
        """
        for turn in turns:
            seen: dict[Candidate, Observation] = {}
            try:
                for candidate in turn.candidates:
                    seen[candidate] = self.observe(turn, candidate)
                    on_decoded(len(turn.prompts))
            except Stopped:
                measured.is_interrupted = True
                return
            measured.turns.append(seen)

    def decode(self, jobs: Sequence[PreparedJob], candidate: Candidate) -> tuple[list[Generation], list[Step], float]:
        """Texts in the order of `jobs`, the steps, and seconds in all. Raises Interrupted or DecodeFailed.

        The engine is empty before and after. Where memory has no room for all jobs at once the rest follow.
        """
        waiting = list(jobs)
        steps: list[Step] = []
        generations: dict[str, Generation] = {}
        began = self.clock()
        try:
            while waiting or len(generations) < len(jobs):
                while waiting and self.engine.has_room(waiting[0]):
                    self.engine.admit(waiting.pop(0), candidate.decision)
                if self.should_stop():
                    raise Stopped
                steps.append(step := self.engine.step())
                generations |= {generation.job_id: generation for generation in step.finished}
                for failed in step.failed:
                    raise DecodeFailed(failed.error.message, hint=failed.error.hint)
                waiting += [job for job in jobs if job.job.job_id in step.interrupted]
        except (Stopped, DecodeFailed):
            self.engine.abandon()
            raise
        wall_s = self.clock() - began
        return [generations[job.job.job_id] for job in jobs], steps, wall_s

    def observe(self, turn: BlockTurn, candidate: Candidate) -> Observation:
        """Decode the turn's prompts in one way. Raises Stopped or DecodeFailed."""
        generations, steps, wall_s = self.decode([self.prepared[number] for number in turn.prompts], candidate)
        numbered = tuple(zip(turn.prompts, generations, strict=True))
        times = sum(map(_times_of, steps), start=RoundTimes())
        return Observation(candidate, turn.block, turn.repeat, numbered, times, wall_s)


class Stopped(Exception):
    """The run should stop; the unfinished turn is dropped."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One block of prompts, decoded together in one way."""

    candidate: Candidate
    block: int
    repeat: int
    generations: tuple[tuple[int, Generation], ...]  #: with the number of each prompt
    times: RoundTimes
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens put out."""
        return sum(generation.counts.num_tokens for _, generation in self.generations)

    @property
    def tokens_per_s(self) -> float:
        """Seconds of the whole block: reading, drafting, decoding, text."""
        return self.num_tokens / self.wall_s


@dataclass(slots=True)
class Measurements:
    """All that was seen, by candidate in the order of the tables. Every candidate has seen the same blocks."""

    candidates: Sequence[Candidate]  #: vanilla first
    turns: list[dict[Candidate, Observation]] = field(default_factory=list)
    is_interrupted: bool = False

    def of(self, candidate: Candidate) -> list[Observation]:
        """In the order of the turns, so that lists of two candidates are pairs."""
        return [turn[candidate] for turn in self.turns]

    def generations(self, candidate: Candidate) -> list[tuple[int, Generation]]:
        """Every text of it, with the number of its prompt."""
        return [item for observation in self.of(candidate) for item in observation.generations]


def _times_of(step: Step) -> RoundTimes:
    if step.num_prefill_tokens:
        return RoundTimes(reading_s=step.wall_s)
    return RoundTimes(
        step.batch, 1, step.wall_s, step.draft_s, step.verify_s, step.num_positions or step.batch * step.width
    )


class ExactnessCheck:
    """Compares texts; asks the target about differences. Raises DecodeFailed.

    A runner that should stop leaves the differences unexamined.
    """

    def __init__(self, runner: Runner, prepared: Sequence[PreparedJob], dtype: str) -> None:
        self._runner = runner
        self._prepared = prepared
        self._tolerance = tolerance_of(dtype)
        self._num_examined = 0
        self._answers: dict[tuple[int, int, int, int], bool] = {}

    def compare(self, vanilla: Sequence[tuple[int, Generation]], other: Sequence[tuple[int, Generation]]) -> Exactness:
        """Both by number of the prompt; of a prompt's repeats the first counts."""
        truths, others = dict(reversed(vanilla)), dict(reversed(other))
        counted = dict.fromkeys(("num_equal", "num_near_ties", "num_wrong", "num_unexamined", "num_sampled"), 0)
        for number, generation in others.items():
            counted[self._kind(number, truths[number], generation)] += 1
        return Exactness(**counted)

    def _kind(self, number: int, vanilla: Generation, other: Generation) -> str:
        sampling = self._prepared[number].sampling
        if sampling.temperature > 0 and sampling.seed is None:
            return "num_sampled"
        truth, tokens = vanilla.token_ids, other.token_ids
        if (truth, vanilla.text) == (tokens, other.text):
            return "num_equal"
        if not self._prepared[number].token_ids:  # a server has the tokens, and takes none to go on from
            return "num_unexamined"
        place = next((i for i, pair in enumerate(zip(truth, tokens, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            # The same tokens ended one text and not the other.
            return "num_wrong"
        if sampling.temperature > 0 or sampling.is_adjusted or self._num_examined >= MAX_EXAMINED:
            return "num_unexamined"
        try:
            return "num_near_ties" if self._is_near_tie(number, place, truth, tokens) else "num_wrong"
        except Stopped:
            return "num_unexamined"

    def _is_near_tie(self, number: int, place: int, truth: Sequence[int], tokens: Sequence[int]) -> bool:
        key = (number, place, truth[place], tokens[place])
        if key not in self._answers:
            self._num_examined += 1
            prepared = self._prepared[number]
            jobs = [
                replace(
                    prepared,
                    job=prepared.job.model_copy(update={"job_id": f"{prepared.job.job_id}-tie-{token}"}),
                    token_ids=(*prepared.token_ids, *truth[:place]),
                    sampling=replace(prepared.sampling, max_tokens=1, logit_bias=((token, self._tolerance),)),
                )
                for token in (truth[place], tokens[place])
            ]
            chosen = [self._runner.decode([job], VANILLA)[0][0].token_ids[0] for job in jobs]
            self._answers[key] = chosen == [truth[place], tokens[place]]
        return self._answers[key]
