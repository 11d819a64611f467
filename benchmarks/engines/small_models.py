"""Models and adapters that are made here, so that a server has something to parse: thoughts, calls of tools, LoRA.

Both are made of SmolLM2 and nothing is trained: what such a model says is nonsense in the right form.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

THINK: Final = ("<issue_start>", "<think>")
END_THINK: Final = ("<issue_closed>", "</think>")
END_TURN_ID: Final = 2  #: of "<|im_end|>"
END_THINK_ID: Final = 10  #: of "</think>", in place of "<issue_closed>"
#: Hermes' form of tools, and a turn that begins with a thought where `enable_thinking` says so.
TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
You call tools as <tool_call>{"name": "…", "arguments": {…}}</tool_call>. Your tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def with_thoughts(folder: Path, out: Path) -> Path:
    """A copy of SmolLM2's folder that has tokens for thoughts, and a template with tools and thoughts."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    for path in (out / "tokenizer.json", out / "tokenizer_config.json"):
        text = path.read_text()
        for old, new in (THINK, END_THINK):
            text = text.replace(f'"{old}"', f'"{new}"')
        found = json.loads(text)
        for token in found.get("added_tokens", ()):
            if token["content"] in (THINK[1], END_THINK[1]):
                token["special"] = False  # a special token is no part of the text in which a parser looks for it
        found.pop("chat_template", None)
        path.write_text(json.dumps(found))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


def adapter(folder: Path, out: Path, *, seed: int, rank: int = 8, scale: float = 0.05) -> Path:
    """A LoRA adapter of drawn numbers for the queries and values of a dense model's folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {"q_proj": width, "v_proj": width // heads * kv_heads}
    drawn = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, width, generator=drawn) * scale
            weights[f"{place}.lora_B.weight"] = torch.randn(size, rank, generator=drawn) * scale
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "",
                "r": rank,
                "lora_alpha": rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": sorted(sizes),
            }
        )
    )
    return out
