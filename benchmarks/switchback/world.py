"""A device that decodes simulated jobs, round by round: texts, load, host, and what the other arm would have taken."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.experiment.observe import RoundFacts, TaskRound, Treatment

TASK: Final = "task"
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
_READ_MS: Final = 8.0
#: Texts that a producer sends in a row.
_IN_A_ROW: Final = 4
#: Rounds whose mean yield sets the cost of a known speed-up.
_NUM_ROUNDS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculation proposes, what of it is accepted, and what a round of it takes."""

    num_draft_tokens: int
    mean_acceptance: float
    correlation: float  #: of the trials of one text: acceptance is drawn for each text from a beta distribution
    fixed_cost: float = 0.0  #: time of a round beyond a vanilla one's, over the vanilla one's
    catch_up: tuple[float, ...] = ()  #: the same, of the first rounds after a pause
    producers: tuple[float, ...] = ()  #: mean acceptance of each; a producer sends several texts in a row


#: Treatment that is vanilla decoding: the null experiment.
NOTHING: Final = Drafting(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Host:
    """What makes the same round take longer at one time than at another."""

    noise: float = 0.04  #: standard deviation of the logarithm of a round's time
    hiccup_share: float = 0.002  #: of rounds, that take 2 to 8 times as long
    slow_every_s: float = math.inf  #: mean time between slow spells, exponential
    slow_s: float = 25.0  #: mean length of one, exponential; the factor is uniform in 1.5 to 4


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment, to be repeated with many seeds."""

    name: str
    drafting: Drafting = NOTHING
    host: Host = Host()
    num_slots: int = 6  #: always full


@dataclass(slots=True)
class Text:
    """A running sequence."""

    num_left: int
    num_context: int
    acceptance: float


@dataclass(slots=True)
class Truth:
    """What treatment rounds took, and what the same tokens would have taken in vanilla rounds of the same moments.

    Sequence-seconds. Rounds that catch up after a pause are left out, and so is control.
    """

    vanilla_s: float = 0.0
    treatment_s: float = 0.0
    prompt_s: float = 0.0

    def add(self, other: Truth) -> None:
        """Runs together."""
        self.vanilla_s += other.vanilla_s
        self.treatment_s += other.treatment_s
        self.prompt_s += other.prompt_s

    @property
    def speedup(self) -> float:
        """With the reading of prompts, which is the same in both arms."""
        return (self.vanilla_s + self.prompt_s) / (self.treatment_s + self.prompt_s)


class World:
    """Repeatable traffic on one device."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self._rng = scenario, random.Random(f"{scenario.name} {seed}")
        drafting = scenario.drafting
        self.treatment = Treatment("draft", drafting.num_draft_tokens)
        spread = 1 / drafting.correlation - 1 if drafting.correlation else 0.0
        self._spread, self._mean, self._num_texts = spread, drafting.mean_acceptance, 0
        self._spells = Spells(scenario.host, self._rng)
        self.now_s = 0.0
        self.running: list[Text] = []
        self.truth = Truth()
        self._rounds_since_pause = 1 << 30

    def admit(self, num_slots: int | None = None) -> int:
        """Fill free slots. Returns the prompts to be read."""
        num_read = max(0, (self.scenario.num_slots if num_slots is None else num_slots) - len(self.running))
        self.running += [self._text() for _ in range(num_read)]
        return num_read

    def round(self, *, speculates: bool, num_prompts: int = 0) -> RoundFacts:
        """Decode one round of what runs."""
        running, drafting, rng = self.running, self.scenario.drafting, self._rng
        num, context = len(running), sum(text.num_context for text in running) / len(running)
        vanilla_s = (7.0 + 0.8 * num) * (1 + context / 8000) * 1e-3 * self._spells.factor(self.now_s)
        vanilla_s *= math.exp(rng.gauss(0.0, self.scenario.host.noise))
        if rng.random() < self.scenario.host.hiccup_share:
            vanilla_s *= rng.uniform(2.0, 8.0)
        num_tokens = num_proposed = 0
        for text in running:
            emitted = min(self._decode(text) if speculates else 1, text.num_left)
            text.num_left -= emitted
            text.num_context += emitted
            num_tokens += emitted
            num_proposed += drafting.num_draft_tokens * speculates
        decoding_s, catch_up = vanilla_s, 0.0
        if speculates:
            decoding_s *= 1 + drafting.fixed_cost
            if self._rounds_since_pause < len(drafting.catch_up):
                catch_up = drafting.catch_up[self._rounds_since_pause] * vanilla_s
            self._rounds_since_pause += 1
        else:
            self._rounds_since_pause = 0
        prompt_s = num_prompts * _READ_MS * 1e-3 * self._spells.factor(self.now_s)
        wall_s = decoding_s + catch_up + prompt_s
        if speculates and not catch_up:
            self.truth.vanilla_s += num_tokens * vanilla_s
            self.truth.treatment_s += num * decoding_s
            self.truth.prompt_s += num * prompt_s
        facts = RoundFacts(
            started_at=_EPOCH + timedelta(seconds=self.now_s),
            wall_s=wall_s,
            num_running=num,
            mean_context_tokens=context,
            has_prompt=num_prompts > 0,
            tasks={TASK: TaskRound(num, num_tokens, num_proposed)},
        )
        self.now_s += wall_s
        self.running = [text for text in running if text.num_left]
        return facts

    def _decode(self, text: Text) -> int:
        accepted = 0
        while accepted < self.scenario.drafting.num_draft_tokens and self._rng.random() < text.acceptance:
            accepted += 1
        return accepted + 1

    def _text(self) -> Text:
        rng = self._rng
        length = min(max(round(rng.lognormvariate(math.log(60), 0.8)), 8), 600)
        drafting, acceptance = self.scenario.drafting, 0.0
        if drafting.producers and self._num_texts % _IN_A_ROW == 0:
            self._mean = rng.choice(drafting.producers)
        self._num_texts += 1
        if drafting.correlation:
            acceptance = rng.betavariate(self._spread * self._mean, self._spread * (1 - self._mean))
        return Text(length, round(rng.uniform(50, 500)), acceptance)


class Spells:
    """How many times slower the host is, by the time."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host, self._rng = host, rng
        self._edges, self._factors = [0.0], [1.0]

    def factor(self, now_s: float) -> float:
        """1 at the host's usual speed."""
        host = self._host
        if math.isinf(host.slow_every_s):
            return 1.0
        while self._edges[-1] <= now_s:
            begins = self._edges[-1] + self._rng.expovariate(1 / host.slow_every_s)
            ends = begins + self._rng.expovariate(1 / host.slow_s)
            self._edges += [begins, ends]
            self._factors += [self._rng.uniform(1.5, 4.0), 1.0]
        return self._factors[bisect_right(self._edges, now_s) - 1]


def with_speedup(drafting: Drafting, speedup: float) -> Drafting:
    """The same drafts at such a cost that decoding is about `speedup` times as fast as vanilla."""
    free = replace(drafting, fixed_cost=0.0, catch_up=())
    world = World(Scenario("calibration", free, Host(noise=0.0, hiccup_share=0.0)), seed=0)
    num_sequences = num_tokens = 0
    for _ in range(_NUM_ROUNDS):
        world.admit()
        own = world.round(speculates=True).tasks[TASK]
        num_sequences += own.num_sequences
        num_tokens += own.num_tokens
    return replace(drafting, fixed_cost=num_tokens / num_sequences / speedup - 1)
