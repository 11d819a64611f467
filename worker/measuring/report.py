"""From observations to the report: figures, verdicts, reasons, and which candidate to ship.

Each reason why a candidate does not reach the bar is a function from figures to a sentence, or to None. A reason is
given only if the figures support it: a better setting was measured or follows from measured parts, an interval excludes
the other value, or without that cost the bar would be reached.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from alphaloop.payoff.figures import (
    VANILLA,
    Acceptance,
    Candidate,
    Exactness,
    Figures,
    PromptBlock,
    RoundTimes,
    ShipVerdict,
    Tails,
    judge,
    median_bounds,
    total_bounds,
)
from alphaloop.payoff.report import Footprint, Report, RoundParts, Row, Setup, costs_of
from alphaloop.wording import share, share_with_interval
from worker.measuring.observing import Measurements, Observation

#: A setting that is faster by less than this is no advice.
NOTABLE: Final = 1.03
#: Below it, the first token, the prompt and the last round are most of a text; the guard of the policy is the same.
SHORT_TOKENS: Final = 20
#: A larger share of rounds without a proposal is most of them.
MOSTLY: Final = 0.5
#: Findings that cost acceptance, by name in `engine.pairing`.
TOKENIZER_CHECKS: Final = ("vocabulary", "special tokens", "chat template")
#: In the middle half of the prompts, the slowest over the fastest round. A longer context adds a few per cent.
_USUAL_SPREAD: Final = 1.25
_LEAST: Final = 8  #: prompts: quarters of fewer say nothing


@dataclass(frozen=True, slots=True)
class DrafterRecords:
    """What is known of the drafters beside what was measured, by name."""

    findings: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a draft's own record says of its acceptance elsewhere."""

    alpha_1: float
    where: str  #: `its 64 held-out texts`


@dataclass(frozen=True, slots=True)
class GreedySample:
    """Some of the sampled prompts at the same k: decoded greedy, and as they were."""

    greedy: Acceptance
    sampled: Acceptance


def report_of(
    setup: Setup,
    measured: Measurements,
    *,
    exactness: Mapping[Candidate, Exactness],
    greedy: Mapping[str, GreedySample],
    records: DrafterRecords,
    footprint: Footprint,
    notes: Sequence[str],
    num_turns_planned: int,
) -> Report:
    """Judge every candidate. `greedy` holds, by drafter, a greedy sample at its best k.

    There must be a finished turn.
    """
    candidates = [candidate for candidate in measured.candidates if candidate != VANILLA]
    vanilla = figures_of(measured, VANILLA, Exactness(), 1)
    figures = [figures_of(measured, c, exactness.get(c, Exactness()), len(candidates)) for c in candidates]
    rows = []
    for own in figures:
        judgement = judge(own.ratio, setup.bar, len(candidates), is_exact=own.exactness.is_exact)
        costs = costs_of(vanilla, own)
        name = own.candidate.drafter or ""
        siblings = [other for other in figures if other.candidate.drafter == name and other is not own]
        is_best = all(other.ratio.estimate <= own.ratio.estimate for other in siblings)
        evidence = CandidateEvidence(
            own=own,
            vanilla=vanilla,
            bar=setup.bar,
            costs=costs,
            siblings=siblings,
            batch=setup.batch,
            temperature=setup.temperature,
            greedy=greedy.get(name) if is_best else None,
            findings=records.findings.get(name, ()),
            held_out=records.held_out.get(name),
        )
        why = reasons(evidence, ships=judgement.verdict is ShipVerdict.SHIP)
        rows.append(Row(own, judgement, costs, tuple(why)))
    shipped = max(
        (row for row in rows if row.judgement.verdict is ShipVerdict.SHIP),
        key=lambda row: row.figures.ratio.estimate,
        default=None,
    )
    return Report(
        setup=setup,
        num_turns=len(measured.turns),
        num_turns_planned=num_turns_planned,
        vanilla=vanilla,
        rows=tuple(rows),
        footprint=footprint,
        notes=tuple(notes),
        shipped=shipped,
        rivals=_rivals(shipped, rows),
        is_interrupted=measured.is_interrupted,
    )


def _rivals(shipped: Row | None, rows: Sequence[Row]) -> tuple[Candidate, ...]:
    """Those whose ratio to the chosen one, of all tokens, has 1 between its bounds."""
    if shipped is None:
        return ()
    others = [row for row in rows if row.judgement.verdict is ShipVerdict.SHIP and row is not shipped]
    rivals = []
    for row in others:
        bounds = total_bounds(shipped.figures.blocks, row.figures.blocks, len(others))
        if bounds.known is None or bounds.known[0] <= 1 <= bounds.known[1]:
            rivals.append(row.candidate)
    return tuple(rivals)


def figures_of(measured: Measurements, candidate: Candidate, exactness: Exactness, num_comparisons: int) -> Figures:
    """The figures of a candidate, over the turns that were finished; there must be one."""
    observations = measured.of(candidate)
    baseline = measured.of(VANILLA)
    texts = [generation for _, generation in measured.generations(candidate)]
    blocks, vanilla_blocks = blocks_of(observations), blocks_of(baseline)
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(blocks, vanilla_blocks, strict=True)]
    token_s = [
        (text.wall_s - text.time_to_first_token_s) / (text.counts.num_tokens - 1)
        for text in texts
        if text.counts.num_tokens > 1
    ]
    return Figures(
        candidate=candidate,
        tokens_per_s=sum(block.num_tokens for block in blocks) / sum(block.wall_s for block in blocks),
        blocks=blocks,
        ratios=tuple(ratios),
        ratio=total_bounds(blocks, vanilla_blocks, num_comparisons),
        median=median_bounds(ratios, num_comparisons),
        first_token_s=Tails.of([text.time_to_first_token_s for text in texts]),
        token_s=Tails.of(token_s) if token_s else None,
        response_s=Tails.of([text.wall_s for text in texts]),
        output_tokens=statistics.median(text.counts.num_tokens for text in texts),
        acceptance=Acceptance.of(
            [(number, text.counts) for number, text in measured.generations(candidate) if text.is_counted]
        ),
        times=sum((observation.times for observation in observations), start=RoundTimes()),
        exactness=exactness,
    )


def blocks_of(observations: Sequence[Observation]) -> tuple[PromptBlock, ...]:
    """The totals of every block, all repeats added up. Blocks are independent of each other, repeats are not."""
    by_number: dict[int, list[Observation]] = defaultdict(list)
    for observation in observations:
        by_number[observation.block].append(observation)
    return tuple(
        PromptBlock(sum(text.num_tokens for text in same), sum(text.wall_s for text in same))
        for _, same in sorted(by_number.items())
    )


@dataclass(frozen=True, slots=True)
class CandidateEvidence:
    """All that is known of one candidate that does not ship."""

    own: Figures
    vanilla: Figures
    bar: float
    costs: RoundParts | None
    siblings: Sequence[Figures] = ()  #: the same drafter at other lengths
    batch: int = 1
    temperature: float = 0.0  #: the highest of the prompts
    greedy: GreedySample | None = None
    findings: Sequence[tuple[str, str]] = field(default=())  #: check and sentence of what check-pair warns of
    held_out: HeldOut | None = None

    @property
    def k(self) -> int:
        """Its draft length."""
        return self.own.candidate.num_draft_tokens


def reasons(evidence: CandidateEvidence, *, ships: bool = False) -> Iterator[tuple[str, str]]:
    """The name and sentence of every reason that the figures support.

    For a candidate that ships, what its total does not show.
    """
    for reason in HIDDEN if ships else REASONS:
        if (sentence := reason(evidence)) is not None:
            yield reason.__name__, sentence


def account(e: CandidateEvidence) -> str | None:
    """What its rounds bring and cost; the arithmetic of every other reason."""
    if (c := e.costs) is None:
        return None
    reading = (
        f"; reading prompts is {_percent(c.vanilla_reading)} of vanilla's time" if c.vanilla_reading > 0.05 else ""
    )
    return (
        f"{c.tokens:.2f} tokens a round, and a round takes {c.total:.2f} vanilla rounds (drafting {c.draft:.2f}, the "
        f"target's pass {c.verify:.2f}, the rest {c.rest:.2f}){reading}: {c.speedup:.2f}x."
    )


def low_acceptance(e: CandidateEvidence) -> str | None:
    """α below what rounds of this cost need."""
    alpha = e.own.acceptance.alpha
    if e.costs is None or alpha is None:
        return None
    needed = e.costs.needed_alpha(e.bar)
    needed_text = f"α is {share_with_interval(alpha)} at k={e.k}; at what its rounds cost, {e.bar:.2f}x needs"
    if needed is None:
        return f"{needed_text} more than every token accepted."
    if alpha.high >= needed:
        return None
    even = e.costs.needed_alpha(1.0)
    return f"{needed_text} {needed:.2f}" + (f", and {even:.2f} to lose nothing." if even is not None else ".")


def k_too_high(e: CandidateEvidence) -> str | None:
    """A shorter draft is faster on the same prompts, or would be by α_i and the measured costs."""
    shorter = [s for s in e.siblings if s.candidate.num_draft_tokens < e.k]
    best = max(shorter, key=lambda s: s.ratio.estimate, default=None)
    if best is not None:
        pairs = total_bounds(best.blocks, e.own.blocks, len(shorter))
        if pairs.known is not None and pairs.known[0] > 1 and pairs.estimate >= NOTABLE:
            return (
                f"k={e.k} is too long: on the same prompts k={best.candidate.num_draft_tokens} is {pairs.estimate:.2f} "
                f"[{pairs.known[0]:.2f} {pairs.known[1]:.2f}] times as fast{_fall(e)}."
            )
    modelled = e.costs.best_shorter() if e.costs else None
    if modelled is None or modelled[1] < NOTABLE:
        return None
    k, gain = modelled
    if any(s.candidate.num_draft_tokens == k for s in e.siblings):
        return None  # measured, and no faster
    return (
        f"k={e.k} may be too long: by α_i and the measured costs k={k} would be {gain:.2f} times as fast{_fall(e)}; "
        f"measure it with --k {k}."
    )


def temperature(e: CandidateEvidence) -> str | None:
    """Sampling lowers acceptance: the same prompts, decoded greedy, have a higher α."""
    if e.greedy is None:
        return None
    sampled, greedy = e.greedy.sampled.alpha, e.greedy.greedy.alpha
    if sampled is None or greedy is None or sampled.high >= greedy.mean or greedy.low <= sampled.mean:
        return None
    return (
        f"Temperature {e.temperature:g} costs acceptance: on {len(e.greedy.greedy.by_prompt)} of the prompts α is "
        f"{share_with_interval(sampled)}, and {share_with_interval(greedy)} where they are decoded greedy."
    )


def tokenizer(e: CandidateEvidence) -> str | None:
    """What the check of the pair found in its vocabulary, special tokens or chat template."""
    warnings = [f"{check}: {sentence}" for check, sentence in e.findings if check in TOKENIZER_CHECKS]
    return f"Draft and target do not fit in full. {' '.join(warnings)}" if warnings else None


def domain(e: CandidateEvidence) -> str | None:
    """The draft was accepted more often on the texts it was judged with."""
    here = e.own.acceptance.alpha_at(1)
    if e.held_out is None or here is None or here.high >= e.held_out.alpha_1:
        return None
    return (
        f"Your prompts are unlike the draft's texts: α_1 is {share_with_interval(here)} here and "
        f"{share(e.held_out.alpha_1)} on {e.held_out.where}. Training on prompts like yours may close the gap."
    )


def draft_cost(e: CandidateEvidence) -> str | None:
    """With a draft that cost nothing, the bar would be reached."""
    if (c := e.costs) is None or c.draft_step is None or e.own.ratio.estimate >= e.bar:
        return None
    if (free := c.whole(c.tokens / (c.verify + c.rest))) < e.bar:
        return None
    return (
        f"Drafting is too dear: a drafted token costs {c.draft_step:.2f} of a target pass (c), {c.draft:.2f} a round; "
        f"if it cost nothing, this would be {free:.2f}x."
    )


def wide_pass(e: CandidateEvidence) -> str | None:
    """With passes as cheap as vanilla's, the bar would be reached."""
    if (c := e.costs) is None or e.own.ratio.estimate >= e.bar or c.verify <= NOTABLE * c.vanilla_verify:
        return None
    if (free := c.whole(c.tokens / (c.draft + c.vanilla_verify + c.rest))) < e.bar:
        return None
    busy = f" at batch {e.batch}" if e.batch > 1 else ""
    return (
        f"Verifying is dear on this device{busy}: a pass over {c.positions:.1f} positions takes "
        f"{c.verify / c.vanilla_verify:.2f} times one over 1; if it took the same, this would be {free:.2f}x."
    )


def prompt_dominated(e: CandidateEvidence) -> str | None:
    """The rounds gain enough; the time lies in reading prompts, which nothing here shortens."""
    if (c := e.costs) is None or e.own.ratio.estimate >= e.bar or c.tokens / c.total < e.bar:
        return None
    return (
        f"Reading prompts takes {_percent(c.vanilla_reading)} of vanilla's time and cannot be drafted: the rounds "
        f"alone are {c.tokens / c.total:.2f}x, and no drafter could gain more than {1 / max(c.reading, 1e-9):.2f}x."
    )


def short_outputs(e: CandidateEvidence) -> str | None:
    """Too few tokens for rounds to matter."""
    if e.vanilla.output_tokens >= SHORT_TOKENS:
        return None
    return (
        f"Answers are short, {e.vanilla.output_tokens:.0f} tokens in the median; under {SHORT_TOKENS} little is left "
        f"to gain behind the first token."
    )


def nothing_proposed(e: CandidateEvidence) -> str | None:
    """A drafter that proposes nothing in most rounds."""
    if (empty := e.own.acceptance.empty_share) <= MOSTLY or not e.own.acceptance.num_rounds:
        return None
    return (
        f"{e.own.candidate.drafter} proposes nothing in {_percent(empty)} of the rounds: the answers repeat neither "
        f"the prompts nor themselves."
    )


def long_tail(e: CandidateEvidence) -> str | None:
    """The median prompt and all tokens together disagree, so the median hides something."""
    median, total = e.own.median, e.own.ratio.estimate
    if median.known is None:
        return None
    low, high = median.known
    if round(low, 2) <= round(total, 2) <= round(high, 2):
        return None
    others = "less" if total < median.estimate else "more"
    return (
        f"The median is {median.estimate:.2f}x [{low:.2f} {high:.2f}], and all tokens over all seconds are "
        f"{total:.2f}x: prompts that gain {others} than the median one take more of the time."
    )


def slower_texts(e: CandidateEvidence) -> str | None:
    """Prompts on which vanilla was faster, whatever all of them came to."""
    slower = [(r, block) for r, block in zip(e.own.ratios, e.own.blocks, strict=True) if r < 1]
    if not slower:
        return None
    slowest, slow_s = min(r for r, _ in slower), sum(block.wall_s for _, block in slower)
    what = "prompt was" if len(slower) == 1 else "prompts were"
    what = what if e.batch == 1 else what.replace("prompt", "batch").replace("batchs", "batches")
    return (
        f"{len(slower)} of {len(e.own.ratios)} {what} slower than vanilla, the slowest {slowest:.2f}x; they took "
        f"{_percent(slow_s / sum(block.wall_s for block in e.own.blocks))} of its time."
    )


#: In the order in which the report gives them.
REASONS: Final = (
    account,
    low_acceptance,
    nothing_proposed,
    k_too_high,
    temperature,
    tokenizer,
    domain,
    draft_cost,
    wide_pass,
    prompt_dominated,
    short_outputs,
    long_tail,
    slower_texts,
)
#: Those that hold of a candidate that ships too.
HIDDEN: Final = (long_tail, slower_texts)


def _fall(e: CandidateEvidence) -> str:
    first, last = e.own.acceptance.alpha_at(1), e.own.acceptance.alpha_at(e.k)
    if first is None or last is None or last.high >= first.low:
        return ""
    return f"; α_i falls from {share(first.mean)} at position 1 to {share(last.mean)} at {e.k}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def busy_note(vanilla: Sequence[Observation]) -> str | None:
    """A remark for the report, or None where vanilla's rounds took alike."""
    ms = sorted(1000 * o.times.round_s / o.times.num_steps for o in vanilla if o.times.num_steps)
    if len(ms) < _LEAST:
        return None
    low, _, high = statistics.quantiles(ms, n=4)
    if high <= _USUAL_SPREAD * low:
        return None
    return (
        f"vanilla's own rounds took {low:.1f} to {high:.1f} ms in the middle half of the prompts: the machine seems to "
        "have been busy with other work. Ratios suffer less than times, because a prompt is compared with itself at "
        "almost the same time; on a quiet machine all bounds are narrower"
    )


def peak_process_bytes() -> int:
    """The most that it has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
