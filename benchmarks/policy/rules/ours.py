"""alphaloop's own decision over its own evidence, as a worker takes it: no formula of the policy stands here."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from datetime import timedelta

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.cost import CostTable
from alphaloop.deciding.evidence import EvidenceSums, Memory
from alphaloop.deciding.goodput import DrafterState, Evidence, PolicyLimits
from alphaloop.deciding.policy import DecisionContext, Reason, decide
from benchmarks.policy.play import Batch, Choice, Decoded, Why

#: worker.history_half_life_days
HALF_LIFE = timedelta(days=7)
_BUDGET = {Reason.CONTROL: Why.CONTROL, Reason.EXPLORING: Why.EXPLORING}


class Ours:
    """The policy with its default limits. Evidence outlives a restart, as it does in Postgres."""

    def __init__(self, draft_tokens: dict[str, int], costs: CostTable, seed: int) -> None:
        self._drafters = [DrafterState(name, "r1", most) for name, most in draft_tokens.items()]
        self._costs = costs
        self._limits = PolicyLimits()
        self._rng = random.Random(seed)
        self._memory: dict[tuple[str, str, str], Memory] = {}

    def choose(self, batch: Batch) -> Choice:
        """What the policy says."""
        cell = batch.cell
        history, usual = {}, []
        for drafter in self._drafters:
            memory = self._memory.get((cell.task, cell.sampling, drafter.name))
            if memory is not None:
                history[drafter.name] = _evidence(memory.all.faded(batch.now, HALF_LIFE))
        for key, memory in self._memory.items():
            if key[0] == cell.task:
                usual.append(memory.all.faded(batch.now, HALF_LIFE))
        context = DecisionContext(
            task=cell.task,
            batch=batch.num_jobs,
            expected_tokens=_expected_tokens(usual),
            draw=self._rng.random(),
            prompt_tokens=cell.prompt_tokens,
        )
        decision = decide(history, self._drafters, self._costs, context, self._limits)
        return Choice(decision.drafter, decision.num_draft_tokens, _BUDGET.get(decision.reason, Why.CHOSEN))

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Store the batch's counts."""
        key = (batch.cell.task, batch.cell.sampling, choice.drafter or "")
        jobs = [
            EvidenceSums.of_job(counts, choice.num_draft_tokens, batch.now, num_tokens, batch.cell.prompt_tokens)
            for counts, num_tokens in zip(decoded.counts(), decoded.num_tokens, strict=True)
        ]
        added = jobs[0]
        for job in jobs[1:]:
            added = added + job
        self._memory[key] = self._memory.get(key, Memory.empty(batch.now)).with_job(added, HALF_LIFE)

    def restart(self) -> None:
        """Everything it decides from is stored."""


def _expected_tokens(sums: Iterable[EvidenceSums]) -> float:
    known = [(s.jobs, s.output_tokens) for s in sums]
    jobs = sum(j for j, _ in known)
    return sum(t for _, t in known) / jobs if jobs else 128.0


def _evidence(sums: EvidenceSums) -> Evidence:
    accepts = [round(a) for a in sums.accepts]
    trials = [max(round(t), a) for t, a in zip(sums.trials, accepts, strict=True)]
    proposed = [max(round(p), t) for p, t in zip(sums.proposed, trials, strict=True)]
    offered = max(round(sums.offered), max(proposed, default=0))
    rounds = max(round(sums.rounds), offered)
    jobs = round(sums.jobs)
    counts = AcceptanceCounts(
        rounds + jobs, rounds - offered + jobs, 0, tuple(proposed), tuple(trials), tuple(accepts)
    )  # fmt: skip
    # No sum of the evidence gives the error over jobs of tokens a round: about one draw's spread for each job.
    se = (
        None
        if sums.jobs < 2
        else math.sqrt(max(sums.tokens / max(sums.rounds, 1.0) - 1, 0.1)) / math.sqrt(4 * sums.jobs)
    )
    return Evidence(counts, jobs, se, tuple(round(c) for c in sums.chances))
