"""Both drafters on texts that vLLM wrote, in vLLM's own environment: tokens a round, and the time of a proposal.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.engines.replayed_proposers texts.jsonl --k 4,8,12

`texts.jsonl` is from `benchmarks.engines.lookup --out`. Greedy texts are the target's own whatever drafts, so a replay
counts what a server with that drafter would. Rows are filled, called and accepted as vLLM does it. Where a text came
from a server with the same drafter and k, its rounds must be those that the server counted: the exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from alphaloop.inside_vllm.proposer import LookupProposer

_MAX_TOKENS: Final = 2048
_BATCHES: Final = (1, 8)


def lookup(k: int, num_rows: int) -> Any:
    """Ours."""
    return LookupProposer(_config(k, num_rows))


def ngram(k: int, num_rows: int) -> Any:
    """vLLM's own, called as ours."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    found = NgramProposer(_config(k, num_rows))
    return SimpleNamespace(propose=lambda *given: found.propose(k, *given))


def _config(k: int, num_rows: int) -> Any:
    return SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(worker_cls="auto", tensor_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=k, prompt_lookup_min=2, prompt_lookup_max=4),
        model_config=SimpleNamespace(max_model_len=_MAX_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=num_rows),
    )


def replay(drafter: Any, texts: Sequence[dict[str, Any]], times: list[float]) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of each round that drafted, text by text; all texts at once, in a row each."""
    rows = np.zeros((len(texts), _MAX_TOKENS), dtype=np.int32)
    ends = [len(one["prompt_ids"]) for one in texts]
    for row, one in zip(rows, texts, strict=True):
        whole = [*one["prompt_ids"], *one["token_ids"]]
        row[: len(whole)] = whole
    lasts = [len(one["prompt_ids"]) + len(one["token_ids"]) for one in texts]
    drafts: list[list[int]] = [[] for _ in texts]
    rounds: list[list[tuple[int, int]]] = [[] for _ in texts]
    while any(end < last for end, last in zip(ends, lasts, strict=True)):
        sampled = []
        for i, (row, last) in enumerate(zip(rows, lasts, strict=True)):
            room = last - ends[i]
            agreed = next(
                (n for n, token in enumerate(drafts[i]) if n >= room or token != row[ends[i] + n]), len(drafts[i])
            )
            if drafts[i] and room:
                rounds[i].append((len(drafts[i]), agreed))
            num_new = min(agreed + 1, room)
            sampled.append(row[ends[i] : ends[i] + num_new].tolist())
            ends[i] += num_new
        begin = time.perf_counter()
        drafts = drafter.propose(sampled, np.array(ends), rows)
        times.append(time.perf_counter() - begin)
    return rounds


def _num_agreed(draft: Sequence[int], behind: Sequence[int]) -> int:
    pairs = zip(draft, behind, strict=False)
    return next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(draft), len(behind)))


def _batches(texts: Sequence[dict[str, Any]], size: int) -> Iterator[Sequence[dict[str, Any]]]:
    for begin in range(0, len(texts), size):
        yield texts[begin : begin + size]


@dataclass(frozen=True, slots=True)
class Replayed:
    """All texts, read by one drafter."""

    rounds: list[list[tuple[int, int]]]  #: (drafted, accepted), text by text
    times_us: Any  #: of each call of `propose`, whatever its rows

    @classmethod
    def of(cls, drafter: Any, texts: Sequence[dict[str, Any]], size: int) -> Replayed:
        """`size` texts at once. The first of them are read twice, and timed the second time: n-grams are compiled."""
        replay(drafter, texts[:size], [])
        times: list[float] = []
        rounds = [one for batch in _batches(texts, size) for one in replay(drafter, batch, times)]
        return cls(rounds, 1e6 * np.array(times))


def num_other(texts: Sequence[dict[str, Any]], replayed: Replayed) -> int:
    """Texts whose rounds are other than those that their server counted.

    The last round is left out: it may reach beyond the end of the text, where only the server knows what followed.
    """
    told = [list(zip(one["drafted"], one["accepted"], strict=True)) for one in texts]
    return sum(one[:-1] != two[:-1] for one, two in zip(told, replayed.rounds, strict=True))


def main() -> int:
    """Print a line for each drafter and k."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.replayed_proposers", description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--k", type=lambda text: [int(one) for one in text.split(",")], default=[4])
    parser.add_argument("--servers-k", type=int, default=4, help="k of the servers that wrote the texts")
    options = parser.parse_args()
    found = [json.loads(line) for line in options.texts.read_text(encoding="utf-8").splitlines()]
    failed = False
    for name, make in (("ngram", ngram), ("lookup", lookup)):
        own = [one for one in found if one["server"] == name]
        others = num_other(own, Replayed.of(make(options.servers_k, 1), own, 1)) if own else 0
        print(f"{name}: {others} of {len(own)} texts have other rounds than its server counted")
        failed |= others > 0
        texts = [one for one in found if one["server"] == "plain"] or own
        num_tokens = sum(len(one["token_ids"]) for one in texts)
        for k in options.k:
            alone, together = (Replayed.of(make(k, size), texts, size) for size in _BATCHES)
            drafted = sum(one for rounds in alone.rounds for one, _ in rounds)
            num_rounds = num_tokens - sum(one for rounds in alone.rounds for _, one in rounds)
            times = ", ".join(
                f"{size} at once median {np.median(took):.0f} us p99 {np.quantile(took, 0.99):.0f} us"
                for size, took in zip(_BATCHES, (alone.times_us, together.times_us), strict=True)
            )
            print(
                f"{name}, k = {k}: {num_tokens / num_rounds:.3f} tokens and {drafted / num_rounds:.3f} drafted ones "
                f"a round; {times}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
