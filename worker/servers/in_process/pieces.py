"""From vLLM's outputs to the pieces of a reply, as its server would send them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from alphaloop.errors import ReplyInvalid
from alphaloop.server_identity import Answer
from worker.servers.forms import Choice, Piece, Usage, VllmMetrics, VllmSpeculation

_LEAST_LOGPROB = -9999.0  #: in place of -inf, as vLLM's server sends it


def piece_of(output: Any, num_tokens_before: int) -> tuple[Piece, int]:
    """The piece of one `vllm.RequestOutput` that holds what is new, and the text's tokens up to it.

    Counts and times are in the last one. Raises ReplyInvalid for an output of another form.
    """
    try:
        (found,) = output.outputs
        num_tokens = num_tokens_before + len(found.token_ids)
        choice = Choice(
            index=found.index, text=found.text, finish_reason=found.finish_reason, token_ids=tuple(found.token_ids)
        )
        if not output.finished:
            return Piece(choices=(choice,)), num_tokens
        usage = Usage(prompt_tokens=len(output.prompt_token_ids), completion_tokens=num_tokens)
        return Piece(choices=(choice,), usage=usage, metrics=_metrics(output.metrics, found)), num_tokens
    except (AttributeError, TypeError, ValueError) as error:
        kind = "ValidationError" if isinstance(error, ValidationError) else type(error).__name__
        raise ReplyInvalid(
            f"vLLM's output has another form than that of the versions that alphaloop knows: {kind}",
            hint="install the version of vLLM that alphaloop[vllm] names",
        ) from None


def answer_of(output: Any) -> Answer:
    """The text of a finished output, and the log-probabilities of the likeliest first tokens."""
    (found,) = output.outputs
    first = found.logprobs[0] if found.logprobs else {}
    return Answer(found.text, {one.decoded_token: max(one.logprob, _LEAST_LOGPROB) for one in first.values()})


def _metrics(times: Any, found: Any) -> VllmMetrics:
    """`metrics` as vLLM's server computes them (vllm/entrypoints/generate/base/serving.py)."""
    drafted = found.spec_decode_metrics
    return VllmMetrics(
        queue_time_ms=_between_ms(times, "queued_ts", "scheduled_ts"),
        time_to_first_token_ms=_between_ms(times, "scheduled_ts", "first_token_ts"),
        generation_time_ms=_between_ms(times, "first_token_ts", "last_token_ts"),
        speculative_decoding=None if drafted is None else VllmSpeculation.model_validate(drafted.to_dict()),
    )


def _between_ms(times: Any, began: str, ended: str) -> float | None:
    if times is None or not (getattr(times, began) > 0 and getattr(times, ended) > 0):
        return None
    return max(0.0, 1000 * float(getattr(times, ended) - getattr(times, began)))
