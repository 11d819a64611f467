"""Tiny models of more than sixty architectures: do they write what transformers' own `generate` writes?

    python -m benchmarks.architectures
    python -m benchmarks.architectures --only gemma3 --only mistral

Greedy, in float32, with prompts longer than every window that a config names. Each architecture gets random weights, a
folder of safetensors, and a tokenizer; the engine loads that folder as a worker does. It decodes prompts of several
lengths together, half of them with look-up. The texts must be those that `generate`
writes for each prompt alone. An architecture is *exact*, *refused* (by an error of ours, whose reason is printed),
*different*, or *failed* (any other error). Two texts may part where the two best logits are as good as equal: that is a
near-tie, and counts as exact. Last line: JSON. Exit status 1 where one is different or failed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import engine as _engine  # noqa: F401  # before torch computes: it settles how threads wait
from alphaloop.engine import Generation, PreparedJob, Sampling
from alphaloop.errors import AlphaloopError
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.exactness import first_difference
from benchmarks.jobs import PromptJob, forced
from benchmarks.reporting import console, parser_of, table_of
from engine.own import TransformersEngine, load_engine

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

    name: str
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


def _named(name: str, model_type: str | None = None, **changes: Any) -> Architecture:
    return Architecture(name, model_type or name, changes)


ARCHITECTURES: Final[tuple[Architecture, ...]] = (
    _named("apertus"),
    _named("arcee"),
    _named("biogpt"),
    _named("bitnet"),
    _named("bloom", n_layer=NUM_LAYERS, n_head=4),
    _named("codegen", rotary_dim=8, n_inner=96),
    _named("cohere"),
    _named("cohere2", **WINDOWED),
    _named("deepseek_v2", **EXPERTS, **LATENT),
    _named("deepseek_v3", **EXPERTS, **LATENT),
    _named("dots1", **EXPERTS, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1),
    _named("ernie4_5", head_dim=16),
    _named("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_num_shared_experts=1),
    _named("exaone4", **WINDOWED),
    _named("falcon", multi_query=False, parallel_attn=False),
    _named("falcon, alibi", "falcon", alibi=True, multi_query=False, parallel_attn=False),
    _named("falcon, multi_query", "falcon", multi_query=True, parallel_attn=True),
    _named("falcon, new decoder", "falcon", new_decoder_architecture=True, num_kv_heads=2),
    _named("falcon_h1"),
    _named("gemma", head_dim=16),
    _named("gemma2", head_dim=16, query_pre_attn_scalar=16, **WINDOWED),
    Architecture(
        "gemma3",
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
    _named("gemma3_text", head_dim=16, query_pre_attn_scalar=16, **WINDOWED),
    _named(
        "gemma4_text",
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=258,
        num_kv_shared_layers=1,
        **WINDOWED,
    ),
    _named("glm", head_dim=16),
    _named("glm4", head_dim=16),
    _named("glm4_moe", head_dim=16, **EXPERTS, first_k_dense_replace=1, n_group=1, topk_group=1),
    _named("gpt2"),
    _named("gpt_bigcode"),
    _named("gpt_neo", attention_types=[[["global", "local"], 2]], num_layers=NUM_LAYERS, window_size=WINDOW),
    _named("gpt_neox"),
    _named("gpt_oss", head_dim=16, **EXPERTS, **WINDOWED),
    _named("gptj", rotary_dim=8, n_inner=96),
    _named("granite"),
    _named("granitemoe", **EXPERTS),
    _named("helium", head_dim=16),
    _named("hunyuan_v1_dense", head_dim=16),
    _named("jamba", **EXPERTS, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1),
    _named("lfm2", layer_types=["conv", "full_attention", "conv", "full_attention"]),
    _named("llama"),
    _named("llama4_text", head_dim=16, **EXPERTS, intermediate_size_mlp=96, attention_chunk_size=WINDOW),
    _named("mamba"),
    _named("minimax_m2", head_dim=16, rotary_dim=8, **EXPERTS),
    _named("ministral", head_dim=16, **WINDOWED),
    _named("mistral", head_dim=16, sliding_window=WINDOW),
    _named("mixtral", **EXPERTS),
    _named("mpt", n_layers=NUM_LAYERS, n_heads=4, max_seq_len=512),
    _named("nemotron"),
    _named("olmo"),
    _named("olmo2"),
    _named("olmo3", **WINDOWED),
    _named("olmoe", **EXPERTS),
    _named("opt", ffn_dim=96, word_embed_proj_dim=64),
    _named("persimmon"),
    _named("phi"),
    _named("phi3", sliding_window=WINDOW),
    _named("phimoe", **EXPERTS, sliding_window=WINDOW),
    _named("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, layer_types=None),
    _named("qwen2_moe", **EXPERTS),
    _named("qwen3", head_dim=16),
    _named("qwen3_5_text"),
    _named("qwen3_moe", head_dim=16, **EXPERTS),
    _named("seed_oss", head_dim=16),
    _named("smollm3", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    _named("stablelm"),
    _named("starcoder2", sliding_window=WINDOW),
    _named("vaultgemma", head_dim=16, query_pre_attn_scalar=16, **WINDOWED),
    _named("xglm", ffn_dim=96, attention_heads=4, num_layers=NUM_LAYERS),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an architecture."""

    name: str
    verdict: str  #: `exact`, `refused`, `different` or `failed`
    engine: str = ""
    num_near_ties: int = 0
    reason: str = ""


def check(architecture: Architecture, folder: Path) -> Outcome:
    """Build, load, decode and compare. `folder` is empty."""
    name = architecture.name
    build(architecture, folder)
    try:
        target = TargetSettings(name="tiny", source=str(folder), dtype="float32", device="cpu", num_threads=1)
        drafters = {"lookup": LookupDrafterSettings(min_ngram=1)}
        engine = load_engine(ModelSettings(target=target, drafters=drafters), num_slots=len(PROMPT_LENGTHS))
        prepared, generations = _decode(engine)
    except AlphaloopError as error:
        # An error of a library with our name around it is no reason that we know.
        is_known = error.__cause__ is None or isinstance(error.__cause__, AlphaloopError)
        return Outcome(name, "refused" if is_known else "failed", reason=error.message.removeprefix(f"{folder}: "))
    except Exception as error:  # what this script is here to find
        return Outcome(name, "failed", reason=f"{type(error).__name__}: {error}")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.eval()
    num_near_ties = 0
    for one, generation in zip(prepared, generations, strict=True):
        expected = _generate(reference, one.token_ids)
        found = first_difference(reference, one.token_ids, expected, generation.token_ids)
        if found is None:
            continue
        if not found.is_near_tie:
            where = f"token {found.place} differs, {found.below_best:.2g} below the best"
            reason = f"a prompt of {len(one.token_ids)} tokens: {where}"
            return Outcome(name, "different", engine.identity.engine, reason=reason)
        num_near_ties += 1
    return Outcome(name, "exact", engine.identity.engine, num_near_ties)


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


def _decode(engine: TransformersEngine) -> tuple[list[PreparedJob], list[Generation]]:
    """All prompts together, every other one with look-up."""
    rng = random.Random(SEED)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
    texts = ["".join(rng.choice("ab cd\n") for _ in range(length)) for length in PROMPT_LENGTHS]
    prepared = [
        engine.prepare(PromptJob(str(number), "code", text, NUM_TOKENS).as_job(), sampling)
        for number, text in enumerate(texts)
    ]
    for number, one in enumerate(prepared):
        engine.admit(one, forced("lookup", 4) if number % 2 else forced())
    found: dict[str, Generation] = {}
    while engine.load().num_running:
        found |= {generation.job_id: generation for generation in engine.step().finished}
    return prepared, [found[one.job.job_id] for one in prepared]


@torch.inference_mode()
def _generate(reference: Any, prompt: Sequence[int]) -> list[int]:
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


def _outcomes(chosen: Sequence[Architecture]) -> Iterator[Outcome]:
    for architecture in chosen:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as quiet:
            quiet.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield check(architecture, Path(folder))


def main() -> None:
    """Print a table of outcomes, and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", help="a name of the table")
    options = parser.parse_args()
    chosen = [one for one in ARCHITECTURES if not options.only or one.name in options.only]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    outcomes = []
    for outcome in _outcomes(chosen):
        outcomes.append(outcome)
        console.print(f"{outcome.name}: {outcome.verdict} {outcome.reason}", markup=False, highlight=False)
    table = table_of(
        f"{len(outcomes)} architectures, transformers {transformers.__version__}",
        "architecture",
        "verdict",
        "near-ties",
        "engine or reason",
    )
    for one in outcomes:
        table.add_row(one.name, one.verdict, str(one.num_near_ties or ""), one.reason or one.engine)
    console.print(table)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(json.dumps({"transformers": transformers.__version__, **counts, "of": [asdict(one) for one in outcomes]}))
    sys.exit(bool(counts["different"] or counts["failed"]))


if __name__ == "__main__":
    main()
