"""The body of a request: a job and its sampling settings in the words of each kind of server.

Every setting is sent, also where it is the default: vLLM and SGLang take defaults from the model's files, and llama.cpp
cuts improbable tokens by default. What a server lacks or means in another way never comes here:
alphaloop/messages/capabilities.py says what each can do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from alphaloop.engine import Sampling
from alphaloop.experiment.observe import Expected, TrialGroup
from alphaloop.inside_vllm.drafting import (
    CONTROL_SHARE,
    DRAFTER,
    EXPECTED,
    FILLER,
    LOOKUP,
    NUM_DRAFT_TOKENS,
    REPORTS,
    SUBJECT,
    TASK,
    TREATMENT,
)
from alphaloop.messages import Body as JobBody
from alphaloop.messages import ChatMessage, Constraint, Job
from alphaloop.server_identity import ServerKind

Body = dict[str, Any]

_WHOLE_TEXT: Final = 1 << 20  #: tokens: more than any context of a model that llama.cpp runs; it takes no -1


@dataclass(frozen=True, slots=True)
class AskedDrafts:
    """The drafts that a request asks a server for which follows requests in that."""

    num_draft_tokens: int  #: most tokens of a draft; 0: it decodes vanilla
    is_lookup: bool = False  #: by alphaloop's look-up, and not by the server's own drafter

    def __str__(self) -> str:
        return f"{self.num_draft_tokens} (look-up)" if self.is_lookup else str(self.num_draft_tokens)


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
    asked: AskedDrafts | None = None,
    measured: Measured | None = None,
) -> Body:
    """The JSON of a request for a job that this kind of server can serve.

    `asked`: of vLLM with our scheduler class; None: its own drafter drafts, with the k of the server's start.
    """
    body: Body = {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "n": sampling.n,
        "stream": stream,
    }
    body |= _prompt_of(kind, job)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if stream:
        body["stream_options"] = {"include_usage": True}
    body |= _ADDED[kind](sampling) | _asking_for_counts(kind, job) | _priority(kind, job)
    body |= _unusual(kind, sampling)
    num_logprobs = sampling.num_logprobs
    if kind == "llama_cpp" and sampling.n > 1:
        num_logprobs = num_logprobs or 0  # the tokens of all texts are counted by them: its usage is that of one
    if num_logprobs is not None:
        body |= _logprobs(kind, num_logprobs, is_chat=job.body.messages is not None)
    if sampling.constraint is not None:
        body |= constrained(kind, sampling.constraint, job.body)
    if asked is not None:
        drafter = {DRAFTER: LOOKUP} if asked.is_lookup else {}
        body["vllm_xargs"] = {**body.get("vllm_xargs", {}), NUM_DRAFT_TOKENS: asked.num_draft_tokens, **drafter}
    if measured is not None:
        body["vllm_xargs"] = {**body.get("vllm_xargs", {}), **_experiment(measured)}
    return body


@dataclass(frozen=True, slots=True)
class Measured:
    """What our scheduler class inside vLLM gets: the reply shall bring what it measured of its steps."""

    control_share: float | None = None  #: of the experiment; None: as it was
    trial: TrialGroup | None = None  #: None: the request is not on trial
    expected: Expected | None = None
    is_filler: bool = False  #: drafts that say nothing, each as long as asked for, to time a pass


def _experiment(measured: Measured) -> Body:
    said: Body = {REPORTS: 1}
    if measured.control_share is not None:
        said[CONTROL_SHARE] = measured.control_share
    if measured.is_filler:
        said[DRAFTER] = FILLER
    if measured.trial is not None:
        said |= {SUBJECT: measured.trial.subject, TREATMENT: measured.trial.treatment.drafter}
        if measured.expected is not None:
            said[EXPECTED] = list(measured.expected)
    return said


def tokenize_body_of(model: str, job: Job) -> Body:
    """The JSON of a request to count the tokens of a job's prompt, as vLLM takes it."""
    fields = _prompt_of("vllm", job)
    return {"model": model, **{name: fields[name] for name in _COUNTED if name in fields}}


#: Fields of vLLM's /tokenize.
_COUNTED: Final = (
    "messages",
    "prompt",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
#: Fields of a conversation that go on as they were sent.
_AS_SENT: Final = frozenset(
    ["reasoning_effort", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"]
)
_PLAIN_FIELDS: Final = frozenset({"role", "content"})


def _prompt_of(kind: ServerKind, job: Job) -> Body:
    """What the model reads: a prompt, or messages and all else that goes into the chat template."""
    job_body = job.body
    body: Body = {}
    if job_body.truncate_prompt_tokens is not None:
        body["truncate_prompt_tokens"] = job_body.truncate_prompt_tokens
    if job_body.messages is None:
        return body | {"prompt": job_body.prompt}
    body["messages"] = [_message(kind, message) for message in job_body.messages]
    body |= {name: getattr(job_body, name) for name in sorted(_AS_SENT & job_body.model_fields_set)}
    if job_body.tools is not None:
        body |= _tools(kind, job_body)
    return body


def _message(kind: ServerKind, message: ChatMessage) -> Body:
    if message.model_fields_set <= _PLAIN_FIELDS:
        return {"role": message.role, "content": message.content}
    fields = message.model_dump(mode="json", exclude_none=True)
    if message.content is None:
        fields["content"] = None
    if message.reasoning is not None and kind in ("sglang", "llama_cpp"):
        fields["reasoning_content"] = fields.pop("reasoning")
    return fields


def _tools(kind: ServerKind, job_body: JobBody) -> Body:
    """Tools and which of them is called.

    Only OpenAI knows `allowed_tools`, and llama.cpp takes a named one for `auto`: the others of these are left out.
    """
    choice: str | Mapping[str, Any] = job_body.tool_choice or "auto"  # TensorRT-LLM's default is none
    tools: Sequence[Mapping[str, Any]] = job_body.tools or ()
    if isinstance(choice, Mapping) and kind != "openai" and (kind == "llama_cpp" or choice["type"] != "function"):
        tools, choice = job_body.callable_tools, "required" if job_body.must_call else "auto"
    body: Body = {"tools": list(tools), "tool_choice": choice}
    if job_body.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = job_body.parallel_tool_calls
    elif kind == "llama_cpp":
        body["parallel_tool_calls"] = True  # as everywhere else
    return body


#: Settings that are sent in every request, under a name of the server's own, or not at all.
_OTHERWISE: Final = frozenset(
    {
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed", "stop"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "stop_token_ids"),
        *("num_logprobs", "constraint", "form_bucket", "predicted", "bucket"),
    }
)
#: All other settings, which are sent as they are named where they are not these defaults. Where a server lacks one,
#: the capabilities say so.
_AS_NAMED: Final = {setting.name: setting.default for setting in fields(Sampling) if setting.name not in _OTHERWISE}


def _unusual(kind: ServerKind, sampling: Sampling) -> Body:
    body: Body = {}
    for name, default in _AS_NAMED.items():
        if (value := getattr(sampling, name)) != default:
            body[name] = list(value) if isinstance(value, tuple) else value
    if kind == "sglang" and body.pop("include_stop_str_in_output", False):
        body["no_stop_trim"] = True
    return body


def _logprobs(kind: ServerKind, num_ranked: int, *, is_chat: bool) -> Body:
    # llama.cpp and TensorRT-LLM report no logprobs for 0 likeliest tokens; the reader leaves out the one too many.
    num_sent = max(1, num_ranked) if kind in ("llama_cpp", "tensorrt_llm") else num_ranked
    return {"logprobs": True, "top_logprobs": num_sent} if is_chat else {"logprobs": num_sent}


def constrained(kind: ServerKind, constraint: Constraint, job_body: JobBody) -> Body:
    """The constraint in the server's words, which has some for it: see the table of capabilities.

    The grammar's dialect is its sender's matter: each server reads one of its own.
    """
    what, source = constraint.kind, constraint.source
    if what == "tools":
        return {}  # tool_choice says it
    if kind == "vllm":
        if job_body.structured_outputs is not None:
            return {"structured_outputs": job_body.structured_outputs}
        return {"response_format": job_body.response_format}
    if what in ("json_schema", "json_object"):
        return _json(kind, constraint, job_body)
    if what == "choice" and kind == "llama_cpp":
        return {"grammar": "root ::= " + " | ".join(map(_quoted, json.loads(source)))}
    if what == "choice":
        what, source = "regex", "|".join(map(_escaped, json.loads(source)))
    if kind == "sglang":
        return {"regex" if what == "regex" else "ebnf": source}
    if kind == "tensorrt_llm":
        form = "regex" if what == "regex" else "ebnf"
        return {"response_format": {"type": form, form: source}}
    return {"grammar": source}


def _json(kind: ServerKind, constraint: Constraint, job_body: JobBody) -> Body:
    if kind == "llama_cpp" and job_body.messages is None:  # its form of prompts has no response_format
        return {"json_schema": json.loads(constraint.source or '{"type":"object"}')}
    if job_body.response_format is not None:
        return {"response_format": job_body.response_format}
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": json.loads(constraint.source)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _escaped(choice: str) -> str:
    """A text as an expression that only it matches: what has a meaning in any dialect is escaped, nothing else is."""
    return re.sub(r"[\\.^$|?*+()\[\]{}/-]", r"\\\g<0>", choice)


def _quoted(choice: str) -> str:
    """A text as a literal of GBNF."""
    return '"' + re.sub(r'["\\\x00-\x1f]', lambda match: f"\\x{ord(match[0]):02X}", choice) + '"'


def _asking_for_counts(kind: ServerKind, job: Job) -> Body:
    """Fields that make a server report tokens and drafts, beside its options; and the task, for look-up in vLLM."""
    if kind == "vllm":
        # Probes and controls repeat prompts: a server with our look-up shall not find their own earlier texts for them.
        task = {"vllm_xargs": {TASK: job.task}} if job.purpose == "traffic" else {}
        return {"return_token_ids": True} | task
    return {"return_spec_tokens_details": True} if kind == "sglang" else {}


def _priority(kind: ServerKind, job: Job) -> Body:
    """The job's priority, for the schedulers that may order requests by it; where they were not started so, they do not
    look at it.

    For vLLM (`--scheduling-policy priority`) the lower value goes first, for SGLang (`--enable-priority-scheduling`)
    the higher one.
    """
    if not job.priority or kind not in ("vllm", "sglang"):
        return {}
    return {"priority": -job.priority if kind == "vllm" else job.priority}


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
    body: Body = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty}
    if sampling.repetition_penalty != 1:
        body["repeat_last_n"] = _WHOLE_TEXT  # its default are the last 64 tokens; others count all
    return body


_ADDED: Final[Mapping[ServerKind, Callable[[Sampling], Body]]] = {
    "vllm": lambda sampling: {"top_k": sampling.top_k} | _of_both(sampling),
    "sglang": lambda sampling: {"top_k": sampling.top_k or -1} | _of_both(sampling),
    "llama_cpp": _llama_cpp,
    "tensorrt_llm": _tensorrt_llm,
    "openai": lambda sampling: {},
}
