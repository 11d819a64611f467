"""One setting for all jobs of a device with slots: what `play_slots` finds with `Static`, for all rounds at once.

With one setting a job's rounds are known before the job starts. So only the order in which slots fall free is played
round by round, and times are computed as arrays. Sums are added up in the order of slot_device.py: they are the same to
the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alphaloop.deciding.decision import DraftSetting
from benchmarks.policy.slot_device import NUM_MOMENTS, SlotTrace, by_lane
from benchmarks.policy.slot_jobs import SlotStream
from benchmarks.policy.slot_table import SlotTable
from benchmarks.policy.stream import Floats, Ints


@dataclass(frozen=True, slots=True)
class _JobRounds:
    """The rounds of all jobs at one setting, job after job."""

    num_rounds: Ints  #: [jobs]
    offered: Ints  #: [rounds of all jobs]
    tokens: Ints  #: [rounds of all jobs], put out

    @property
    def first(self) -> Ints:
        """[jobs], the place of a job's first round."""
        return np.cumsum(self.num_rounds) - self.num_rounds


@dataclass(frozen=True, slots=True)
class _Starts:
    """In which of the device's rounds the jobs start."""

    rounds: Ints  #: [jobs]
    order: Ints  #: numbers of the jobs as they stand side by side in their first round


def play_static(stream: SlotStream, table: SlotTable, setting: DraftSetting) -> SlotTrace:
    """All of the stream at one setting."""
    its = _job_rounds(stream, setting)
    starts = _play_starts(stream, its)
    within = np.arange(len(its.tokens)) - np.repeat(its.first, its.num_rounds)
    at = np.repeat(starts.rounds, its.num_rounds) + within
    num_running, num_new = np.bincount(at), np.bincount(starts.rounds, minlength=int(at.max()) + 1)
    tokens_after = np.cumsum(np.bincount(at, its.tokens) + num_new)
    tokens_before = np.concatenate([[0], tokens_after[:-1]])

    host, slower = _slowness(stream, tokens_before, setting.drafter)
    ms = host * table.passes_ms(num_running, np.bincount(at, its.offered) / num_running)
    read_ms = host * _reading_ms(stream, table, None, starts, np.arange(len(stream.jobs)), len(ms))
    if setting.drafter is not None:
        is_slow = slower * _hiccup(stream, setting.drafter, np.cumsum(num_new))
        ms += host * (is_slow * table.drafts_ms(setting.drafter, num_running, setting.num_draft_tokens))
    ms += read_ms
    if setting.drafter is not None:
        ms += host * _reading_ms(stream, table, setting.drafter, starts, starts.order, len(ms), slower)

    times = np.cumsum(ms)
    moments = np.interp(
        np.linspace(0, tokens_after[-1], NUM_MOMENTS + 1)[1:], np.append(0, tokens_after), np.append(0, times)
    )
    job_of = np.repeat(np.arange(len(stream.jobs)), its.num_rounds)
    job_ms = np.asarray(np.bincount(job_of, (ms / num_running)[at]), dtype=np.float64)
    nothing = np.zeros(len(stream.jobs))
    return SlotTrace(float(times[-1]), moments, job_ms, nothing, nothing)


def _job_rounds(stream: SlotStream, setting: DraftSetting) -> _JobRounds:
    drawn = stream.drawn(setting.drafter)
    offered = np.minimum(drawn.offered, setting.num_draft_tokens)
    tokens = np.minimum(drawn.accepted, offered) + 1
    out = np.cumsum(tokens)
    # A job is over in the round in which its last token comes out; the rounds drawn behind are not played.
    wanted = drawn.num_rounds + (out - tokens)[drawn.first]
    last = np.searchsorted(out, wanted)
    tokens[last] -= out[last] - wanted
    num_rounds = last + 1 - drawn.first
    is_played = np.arange(len(out)) - np.repeat(drawn.first, drawn.num_rounds) < np.repeat(num_rounds, drawn.num_rounds)
    return _JobRounds(num_rounds, offered[is_played], tokens[is_played])


def _play_starts(stream: SlotStream, its: _JobRounds) -> _Starts:
    """A slot that falls free is refilled in the next round, while as many slots as that are open."""
    lengths, first = its.num_rounds.tolist(), its.first.tolist()
    tokens_at = np.zeros(len(its.tokens) + 1, np.int64)
    ends_at = [0] * (len(its.tokens) + 1)
    rounds: list[int] = []
    order: list[int] = []
    num_running = num_tokens = now = 0
    while len(rounds) < len(lengths):
        num_running -= ends_at[now]
        num_free = stream.stretches.at(num_tokens).num_open - num_running
        new = range(len(rounds), min(len(rounds) + max(num_free, 0), len(lengths)))
        for number in new:
            end = now + lengths[number]
            tokens_at[now:end] += its.tokens[first[number] : first[number] + lengths[number]]
            ends_at[end] += 1
            rounds.append(now)
        order += [job.number for jobs in by_lane([stream.jobs[n] for n in new]) for job in jobs]
        num_running += len(new)
        num_tokens += int(tokens_at[now]) + len(new)
        now += 1
    return _Starts(np.array(rounds), np.array(order))


def _slowness(stream: SlotStream, tokens_before: Ints, drafter: str | None) -> tuple[Floats, Floats]:
    """By round: the factor of all times, noise included, and the drafter's own."""
    stretches = stream.stretches
    host, own = (
        np.array([dict(stretch.slower).get(part or "", 1.0) for stretch in stretches.of]) for part in ("host", drafter)
    )
    which = np.searchsorted(stretches.begins, tokens_before, side="right") - 1
    noise = np.resize(stream.noise, len(tokens_before))
    return host[which] * noise, own[which]


def _hiccup(stream: SlotStream, drafter: str, num_started: Ints) -> Floats:
    """By round: the factor of the drafter in the scenario's hiccup, else 1."""
    found = np.ones(len(num_started))
    hiccup = stream.scenario.slots.hiccup if stream.scenario.slots else None
    if hiccup is not None and hiccup.drafter == drafter:
        found[np.flatnonzero(num_started > hiccup.from_job)[: hiccup.num_rounds]] = hiccup.slower
    return found


def _reading_ms(
    stream: SlotStream,
    table: SlotTable,
    part: str | None,
    starts: _Starts,
    order: Ints,
    num_rounds: int,
    slower: Floats | float = 1.0,
) -> Floats:
    """By round: reading the prompts of jobs that start."""
    at = starts.rounds[order]
    ms = np.array([table.read_ms(part, stream.jobs[number].cell.prompt_tokens) for number in order.tolist()])
    factors = slower if isinstance(slower, float) else slower[at]
    return np.asarray(np.bincount(at, factors * ms, num_rounds), dtype=np.float64)
