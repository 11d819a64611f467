"""One measurement from its plan to its report, over an engine that is loaded."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.commands import AdvanceEvent, StageEvent, Tell
from alphaloop.errors import ConfigError, DecodeFailed
from alphaloop.payoff.bounds import min_values
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, Exactness
from alphaloop.payoff.report import Footprint, Report, Setup, best_of
from alphaloop.payoff.verdict import Verdict
from worker.engine import Engine, PreparedJob
from worker.measuring.candidates import divide, turns
from worker.measuring.evidence import GreedySample
from worker.measuring.exactness import ExactnessCheck
from worker.measuring.observations import Measured
from worker.measuring.report import Records, report_of
from worker.measuring.running import Interrupted, Runner

#: Of sampled prompts decoded greedy as well, to see what the temperature costs.
NUM_GREEDY: Final = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on what."""

    prepared: Sequence[PreparedJob]
    candidates: Sequence[Candidate]
    batch: int
    num_repeats: int
    bar: float
    seed: int

    @property
    def num_blocks(self) -> int:
        """Batches of prompts."""
        return -(-len(self.prepared) // self.batch)

    @property
    def num_turns(self) -> int:
        """How often every candidate has a batch to decode."""
        return self.num_blocks * self.num_repeats

    @property
    def num_texts(self) -> int:
        """Texts in all, vanilla's among them."""
        return len(self.prepared) * self.num_repeats * (len(self.candidates) + 1)


def refuse_few(num_prompts: int, batch: int, num_candidates: int) -> None:
    """Raise ConfigError where batches are too few for any bounds: prompts that share passes are one observation."""
    needed = min_values(num_candidates)
    if -(-num_prompts // batch) < needed:
        raise ConfigError(
            f"expected at least {needed} batches to bound {num_candidates} candidates, found "
            f"{-(-num_prompts // batch)}: {num_prompts} prompts at --batch {batch}",
            hint=f"give at least {(needed - 1) * batch + 1} prompts, or a smaller --batch",
        )


class Session:
    """Runs a plan, and tells its stages and the texts done."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        *,
        should_stop: Callable[[], bool],
        tell: Tell = lambda event: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._runner = Runner(engine, plan.prepared, should_stop=should_stop, clock=clock)
        self._tell = tell
        self.measured = Measured([VANILLA, *plan.candidates])
        self.failure: DecodeFailed | None = None  #: what ended it early

    def run(self) -> None:
        """Warm up and measure, until done, told to stop, or a step fails; `measured` holds what was finished."""
        plan = self._plan
        rng = random.Random(plan.seed)
        blocks = divide(len(plan.prepared), plan.batch, rng)
        try:
            self._tell(StageEvent(name="warming up"))
            self._runner.warm_up(blocks[0], plan.candidates)
            self._tell(StageEvent(name="measuring", total=plan.num_texts))
            order = turns(blocks, plan.candidates, plan.num_repeats, rng)
            self._runner.run(order, self.measured, lambda num: self._tell(AdvanceEvent(num=num)))
        except Interrupted:
            self.measured.is_interrupted = True
        except DecodeFailed as error:
            self.measured.is_interrupted = True
            self.failure = error

    def report(self, records: Records, footprint: Callable[[], Footprint], notes: Sequence[str]) -> Report:
        """Compare the texts, look into temperature where prompts are sampled, and judge. There must be a turn."""
        self._tell(StageEvent(name="comparing texts"))
        exactness = self._exactness()

        def made(greedy: Mapping[str, GreedySample]) -> Report:
            return report_of(
                self._setup(), self.measured, exactness, greedy, records, footprint(), notes, self._plan.num_turns
            )

        report = made({})
        greedy = self._greedy(report)
        return made(greedy) if greedy else report

    def _setup(self) -> Setup:
        plan = self._plan
        return Setup(
            identity=self._engine.identity,
            num_prompts=len(plan.prepared),
            prompt_tokens=statistics.median(job.num_prompt_tokens for job in plan.prepared),
            max_tokens=max(job.sampling.max_tokens for job in plan.prepared),
            temperature=max(job.sampling.temperature for job in plan.prepared),
            batch=plan.batch,
            num_repeats=plan.num_repeats,
            bar=plan.bar,
            seed=plan.seed,
        )

    def _exactness(self) -> dict[Candidate, Exactness]:
        check = ExactnessCheck(self._runner, self._plan.prepared, self._engine.identity.dtype)
        truths = self.measured.generations(VANILLA)
        return {c: check.compare(truths, self.measured.generations(c)) for c in self._plan.candidates}

    def _greedy(self, report: Report) -> dict[str, GreedySample]:
        """By drafter with nothing to ship, some of the sampled prompts decoded greedy at its best k."""
        seen = dict.fromkeys(number for number, _ in self.measured.generations(VANILLA))
        prepared = self._plan.prepared
        sampled = [number for number in seen if prepared[number].sampling.temperature > 0][:NUM_GREEDY]
        if not sampled or self.measured.is_interrupted:
            return {}
        self._tell(StageEvent(name="sampling against greedy"))
        jobs = [
            replace(prepared[number], sampling=replace(prepared[number].sampling, temperature=0.0))
            for number in sampled
        ]
        found = {}
        for drafter in dict.fromkeys(row.candidate.drafter or "" for row in report.rows):
            best = best_of(report.rows, drafter)
            if best.judgement.verdict is Verdict.SHIP:
                continue
            try:
                generations, _, _ = self._runner.decode(jobs, best.candidate)
            except Interrupted:
                break
            greedy = [(n, text.counts) for n, text in zip(sampled, generations, strict=True) if text.is_counted]
            texts = self.measured.generations(best.candidate)
            own = [(n, text.counts) for n, text in texts if n in sampled and text.is_counted]
            found[drafter] = GreedySample(Acceptance.of(greedy), Acceptance.of(own))
        return found
