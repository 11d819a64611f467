"""A model's facts from its config and tokenizer. Weights are never read: their shapes follow from the config."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from alphaloop.errors import UnsupportedModel
from alphaloop.settings.models import Dtype
from worker.decoding.drafters.draft_vocabulary import read_draft_vocabulary, restrict_head
from worker.decoding.memory import kv_bytes_per_token, pass_bytes
from worker.decoding.models import as_unsupported, attention_of, end_tokens, refuse_form, refuse_tokenizer
from worker.decoding.pairing.pair import ModelFacts
from worker.decoding.sources import find_description
from worker.decoding.text_facts import LONGEST_DEFAULT_CONTEXT, text_config, text_facts


def facts_of(
    source: str, *, dtype: Dtype, revision: str | None = None, context_length: int | None = None
) -> ModelFacts:
    """Read the facts of the model at `source`, served in `dtype` with at most `context_length` tokens.

    If `context_length` is None, the context is the model's own, at most 8192, as for a target. Takes a second for a
    folder, and ten to twenty for a GGUF file that was never loaded here. Raises ModelNotFound, or UnsupportedModel if
    config or tokenizer cannot be read. For a model that can be read but not decoded, `refusal` says why.
    """
    path = find_description(source, revision)
    where: dict[str, Any] = {"trust_remote_code": False}
    folder = path
    if path.is_file():
        where["gguf_file"], folder = path.name, path.parent
    with as_unsupported(source):
        config: Any = AutoConfig.from_pretrained(folder, **where)
        facts = text_facts(config)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **where)
        model = _shapes(config, None if path.is_file() else path)
    served = min(facts.longest, context_length or LONGEST_DEFAULT_CONTEXT)
    width: torch.dtype = getattr(torch, dtype)
    num_rows = int(model.get_input_embeddings().weight.shape[0])
    return ModelFacts(
        source=source,
        family=config.model_type,
        refusal=facts.refusal_at(served) or _refusal(model, tokenizer),
        tokens={index: token for token, index in tokenizer.get_vocab().items()},
        num_rows=num_rows,
        end_tokens=end_tokens(model, tokenizer),
        bos_token=tokenizer.bos_token_id,
        pad_token=tokenizer.pad_token_id,
        chat_template=tokenizer.chat_template,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        num_parameters_read=_num_read(model),
        dtype=dtype,
        itemsize=width.itemsize,
        kv_bytes_per_token=kv_bytes_per_token(config, width),
        pass_bytes_per_row=pass_bytes(num_rows, 1),
        context_length=served,
    )


def _shapes(config: Any, folder: Path | None) -> Any:
    """The model without numbers: every parameter has its shape and no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention_of(config), trust_remote_code=False
        )
    if folder is not None:
        with contextlib.suppress(OSError):  # not every folder has one; then the config's own value counts
            model.generation_config = GenerationConfig.from_pretrained(folder)
        if (token_ids := read_draft_vocabulary(folder)) is not None:
            restrict_head(model, token_ids)
    return model


def _refusal(model: Any, tokenizer: Any) -> str | None:
    try:
        refuse_form(model)
        refuse_tokenizer(tokenizer, model)
    except UnsupportedModel as error:
        return error.message
    return None


def _num_read(model: Any) -> int:
    """Parameters that a pass of width 1 reads."""
    config = text_config(model.config)
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    head = model.get_output_embeddings()
    rows = model.get_input_embeddings().weight
    num_read = 0.0
    for name, weight in model.named_parameters():
        if weight is rows and (head is None or head.weight is not rows):
            continue  # a pass reads only one row of it
        num_read += weight.numel() * (share if ".experts." in name else 1)
    return round(num_read)


# The library's progress bars and advice would stand between our own lines.
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
