"""The memory of a stream's test, and the mathematics of the test; docs/concepts/drift.md explains them.

A memory is arrays of fixed size, so no history of jobs makes it larger. The functions that read and change it are loops
over arrays and call each other alone, because `benchmarks.drift` compiles them as they stand: to measure one false
alarm in 50,000 jobs takes tens of millions of jobs.

The test: evidence for a fall and for a rise, of several sizes at once (Shiryaev-Roberts, a mixture over sizes). For a
size Δ, R says how much likelier a change is than none, summed over all jobs with which it may have begun (Shiryaev
1963, Roberts 1966; x: residual, s: information, V: variance on the scale of the size):

    R ← (1 + R) · exp((±Δ x - Δ² s / 2) / V)

While nothing changes each R grows by at most 1 a job on average, and so does their weighted mean. An alarm at a mean of
A therefore comes after A jobs or later on average: the wanted run length is the threshold.

Scales: how much sums over 1, 2, 4 … 4096 consecutive jobs vary. Neighbouring jobs resemble each other: they come from
one producer, one user, one hour. The sum of m such jobs varies more than m times as much as one job. How much more
depends on m, so it is measured for each m = 2ʲ: batch means with every batch size at once. A test of a window of m
jobs takes the variance of its own scale. Batches, clusters, serial correlation and slow waves are thereby allowed for
without naming them.

Windows: when a change began. Windows of the last m jobs are compared with the reference, for m from 5 to 4096:

    Z_m = Σ residuals / √(V_m · Σ information + (Σ reference error)²)

Where |Z_m| is nearly the largest, the window probably begins with the change.

The reference: the level of each draft length and position, and what is expected of a job. α_i hardly moves with k, but
it does move: look-up on 700 real texts had α_1 of .465 at k = 1 and .419 at k = 12. Each draft length therefore has a
level of its own, drawn towards the level over all lengths while its own jobs are few. What remains uncertain widens the
test of the jobs that it concerns.

The day's rhythm: what of α goes up and down with the hour, learned from the days that were seen. Two waves (a day and
half a day) are fitted to the residuals by a ridge regression. Before a day was seen the waves are uncertain, and this
uncertainty widens the test for hours unlike those of the reference: evening jobs are compared with a morning's
reference with care, morning jobs of the next day without. A stream without a rhythm would pay for the uncertainty of
its waves for ever, so the fit is weighted by the probability that there is a rhythm at all.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Stored memories of another version are not read: the stream is learned anew.
VERSION: Final = 2

ROWS: Final = 16  # draft lengths with a row of their own; all further ones share the last row
POSITIONS: Final = 16  # draft positions counted; few rounds reach deeper ones
SEGMENTS: Final = 32  # likewise
SCALES: Final = 13  # blocks of 1, 2, 4 … 4096 jobs
LEVELS: Final = 10  # windows of 5 to 4096 jobs: those of level j are 4·2ʲ to 8·2ʲ jobs long
SIZES: Final = 4  # changes looked for: ALPHA_MARGIN and 2, 4 and 8 times as much
RING: Final = 9  # marks kept a level: a window of level j begins at most 8 marks ago
FEATURES: Final = 4  # cosine and sine of a day and of half a day
#: Change of α_1 that does not matter: steady is an interval within it, moved an estimate beyond it.
ALPHA_MARGIN: Final = 0.05

Floats = NDArray[np.float64]

# Indices into Memory.clock
NUM_WINDOWED, PHASE, NUM_ALARMS, NUM_JOBS = 0, 1, 2, 3
# Phases
LEARNING, WATCHING = 0, 1
# Indices into JobTally.first: jobs, and of position 1 trials, accepts, residuals and squared residuals
JOBS, TRIALS, ACCEPTS, RESIDUALS, SQUARES = 0, 1, 2, 3, 4
# Indices into Memory.alarm
DIRECTION, RAISED_AT, CHANGED_AFTER, CHANGED_BEFORE, MOVED_AFTER, MOVED_BEFORE = 0, 1, 2, 3, 4, 5


class Jobs(NamedTuple):
    """A page of a stream's jobs in their order, a row a job."""

    rows: NDArray[np.int64]  #: draft length, as a row of the tables
    trials: Floats  #: [num_jobs, POSITIONS]
    accepts: Floats  #: [num_jobs, POSITIONS]
    tokens: Floats
    at: Floats  #: seconds since 1970, UTC
    segments: NDArray[np.int64]  #: segment, as a row of the tallies


class JobTally(NamedTuple):
    """Counts of a stretch of jobs."""

    trials: Floats = np.zeros((ROWS, POSITIONS))
    accepts: Floats = np.zeros((ROWS, POSITIONS))
    mass: Floats = np.zeros((ROWS, 2))  #: tokens and information
    features: Floats = np.zeros(FEATURES)  #: Σ information · feature
    first: Floats = np.zeros(5)  #: of position 1
    segments: Floats = np.zeros((SEGMENTS, 3))  #: jobs, trials and residuals of position 1


class Memory(NamedTuple):
    """What the test remembers of a stream."""

    clock: NDArray[np.int64] = np.zeros(4, np.int64)  #: jobs in the windows, phase, alarms so far, jobs so far
    sums: Floats = np.zeros(3)  #: running sums of residuals, information and reference error
    marks: Floats = np.zeros((SCALES, RING, 4))  #: the sums and the time (s) at multiples of 2ʲ jobs
    spread: Floats = np.zeros((SCALES, 2))  #: number of reference blocks, sum of their squared sums over information
    pending_spread: Floats = np.zeros((SCALES, 2))  #: the same of the last whole period
    current_spread: Floats = np.zeros((SCALES, 2))  #: the same of the running period
    base: Floats = np.zeros(1)  #: variance of one job a unit of information, before its own says
    variance: Floats = np.zeros(SCALES)  #: variance of sums over 2ʲ jobs, a unit of information
    reference: JobTally = JobTally()  #: the level that jobs are compared with
    pending: JobTally = JobTally()  #: the last whole period, not yet in the reference
    current: JobTally = JobTally()  #: the running period
    norm: JobTally = JobTally()  #: of an open event: the reference before it
    earlier: JobTally = JobTally()  #: of an open event: jobs since its last alarm beside the norm, all whole periods
    latest: JobTally = JobTally()  #: and the running period
    norm_alpha: Floats = np.zeros(ROWS)  #: expected α_1 before the event
    norm_centre: Floats = np.zeros(FEATURES)  #: mean feature of the norm
    alpha: Floats = np.zeros((ROWS, POSITIONS))  #: expected α
    shape: Floats = np.zeros((ROWS, 2))  #: trials a token, and variance of the row's level in the reference
    gram: Floats = np.zeros((1 + FEATURES, 1 + FEATURES))  #: Σ information · feature · feature
    moment: Floats = np.zeros(1 + FEATURES)  #: Σ feature · residual
    rhythm: Floats = np.zeros(FEATURES)  #: the day's rhythm, in α
    centre: Floats = np.zeros(FEATURES)  #: mean feature of the reference
    doubt: Floats = np.zeros((FEATURES, FEATURES))  #: covariance of `rhythm`
    evidence: Floats = np.zeros((2, SIZES))  #: for a fall and for a rise of each size
    noise: Floats = np.zeros(SIZES)  #: variance with which a size keeps the run length, a unit of information
    alarm: Floats = np.zeros(6)  #: direction of the open event (0: none), times (s) of the last alarm, around the
    #: event's beginning and around the last change


def empty_tally() -> JobTally:
    """No jobs."""
    return JobTally(*(part.copy() for part in JobTally()))


def empty_memory() -> Memory:
    """A stream of which nothing was read."""
    return Memory._make(empty_tally() if isinstance(part, JobTally) else part.copy() for part in Memory())


def is_open(memory: Memory) -> bool:
    """Whether an alarm has not ended."""
    return bool(memory.alarm[DIRECTION] != 0)


def to_document(memory: Memory | JobTally) -> dict[str, Any]:
    """As JSON keeps it: numbers in nested lists."""
    return {
        name: to_document(part) if isinstance(part, JobTally) else part.tolist()
        for name, part in memory._asdict().items()
    }


def from_document(document: Any) -> Memory:
    """The inverse of `to_document`. Raises KeyError, TypeError or ValueError for anything else."""
    return Memory._make(
        JobTally._make(_array(document[name][field], like) for field, like in part._asdict().items())
        if isinstance(part, JobTally)
        else _array(document[name], part)
        for name, part in Memory()._asdict().items()
    )


def _array(numbers: Any, like: NDArray[Any]) -> NDArray[Any]:
    array = np.array(numbers, dtype=like.dtype)
    if array.shape != like.shape or not np.isfinite(array).all():
        raise ValueError(f"expected {like.shape} finite numbers, found {array.shape}")
    return array


# The test

STEEPEST: Final = 1.5  # standard deviations of a job: residuals are skewed, and a steeper test would follow single jobs


def weigh(memory: Memory, run_length: float, residual: float, information: float, error: float) -> bool:
    """Add a job to the evidence. Whether that is an alarm.

    Args:
        memory: changed.
        run_length: jobs between two false alarms.
        residual: of the job, times its weight.
        information: of the job.
        error: standard error of the α that is expected of the job.
    """
    mean = 0.0
    deviation = math.sqrt(memory.variance[0] * information)
    for step in range(SIZES):
        size = ALPHA_MARGIN * 2.0**step
        # The error of the reference is the same in all jobs since the change: it counts most where a size takes long.
        doubt = 2 * math.log(run_length) * (error / size) ** 2
        if doubt < 1:  # otherwise this reference cannot show the size
            variance = memory.noise[step] / (1 - doubt)
            size = min(size, STEEPEST * variance / deviation)
            for side in range(2):
                towards = residual if side else -residual
                memory.evidence[side, step] += 1
                memory.evidence[side, step] *= math.exp((size * towards - size * size * information / 2) / variance)
        mean += share(step) * (memory.evidence[0, step] + memory.evidence[1, step])
    return bool(mean >= run_length)


def share(step: int) -> float:
    """Weight of a size in each direction. Half the size takes four times as long, so it has twice the weight."""
    return 0.5 * 2.0 ** (SIZES - 1 - step) / (2**SIZES - 1)


def find_noise(memory: Memory, run_length: float) -> None:
    """Take for each size the variance with which no stretch of jobs raises more false alarms than wanted.

    Sums over m jobs with information S have the variance S · V_m. They reach an alarm, the log likelihood ratio
    L = ln(run length) for a size Δ at the variance V, where they exceed L V / Δ + Δ S / 2. That is to be √(2 L)
    standard deviations for every m. Independent jobs give V = V_1; clusters count for large sizes too, which are found
    in less time than a cluster takes.
    """
    information = memory.reference.mass[:, 1].sum() / memory.reference.first[JOBS]
    limit = math.log(run_length)
    stretches = information * 2.0 ** np.arange(SCALES)
    needed = math.sqrt(2 * limit) * np.sqrt(stretches * memory.variance)
    for step in range(SIZES):
        size = ALPHA_MARGIN * 2.0**step
        memory.noise[step] = max((size / limit * (needed - size * stretches / 2)).max(), memory.variance[0] / 2)


# Scales

BORROWED_BLOCKS: Final = 16.0  # weight, in blocks, of the next shorter scale in the estimate of a scale
GROWTH: Final = 1.05  # factor by which a doubled scale is expected to vary more, before its blocks say
LONGEST_SHARE: Final = 0.25  # of a block, in the information of the reference
MOST_BLOCKS: Final = 500.0  # older blocks fade, so that the variance follows the stream
LIMIT: Final = 4.0  # a squared block sum counts at most this many variances: a change must not hide itself
LIMITED_MEAN: Final = 0.9205  # mean of a squared standard normal number that is limited so


def advance(memory: Memory, residual: float, information: float, error: float, at: float) -> None:
    """Add a job to the running sums, and set the marks and measure the blocks that end with the job."""
    sums = memory.sums
    sums[0] += residual
    sums[1] += information
    sums[2] += error
    memory.clock[NUM_WINDOWED] += 1
    count = memory.clock[NUM_WINDOWED]
    scale = 0
    while scale < SCALES and count % (1 << scale) == 0:
        number = count >> scale
        measure_block(memory, scale, (number - 1) % RING)
        mark = memory.marks[scale, number % RING]
        mark[:3] = sums
        mark[3] = at
        scale += 1


def measure_block(memory: Memory, scale: int, begin: int) -> None:
    """Add the block that ends now and began at the mark `begin` to the period's blocks of its scale.

    A block is left out that is long beside the reference: its sum would show the error of the reference.
    """
    mark = memory.marks[scale, begin]
    total, information = memory.sums[0] - mark[0], memory.sums[1] - mark[1]
    share = information / memory.reference.mass[:, 1].sum()
    if share > LONGEST_SHARE:
        return
    variance = memory.variance[scale]
    squared = min(total * total / (information * (1 + share)), LIMIT * variance) / LIMITED_MEAN
    memory.current_spread[scale, 0] += 1.0
    memory.current_spread[scale, 1] += squared


def join_blocks(memory: Memory) -> None:
    """End a period: the blocks of the period before it join those of the reference."""
    memory.spread[:] += memory.pending_spread
    for scale in range(SCALES):
        memory.spread[scale] *= min(1.0, MOST_BLOCKS / max(memory.spread[scale, 0], 1.0))
    memory.pending_spread[:] = memory.current_spread
    memory.current_spread[:] = 0.0
    estimate_variances(memory)


def forget_blocks(memory: Memory) -> None:
    """Leave out the blocks that are not in the reference yet: they may hold a change."""
    memory.pending_spread[:] = 0.0
    memory.current_spread[:] = 0.0


def estimate_variances(memory: Memory) -> None:
    """Each scale's own blocks, and the next shorter scale while the blocks are few."""
    variance, spread = memory.variance, memory.spread
    borrowed = memory.base[0]
    for scale in range(SCALES):
        num = spread[scale, 0]
        variance[scale] = (BORROWED_BLOCKS * borrowed + spread[scale, 1]) / (BORROWED_BLOCKS + num)
        borrowed = variance[scale] * GROWTH


def clear_windows(memory: Memory, at: float) -> None:
    """Begin to test anew at the time `at`; what is known of the variance stays."""
    memory.clock[NUM_WINDOWED] = 0
    memory.evidence[:] = 0.0
    memory.sums[:] = 0.0
    memory.marks[:] = 0.0
    memory.marks[:, :, 3] = at


# Windows

WINDOWS: Final = 4  # windows a level: each begins one mark after the other
PLAUSIBLE: Final = 4.0  # a change may lie where Z² is at most so much below its largest value: likelihood ratio e²


def note(memory: Memory, at: float) -> None:
    """Note an alarm, and between which moments the change was: where windows begin that are nearly the clearest.

    While a level is learned, the change lies between the last two alarms, and no job is sure to come after it. The
    first mark keeps the sums of the alarm's window until the new level is watched.
    """
    direction, earliest, latest = -1, memory.alarm[RAISED_AT], at
    if memory.clock[PHASE] == LEARNING:
        memory.sums[:] = 0.0
    else:
        direction, earliest, latest = between(memory, at)
        memory.marks[0, 0, :3] = memory.sums
    memory.clock[NUM_ALARMS] += 1
    memory.alarm[RAISED_AT] = at
    memory.alarm[MOVED_AFTER] = earliest
    memory.alarm[MOVED_BEFORE] = latest
    if not is_open(memory):
        begin_event(memory, direction)


def between(memory: Memory, at: float) -> tuple[int, float, float]:
    """Direction of a change and the moments around it. The running sums become those of the clearest window."""
    windows = [(level, back) for level in range(LEVELS) for back in range(RING) if is_kept(memory, level, back)]
    best, begun = 0.0, memory.marks[0, 0].copy()
    for level, back in windows:
        squared = standing(memory, level, back)
        if abs(squared) > abs(best):
            best, begun = squared, mark_of(memory, level, back).copy()
    direction = 1 if best > 0 else -1
    earliest, latest = at, 0.0
    for level, back in windows:
        if direction * standing(memory, level, back) >= abs(best) - PLAUSIBLE:
            began = mark_of(memory, level, back)[3]
            earliest, latest = min(earliest, began), max(latest, began)
    memory.sums[:] -= begun[:3]
    return direction, earliest, latest


def begin_event(memory: Memory, direction: int) -> None:
    """Let the event begin with the last change."""
    memory.alarm[DIRECTION] = direction
    memory.alarm[CHANGED_AFTER] = memory.alarm[MOVED_AFTER]
    memory.alarm[CHANGED_BEFORE] = memory.alarm[MOVED_BEFORE]


def standing(memory: Memory, level: int, back: int) -> float:
    """Z² of the window that began `back` marks of `level` ago, with the sign of Z."""
    mark = mark_of(memory, level, back)
    total = memory.sums[0] - mark[0]
    error = memory.sums[2] - mark[2]
    # A block of 8·2ʲ jobs, so the scale j + 3, is the shortest that is as long as every window of level j.
    expected = memory.variance[level + 3] * (memory.sums[1] - mark[1]) + error * error
    return total * abs(total) / expected if expected > 0 else 0.0


def mark_of(memory: Memory, level: int, back: int) -> Floats:
    """The mark `back` marks of `level` ago."""
    mark: Floats = memory.marks[level, ((memory.clock[NUM_WINDOWED] >> level) - back) % RING]
    return mark


def nearest(count: int, level: int) -> int:
    """How many marks ago the shortest window of a level begins: the level's windows are 4·2ʲ to 8·2ʲ jobs long."""
    return WINDOWS if count % (1 << level) else WINDOWS + 1


def is_kept(memory: Memory, level: int, back: int) -> bool:
    """Whether a window of the level that begins `back` marks ago exists and is one of those that are tested."""
    count = memory.clock[NUM_WINDOWED]
    first = nearest(count, level)
    return first <= back < first + WINDOWS and count >> level >= back


# The reference

#: Weight of a job: trials / (1 + WITHIN · trials), the best where trials of a job correlate by .1. Where they correlate
#: otherwise the test loses a little power; its rate stays, because the variance is measured.
WITHIN: Final = 0.1
LENGTH_DEVIATION: Final = 0.04  # prior standard deviation of a draft length's level around that of all


def weight(trials: float) -> float:
    """The factor of a residual."""
    return 1 / (1 + WITHIN * trials)


def count(tally: JobTally, jobs: Jobs, index: int, information: float, waves: Floats, residual: float) -> None:
    """Add a job: all its counts by draft length, and those of position 1 with the `residual` there."""
    row, trials, accepts = jobs.rows[index], jobs.trials[index], jobs.accepts[index]
    tally.trials[row, :] += trials
    tally.accepts[row, :] += accepts
    tally.mass[row, 0] += jobs.tokens[index]
    tally.mass[row, 1] += information
    tally.features[:] += information * waves
    first = tally.first
    first[JOBS] += 1
    first[TRIALS] += trials[0]
    first[ACCEPTS] += accepts[0]
    first[RESIDUALS] += residual
    first[SQUARES] += residual * residual
    counts = tally.segments[jobs.segments[index]]
    counts[0] += 1
    counts[1] += trials[0]
    counts[2] += residual


def merge(into: JobTally, added: JobTally) -> None:
    """Add `added` to `into`."""
    into.trials[:] += added.trials
    into.accepts[:] += added.accepts
    into.mass[:] += added.mass
    into.features[:] += added.features
    into.first[:] += added.first
    into.segments[:] += added.segments


def clear(tally: JobTally) -> None:
    """Forget."""
    tally.trials[:] = 0.0
    tally.accepts[:] = 0.0
    tally.mass[:] = 0.0
    tally.features[:] = 0.0
    tally.first[:] = 0.0
    tally.segments[:] = 0.0


def settle(memory: Memory) -> None:
    """Compute from the counts of the reference what is expected of jobs."""
    reference, variance = memory.reference, memory.variance[SCALES - 1]
    tokens, information = reference.mass[:, 0].sum(), reference.mass[:, 1].sum()
    known = 0.0
    for i in range(POSITIONS):
        trials, accepts = reference.trials[:, i].sum(), reference.accepts[:, i].sum()
        # A position that the reference never tested is taken to be like the one before it.
        known = accepts / trials if trials > 0 else known
        for row in range(ROWS):
            own = reference.trials[row, i]
            trust = shrinkage(reference.mass[row, 1], variance) if own > 0 else 0.0
            level = reference.accepts[row, i] / own if own > 0 else 0.0
            memory.alpha[row, i] = trust * level + (1 - trust) * known
    for row in range(ROWS):
        trust = shrinkage(reference.mass[row, 1], variance)
        per_token = reference.trials[row].sum() / reference.mass[row, 0] if reference.mass[row, 0] > 0 else 0.0
        memory.shape[row, 0] = trust * per_token + (1 - trust) * reference.trials.sum() / tokens
        overall = variance / information
        own_variance = trust**2 * variance / reference.mass[row, 1] if reference.mass[row, 1] > 0 else 0.0
        memory.shape[row, 1] = max(overall, own_variance + (1 - trust) ** 2 * (LENGTH_DEVIATION**2 + overall))
    memory.centre[:] = reference.features / information


def shrinkage(information: float, variance: float) -> float:
    """Weight of a draft length's own counts beside those of all lengths."""
    return information / (information + variance / LENGTH_DEVIATION**2)


# The day's rhythm

DAY_S: Final = 86_400.0
DEVIATIONS: Final = (0.03, 0.03, 0.015, 0.015)  # prior standard deviation of each wave, in α
LIKELY: Final = 0.9  # probability of a rhythm before jobs say
LEVEL_DEVIATION: Final = 0.1  # prior standard deviation of the level in the same regression


def features(at: float) -> Floats:
    """Cosine and sine of the time of day, for a day and for half a day; `at` in seconds since 1970, UTC."""
    angle = 2 * math.pi * (at % DAY_S) / DAY_S
    return np.array([math.cos(angle), math.sin(angle), math.cos(2 * angle), math.sin(2 * angle)])


def learn(memory: Memory, off: Floats, residual: float, information: float) -> None:
    """Add a job to the regression of residuals on the waves; `off` is how far its features are from the reference's."""
    design = np.concatenate((np.ones(1), off))
    memory.gram[:] += information * np.outer(design, design)
    memory.moment[:] += residual * design


def solve(memory: Memory) -> None:
    """Fit the waves anew: posterior mean and covariance, with the variance of the longest scale."""
    variance = memory.variance[SCALES - 1]
    precision = memory.gram / variance
    precision[0, 0] += 1 / LEVEL_DEVIATION**2
    level = precision[0, 0]
    gain = math.log(level)
    for i in range(FEATURES):
        precision[1 + i, 1 + i] += 1 / DEVIATIONS[i] ** 2
        gain -= 2 * math.log(DEVIATIONS[i])
    covariance = np.linalg.inv(precision)
    moment = memory.moment / variance
    fitted = covariance @ moment
    # Twice the logarithm of the Bayes factor of "level and waves" against "level".
    gain += moment @ fitted - moment[0] ** 2 / level - np.linalg.slogdet(precision)[1]
    likely = 1 / (1 + (1 - LIKELY) / LIKELY * math.exp(-min(max(gain / 2, -50.0), 50.0)))
    memory.rhythm[:] = likely * fitted[1:]
    memory.doubt[:] = likely * (covariance[1:, 1:] + (1 - likely) * np.outer(fitted[1:], fitted[1:]))


def wave(memory: Memory, off: Floats) -> tuple[float, float]:
    """What the rhythm adds to α so far from the reference's features, and its variance."""
    return float(memory.rhythm @ off), max(float(off @ memory.doubt @ off), 0.0)


# How well a level is known: standard errors of α_1, with the variance of their time scale

CLOSING: Final = 3.0  # standard errors within which a level is taken to be known
LONGEST_PERIOD: Final = 8192  # jobs


def is_fine(memory: Memory, tally: JobTally) -> bool:
    """Whether a tally's level is known far better than the margin, or never will be."""
    is_sure = CLOSING * standard_error(memory, tally) <= ALPHA_MARGIN / 2
    return bool(is_sure or tally.first[JOBS] >= LONGEST_PERIOD)


def standard_error(memory: Memory, tally: JobTally) -> float:
    """Standard error of the mean residual of position 1 over a tally's jobs, in α."""
    first = tally.first
    scale = min(SCALES - 1, int(math.log2(first[JOBS])))
    return math.sqrt(first[SQUARES] * inflation(memory, scale)) / float(first[TRIALS])


def reference_error(memory: Memory, before: JobTally, tally: JobTally) -> float:
    """Standard error of the α_1 of the jobs `before`, from the variance of the tally's jobs."""
    first = tally.first
    own = first[SQUARES] * inflation(memory, SCALES - 1) / first[TRIALS] ** 2
    return math.sqrt(own * first[JOBS] / before.first[JOBS])


def inflation(memory: Memory, scale: int) -> float:
    """By how much sums over 2^scale jobs vary more than those of independent jobs."""
    return max(1.0, float(memory.variance[scale] / memory.variance[0]))
