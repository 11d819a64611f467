"""The body of a request: a job and its sampling settings in the words of each kind of server.

Every setting is sent, also where it is the default: vLLM and SGLang take defaults from the model's files, and llama.cpp
cuts improbable tokens unless told otherwise. A setting that a server lacks or means in another way is refused, because
a text sampled otherwise would be a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from alphaloop.errors import InvalidField
from alphaloop.inside_vllm.proposer import NUM_DRAFT_TOKENS, TASK
from alphaloop.messages import Job
from alphaloop.server_identity import ServerKind
from worker.engine import Sampling

Body = dict[str, Any]

_WHOLE_TEXT: Final = 1 << 20  #: tokens: more than any context of a model that llama.cpp runs; it takes no -1


def path_of(job: Job) -> str:
    """Where the request goes: a prompt is continued as it stands, messages get the server's chat template."""
    return "/chat/completions" if job.body.messages is not None else "/completions"


def body_of(
    kind: ServerKind,
    model: str,
    job: Job,
    sampling: Sampling,
    *,
    stream: bool,
    num_draft_tokens: int | None = None,
) -> Body:
    """The JSON of a request. Raises InvalidField for a setting that this kind of server cannot follow.

    `num_draft_tokens`: most tokens of a draft, of vLLM with our look-up; None: as the server was started.
    """
    body: Body = {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "n": 1,
        "stream": stream,
    }
    body |= _prompt_of(job)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if stream:
        body["stream_options"] = {"include_usage": True}
    body |= _ADDED[kind](sampling) | _asking_for_counts(kind, job)
    if num_draft_tokens is not None:
        body["vllm_xargs"] = {**body.get("vllm_xargs", {}), NUM_DRAFT_TOKENS: num_draft_tokens}
    return body


def tokenize_body_of(model: str, job: Job) -> Body:
    """The JSON of a request to count the tokens of a job's prompt, as vLLM takes it."""
    return {"model": model, **_prompt_of(job)}


def _prompt_of(job: Job) -> Body:
    if job.body.messages is not None:
        return {"messages": [{"role": said.role, "content": said.content} for said in job.body.messages]}
    return {"prompt": job.body.prompt}


def refuse_settings(kind: ServerKind, sampling: Sampling, *, drafts: bool) -> None:
    """Raise InvalidField for a setting that this kind of server cannot follow, or cannot while it drafts."""
    _ADDED[kind](sampling)
    if drafts and kind == "vllm":
        # vllm/sampling_params.py, _validate_spec_decode: answered with 400.
        _refuse("vLLM with drafts", {"min_p": sampling.min_p, "logit_bias": sampling.logit_bias})


def _asking_for_counts(kind: ServerKind, job: Job) -> Body:
    """What must be asked for, where a server's options alone do not make it tell; and the task, for look-up in vLLM."""
    if kind == "vllm":
        # Probes and controls repeat prompts: a server with our look-up shall not find their own earlier texts for them.
        told = {"vllm_xargs": {TASK: job.task}} if job.purpose == "traffic" else {}
        return {"return_token_ids": True} | told
    return {"return_spec_tokens_details": True} if kind == "sglang" else {}


def _of_both(sampling: Sampling) -> Body:
    return {
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def _tensorrt_llm(sampling: Sampling) -> Body:
    added = _of_both(sampling) | {"top_k": sampling.top_k}
    defaults = {"min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "top_k": 0}
    return {name: value for name, value in added.items() if value != defaults[name]}


def _llama_cpp(sampling: Sampling) -> Body:
    _refuse(
        "llama.cpp",
        {
            "stop_token_ids": sampling.stop_token_ids,
            # It counts the prompt's tokens too, and OpenAI's form means those of the text alone.
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
        },
    )
    body: Body = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty}
    if sampling.repetition_penalty != 1:
        body["repeat_last_n"] = _WHOLE_TEXT  # its default are the last 64 tokens; others count all
    return body


def _openai(sampling: Sampling) -> Body:
    _refuse(
        "OpenAI's form",
        {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "stop_token_ids": sampling.stop_token_ids,
        },
    )
    return {}


def _refuse(whose: str, unknown: Mapping[str, object]) -> None:
    for name, value in unknown.items():
        if value:
            raise InvalidField(
                f"{whose} has no such setting, or another one of this name",
                field=f"body.{name}",
                hint="leave it out, or route the task to a server of another kind",
            )


_ADDED: Final[Mapping[ServerKind, Callable[[Sampling], Body]]] = {
    "vllm": lambda sampling: {"top_k": sampling.top_k} | _of_both(sampling),
    "sglang": lambda sampling: {"top_k": sampling.top_k or -1} | _of_both(sampling),
    "llama_cpp": _llama_cpp,
    "tensorrt_llm": _tensorrt_llm,
    "openai": _openai,
}
