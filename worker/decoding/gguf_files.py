"""A GGUF file as transformers' config and tokenizer. What these cannot carry is refused by its name.

transformers' reader leaves out every key and tensor that it does not know, and the file then writes other texts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, GGUF_TOKENIZER_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from alphaloop.errors import UnsupportedModel

#: A tensor with the divisor of each frequency of the rotation, as Llama 3.1 scales them.
_DIVISORS: Final = "rope_freqs.weight"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALING: Final = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
#: Values of `tokenizer.ggml.pre` that split as GPT-2 does, and those that split off each digit besides.
_LIKE_GPT2: Final = ("gpt-2", "phi-2", "mpt", "olmo")
_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
#: Keys that change no text: of container and author, sizes that the weights have too, tokens that nothing here adds.
_HARMLESS: Final = re.compile(
    r"GGUF\.|general\.(?!sampling\.)|split\.(no|tensors\.count)$|tokenizer\.(huggingface\.json|chat_templates)$|"
    r"tokenizer\.ggml\.(seperator|mask|prefix|suffix|middle|eot|eom|fim_\w+)_token_id$|"
    r"[^.]+\.(rope\.scaling\.finetuned|attention\.(key|value)_length|expert_(shared_)?feed_forward_length)$"
)


class GgufFile:
    """One file, whose header takes seconds to read. Methods raise UnsupportedModel for what cannot be carried."""

    def __init__(self, file: Path) -> None:
        self._where: Any = {
            "pretrained_model_name_or_path": file.parent,
            "gguf_file": file.name,
            "trust_remote_code": False,
        }
        reader = gguf.GGUFReader(file)
        self._keys = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        self._kind = str(self._keys["general.architecture"])

    def config(self) -> Any:
        """The model's config, with the scaling of its rotation."""
        config: Any = AutoConfig.from_pretrained(**self._where)
        self._scale_rotation(config)
        mapped: Any = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), {})
        known = {f"{self._kind}.{name}" for name in (*_SCALING, *(key for key in mapped if mapped[key]))}
        known |= {f"tokenizer.{name}" for group in GGUF_TOKENIZER_MAPPING.values() for name in group}
        known |= {f"general.sampling.{name}" for name in _SAMPLING}
        only = self._only_values(config)
        left = [key for key in self._keys if key not in known | set(only) and not _HARMLESS.match(key)]
        self._refuse("keys", left + [key for key, value in only.items() if self._keys.get(key, value) != value])
        return config

    def tokenizer(self) -> Any:
        """The tokenizer, which splits texts as the file says."""
        tokenizer: Any = AutoTokenizer.from_pretrained(**self._where)
        if self._keys.get("tokenizer.ggml.model") == "gpt2":
            split = self._keys.get("tokenizer.ggml.pre", "gpt-2")
            if split in _DIGITS:
                digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
            elif split not in {*_LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
                self._refuse("keys", ["tokenizer.ggml.pre"])
        return tokenizer

    def generation(self) -> dict[str, Any]:
        """What a generation config says: every token that ends a text, and suggestions for sampling."""
        ends = [self._keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        given = {ours: self._keys.get(f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
        suggested = {name: value for name, value in given.items() if value is not None}
        return {
            "eos_token_id": sorted({end for end in ends if end is not None}) or None,
            **({"do_sample": True, **suggested} if suggested else {}),
        }

    def refuse_unread(self, model: Any) -> None:
        """Raise for a tensor that no weight of `model` comes from."""
        processor: Any = TENSOR_PROCESSORS.get(self._kind, TensorProcessor)
        read = {_DIVISORS, *get_gguf_hf_weights_map(model, processor(model.config.to_dict()))}
        self._refuse("tensors", [name for name in self._tensors if not {name, name.removesuffix(".weight")} & read])

    def _only_values(self, config: Any) -> dict[str, Any]:
        """Keys with the one value that the config and the tokenizer stand for."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        is_spaced = self._keys.get("tokenizer.ggml.model") == "llama" and not self._kind.startswith("gemma")
        only = {
            "rope.dimension_count": int(width * (config.rope_parameters or {}).get("partial_rotary_factor", 1)),
            **dict.fromkeys(
                (f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")), 1
            ),
            "attention.causal": True,
            "attention.sliding_window": getattr(config, "sliding_window", None),
            **{name: getattr(config, name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        }
        return {f"{self._kind}.{name}": value for name, value in only.items()} | {
            "tokenizer.ggml.add_space_prefix": is_spaced,
            **dict.fromkeys(("tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"), False),
            "split.count": 1,
        }

    def _scale_rotation(self, config: Any) -> None:
        given, factor, original = (self._keys.get(f"{self._kind}.{name}") for name in _SCALING)
        kind = given or ("none" if factor is None else "linear")  # as llama.cpp reads it
        rope: dict[str, Any] = config.rope_parameters or {}
        rope = rope.get("full_attention", rope)
        if kind == "linear":
            rope |= {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            longest = original or config.max_position_embeddings
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": longest}
        elif kind != "none":
            self._refuse("keys", [f"{self._kind}.{_SCALING[0]}"])
        if _DIVISORS in self._tensors:
            divisors = torch.tensor(self._tensors[_DIVISORS])
            plain = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
            rope |= {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
            if kind != "none" or not torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
                self._refuse("tensors", [_DIVISORS])

    def _refuse(self, what: str, names: list[str]) -> None:
        shown = [f"{name} = {str(self._keys[name])[:80]}" if name in self._keys else name for name in names[:3]]
        if names:
            others = f"{len(names)} others: {', '.join(shown)}{', …' if len(names) > 3 else ''}"
            raise UnsupportedModel(
                f"expected {what} of {self._kind} that can be carried over, found {others}",
                hint="without them texts would differ; serve the model as a folder of safetensors",
            )
