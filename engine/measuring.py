"""Timing a round's parts on this device, in scratch slots over scratch texts: nothing that runs is touched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

import torch

from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed
from engine.network.language_model import LanguageModel
from engine.network.operations import best_tokens
from engine.network.passes import Read
from engine.proposal import Ask, Drafter
from engine.sampling import TokenChooser
from engine.verification import verify_greedy

_NUM_WARM_UP: Final = 1
_GREEDY: Final = Sampling(max_tokens=1, temperature=0.0)
_NO_TASK: Final = ""  # what is measured is remembered for no task


@torch.inference_mode()
def measure_pass_ms(model: LanguageModel, batch: int, width: int, context: int, num_samples: int) -> float:
    """Median milliseconds of a pass of `width` columns for `batch` sequences, with its greedy verification."""
    generator = torch.Generator().manual_seed(batch * 1000 + width)
    context = min(context, model.num_positions - width)
    token_ids = torch.randint(0, model.num_rows, (batch, width), generator=generator)
    cache = model.new_cache(batch)
    rows = [cache.acquire() for _ in range(batch)]
    texts: list[list[int]] = token_ids.tolist()
    reads = [Read(row, tokens, num_logits=width) for row, tokens in zip(rows, texts, strict=True)]

    def one_pass() -> None:
        best, _ = best_tokens(model.read(cache, reads))
        for row, tokens in enumerate(texts):
            verify_greedy(best[row * width : (row + 1) * width], tokens[1:])

    with _measuring(f"{batch} sequences of width {width}"):
        # Keys that were written take as long to read as any others, and reading a prompt takes longer than all the
        # passes. Memory that nothing was written to is not there, and so is read in no time.
        cache.write_zeros(batch, context + width)
        for row in rows:
            cache.lengths[row] = context
        return _median_ms(one_pass, num_samples)


@torch.inference_mode()
def measure_prefill_ms(model: LanguageModel, num_tokens: int, num_samples: int) -> float:
    """Median milliseconds to read a prompt of `num_tokens` into an empty slot, until its first token is known."""
    generator = torch.Generator().manual_seed(num_tokens)
    prompt = torch.randint(0, model.num_rows, (num_tokens,), generator=generator).tolist()
    cache = model.new_cache(1)

    def one_prefill() -> None:
        slot = cache.acquire()
        int(model.prefill(cache, slot, prompt).argmax())  # reading the result waits for the GPU
        cache.release(slot)

    with _measuring(f"a prompt of {num_tokens} tokens"):
        return _median_ms(one_prefill, num_samples, num_warm_up=0)


@torch.inference_mode()
def measure_draft_ms(drafter: Drafter, batch: int, width: int, context: int, num_samples: int) -> float:
    """Median milliseconds to take in a round's tokens and propose `width - 1` more for each of `batch` sequences.

    Between two rounds half of each chain is accepted, and a token follows that was not drafted.
    """
    texts = [_some_text(row, context) for row in range(batch)]
    asks = [_ask(f"{row}", text, width - 1) for row, text in enumerate(texts)]

    def one_round() -> None:
        for proposal, text in zip(drafter.propose(asks), texts, strict=True):
            if proposal.parents is None:
                text += proposal.tokens[: len(proposal.tokens) // 2]
            text.append(_token(len(text)))

    with _measuring(f"{batch} proposals of {width - 1} tokens by {drafter.state.name}"):
        try:
            for ask, text in zip(asks, texts, strict=True):
                drafter.open(ask.job_id, text, _GREEDY, _NO_TASK)
            return _median_ms(one_round, num_samples)
        finally:
            for ask in asks:
                drafter.close(ask.job_id)


@torch.inference_mode()
def measure_draft_prefill_ms(drafter: Drafter, num_tokens: int, num_samples: int) -> float:
    """Median milliseconds until a prompt of `num_tokens` has its first proposal, of one token."""
    numbers = count()

    def one_prefill() -> None:
        # Another text each time: a drafter may know one that it has read.
        text = _some_text(next(numbers), num_tokens)
        ask = _ask("0", text, 1)
        drafter.open(ask.job_id, text, _GREEDY, _NO_TASK)
        try:
            drafter.propose([ask])
        finally:
            drafter.close(ask.job_id)

    with _measuring(f"how {drafter.state.name} reads {num_tokens} tokens"):
        return _median_ms(one_prefill, num_samples, num_warm_up=0)


@contextmanager
def _measuring(what: str) -> Iterator[None]:
    """Whatever goes wrong is a DecodeFailed: drafters and devices raise anything."""
    try:
        yield
    except Exception as error:
        raise DecodeFailed(f"measuring {what} failed: {type(error).__name__}: {error}") from error


def _ask(name: str, text: list[int], num_tokens: int) -> Ask:
    """Its job_id holds a character that no job's can: nothing running is meant."""
    job_id = f"\0measuring-{name}"
    return Ask(job_id, text, num_tokens, TokenChooser(job_id, _GREEDY, len(text)), is_timed=True)


def _some_text(number: int, num_tokens: int) -> list[int]:
    return [_token(number + i) for i in range(max(1, num_tokens))]


def _token(position: int) -> int:
    """Repeats itself, so that look-up finds something; small, so that every vocabulary has it."""
    return 7 * position * position % 31


def _median_ms(run: Callable[[], object], num_samples: int, *, num_warm_up: int = _NUM_WARM_UP) -> float:
    for _ in range(num_warm_up):
        run()
    samples = []
    for _ in range(num_samples):
        began = time.perf_counter()
        run()
        samples.append(1000 * (time.perf_counter() - began))
    return statistics.median(samples)
