"""What each kind of server adds to OpenAI's form: counts of drafts, and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from alphaloop.server_kind import ServerKind
from worker.servers import told
from worker.servers.forms import LlamaTimings, Piece, SglangDrafts, TensorrtSpeculation, VllmMetrics
from worker.servers.told import Told


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Times that the server measured itself, in seconds; None where it does not tell."""

    queue_s: float | None = None
    prefill_s: float | None = None  #: from the start of work to the first token
    decode_s: float | None = None  #: from the first token to the last


@dataclass(slots=True)
class Added:
    """What the pieces of one reply had beside text and usage, the last of each."""

    metrics: VllmMetrics | None = None
    timings: LlamaTimings | None = None
    sglang: SglangDrafts | None = None
    speculative_decoding: TensorrtSpeculation | None = None

    def take(self, piece: Piece) -> None:
        """Keep what a piece has."""
        self.metrics = piece.metrics or self.metrics
        self.timings = piece.timings or self.timings
        self.sglang = (piece.sglext.spec_tokens_details if piece.sglext else None) or self.sglang
        for choice in piece.choices:
            self.speculative_decoding = choice.speculative_decoding or self.speculative_decoding


def told_of(kind: ServerKind, added: Added, num_tokens: int, num_draft_tokens: int | None = None) -> Told:
    """What that kind of server told about the drafts of a text of `num_tokens`.

    `num_draft_tokens`: k that was asked for or that of its start, where known. SGLang does not tell the depth of its
    trees, and vLLM's list of lengths is as long as that of its start.
    """
    if kind == "sglang":
        return _sglang(added, num_tokens, num_draft_tokens)
    if kind == "vllm":
        return _vllm(added, num_tokens, num_draft_tokens)
    return _TOLD[kind](added, num_tokens)


def _vllm(added: Added, num_tokens: int, num_draft_tokens: int | None) -> Told:
    found = added.metrics.speculative_decoding if added.metrics else None
    if found is None:
        return told.NOTHING
    if not found.num_spec_steps:  # then there are no arrays, whether they were asked for or not
        return told.of_vanilla("rounds", num_tokens)
    if found.per_step_drafted is not None and found.per_step_accepted is not None:
        rounds = told.from_rounds(found.per_step_drafted, found.per_step_accepted, num_tokens)
        sums = (found.num_draft_tokens, found.num_accepted_draft_tokens)
        if rounds.doubt is None and (rounds.num_proposed, rounds.num_accepted) != sums:
            return told.doubtful("rounds", f"the rounds do not add up to {sums[1]} of {sums[0]} tokens")
        return rounds
    if found.acceptance_histogram is not None:
        k, histogram = num_draft_tokens or 0, found.acceptance_histogram
        if found.num_draft_tokens == k * found.num_spec_steps and not any(histogram[k + 1 :]):
            histogram = histogram[: k + 1]
        return told.from_lengths(histogram, found.num_draft_tokens, num_tokens, found.num_spec_steps)
    return told.from_sums(found.num_draft_tokens, found.num_accepted_draft_tokens, num_tokens)


def _sglang(added: Added, num_tokens: int, num_draft_tokens: int | None) -> Told:
    """Every round drafts as much, so what came is counts by position, or by level where drafts are trees.

    A tree of more tokens than k levels offers k tokens in a row, and its accepted ones are a path in it.
    """
    found = added.sglang
    if found is None or not found.spec_verify_ct:  # told of no round: nothing drafts, or it does not tell
        return told.NOTHING
    num_rounds, num_proposed = found.spec_verify_ct, found.spec_num_proposed_drafts or 0
    histogram = found.spec_correct_drafts_histogram
    if histogram is None:
        return told.from_sums(num_proposed, found.spec_num_correct_drafts or 0, num_tokens)
    num_drafted, rest = divmod(num_proposed, num_rounds)  # in each round
    k = num_drafted if num_draft_tokens is None else num_draft_tokens
    if rest or k > num_drafted or len(histogram) > k + 1:
        return told.doubtful(
            "lengths",
            f"{num_rounds} rounds drafted {num_proposed} tokens and accepted up to {len(histogram) - 1}: "
            f"drafts are not of {k} tokens",
        )
    # The server's list ends at the longest that was accepted.
    padded = (*histogram, *(0,) * (k + 1 - len(histogram)))
    return told.from_lengths(padded, num_rounds * k, num_tokens, num_rounds)


def _llama_cpp(added: Added, num_tokens: int) -> Told:
    if added.timings is None:
        return told.NOTHING
    return told.from_sums(added.timings.draft_n or 0, added.timings.draft_n_accepted or 0, num_tokens)


def _tensorrt_llm(added: Added, num_tokens: int) -> Told:
    found = added.speculative_decoding
    if found is None:
        return told.NOTHING
    if found.acceptance_histogram is not None:
        return told.from_lengths(found.acceptance_histogram, found.total_draft_tokens, num_tokens, found.num_spec_steps)
    return told.from_sums(found.total_draft_tokens, found.total_accepted_draft_tokens, num_tokens)


_TOLD: Final[Mapping[ServerKind, Callable[[Added, int], Told]]] = {
    "llama_cpp": _llama_cpp,
    "tensorrt_llm": _tensorrt_llm,
    "openai": lambda added, num_tokens: told.NOTHING,
}


def times_of(added: Added) -> ServerTimes:
    if added.metrics is not None:
        found = added.metrics
        return ServerTimes(
            *map(_seconds, (found.queue_time_ms, found.time_to_first_token_ms, found.generation_time_ms))
        )
    if added.timings is not None:
        return ServerTimes(None, _seconds(added.timings.prompt_ms), _seconds(added.timings.predicted_ms))
    return ServerTimes()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
