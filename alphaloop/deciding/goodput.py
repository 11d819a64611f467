"""Expected goodput of each setting: tokens a second, with bounds, from posteriors and costs. Pure.

The bounds of a speed-up hold the uncertainty about tokens a round and the uncertainty about costs. Let T(w) be the
target's pass at width w and D the draft. Let v be the share of T(1) in the time of a vanilla job. Let p and d be the
shares of T(w) and of D in the time of the job. Then

    variance of ln(speed-up) = (slope · sd(tokens))² + (v² + p²) · var(ln T) + d² · var(ln D)

because T(1) and T(w) were measured apart. Reading the prompt takes the same time in both jobs and is left out.

On servers each alternative has servers of its own, and its rounds are those of the requests in flight at one of them:
the running sequences, divided by the servers. A whole round is D, and so is the reading of the prompt, which that
server does for itself; so v and d are 1.

Both are what the model knows. Earlier expectations were compared with measured speed-ups: their mean error corrects the
speed-up, and its variance is added to that of ln(speed-up) (expectation_error.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, inf, log, sqrt
from typing import Final, NamedTuple

from alphaloop.acceptance import Z95
from alphaloop.costs import CostTable, RoundCosts
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError
from alphaloop.deciding.job_facts import Aim, Objective
from alphaloop.deciding.posterior import Posterior
from alphaloop.experiment.observe import Expected

#: Least expected speed-up that is worth the risk of speculation.
MIN_SPEEDUP: Final = 1.01


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter that this worker could use now."""

    name: str
    revision: str
    max_draft_tokens: int
    is_stale: bool = False
    cache_bytes_per_token: int = 0  #: keys and values that a draft model keeps of every token of a sequence
    #: Prior of P(a token is proposed | those before it were) by position, the last one for all further positions;
    #: empty: the drafter proposes as many tokens as it is asked for. Only costs depend on it.
    offers: tuple[float, ...] = ()
    #: Prior of s_i, P(a token is proposed at i and accepted | accepted through i - 1), in the same form; empty:
    #: one α for all positions.
    through: tuple[float, ...] = ()
    is_scored: bool = False  #: every finished text yields its evidence, at its longest draft: trials add nothing
    is_scorable: bool = False  #: one pass over a greedy text gives the counts of decoding it
    max_prompt_tokens: int | None = None  #: that it reads of a prompt; None: all
    #: One name for drafters with shared weights, which differ only in where they end a draft: rounds of each are
    #: counted for the others too. Empty: no other drafter has its weights.
    shared_weights: str = ""
    #: No shorter draft can be asked for: most servers draft as many tokens as they were started with. 1 where every
    #: endpoint obeys the k of a request.
    least_draft_tokens: int = 1
    num_endpoints: int = 1  #: servers on which it drafts, and which share its jobs; this process counts as one
    num_vanilla_endpoints: int = 1  #: servers of the same target on which nothing drafts
    num_places: int | None = None  #: requests that all its servers together take at once; None: all that run
    num_vanilla_places: int | None = None  #: the same of those on which nothing drafts
    sources: tuple[str, ...] = ()  #: drafters that it asks, one a round or all; empty: it drafts by itself
    trained_for: str = ""  #: revision of the target that it was trained for; empty: its files do not say

    @property
    def is_mixed(self) -> bool:
        """Whether rounds of the same shape take different times, because they ask different drafters."""
        return bool(self.sources)

    def shares_weights_with(self, other: DrafterState) -> bool:
        """Whether rounds of either are counted for the other too."""
        return bool(self.shared_weights) and self.shared_weights == other.shared_weights and self.name != other.name

    def num_read(self, num_prompt_tokens: float) -> float:
        """Tokens that it reads of a prompt."""
        return num_prompt_tokens if self.max_prompt_tokens is None else min(num_prompt_tokens, self.max_prompt_tokens)

    def within(self, num_draft_tokens: int) -> int:
        """The k nearest to `num_draft_tokens` that it can be asked for."""
        return max(min(num_draft_tokens, self.max_draft_tokens), self.least_draft_tokens)

    def reading_ms(self, costs: CostTable, num_prompt_tokens: float) -> float:
        """Expected milliseconds in which it reads its part of a prompt; on a server, in which the server reads all."""
        return costs.prefill_ms(self.name, self.num_read(num_prompt_tokens))

    def first_token_ms(self, costs: CostTable, num_prompt_tokens: float) -> float:
        """Expected milliseconds in which a prompt is read where it drafts, by all that read it there."""
        own_ms = self.reading_ms(costs, num_prompt_tokens)
        return own_ms if costs.is_served(self.name) else costs.prefill_ms(None, num_prompt_tokens) + own_ms


def marked_stale(drafters: Iterable[DrafterState], is_stale: Callable[[DrafterState], bool]) -> list[DrafterState]:
    """The drafters; one is stale if `is_stale` says so of it, or of a drafter that it asks."""
    drafters = list(drafters)
    flagged = {drafter.name for drafter in drafters if is_stale(drafter)}
    return [replace(drafter, is_stale=not flagged.isdisjoint((drafter.name, *drafter.sources))) for drafter in drafters]


@dataclass(frozen=True, slots=True)
class JobSize:
    """A usual job: the tokens of its prompt and of its output."""

    num_prompt_tokens: float
    num_tokens: float

    @property
    def context(self) -> float:
        """Tokens before a round, on average over the job."""
        return self.num_prompt_tokens + self.num_tokens / 2


class Alternative(NamedTuple):
    """A setting and its expected goodput. Vanilla is k = 0.

    The speed-up is of whole jobs where their size is known: prompts are read in every mode, and draft models read them
    too. Otherwise the speed-up is of the rounds alone. A tuple, because a decision makes dozens.
    """

    drafter: str | None
    num_draft_tokens: int
    tokens_per_round: float
    round_ms: float
    speedup: float = 1.0
    speedup_low: float = 1.0
    speedup_high: float = 1.0
    slope: float = 0.0  #: ∂ ln(speed-up) / ∂ tokens a round
    chance: float = 1.0  #: of meeting the objective's target
    cost_sd: float = 0.0  #: standard deviation of ln(speed-up) that comes from costs
    error: ExpectationError = NO_ERROR  #: what corrected the speed-up and widened its bounds
    model_sd: float = 0.0  #: standard deviation of ln(speed-up) that acceptance and costs leave open

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens a second of one sequence."""
        return 1000 * self.error.factor * self.tokens_per_round / self.round_ms

    @property
    def expected(self) -> Expected:
        """The speed-up, to be compared with the one that will be measured."""
        return Expected(*self[4:7], self.speedup / self.error.factor, self.model_sd)


class Shares:
    """The sequences at each of the servers that share the running ones; all of them, where this process decodes.

    Servers have no more than they take at once: what a full route leaves waits, or goes to another one.
    """

    def __init__(self, num_running: int, drafters: Sequence[DrafterState]) -> None:
        self._num_running = num_running
        #: The state of every drafter names the servers without a drafter.
        self.num_vanilla_endpoints: Final = max((d.num_vanilla_endpoints for d in drafters), default=1)
        places = next((d.num_vanilla_places for d in drafters), None)
        self.vanilla: Final = self.at_one(self._taken(places), self.num_vanilla_endpoints)

    def of(self, drafter: DrafterState) -> float:
        """At one of the drafter's servers."""
        return self.at_one(self._taken(drafter.num_places), drafter.num_endpoints)

    def _taken(self, num_places: int | None) -> int:
        return self._num_running if num_places is None else min(self._num_running, num_places)

    @staticmethod
    def at_one(num_sequences: int, num_endpoints: int) -> float:
        """At one of `num_endpoints`, at least one."""
        return num_sequences if num_endpoints == 1 else max(1.0, num_sequences / num_endpoints)


def weigh(
    posteriors: Mapping[str, Posterior],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    num_running: int,
    size: JobSize | None = None,
    objective: Objective | None = None,
    num_jobs: int | None = None,
) -> tuple[Alternative, ...]:
    """Every alternative whose cost is known, the best first; empty where vanilla was never measured.

    Rounds are those of `num_running` sequences. Prompts are read one after the other beside the running sequences:
    while a job runs, each of the `num_running` slots takes one new job on average, so a job's time includes reading
    `num_running` prompts. On servers it includes its own prompt alone, because the rounds of requests that were timed
    there include the waiting for others. A first token waits only for the prompts of the `num_jobs` jobs that join
    together, all running ones unless given.
    """
    scale = _Scale(costs, Shares(num_running, drafters), num_running, size, objective or Objective(), num_jobs)
    if scale.vanilla is None:
        return ()
    alternatives = [scale.vanilla]
    for drafter in drafters:
        alternatives += scale.drafts(drafter, posteriors[drafter.name])
    alternatives.sort(key=lambda a: (-a.chance, -a.speedup, a.num_draft_tokens))
    return tuple(alternatives)


class _Scale:
    """The jobs of one decision, decoded vanilla: what every other way is compared with."""

    def __init__(
        self,
        costs: CostTable,
        shares: Shares,
        num_running: int,
        size: JobSize | None,
        objective: Objective,
        num_jobs: int | None,
    ) -> None:
        self._costs, self._shares, self._num_running = costs, shares, num_running
        self._size, self._objective, self._has_target = size, objective, objective.aim is not Aim.THROUGHPUT
        self._num_tokens = num_tokens = size.num_tokens if size else 1.0
        rounds = costs.rounds(shares.vanilla, size.context if size else None)
        self.vanilla: Alternative | None = None  #: None where its cost was never measured
        if (round_ms := rounds.part_ms(None, 1)) is None:
            return
        prompt_ms = costs.prefill_ms(None, size.num_prompt_tokens) if size else 0.0
        self._num_read = 1 if costs.is_of_servers else num_running
        self._reading_ms = self._num_read * prompt_ms
        self._job_ms = self._reading_ms + num_tokens * round_ms
        self._variance = rounds.variance(None)
        self._share = 1.0 if costs.is_of_servers else num_tokens * round_ms / self._job_ms
        is_first = num_jobs is not None and objective.aim is Aim.TIME_TO_FIRST_TOKEN
        self._num_first = num_jobs if is_first and num_jobs is not None else num_running
        met = objective.chance(
            reading_ms=shares.at_one(self._num_first, shares.num_vanilla_endpoints) * prompt_ms,
            round_ms=round_ms,
            num_tokens=num_tokens,
            tokens_per_round=1.0,
            tokens_sd=0.0,
        )
        self.vanilla = Alternative(None, 0, 1.0, round_ms, chance=met)

    def drafts(self, drafter: DrafterState, posterior: Posterior) -> Iterator[Alternative]:
        """Every draft length of a drafter whose cost is known."""
        costs, size, num_tokens, error = self._costs, self._size, self._num_tokens, posterior.error
        rounds = costs.rounds(self._shares.of(drafter), size.context if size else None)
        longest = posterior.longest_proposed(self._num_running)
        draft_read_ms = self._num_read * drafter.reading_ms(costs, size.num_prompt_tokens) if size else 0.0
        is_served, draft_variance = costs.is_served(drafter.name), rounds.variance(drafter.name)
        read_ms = draft_read_ms if is_served else self._reading_ms + draft_read_ms
        first_ms = drafter.first_token_ms(costs, size.num_prompt_tokens) if size and self._has_target else 0.0
        first_ms *= self._shares.at_one(self._num_first, drafter.num_endpoints)
        job_ms, vanilla_share, has_target = error.factor * self._job_ms, self._share * self._share, self._has_target
        for k in range(drafter.least_draft_tokens, min(drafter.max_draft_tokens, posterior.max_draft_tokens) + 1):
            components = rounds.components_ms(drafter.name, k, posterior.proposed, longest[k])
            if components is None:
                break
            draft_ms, pass_ms = components
            round_ms, tokens = draft_ms + pass_ms, posterior.tokens[k]
            rounds_ms = num_tokens * round_ms
            taken_ms = read_ms + rounds_ms / tokens
            speedup = job_ms / taken_ms
            pass_share = num_tokens * pass_ms / tokens / taken_ms
            draft_share = (draft_read_ms + num_tokens * draft_ms / tokens) / taken_ms
            if is_served:
                draft_variance = rounds.variance(drafter.name, k + 1)
            cost_sd = sqrt(
                (vanilla_share + pass_share * pass_share) * self._variance + draft_share * draft_share * draft_variance
            )
            slope = rounds_ms / tokens / tokens / taken_ms
            low, high = posterior.tokens_bounds(k, num_tokens)
            # Independent errors of ln(speed-up) add up by squares, on either side.
            doubt = Z95 * hypot(cost_sd, error.sd)
            bounds = (
                speedup * exp(-hypot(log(taken_ms / (read_ms + rounds_ms / low)), doubt)),
                speedup * exp(hypot(log(taken_ms / (read_ms + rounds_ms / high)), doubt)),
            )
            chance = self._chance(posterior, k, first_ms, round_ms) if has_target else 1.0
            model_sd = hypot(slope * tokens * posterior.relative_sd(k, num_tokens), cost_sd)
            yield Alternative(
                drafter.name,
                k,
                tokens,
                round_ms,
                speedup,
                *bounds,
                slope=slope,
                chance=chance,
                cost_sd=cost_sd,
                error=error,
                model_sd=model_sd,
            )

    def _chance(self, posterior: Posterior, k: int, reading_ms: float, round_ms: float) -> float:
        """Probability of meeting the objective's target."""
        error, tokens, factor = posterior.error, posterior.tokens[k], posterior.error.factor
        return self._objective.chance(
            reading_ms=reading_ms,
            round_ms=round_ms,
            num_tokens=self._num_tokens,
            tokens_per_round=factor * tokens,
            tokens_sd=factor * hypot(posterior.tokens_sd[k], tokens * error.sd),
        )


def climbed(k: int, worth: float, lengths: range, worth_at: Callable[[int], float]) -> tuple[int, float]:
    """The draft length among `lengths` that a climb from `k`, worth `worth`, ends at, and what that is worth."""
    first = k
    for step in (1, -1):
        while k + step in lengths and (better := worth_at(k + step)) > worth:
            k, worth = k + step, better
        if k != first:
            break
    return k, worth


def token_ms(rounds: RoundCosts, drafter: str, k: int, posterior: Posterior, longest: Sequence[float]) -> float:
    """Milliseconds a token at `k` where all that run draft alike; infinite where a cost was never measured."""
    ms = rounds.round_ms(drafter, k, posterior.proposed, longest[k])
    return inf if ms is None else ms / posterior.corrected_tokens[k]


def shared_round_ms(
    all_rounds: RoundCosts,
    mean_proposed: float,
    drafting: Mapping[str, tuple[int, float]],
    rounds_of: Callable[[int], RoundCosts],
) -> float | None:
    """Milliseconds of a round that sequences with different drafts share; None where a cost was never measured.

        T(mean width) + Σ_drafters D(its sequences, its longest draft)

    `all_rounds` are the costs with all that run. `drafting` has for each drafter its sequences, or jobs, of which
    `rounds_of` gives the costs, and the tokens of its longest draft on average.
    """
    ms = all_rounds.part_ms(None, 1 + mean_proposed)
    for drafter, (num, longest) in drafting.items():
        draft_ms = rounds_of(num).part_ms(drafter, 1 + longest)
        ms = None if ms is None or draft_ms is None else ms + draft_ms
    return ms


# The prior of the look-up drafter, by position; the last value holds for all further positions.
#
# Look-up often finds nothing, and its first token is often wrong, but a copy that held for a few tokens mostly goes on.
# A draft model has no such shape: one α fits all its positions. Compared with one probability for every position, with
# four to twenty jobs a task, this shape reduces the loss of the chosen draft length from 3.5–4.7 % to .4–.9 %.
#
# Smallest and largest value over 13 tasks of 40 prompts each, SmolLM2-135M-Instruct, k = 12, greedy, 64 tokens; the
# constants below are the medians:
#
#     i                         1         2         3         4         5         6         7 and on
#     offered at i           .40–.78   .54–.95   .20–.78   .39–.76   .78–.94   .61–.93   .86–1.0
#     through i              .08–.56   .39–.79   .36–.81   .48–.86   .63–1.0   .62–.92   .67–1.0

#: P(a token is proposed at i | proposed through i - 1): the draft ends where the next token is less likely than
#: `min_probability`. Only costs depend on it.
LOOKUP_OFFERED: Final = (0.6, 0.65, 0.5, 0.6, 0.85, 0.85, 0.9)
#: s_i = P(a token is proposed at i and accepted | accepted through i - 1).
LOOKUP_THROUGH: Final = (0.25, 0.6, 0.55, 0.65, 0.75, 0.8, 0.85)
