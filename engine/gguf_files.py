"""A GGUF file as transformers' config and tokenizer. What these cannot carry is refused by its name.

transformers' reader leaves out every key and tensor that it does not know, and the file then writes other texts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
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
#: Keys of which only the value that the config has already can be carried, with the config's name.
_SAME: Final = {"attention.sliding_window": "sliding_window"} | {
    name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")
}
_SAMPLING: Final = {f"general.sampling.{name}": name for name in ("top_k", "top_p", "min_p")} | {
    "general.sampling.temp": "temperature",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
#: Values of `tokenizer.ggml.pre` for which llama.cpp takes a piece that is a token as it is, without merges, and
#: begins a text with the BOS token where the file does not say otherwise (`src/llama-vocab.cpp`, `load`).
_WHOLE_PIECES: Final = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "tekken",
)
#: Values of `tokenizer.ggml.token_type`: tokens that a text has whole, control tokens first.
_CONTROL, _USER_DEFINED = 3, 4
_NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
#: Values of `tokenizer.ggml.pre` that split as GPT-2 does, and those that split off each digit besides.
_LIKE_GPT2: Final = ("gpt-2", "phi-2", "mpt", "olmo")
_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
#: Keys that change no text: of container and author, sizes that the weights have too, tokens that nothing here adds.
_HARMLESS: Final = re.compile(
    r"GGUF\.|general\.(?!sampling\.)|split\.|tokenizer\.(huggingface\.json|chat_templates)$|"
    r"tokenizer\.ggml\.(seperator|mask|prefix|suffix|middle|eot|eom|fim_\w+)_token_id$|"
    r"[^.]+\.(rope\.scaling\.finetuned|attention\.(key|value)_length|expert_(shared_)?feed_forward_length)$"
)


class GgufFile:
    """One file, whose header takes seconds to read. Methods raise UnsupportedModel for what cannot be carried."""

    def __init__(self, file: Path) -> None:
        self._where: Any = {"gguf_file": file.name, "trust_remote_code": False}
        self._folder = file.parent
        reader = gguf.GGUFReader(file)
        self._keys = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        self._kind = str(self._keys["general.architecture"])

    def config(self) -> Any:
        """The model's config, with the scaling of its rotation."""
        config: Any = AutoConfig.from_pretrained(self._folder, **self._where)
        self._scale_rotation(config)
        mapped: Any = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), {})
        known = {f"{self._kind}.{name}" for name in (*_SCALING, *(key for key in mapped if mapped[key]))} | set(
            _SAMPLING
        )
        known |= {f"tokenizer.{name}" for group in GGUF_TOKENIZER_MAPPING.values() for name in group}
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(width * (config.rope_parameters or {}).get("partial_rotary_factor", 1))
        is_spaced = self._keys.get("tokenizer.ggml.model") == "llama" and not self._kind.startswith("gemma")
        only = {f"{self._kind}.{key}": getattr(config, name, None) for key, name in _SAME.items()}
        only |= {f"{self._kind}.rope.dimension_count": rotated, f"{self._kind}.rope.scaling.attn_factor": 1}
        only |= {"tokenizer.ggml.add_space_prefix": is_spaced}
        left = [key for key in self._keys if key not in known | set(only) and not _HARMLESS.match(key)]
        self._refuse("keys", left + [key for key, value in only.items() if self._keys.get(key, value) != value])
        return config

    def tokenizer(self) -> Any:
        """The tokenizer, which splits texts as the file says."""
        tokenizer: Any = AutoTokenizer.from_pretrained(self._folder, **self._where)
        if self._keys.get("tokenizer.ggml.model") != "gpt2":
            return tokenizer
        split = self._keys.get("tokenizer.ggml.pre")
        if split in _DIGITS:
            digits, rest = (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            )
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
        elif split not in (None, *_LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
            self._refuse("keys", ["tokenizer.ggml.pre"])
        return self._with_whole_tokens(tokenizer, split in _WHOLE_PIECES)

    def _with_whole_tokens(self, tokenizer: Any, takes_pieces: bool) -> Any:
        """A byte-level tokenizer with the file's control tokens; transformers spells those outside ASCII as bytes."""
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary, names = content["model"]["vocab"], self._keys["tokenizer.ggml.tokens"]
        spelt = {token_id: token for token, token_id in vocabulary.items()}
        merged = set(map("".join, content["model"]["merges"]))
        kinds = enumerate(self._keys.get("tokenizer.ggml.token_type", ()))
        whole = {
            token_id: kind
            for token_id, kind in kinds
            if kind in (_CONTROL, _USER_DEFINED) and token_id in spelt and spelt[token_id] not in merged
        }
        for token_id in whole:
            vocabulary[names[token_id]] = vocabulary.pop(spelt[token_id])
        content["model"]["ignore_merges"] = takes_pieces
        backend = Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))
        for token_id, kind in whole.items():
            backend.add_tokens([AddedToken(names[token_id], normalized=False, special=kind == _CONTROL)])
        named = {f"{name}_token": self._keys.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
        begins = self._keys.get("tokenizer.ggml.add_bos_token", takes_pieces) and named["bos_token"] is not None
        return type(tokenizer)(
            tokenizer_object=backend,
            chat_template=tokenizer.chat_template,
            clean_up_tokenization_spaces=False,
            add_bos_token=begins,
            add_eos_token=self._keys.get("tokenizer.ggml.add_eos_token", False),
            **{name: names[token_id] for name, token_id in named.items() if token_id is not None},
        )

    def generation(self) -> dict[str, Any]:
        """What a generation config says: every token that ends a text, and suggestions for sampling."""
        ends = {self._keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        suggested = {ours: self._keys[name] for name, ours in _SAMPLING.items() if name in self._keys}
        return {"eos_token_id": sorted(ends) or None, **suggested, "do_sample": bool(suggested)}

    def refuse_unread(self, model: Any) -> None:
        """Raise for a tensor that no weight of `model` comes from."""
        processor: Any = TENSOR_PROCESSORS.get(self._kind, TensorProcessor)
        read = {_DIVISORS, *get_gguf_hf_weights_map(model, processor(model.config.to_dict()))}
        self._refuse("tensors", [name for name in self._tensors if not {name, name.removesuffix(".weight")} & read])

    def _scale_rotation(self, config: Any) -> None:
        rope_kind, factor, original = (self._keys.get(f"{self._kind}.{name}") for name in _SCALING)
        kind = rope_kind or ("none" if factor is None else "linear")  # as llama.cpp reads it, and a missing or zero
        factor = factor or 1.0  # factor as none
        rope: dict[str, Any] = config.rope_parameters or {}
        rope = rope.get("full_attention", rope)
        if kind in ("linear", "yarn"):
            longest = {"original_max_position_embeddings": original or config.max_position_embeddings}
            rope |= {"rope_type": kind, "factor": factor, **(longest if kind == "yarn" else {})}
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
        if names:
            shown = [f"{name} = {str(self._keys[name])[:80]}" if name in self._keys else name for name in names[:3]]
            others = f"{len(names)} others: {', '.join(shown)}{', …' if len(names) > 3 else ''}"
            raise UnsupportedModel(
                f"expected {what} of {self._kind} that can be carried over, found {others}",
                hint="without them texts would differ; serve the model as a folder of safetensors",
            )
