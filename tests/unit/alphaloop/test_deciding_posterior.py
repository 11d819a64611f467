from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums, KeyEvidence, design_effect
from alphaloop.deciding.goodput import LOOKUP_OFFERED, LOOKUP_THROUGH, DrafterState
from alphaloop.deciding.inference import PairPosterior, Posteriors, infer, splits_by_segment
from alphaloop.deciding.posterior import MEASURED_JOBS, Counts, Posterior, Profile
from alphaloop.settings.models import LookupDrafterSettings

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
UNKNOWN = PairPosterior.unknown(8)
ALPHAS = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45)


def key(sampling: str = "greedy", segment: str = "", form: str = "") -> EvidenceKey:
    return EvidenceKey("code", "target", "engine", sampling, "<=256", segment, "draft", "r1", form)


def job(rng: random.Random, alphas: tuple[float, ...], k: int, *, spread: float = 0.0) -> EvidenceSums:
    """One job of 40 rounds; `spread` is the standard deviation over jobs of the logits of α_i."""
    shift = rng.gauss(0, spread)
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    chances = [1 / (1 + math.exp(-math.log(a / (1 - a)) - shift)) for a in alphas]
    for _ in range(40):
        accepted = next((i for i in range(k) if rng.random() >= chances[i]), k)
        counts = counts.with_round(k, accepted, num_emitted=accepted + 1)
    return EvidenceSums.of_job(counts, k, NOW, counts.num_tokens)


def evidence_cache(
    rng: random.Random, num_jobs: int, alpha: float | tuple[float, ...] = ALPHAS, *, k: int = 3, spread: float = 0.0
) -> KeyEvidence:
    alphas = alpha if isinstance(alpha, tuple) else (alpha,) * 8
    evidence = KeyEvidence.empty(NOW)
    for _ in range(num_jobs):
        evidence = evidence.with_job(job(rng, alphas, k, spread=spread), HALF_LIFE)
    return evidence


def expected(alphas: tuple[float, ...], k: int, spread: float) -> float:
    """Tokens a round over many jobs that differ by `spread`."""
    total = 0.0
    weights = {z: math.exp(-z * z / 2) for z in (-2, -1, 0, 1, 2)}
    for z, weight in weights.items():
        tokens, through = 1.0, 1.0
        for a in alphas[:k]:
            through /= 1 + math.exp(-math.log(a / (1 - a)) - spread * z)
            tokens += through
        total += weight * tokens
    return total / sum(weights.values())


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_intervals_cover_the_truth_though_tokens_of_a_job_are_alike(rng: random.Random, spread: float) -> None:
    truth = expected(ALPHAS, 3, spread)
    covered, num_trials = 0, 40
    for _ in range(num_trials):
        posterior = infer({key(): evidence_cache(rng, 20, spread=spread)}, key(), 8, UNKNOWN)
        covered += abs(posterior.tokens[3] - truth) <= 1.96 * posterior.tokens_sd[3]
    # 95 % of 40 are 38; fewer than 31 happen less than once in 10^4 at that rate.
    assert covered >= 31


@pytest.mark.parametrize(("own_sd", "error"), [(0.0, 0.05), (0.3, 0.03)])
def test_tokens_a_round_are_the_inverse_of_the_expected_rounds_a_token(own_sd: float, error: float) -> None:
    """Compared with 20,000 draws of s_i."""
    rng, size = random.Random(7), 6
    profile = Profile(
        tuple(math.log(s / (1 - s)) for s in (0.3, 0.6, 0.6, 0.7, 0.8, 0.8)), 1.0, (own_sd**2,) * size, (1.0,) * size
    )
    posterior = Posterior(profile, (1.0,) * size, 0.0, 1.0)
    sums, logs = [0.0] * (size + 1), [[] for _ in range(size + 1)]
    for _ in range(20_000):
        common, tokens, through = rng.gauss(0, 1), 1.0, 1.0
        for k in range(size + 1):
            if k:
                through /= 1 + math.exp(-profile.mean[k - 1] - common - rng.gauss(0, own_sd))
                tokens += through
            sums[k] += 1 / tokens
            logs[k].append(math.log(tokens))
    for k in range(1, size + 1):
        assert posterior.tokens[k] == pytest.approx(20_000 / sums[k], rel=error)
        assert posterior.tokens_sd[k] == pytest.approx(posterior.tokens[k] * statistics.stdev(logs[k]), rel=0.15)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12), st.floats(0, 2), st.floats(0, 2))
def test_bounds_hold_the_tokens_and_a_sure_posterior_has_those_of_its_probabilities(
    s: list[float], common_sd: float, own_sd: float
) -> None:
    mean = tuple(math.log(x / (1 - x)) for x in s)
    sure, unsure = (
        Posterior(Profile(mean, a**2, (b**2,) * len(s), (1.0,) * len(s)), (1.0,) * len(s), 0.0, 1.0)
        for a, b in ((0.0, 0.0), (common_sd, own_sd))
    )
    for k, tokens in enumerate(unsure.tokens):
        low, high = unsure.tokens_bounds(k)
        assert 1 <= low <= tokens <= high <= k + 1
    assert sure.tokens == pytest.approx([1 + sum(math.prod(s[:i]) for i in range(1, k + 1)) for k in range(len(s) + 1)])


def test_what_a_drafter_offers_is_foreseen_and_learned(rng: random.Random) -> None:
    """Only costs rest on it; what comes through does not."""
    pair = PairPosterior.unknown(4, offers=(0.5, 0.8))
    cold = infer({}, key(), 4, pair)
    assert (cold.reach, cold.through) == ((0.5, 0.8, 0.8, 0.8), UNKNOWN.for_a_task().through[:4])
    seen = [evidence_cache(rng, 60, 0.8, k=4).all for _ in range(5)]  # offers whatever it is asked for
    assert min(pair.with_tasks(seen).reach) > 0.95


def copies(rng: random.Random, num_jobs: int, num_tokens: int) -> list[list[int]]:
    """Look-up's accepted tokens from one rejection to the next, if no draft were ever cut; by text."""
    through = (*LOOKUP_THROUGH, *LOOKUP_THROUGH[-1:] * 30)
    texts = []
    for _ in range(num_jobs):
        shift, runs = rng.gauss(0.7, 0.5), list[int]()
        while sum(runs) + len(runs) < num_tokens:
            odds = [s / (1 - s) * math.exp(shift) for s in through]
            runs.append(next((i for i, x in enumerate(odds) if rng.random() >= x / (1 + x)), len(odds)))
        texts.append(runs)
    return texts


def decoded(runs: list[int], k: int) -> AcceptanceCounts:
    """A round after a cut draft begins within the same copy, at the token after the target's own."""
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    for run in runs:
        while run >= 0:
            counts = counts.with_round(k, min(run, k), num_emitted=min(run, k) + 1)
            run -= k + 1
    return counts


@pytest.mark.parametrize(("seen_k", "error"), [(3, 0.12), (6, 0.08), (12, 0.06)])
def test_copies_that_were_seen_at_one_draft_length_are_foreseen_at_every_other(
    rng: random.Random, seen_k: int, error: float
) -> None:
    """Four probes at k=3 were expected to yield twice the tokens that traffic had at k=12."""
    state = LookupDrafterSettings().state("lookup", "r1")
    texts = copies(rng, 60, 100)
    evidence = KeyEvidence.empty(NOW)
    for runs in texts:
        counts = decoded(runs, seen_k)
        evidence = evidence.with_job(EvidenceSums.of_job(counts, seen_k, NOW, counts.num_tokens), HALF_LIFE)
    posterior = infer({key(): evidence}, key(), 12, PairPosterior.of_drafter(state))
    for k in (1, 3, 4, 6, 8, 12):
        every = [decoded(runs, k) for runs in texts]
        tokens = sum(one.num_tokens - 1 for one in every) / sum(one.rounds - 1 for one in every)
        assert posterior.tokens[k] == pytest.approx(tokens, rel=error)


def test_few_jobs_are_few_clusters_and_further_jobs_differ_too(rng: random.Random) -> None:
    widths = {}
    for num in (0, 4, 16, 64, 1000):
        found = infer({key(): evidence_cache(rng, num, k=8, spread=0.8)} if num else {}, key(), 8, UNKNOWN)
        low, high = found.tokens_bounds(8)
        widths[num] = math.log(high / low)
        # Of a normal distribution that knows how much jobs differ, without the jobs of the measurement.
        assert widths[num] > 2 * 1.96 * found.tokens_sd[8] / found.tokens[8] or low == 1
    assert sorted(widths.values(), reverse=True) == list(widths.values())
    of_measured = 2 * 1.96 * 0.8 * found.elasticity[8] / math.sqrt(MEASURED_JOBS)
    assert widths[1000] == pytest.approx(of_measured, rel=0.3)


def test_what_lies_beyond_the_limit_of_the_texts_that_were_seen_is_less_sure(rng: random.Random) -> None:
    seen = infer({key(): evidence_cache(rng, 8, k=8)}, key(), 8, UNKNOWN)
    short, whole = (replace(seen, text_tokens=num) for num in (48.0, 128.0))
    assert short.tokens == whole.tokens
    assert whole.tokens_bounds(5, 128) == whole.tokens_bounds(5, 60) == seen.tokens_bounds(5)
    widths = [
        math.log(high / low) for high, low in ((b, a) for a, b in (short.tokens_bounds(5, n) for n in (48, 96, 128)))
    ]
    assert widths[0] < widths[1] < widths[2]


def test_look_up_is_expected_to_go_on_where_it_went_well(rng: random.Random) -> None:
    state = LookupDrafterSettings().state("lookup", "r1")
    pair = PairPosterior.of_drafter(state)
    cold = infer({}, key(), state.max_draft_tokens, pair)
    assert cold.through[: len(LOOKUP_THROUGH)] == pytest.approx(LOOKUP_THROUGH)
    assert cold.through[-1] == pytest.approx(LOOKUP_THROUGH[-1])
    assert cold.proposed[2] == pytest.approx(LOOKUP_OFFERED[0] * (1 + LOOKUP_OFFERED[1]))
    # Jobs that never went beyond the fourth position move all of them: more came through than was expected.
    seen = infer({key(): evidence_cache(rng, 30, 0.8, k=4)}, key(), state.max_draft_tokens, pair)
    assert all(after > before for after, before in zip(seen.through, cold.through, strict=True))


def test_a_task_that_is_new_begins_where_the_others_are(rng: random.Random) -> None:
    def pair(alpha: float) -> PairPosterior:
        return UNKNOWN.with_tasks([evidence_cache(rng, 30, alpha).all for _ in range(5)])

    good, bad = pair(0.85), pair(0.2)
    assert good.for_a_task().tokens[3] > UNKNOWN.for_a_task().tokens[3] > bad.for_a_task().tokens[3]
    mixed = UNKNOWN.with_tasks([evidence_cache(rng, 30, alpha).all for alpha in (0.9, 0.2, 0.9, 0.2)])
    assert mixed.spread > 1.2 > good.spread
    assert mixed.for_a_task().tokens_sd[3] > good.for_a_task().tokens_sd[3]
    own = infer({key(): evidence_cache(rng, 60, 0.2)}, key(), 8, good)
    assert own.through[0] == pytest.approx(0.2, abs=0.06)


def test_buckets_of_a_task_lend_each_other_what_they_have_in_common(rng: random.Random) -> None:
    hot, greedy = key("t<=1.0"), key("greedy")
    lent = infer({greedy: evidence_cache(rng, 60, 0.9)}, hot, 8, UNKNOWN)
    assert lent.through[0] > 0.7
    alone = infer({greedy: evidence_cache(rng, 60, 0.9)}, greedy, 8, UNKNOWN)
    assert lent.tokens_sd[3] > 2 * alone.tokens_sd[3]
    apart = infer({greedy: evidence_cache(rng, 60, 0.9), hot: evidence_cache(rng, 60, 0.3)}, hot, 8, UNKNOWN)
    assert apart.through[0] == pytest.approx(0.3, abs=0.06)


def test_segments_are_split_only_by_evidence(rng: random.Random) -> None:
    def leaves(*alphas: float) -> dict[EvidenceKey, KeyEvidence]:
        return {key(segment=str(i)): evidence_cache(rng, 40, a, spread=0.4) for i, a in enumerate(alphas)}

    differ = leaves(0.85, 0.85, 0.4)
    assert splits_by_segment(differ)
    third = infer(differ, key(segment="2"), 8, UNKNOWN)
    assert third.through[0] == pytest.approx(0.4, abs=0.1)
    # A test at 5 %: four of six happen once in 10^4.
    assert sum(splits_by_segment(leaves(0.7, 0.7, 0.7)) for _ in range(6)) <= 3


def test_the_design_effect_is_measured_and_short_drafts_beside_long_ones_are_none(rng: random.Random) -> None:
    alike = [evidence_cache(rng, 150, spread=0.0).all]
    unlike = [evidence_cache(rng, 150, spread=1.0).all]
    assert design_effect(alike) < 2.5
    assert design_effect(unlike) > 2 * design_effect(alike)
    mixed = KeyEvidence.empty(NOW)
    for i in range(150):
        mixed = mixed.with_job(job(rng, ALPHAS, (1, 3, 8)[i % 3]), HALF_LIFE)
    assert design_effect([mixed.all]) < 4


def test_a_drop_shows_within_a_dozen_jobs(rng: random.Random) -> None:
    evidence = evidence_cache(rng, 300, 0.85, spread=0.4)
    before = infer({key(): evidence}, key(), 8, UNKNOWN)
    for _ in range(12):
        evidence = evidence.with_job(job(rng, (0.3,) * 8, 3, spread=0.4), HALF_LIFE)
    after = infer({key(): evidence}, key(), 8, UNKNOWN)
    assert before.kept > 0.5
    assert after.through[0] < 0.6
    assert after.tokens_sd[3] > before.tokens_sd[3]


def test_a_rise_shows_in_six_late_rechecks_of_an_unused_drafter(rng: random.Random) -> None:
    evidence = evidence_cache(rng, 40, 0.4, spread=0.3)
    low = infer({key(): evidence}, key(), 8, UNKNOWN)
    later = NOW + timedelta(hours=10)
    for _ in range(6):
        evidence = evidence.faded(later, HALF_LIFE).with_job(job(rng, (0.9,) * 8, 1).faded(later, HALF_LIFE), HALF_LIFE)
    high = infer({key(): evidence}, key(), 8, UNKNOWN)
    assert high.through[0] > low.through[0] + 0.1


def test_only_the_drafters_own_revision_counts(rng: random.Random) -> None:
    earlier = replace(key(), draft_revision="r0")
    snapshot = EvidenceSnapshot(HALF_LIFE, {key(): evidence_cache(rng, 30, 0.9), earlier: evidence_cache(rng, 30, 0.1)})
    posteriors = Posteriors(snapshot)
    draft, lookup = (
        posteriors.inferred(key(), drafter, NOW).posterior
        for drafter in (DrafterState("draft", "r1", 8), DrafterState("lookup", "r7", 4))
    )
    assert draft.through[0] == pytest.approx(0.9, abs=0.05)
    assert (lookup.jobs, lookup.max_draft_tokens) == (0.0, 4)


COUNTS = st.lists(st.tuples(st.floats(0, 500), st.floats(0, 1)), min_size=1, max_size=8).map(
    lambda pairs: Counts(tuple(n * p for n, p in pairs), tuple(n for n, _ in pairs))
)


@given(counts=COUNTS, spread=st.floats(0.05, 3), start=st.floats(0.01, 0.99))
def test_a_posterior_stays_a_distribution(counts: Counts, spread: float, start: float) -> None:
    prior = Profile.around((start,) * 8, spread)
    after = prior.updated(counts)
    assert all(0 < p < 1 for p in after.probabilities())
    assert 0 < after.common_var <= prior.common_var * (1 + 1e-9)
    assert all(0 <= v <= prior.own_var[0] * (1 + 1e-9) for v in after.own_var)
    wider = after.widened(0.5)
    for i in range(8):
        own = after.own_var[i] + after.common_var * after.loading[i] ** 2
        assert wider.own_var[i] + wider.common_var >= own + 0.25 - 1e-9


@given(counts=COUNTS, position=st.integers(0, 7), more=st.floats(0, 1))
def test_more_accepts_never_lower_any_position(counts: Counts, position: int, more: float) -> None:
    i = position % len(counts.accepts)
    accepts = list(counts.accepts)
    accepts[i] += more * (counts.chances[i] - accepts[i])
    prior = Profile.around((0.5,) * 8, 1.0)
    low = prior.updated(counts).probabilities()
    high = prior.updated(Counts(tuple(accepts), counts.chances)).probabilities()
    assert all(h >= lo - 1e-3 for h, lo in zip(high, low, strict=True))


def test_what_a_draft_holds_is_what_was_proposed(rng: random.Random) -> None:
    """A drafter that goes on where it is right, and stops at once where it is wrong: seldom long, often accepted."""
    k, num_rounds, right = 6, 3000, rng.randint(200, 800)
    counts = AcceptanceCounts(
        rounds=num_rounds + 1,
        num_empty_rounds=1,
        proposed=(num_rounds, *(right,) * (k - 1)),
        trials=(num_rounds, *(right,) * (k - 1)),
        accepts=(right,) * k,
    )
    one = EvidenceSums.of_job(counts, k, NOW, counts.num_tokens)
    posterior = infer({key(): KeyEvidence.empty(NOW).with_job(one, HALF_LIFE)}, key(), k, PairPosterior.unknown(k))
    seen = (num_rounds + (k - 1) * right) / num_rounds
    assert posterior.proposed[k] == pytest.approx(seen, rel=0.1)
    assert posterior.reach[1] > 0.95  # behind what was accepted it always goes on


@given(
    offered=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    batch=st.integers(1, 4),
)
def test_the_longest_of_several_proposals_by_enumeration(offered: list[float], batch: int) -> None:
    posterior = PairPosterior.unknown(len(offered), offers=offered).for_a_task()
    through = [math.prod(offered[:i]) for i in range(len(offered) + 1)]
    for k in range(len(offered) + 1):
        ends = [through[i] - (through[i + 1] if i < k else 0.0) for i in range(k + 1)]
        expected = sum(
            max(lengths) * math.prod(ends[i] for i in lengths)
            for lengths in itertools.product(range(k + 1), repeat=batch)
        )
        assert posterior.longest_proposed(batch)[k] == pytest.approx(expected)


def test_a_form_borrows_from_its_task_and_is_never_summed_with_other_forms(rng: random.Random) -> None:
    """Two JSON jobs move its posterior more than a hundred of plain text do, which still narrow it."""
    plain, few = evidence_cache(rng, 100, 0.3), evidence_cache(rng, 2, 0.95)
    leaves = {key(): plain, key(form="json"): few}
    alone, borrowed = (infer(its, key(form="json"), 3, UNKNOWN) for its in ({key(form="json"): few}, leaves))
    unseen, of_plain = (infer({key(): plain}, key(form=form), 3, UNKNOWN) for form in ("json", ""))
    first = [one.profile.probabilities()[0] for one in (of_plain, unseen, borrowed)]
    assert first[0] == pytest.approx(0.3, abs=0.05)
    assert first[0] < first[2], "what was seen of JSON moves JSON"
    assert infer(leaves, key(), 3, UNKNOWN).profile.probabilities()[0] == pytest.approx(first[0], abs=0.03)
    assert of_plain.tokens_sd[3] < unseen.tokens_sd[3], "another form is doubted more"
    assert unseen.tokens_sd[3] < infer({}, key(form="json"), 3, UNKNOWN).tokens_sd[3], "and less than nothing"
    assert borrowed.tokens != alone.tokens


def test_a_task_of_one_form_is_judged_as_before_there_were_forms(rng: random.Random) -> None:
    seen = evidence_cache(rng, 20)
    forms = [infer({key(form=form): seen}, key(form=form), 3, UNKNOWN) for form in ("", "json")]
    assert forms[0] == forms[1]
