"""What servers send: OpenAI's form, and what each kind adds to it. Other fields are ignored.

Read in November 2026 from the documentation and sources of vLLM 0.32, SGLang, llama.cpp and TensorRT-LLM. A whole reply
and an event of a stream are read alike: an event has `delta` in place of `message`, and most fields only at the end.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alphaloop.errors import ReplyInvalid

Count = Annotated[int, Field(ge=0, le=1 << 40)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Form(BaseModel):
    """A JSON object of a server's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


AnyForm = TypeVar("AnyForm", bound=Form)


def read_form(form: type[AnyForm], content: bytes) -> AnyForm:
    """The content in its form. Raises ReplyInvalid, which names the field and not what stood there."""
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in found["loc"]) or "the reply"
        raise ReplyInvalid(f"{path}: {found['type']}", hint="is the server of the kind that was named?") from None


class Said(Form):
    """`message` of a whole chat reply, `delta` of an event."""

    content: str | None = None
    #: What a parser of reasoning took out of the text: vLLM's name, and SGLang's, llama.cpp's and its own older one.
    reasoning: str | None = None
    reasoning_content: str | None = None


class SglangDrafts(Form):
    """What SGLang says of drafts, with `return_spec_tokens_details`."""

    spec_verify_ct: Count | None = None
    spec_num_correct_drafts: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_correct_drafts_histogram: tuple[Count, ...] | None = None


class SglangExtension(Form):
    """SGLang's `sglext`; no `spec_tokens_details` where nothing drafts."""

    spec_tokens_details: SglangDrafts | None = None


class TensorrtSpeculation(Form):
    """TensorRT-LLM's `speculative_decoding` of a choice, with `per_request_spec_decode_stats: true`."""

    num_spec_steps: Count
    total_accepted_draft_tokens: Count
    total_draft_tokens: Count
    acceptance_histogram: tuple[Count, ...] | None = None


class Choice(Form):
    """The one text of a reply."""

    index: int = 0
    text: str | None = None
    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    token_ids: tuple[Count, ...] | None = None  #: vLLM's, asked for with `return_token_ids`
    speculative_decoding: TensorrtSpeculation | None = None

    @property
    def words(self) -> str:
        """The text in it."""
        said = self.message or self.delta
        return self.text or (said.content if said else None) or ""

    @property
    def lacks_reasoning(self) -> bool:
        """Whether a part of the text was taken out of it."""
        said = self.message or self.delta
        return said is not None and bool(said.reasoning or said.reasoning_content)


class Usage(Form):
    """Tokens of prompt and text."""

    prompt_tokens: Count
    completion_tokens: Count


class VllmSpeculation(Form):
    """vLLM's `metrics.speculative_decoding`, with `--per-request-spec-decode-metrics`; the arrays are of `detailed`."""

    num_spec_steps: Count
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count
    acceptance_histogram: tuple[Count, ...] | None = None
    per_step_drafted: tuple[Count, ...] | None = None
    per_step_accepted: tuple[Count, ...] | None = None


class VllmMetrics(Form):
    """vLLM's `metrics`, with `--enable-per-request-metrics`."""

    queue_time_ms: Milliseconds | None = None
    time_to_first_token_ms: Milliseconds | None = None
    generation_time_ms: Milliseconds | None = None
    speculative_decoding: VllmSpeculation | None = None


class LlamaTimings(Form):
    """llama.cpp's `timings`; `draft_n` is absent where nothing was drafted, whatever the server is set to."""

    prompt_ms: Milliseconds | None = None
    predicted_ms: Milliseconds | None = None
    draft_n: Count | None = None
    draft_n_accepted: Count | None = None


class Failure(Form):
    """`error` of a refusal. Its message may quote the prompt, so it is read and never shown."""

    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    param: str | None = None
    n_prompt_tokens: Count | None = None  #: llama.cpp's, of a prompt that is too long
    n_ctx: Count | None = None


class Piece(Form):
    """A whole reply, or an event of a stream."""

    model: str | None = None
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    metrics: VllmMetrics | None = None
    timings: LlamaTimings | None = None
    sglext: SglangExtension | None = None
    error: Failure | str | None = None


class Refusal(Form):
    """The body of a reply that is not 200. vLLM's old form and SGLang's have the fields of `error` at the top."""

    error: Failure | str | None = None
    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    detail: str | list[object] | None = None


class ModelCard(Form):
    """A model of `GET /v1/models`."""

    class Meta(Form):
        """llama.cpp's facts of it."""

        n_ctx: Count | None = None

    id: str
    root: str | None = None
    max_model_len: Count | None = None  #: of vLLM and SGLang
    meta: Meta | None = None

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and text together; None where the server does not say."""
        return self.max_model_len or (self.meta.n_ctx if self.meta else None) or None


class Version(Form):
    """`/version` of vLLM and TensorRT-LLM, `/server_info` of SGLang, `/props` of llama.cpp."""

    version: str | None = None
    build_info: str | None = None


class Tokenized(Form):
    """vLLM's `POST /tokenize`."""

    count: Count
    max_model_len: Count


class ModelList(Form):
    """`GET /v1/models`."""

    data: tuple[ModelCard, ...]
