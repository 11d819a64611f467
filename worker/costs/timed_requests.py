"""What a request to a server tells of costs: the time of its rounds and of its prompt."""

from __future__ import annotations

from typing import Final, NamedTuple

from alphaloop.cost import BASE_CONTEXT, CostKind
from worker.costs.time_law import Time
from worker.engine import Generation

#: A request of few rounds tells less: the clock, the network and the first round weigh as much as so many rounds.
_ROUNDS_OF_OWN: Final = 8
#: Of the errors of requests that share their rounds. Assumed: their prompts and texts differ, their minute does not.
_CORRELATION: Final = 0.25


class Timed(NamedTuple):
    """A time of one route; `drafter` is None for the target alone."""

    drafter: str | None
    kind: CostKind  #: prefill, or a whole round
    time: Time
    width: int = 1  #: of a round: draft tokens that it may have, and one


def timed(generation: Generation) -> list[Timed]:
    """The times that a text of a server gives; none for one that this process decoded.

    Requests that are in flight together share their rounds, so their times are correlated and n of them tell less than
    n others would.
    """
    served = generation.served
    if served is None:
        return []
    found = []
    load = max(1.0, served.num_beside)
    num_tokens = generation.counts.num_tokens
    num_rounds = served.num_passes(num_tokens)
    # The first pass read the prompt.
    if served.decode_s and num_rounds is not None and num_rounds > 1:
        ms = 1000 * served.decode_s / (num_rounds - 1)
        variance = (1 + (load - 1) * _CORRELATION) * (1 + _ROUNDS_OF_OWN / (num_rounds - 1))
        context = generation.num_prompt_tokens + num_tokens / 2
        kind = CostKind.SERVED if served.drafter else CostKind.ROUND
        found.append(Timed(served.drafter, kind, Time(load, context, ms, variance), served.num_draft_tokens + 1))
    if served.prefill_s and generation.num_prompt_tokens:
        time = Time(generation.num_prompt_tokens, BASE_CONTEXT, 1000 * served.prefill_s, 1.0)
        found.append(Timed(served.drafter, CostKind.PREFILL, time))
    return found
