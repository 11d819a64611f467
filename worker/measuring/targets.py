"""`alphaloop measure --target A --target B`: both decode every batch of prompts, one after the other in random order.

Both are loaded at once, so that each pair of times is of the same minutes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alphaloop.commands import AdvanceEvent, StageEvent, Tell
from alphaloop.engine import Engine, PreparedJob
from alphaloop.errors import ConfigError, DecodeFailed
from alphaloop.payoff.figures import VANILLA
from alphaloop.payoff.targets import MeasuredTarget, TargetsReport, difference_of, ratios_of
from alphaloop.settings import ModelSettings
from worker.measuring.observing import BlockTurn, Observation, Runner, Stopped, divide
from worker.measuring.report import blocks_of, busy_note


def models_of(models: ModelSettings, sources: Sequence[str]) -> list[ModelSettings]:
    """The settings of each target: those of models.target with another source, and no drafters. Raises ConfigError."""
    if len(set(sources)) != 2:
        raise ConfigError(
            f"--target: expected two different models, found {', '.join(sources)}",
            hint="a folder, a .gguf file, package:NAME or a hub name, as for `alphaloop check-pair`",
        )
    if models.target.engine != "own":
        raise ConfigError(f"--target: expected models.target.engine own, found {models.target.engine}")
    return [
        models.model_copy(
            update={"drafters": {}, "target": models.target.model_copy(update={"source": source, "revision": None})}
        )
        for source in sources
    ]


@dataclass(eq=False)
class TargetsSession:
    """Decodes, and reports its stages and the texts done. `prepared` are the same prompts for each engine."""

    engines: Sequence[Engine]
    prepared: Sequence[Sequence[PreparedJob]]
    batch: int
    num_repeats: int
    seed: int
    should_stop: Callable[[], bool]
    tell: Tell
    seen: list[tuple[Observation, Observation]] = field(default_factory=list)  #: turn by turn, of both targets
    is_interrupted: bool = False
    failure: DecodeFailed | None = None  #: what ended it early

    def run(self) -> None:
        """Warm up and measure, until done, stopped, or a step fails; `seen` holds the turns that both finished."""
        rng = random.Random(self.seed)
        blocks = divide(len(self.prepared[0]), self.batch, rng)
        runners = [
            Runner(engine, prepared, should_stop=self.should_stop)
            for engine, prepared in zip(self.engines, self.prepared, strict=True)
        ]
        try:
            self.tell(StageEvent(name="warming up"))
            for runner in runners:
                runner.warm_up(blocks[0], ())
            self.tell(StageEvent(name="measuring", total=2 * self.num_repeats * len(self.prepared[0])))
            for repeat in range(self.num_repeats):
                for block in rng.sample(range(len(blocks)), len(blocks)):
                    self._observe(runners, BlockTurn(block, repeat, blocks[block], (VANILLA,)), rng)
        except Stopped:
            self.is_interrupted = True
        except DecodeFailed as error:
            self.is_interrupted, self.failure = True, error

    def _observe(self, runners: Sequence[Runner], turn: BlockTurn, rng: random.Random) -> None:
        seen: dict[int, Observation] = {}
        for side in rng.sample((0, 1), 2):
            seen[side] = runners[side].observe(turn, VANILLA)
            self.tell(AdvanceEvent(num=len(turn.prompts)))
        self.seen.append((seen[0], seen[1]))

    def report(self, sources: Sequence[str], places: Sequence[str], notes: Sequence[str]) -> TargetsReport:
        """Times and texts. There must be a turn; `places` are the prompts' lines."""
        first, second = ([turn[side] for turn in self.seen] for side in (0, 1))
        ratio, median, ratios = ratios_of(blocks_of(first), blocks_of(second))
        texts = [_texts(first), _texts(second)]
        busy = busy_note(first)
        compared = [n for n in sorted(texts[0]) if not self._is_drawn(n)]
        found = (difference_of(places[number], texts[0][number], texts[1][number]) for number in compared)
        return TargetsReport(
            targets=(self._target(0, sources[0], first), self._target(1, sources[1], second)),
            ratio=ratio,
            median=median,
            ratios=ratios,
            num_prompts=len(places),
            batch=self.batch,
            num_repeats=self.num_repeats,
            seed=self.seed,
            num_turns=len(self.seen),
            num_turns_planned=-(-len(places) // self.batch) * self.num_repeats,
            num_compared=len(compared),
            differences=tuple(difference for difference in found if difference is not None),
            notes=(*notes, *([busy] if busy else [])),
            is_interrupted=self.is_interrupted,
        )

    def _is_drawn(self, number: int) -> bool:
        sampling = self.prepared[0][number].sampling
        return sampling.temperature > 0 and sampling.seed is None

    def _target(self, side: int, source: str, seen: Sequence[Observation]) -> MeasuredTarget:
        blocks = blocks_of(seen)
        return MeasuredTarget(
            source=source,
            identity=self.engines[side].identity,
            tokens_per_s=sum(block.num_tokens for block in blocks) / sum(block.wall_s for block in blocks),
            output_tokens=statistics.median(
                text.counts.num_tokens for observation in seen for _, text in observation.generations
            ),
        )


def _texts(seen: Sequence[Observation]) -> dict[int, str]:
    """By number of the prompt; of its repeats the first counts."""
    return {number: text.text for observation in reversed(seen) for number, text in observation.generations}
