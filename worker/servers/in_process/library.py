"""The only module that imports vLLM: its engine is started here, asked here, and its errors are named here.

Written for vLLM 0.32. Its engine is a child process of this one (with tensor parallelism one child more for each GPU),
and `AsyncLLM` is its handle in this process.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import AsyncGenerator, Mapping
from multiprocessing import resource_tracker
from typing import Any, Final

from jinja2 import TemplateError

from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    EngineSick,
    PromptTooLong,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnavailable,
)
from alphaloop.messages import Job
from worker.engine import Sampling
from worker.servers.in_process.guard import Guard

#: Beside alphaloop[decode] it would replace that torch by another one.
INSTALL: Final = "in an environment of its own, without alphaloop[decode]: pip install 'alphaloop[vllm]'"
_END_S: Final = 15.0  #: for vLLM's processes to end by themselves
_MAX_SAID_CHARS: Final = 300
_TOO_LONG: Final = frozenset({"input_tokens", "input_text"})  #: what vLLM calls the setting at fault
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: What the server of vLLM asks its templates for, too.
_CHAT: Final = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "tokenize": False}


class RunningVllm:
    """One life of vLLM's engine. One event loop's thread uses it, the first one that asks for a text."""

    def __init__(self, engine: Any, guard: Guard, *, version: str, device: str) -> None:
        self._engine, self._guard = engine, guard
        self.version = version
        self.device = device  #: as a person would name it
        self.context_length = int(engine.model_config.max_model_len)  #: tokens of prompt and text together

    @property
    def is_dead(self) -> bool:
        """Whether its child process has ended or given up."""
        return bool(self._engine.errored)

    async def prompt_of(self, job: Job) -> Any:
        """The job's prompt in tokens, as vLLM's server makes them: a chat through the model's template.

        A mapping with `prompt_token_ids`. Raises PromptTooLong, RequestRefused or ServerUnavailable.
        """
        from vllm.renderers.params import ChatParams

        renderer = self._engine.renderer
        try:
            if job.body.messages is None:
                (prompt,) = await renderer.render_cmpl_async([{"prompt": job.body.prompt}])
                return prompt
            messages = [{"role": said.role, "content": said.content} for said in job.body.messages]
            _, (prompt,) = await renderer.render_chat_async([messages], ChatParams(chat_template_kwargs=_CHAT))
        except (TemplateError, TypeError, ValueError):  # no template, or one that does not take these messages
            raise RequestRefused("the model's chat template does not take these messages") from None
        except Exception as error:
            raise _error_of(error) from error
        return prompt

    async def outputs(
        self, prompt: Any, sampling: Sampling, request_id: str, *, is_streamed: bool, num_likeliest: int | None = None
    ) -> AsyncGenerator[Any, None]:
        """`vllm.RequestOutput`s: each with what is new where it is streamed, else one with the whole text.

        Closing the generator aborts the request. Raises what is described at `_error_of`.
        """
        try:
            params = _params(sampling, is_streamed=is_streamed, num_likeliest=num_likeliest)
            async for output in self._engine.generate(prompt, params, request_id):
                yield output
        except Exception as error:
            raise _error_of(error) from error

    def close(self) -> None:
        """End the child processes; blocks until they have ended."""
        self._engine.shutdown(timeout=_END_S)
        # vLLM shuts it down again when it is collected, and fails then where the interpreter is ending too.
        self._engine.shutdown = _nothing
        self._guard.close()


def start_vllm(engine_args: Mapping[str, Any]) -> RunningVllm:
    """Load the model; takes a minute or more, and blocks. The calling thread is used for nothing else.

    Raises ConfigError where vLLM is missing or refuses an option, and EngineSick where its engine does not come up.
    """
    _set_up_process()
    try:
        from vllm import AsyncEngineArgs, __version__
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(f"{error.name or 'vllm'} is not installed, or cannot be loaded", hint=INSTALL) from error
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(engine_args.keys() - known):
        raise ConfigError(f"vLLM {__version__} has no option {', '.join(unknown)}")
    try:
        config = AsyncEngineArgs(**engine_args).create_engine_config()
    except Exception as error:
        raise ConfigError(f"vLLM refuses its options: {_said(error)}") from error
    guard = Guard()
    try:
        engine = AsyncLLM.from_vllm_config(config)
    except Exception as error:
        guard.close()
        raise EngineSick(f"vLLM's engine did not start: {_said(error)}", hint="its own lines above say why") from error
    return RunningVllm(engine, guard, version=__version__, device=_device(current_platform))


def _nothing(timeout: float | None = None) -> None:
    """In place of a second shutdown."""


def _set_up_process() -> None:
    """What vLLM and its child processes take from this one."""
    # A fork of a process with many threads may hang for ever.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Its lines go through the worker's log from WARNING up. Its own form would show the texts of exceptions.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Its processes give themselves names, which would be written over the mark of their guard.
    os.environ["SPT_NOENV"] = "1"
    # Ctrl-C goes to all processes of a terminal, and vLLM's would end before the running jobs have. Child processes
    # inherit the mask of the thread that starts them. The tracker's own start would undo it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _device(platform: Any) -> str:
    try:
        return str(platform.get_device_name())
    except Exception:  # not every platform has a name
        return str(platform.device_type)


def _params(sampling: Sampling, *, is_streamed: bool, num_likeliest: int | None) -> Any:
    """Every setting is given, because vLLM fills gaps from the model's files."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams.from_optional(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        logprobs=num_likeliest,
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )


def _error_of(error: Exception) -> AlphaloopError:
    """The error of alphaloop's tree. vLLM's words may quote the prompt, so they are left out."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, AlphaloopError):
        return error
    if isinstance(error, EngineDeadError):
        return ServerUnavailable("vLLM's engine has died", hint="its own lines above say why")
    if isinstance(error, GracefulHTTPError):
        return ServerBusy("vLLM has too many requests in its queue")
    if isinstance(error, VLLMClientError):
        field = str(getattr(error, "parameter", None) or "")
        if field in _TOO_LONG:
            return too_long()
        named = f": {field}" if _NAME.fullmatch(field) else ""
        return RequestRefused(f"vLLM refused the request ({type(error).__name__}{named})")
    return ServerFailed(f"vLLM could not decode the request ({type(error).__name__})")


def too_long() -> PromptTooLong:
    """Prompt and text do not fit."""
    return PromptTooLong(
        "prompt and output do not fit the model's context",
        field="body",
        hint="shorten the prompt, or serve a model with a longer context",
    )


def _said(error: Exception) -> str:
    """Why the engine did not start: no prompt is near, so vLLM's own words may be shown, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_SAID_CHARS]
