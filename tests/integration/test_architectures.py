"""Tiny models of several architectures, one of each kind, write what transformers' own `generate` writes.

Greedy, in float32, with prompts longer than every window that a config names. Each architecture gets random weights, a
folder of safetensors, and a tokenizer; the engine loads that folder as a worker does. It decodes prompts of several
lengths together, half of them with look-up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

import engine as _engine  # noqa: F401  # before torch computes: it settles how threads wait
from alphaloop.engine import Generation, PreparedJob, Sampling
from benchmarks.exactness import first_difference
from benchmarks.jobs import PromptJob, forced
from engine.own import TransformersEngine
from tests.fixtures.models import engine_over, finish

WINDOW: Final = 16  #: of every layer that has one: shorter than every prompt
PROMPT_LENGTHS: Final = (19, 33, 64, 150)  #: characters, which are tokens
NUM_TOKENS: Final = 24  #: that are generated
NUM_LAYERS: Final = 4
SEED: Final = 20_251_126
SPECIAL: Final = ("<eos>", "<user>")

#: What every config gets, where it has the field.
TINY: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 0,
}
MIXED: Final = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOWED: Final[Mapping[str, Any]] = {"sliding_window": WINDOW, "layer_types": MIXED}
EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
LATENT: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type of transformers, and what makes it tiny beside `TINY`."""

    model_type: str
    changes: Mapping[str, Any]
    text: Mapping[str, Any] | None = None  #: of the text model, where the config holds several models

    def config(self, vocab_size: int) -> Any:
        """The tiny config."""
        kind: Any = transformers.CONFIG_MAPPING[self.model_type]
        if self.text is None:
            return kind(**_known(kind(), {**TINY, "vocab_size": vocab_size, **self.changes}))
        text = kind().get_text_config()
        fields = _known(text, {**TINY, "vocab_size": vocab_size, **self.text})
        return kind(text_config=fields, **self.changes)


EXACT: Final = (
    # A config that holds several models, with windows of the text model only.
    Architecture(
        "gemma3",
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWED},
    ),
    # One window for all layers, computed by transformers' modules.
    Architecture("phi3", {"sliding_window": WINDOW}),
    # Windows, and scores that torch's attention cannot cap.
    Architecture("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWED}),
    # Latent attention: a key and a value of another size.
    Architecture("deepseek_v3", {**EXPERTS, **LATENT}),
    Architecture("falcon", {"multi_query": True, "parallel_attn": True}),
    # Heads whose size depends on the layer, and layers that share keys.
    Architecture(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 258,
            "num_kv_shared_layers": 1,
            **WINDOWED,
        },
    ),
)


@pytest.mark.parametrize("architecture", EXACT, ids=lambda architecture: architecture.model_type)
def test_it_writes_what_transformers_writes(architecture: Architecture, tmp_path: Path) -> None:
    build(architecture, tmp_path)
    prepared, generations = decode(
        engine_over(tmp_path, num_slots=len(PROMPT_LENGTHS), drafters={"lookup": {}}, dtype="float32")
    )
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reference.eval()
    for job, generation in zip(prepared, generations, strict=True):
        expected = generate(reference, job.token_ids)
        difference = first_difference(reference, job.token_ids, expected, generation.token_ids)
        assert difference is None or difference.is_near_tie, difference


def build(architecture: Architecture, folder: Path) -> None:
    """The architecture as a folder of safetensors with a tokenizer; the same weights in every run."""
    tokenizer = tiny_tokenizer()
    config = architecture.config(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                # As they are initialised, biases and norms that were forgotten would go unnoticed, and logits would be
                # near-ties.
                spread = 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
                parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """A tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=SPECIAL[0]
    )


def _known(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {*config.to_dict(), *config.attribute_map}
    return {name: value for name, value in fields.items() if name in names}


def decode(engine: TransformersEngine) -> tuple[list[PreparedJob], list[Generation]]:
    """All prompts together, every other one with look-up."""
    rng = random.Random(SEED)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
    texts = ["".join(rng.choice("ab cd\n") for _ in range(length)) for length in PROMPT_LENGTHS]
    prepared = [
        engine.prepare(PromptJob(str(number), "code", text, NUM_TOKENS).as_job(), sampling)
        for number, text in enumerate(texts)
    ]
    for number, job in enumerate(prepared):
        engine.admit(job, forced("lookup", 4) if number % 2 else forced())
    written = finish(engine)
    return prepared, [written[job.job.job_id] for job in prepared]


@torch.inference_mode()
def generate(reference: Any, prompt: Sequence[int]) -> list[int]:
    token_ids = torch.tensor([list(prompt)])
    output = reference.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]
