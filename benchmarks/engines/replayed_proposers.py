"""How long a proposal takes: texts that vLLM wrote are read again by both drafters, in vLLM's own environment.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.engines.replayed_proposers texts.jsonl [K]

`texts.jsonl` is from `benchmarks.engines.lookup --out`. Rows are filled, called and accepted as vLLM does it. Where a
text came from a server with the same drafter without memory, its rounds must be those that the server counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
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
    for begin in range(0, len(texts) - size + 1, size):
        yield texts[begin : begin + size]


def main() -> int:
    """Print microseconds a proposal, and whether the rounds are those of the server. 1 where they are not."""
    with open(sys.argv[1], encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    k = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    num_other = 0
    for name, make in (("ngram", ngram), ("lookup", lookup)):
        texts = [one for one in found if one["server"] == name]
        for size in _BATCHES:
            drafter = make(k, size)
            times: list[float] = []
            for batch in _batches(texts, size):
                told = [list(zip(one["drafted"], one["accepted"], strict=True)) for one in batch]
                played = replay(drafter, batch, times)
                # The last round of a text may reach beyond its end, where nothing is known.
                num_other += sum(one[:-1] != two[:-1] for one, two in zip(told, played, strict=True))
            took = 1e6 * np.array(times)
            print(
                f"{name}, {size} at once: {len(times)} proposals of {len(texts)} texts, mean {took.mean():.0f} us, "
                f"median {np.median(took):.0f}, p99 {np.quantile(took, 0.99):.0f}"
            )
    print(f"texts whose rounds are other than the server's: {num_other}")
    return int(num_other > 0)


if __name__ == "__main__":
    sys.exit(main())
